// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// quote returns s between double quotes, as printable ASCII. What else is in it stands as \n, \r, \t, \\ or \", as \xHH
// if it is another control character or a byte that is not UTF-8, and as \uHHHH or \UHHHHHHHH. It does not ask a table
// of Unicode, which a newer one would answer otherwise.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case ' ' <= r && r <= '~':
			b.WriteRune(r)
		case r < utf8.RuneSelf || r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
		s = s[n:]
	}
	b.WriteByte('"')
	return b.String()
}

// unquote reads what quote writes from the beginning of s, and returns what is behind it.
func unquote(s string) (text, rest string, err error) {
	q, err := strconv.QuotedPrefix(s)
	if err != nil {
		return "", "", err
	}
	text, err = strconv.Unquote(q)
	return text, s[len(q):], err
}
