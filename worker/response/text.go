// SPDX-License-Identifier: Apache-2.0

package response

import (
	"strconv"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/worker"
)

const (
	// maxText bounds, in bytes, what is quoted of an error or of one line of an outcome's message.
	maxText = 2000
	// maxLines is how many lines there are at most of an outcome's message, with how to reproduce it, and what was
	// remarked by the worker that a message came from.
	maxLines = worker.MaxMessageLines + 2
)

// Lines returns the lines of an outcome's message, each by itself as OneLine returns it, and not too many.
// Those that are empty are left out.
func Lines(s string) string {
	var all []string
	for line := range strings.Lines(s) {
		if line = OneLine(line); line == "" {
			continue
		}
		if len(all) == maxLines {
			break
		}
		all = append(all, line)
	}
	return strings.Join(all, "\n")
}

// OneLine returns s without line breaks, in ASCII, which is what every client displays as it is, and
// not too long for a person to read. Other characters become Go's escapes.
func OneLine(s string) string {
	var line []byte
	space := false
	for _, r := range s {
		if unicode.IsSpace(r) {
			space = len(line) > 0
			continue
		}
		if len(line) >= maxText {
			return string(line) + "[cut]"
		}
		if space {
			line = append(line, ' ')
			space = false
		}
		if ' ' < r && r <= '~' {
			line = append(line, byte(r))
			continue
		}
		quoted := strconv.QuoteRuneToASCII(r)
		line = append(line, quoted[1:len(quoted)-1]...)
	}
	return string(line)
}
