// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/hex"
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
)

// ellipsis replaces omitted text.
const ellipsis = "..."

// excerpts returns a and b in printable text of at most maxText bytes each. Of long ones it omits most of the common
// prefix.
func excerpts(a, b string) (string, string) {
	const context = 60
	if len(a) > maxText || len(b) > maxText {
		if n := commonPrefix(a, b); n > context {
			a, b = ellipsis+a[n-context:], ellipsis+b[n-context:]
		}
	}
	return printable.Head(a, maxText), printable.Head(b, maxText)
}

// hexText returns up to 16 bytes in hexadecimal and as text.
func hexText(p []byte) string {
	p = p[:min(len(p), 16)]
	if len(p) == 0 {
		return ""
	}
	text := make([]byte, len(p))
	for i, b := range p {
		text[i] = '.'
		if b >= ' ' && b <= '~' {
			text[i] = b
		}
	}
	var digits []string
	for len(p) > 0 {
		n := min(len(p), 4)
		digits = append(digits, hex.EncodeToString(p[:n]))
		p = p[n:]
	}
	return strings.Join(digits, " ") + "  " + string(text)
}
