// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"io"
	"strings"
)

// compareGoObject compares two Go object files or export data, which are members of ar archives: the settings
// in the header and the texts in the rest. The build ID is a consequence.
//
// Source: cmd/internal/archive, cmd/internal/goobj.
func compareGoObject(c *comparison, a, b *io.SectionReader) error {
	return c.withBytes(a, b, func(a, b []byte) error {
		headA, restA := goObjectHead(a)
		headB, restB := goObjectHead(b)
		linesA, linesB := strings.Split(headA, "\n"), strings.Split(headB, "\n")
		isID := func(line string) bool { return strings.HasPrefix(line, "build id ") }
		ids := [2]string{}
		settings := func(lines []string, id *string) []string {
			var others []string
			for _, line := range lines {
				if isID(line) {
					*id = line
				} else {
					others = append(others, line)
				}
			}
			return others
		}
		settingsA, settingsB := settings(linesA, &ids[0]), settings(linesB, &ids[1])
		c.unmatched("setting", subtract(settingsA, settingsB), subtract(settingsB, settingsA), "head")
		if !bytes.Equal(restA, restB) && !c.texts(restA, restB, minText) {
			c.firstByte(restA, restB)
		}
		if ids[0] != ids[1] {
			c.identity("build id", ids[0], ids[1], "head")
		}
		return nil
	})
}

// goObjectHead splits an object after its text header.
func goObjectHead(data []byte) (head string, rest []byte) {
	const most = 4 << 10
	i := bytes.Index(data[:min(len(data), most)], []byte("\n!\n"))
	if i < 0 {
		i = max(0, bytes.IndexByte(data, '\n'))
	}
	return string(data[:i]), data[i:]
}
