// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// Reserved lists the words that an instance name must not contain as a segment: they separate the parts of a resource
// name (REAPI, GetCapabilitiesRequest.instance_name, and logstreams of the Log Stream API).
func Reserved() []string {
	return []string{
		"blobs", "uploads", "actions", "actionResults", "operations", "capabilities", "compressed-blobs", "logstreams",
	}
}

// CheckInstanceName returns ErrInvalid for a name with a reserved or empty segment, that is not UTF-8, or that is
// longer than 256 bytes. The empty name is valid.
func CheckInstanceName(name string) error {
	if name == "" {
		return nil
	}
	if len(name) > 256 || !utf8.ValidString(name) || strings.ContainsRune(name, 0) {
		return invalidf("instance name %.64q is not UTF-8 text of at most 256 bytes", name)
	}
	for seg := range strings.SplitSeq(name, "/") {
		if seg == "" {
			return invalidf("instance name %q has an empty segment", name)
		}
		if slices.Contains(Reserved(), seg) {
			return invalidf("instance name %q contains the reserved word %q", name, seg)
		}
	}
	return nil
}
