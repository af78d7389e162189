// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cloister-build/cloister/tests/must"
	"github.com/spf13/cobra"
)

// TestHelpFitsOnAScreen: the help of every command but serve takes at most 50 lines of 120 columns.
func TestHelpFitsOnAScreen(t *testing.T) {
	const columns, most = 120, 50
	commands(func(cmd *cobra.Command) {
		words := strings.Fields(cmd.CommandPath())[1:]
		help, code := runCLI(t, append([]string{"help"}, words...)...)
		must.Be(t, code == 0 && strings.Contains(help, "\n"), "cloister help %v: exit %d, %q", words, code, help)
		rows := 0
		for line := range strings.Lines(help) {
			width := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
			rows += max(1, (width+columns-1)/columns)
		}
		if rows > most && cmd.Name() != "serve" {
			t.Errorf("%s --help: %d rows of %d columns, want at most %d", cmd.CommandPath(), rows, columns, most)
		}
	})
}
