// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// maxName bounds escaped names: 255 bytes is what the common file systems allow, and paths have a limit
// as well.
const maxName = 120

// escape returns the file name of an instance. Different names have different file names, also on
// file systems that fold case, normalise Unicode or forbid characters, words and trailing dots: the
// alphabet is a-z, 0-9, "-", "_", "%", and "@" at the front. A name whose escaped form would be longer
// than maxName is "@@" and its SHA-256.
func escape(name string) string {
	var b strings.Builder
	b.WriteByte('@')
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02x", c)
		}
	}
	if b.Len() <= maxName {
		return b.String()
	}
	sum := sha256.Sum256([]byte(name))
	return "@@" + hex.EncodeToString(sum[:])
}
