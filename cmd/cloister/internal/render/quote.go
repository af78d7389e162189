// SPDX-License-Identifier: Apache-2.0

package render

import (
	"strconv"
	"strings"
	"unicode"
)

// QuoteAll returns a command as a line that a shell reads as the same words.
func QuoteAll(args []string) string { return joined(args, Quote) }

// QuoteScript is quoteAll for a command that people read: lines of a script stay lines.
func QuoteScript(args []string) string { return joined(args, quoteWord) }

func joined(args []string, quote func(string) string) string {
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = quote(a)
	}
	return strings.Join(quoted, " ")
}

// Quote returns s as one word of a shell, in one line: what follows a line end in it would look like a line of ours. What
// a terminal would not show as it is becomes an escape, which shells read in $'...'.
func Quote(s string) string {
	if strings.Contains(s, "\n") {
		return quoteEscaped(s)
	}
	return quoteWord(s)
}

// quoteWord is quote, but that a line end stays one.
func quoteWord(s string) string {
	plain := s != ""
	for _, r := range s {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) && r != '\n' {
			return quoteEscaped(s)
		}
		plain = plain && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("@%+=:,./-_", r))
	}
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func quoteEscaped(s string) string {
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
			// Three digits, so that what follows is not read as one more.
			b.WriteString(`\` + strconv.FormatUint(uint64(c)|1<<9, 8)[1:])
		}
	}
	return b.String() + "'"
}
