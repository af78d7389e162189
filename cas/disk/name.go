// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// maxName limits escaped names. File systems allow 255 bytes, but paths are limited, too.
const maxName = 120

// escape returns the file name of an instance. Different names have different file names even on file systems that
// fold case, normalize Unicode or forbid characters, words and trailing dots: the alphabet is a-z, 0-9, "-", "_",
// "%", and "@" at the front. If the result would be longer than maxName, it is "@@" and the SHA-256 of the name.
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
