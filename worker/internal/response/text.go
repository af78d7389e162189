// SPDX-License-Identifier: Apache-2.0

package response

import (
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
)

const (
	// maxText bounds, in bytes, an error's text or one line of an outcome's message.
	maxText = 2000
	// maxLines bounds an outcome's message, with the line that reproduces it and a remark of the worker that sent it.
	maxLines = worker.MaxMessageLines + 2
)

// Lines returns the first lines of an outcome's message that are not empty, each as OneLine returns it.
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

// OneLine returns s as one line of printable ASCII of bounded length, with runs of white space as one space.
func OneLine(s string) string { return printable.Head(strings.Join(strings.Fields(s), " "), maxText) }
