// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of what a page shows of a text.
const (
	maxLines = 5000
	maxLine  = 4096 // bytes of one line
)

// escapes matches the control sequences of terminals: CSI, OSC and short ones (ECMA-48, ISO 2022).
var escapes = regexp.MustCompile("\x1b(?:\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|[ -/]*[0-Z\\\\^-~])")

// Visible returns s without the control sequences of terminals. Characters that do not print, such as those that change
// the direction of text, and bytes that are not UTF-8 become Go escapes.
func Visible(s string) string {
	s = escapes.ReplaceAllString(s, "")
	shown := func(r rune) bool { return r == '\t' || r != utf8.RuneError && unicode.IsPrint(r) }
	if !strings.ContainsFunc(s, func(r rune) bool { return !shown(r) }) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case shown(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
		s = s[n:]
	}
	return b.String()
}

// Plain is Visible for a text of several lines.
func Plain(text string) string {
	all := strings.Split(text, "\n")
	for i, line := range all {
		all[i] = Visible(strings.TrimSuffix(line, "\r"))
	}
	return strings.Join(all, "\n")
}

// lines returns the first lines of a text, and whether that is all of it.
func lines(text []byte) (all []string, whole bool) {
	whole = true
	for line := range strings.SplitSeq(strings.TrimSuffix(string(text), "\n"), "\n") {
		if len(all) == maxLines {
			return all, false
		}
		if line = strings.TrimSuffix(line, "\r"); len(line) > maxLine {
			line, whole = line[:maxLine], false
		}
		all = append(all, Visible(line))
	}
	return all, whole
}

// dump returns a hex dump, as hexdump -C prints it.
func dump(b []byte) []string {
	return strings.Split(strings.TrimSuffix(hex.Dump(b), "\n"), "\n")
}
