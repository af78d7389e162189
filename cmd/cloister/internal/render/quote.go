// SPDX-License-Identifier: Apache-2.0

package render

import (
	"strconv"
	"strings"
	"unicode"
)

// QuoteAll returns a command as one line that a shell splits into the same words.
func QuoteAll(args []string) string { return join(args, Quote) }

// QuoteScript is QuoteAll for reading: it keeps line breaks within a word.
func QuoteScript(args []string) string { return join(args, quoteWord) }

func join(args []string, quote func(string) string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = quote(a)
	}
	return strings.Join(quoted, " ")
}

// Quote returns s as one word of a shell, on one line. Characters that a terminal would not show become escapes, which
// shells read in $'...'.
func Quote(s string) string {
	if strings.Contains(s, "\n") {
		return escape(s)
	}
	return quoteWord(s)
}

func quoteWord(s string) string {
	plain := s != ""
	for _, r := range s {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) && r != '\n' {
			return escape(s)
		}
		plain = plain && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("@%+=:,./-_", r))
	}
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func escape(s string) string {
	var b strings.Builder
	b.WriteString("$'")
	for i := range len(s) {
		switch c := s[i]; {
		case c == '\'' || c == '\\':
			b.WriteString(`\` + string(rune(c)))
		case c == '\n':
			b.WriteString(`\n`)
		case c >= ' ' && c <= '~':
			b.WriteByte(c)
		default:
			// Always three digits, so that a following digit is not read as part of the escape.
			b.WriteString(`\` + strconv.FormatUint(uint64(c)|1<<9, 8)[1:])
		}
	}
	return b.String() + "'"
}
