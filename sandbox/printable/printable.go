// SPDX-License-Identifier: Apache-2.0

// Package printable makes text from actions, clients and servers safe to log and to show. A file name or an error
// message that an attacker chose can then neither forge a line nor control a terminal.
//
// The result is ASCII, because some clients and terminals garble everything else, and because a byte is then a column.
package printable

import (
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

const ellipsis = "..."

// Text returns s on one line of printable ASCII. Other characters and invalid UTF-8 become Go escapes such as \n,
// \u00e9 and \xff. Backslashes are kept, so Text(Text(s)) is Text(s).
func Text(s string) string { return Head(s, math.MaxInt) }

// Head returns the beginning of Text(s), in at most limit bytes. If it drops anything it ends in an ellipsis. It never
// splits an escape. limit is at least 3.
func Head(s string, limit int) string {
	var b strings.Builder
	end := 0 // the longest prefix of b that leaves room for the ellipsis
	for len(s) > 0 {
		text, size := first(s)
		if b.Len()+len(text) > limit {
			return b.String()[:end] + ellipsis
		}
		b.WriteString(text)
		s = s[size:]
		if b.Len() <= limit-len(ellipsis) {
			end = b.Len()
		}
	}
	return b.String()
}

// Tail returns the end of Text(s), in at most limit bytes, for text such as paths whose end matters most. If it drops
// anything it begins with an ellipsis. limit is at least 3.
func Tail(s string, limit int) string {
	s = Text(s)
	if len(s) > limit {
		s = ellipsis + s[len(s)-limit+len(ellipsis):]
	}
	return s
}

// Quote returns s if it is a single word of printable ASCII, and a Go string literal in ASCII otherwise, so that a
// reader sees where it begins and ends. Like Head, it returns at most limit bytes.
func Quote(s string, limit int) string {
	if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' || r == '"' }) {
		s = strconv.QuoteToASCII(s)
	}
	return Head(s, limit)
}

// first returns the first character of s, escaped if necessary, and its length in s.
func first(s string) (text string, size int) {
	r, size := utf8.DecodeRuneInString(s)
	text = s[:size]
	if r < ' ' || r > '~' {
		text = strconv.QuoteToASCII(text)
		text = text[1 : len(text)-1]
	}
	return text, size
}
