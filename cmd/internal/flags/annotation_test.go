// SPDX-License-Identifier: Apache-2.0

package flags_test

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/spf13/cobra"
)

func TestEmptyValues(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"", ""},
		{"--text=x --list=x --csv=x,y --also=", ""},
		{"--text=", "--text is empty: write a value or omit the flag; it is the text of a test"},
		{"--text=x --text=", "--text is empty"},
		{"--list=", "--list is empty"},
		{"--list=x --list= --list=y", "--list is empty"},
		{"--csv=", "--csv is empty"},
		{"--csv=x,,y", "--csv is empty"},
		{"--text= too many arguments", "--text is empty"},
	} {
		cmd := &cobra.Command{Use: "test", Args: cobra.NoArgs, RunE: func(*cobra.Command, []string) error { return nil }, SilenceErrors: true, SilenceUsage: true}
		f := cmd.Flags()
		f.String("text", "", "text of a test")
		f.String("also", "", "text that may be empty")
		f.StringArray("list", nil, "list of a test")
		f.StringSlice("csv", nil, "values of a test")
		flags.AllowEmpty(f, "also")
		flags.ExplainMistakes(cmd)
		cmd.SetArgs(strings.Fields(c.line))
		got := ""
		if err := cmd.Execute(); err != nil {
			got = err.Error()
		}
		expect.That(t, strings.HasPrefix(got, c.want) && (got == "") == (c.want == ""),
			"%s: got %q, want %q", c.line, got, c.want)
	}
}
