// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/hex"
	"strconv"
	"strings"
	"unicode/utf8"
)

// cut stands where text was left out.
const cut = "..."

// printable returns s as one line of ASCII, with other characters as Go's escapes, cut after most bytes.
func printable(s string, most int) string {
	var b strings.Builder
	room := 0 // as much of b as leaves room to say that it was cut
	for i, size := 0, 0; i < len(s); i += size {
		var r rune
		r, size = utf8.DecodeRuneInString(s[i:])
		piece := s[i : i+size]
		if r < ' ' || r > '~' {
			piece = strconv.QuoteToASCII(piece)
			piece = piece[1 : len(piece)-1]
		}
		if b.Len() <= most-len(cut) {
			room = b.Len()
		}
		if b.Len()+len(piece) > most {
			return b.String()[:room] + cut
		}
		b.WriteString(piece)
	}
	return b.String()
}

// excerpts returns a and b in printable text of at most MaxText bytes each: from a little before where they begin to
// differ.
func excerpts(a, b string) (string, string) {
	const lead = 60
	if len(a) > MaxText || len(b) > MaxText {
		if n := commonPrefix(a, b); n > lead {
			a, b = cut+a[n-lead:], cut+b[n-lead:]
		}
	}
	return printable(a, MaxText), printable(b, MaxText)
}

// hexText returns up to 16 bytes as hex and as text.
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
