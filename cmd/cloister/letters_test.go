// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestOneLetterOneMeaning: a letter abbreviates the same flag in every command, a flag has the same letter in every
// command, and --json takes no value anywhere.
func TestOneLetterOneMeaning(t *testing.T) {
	type use struct{ value, command string }
	names, letters := map[string]use{}, map[string]use{}
	check := func(what, key, value, command string, all map[string]use) {
		if first, ok := all[key]; ok && first.value != value {
			t.Errorf("%s %s: got %q in %s and %q in %s, want one meaning", what, key, first.value, first.command, value, command)
		} else if !ok {
			all[key] = use{value, command}
		}
	}
	commands(func(cmd *cobra.Command) {
		see := func(f *pflag.Flag) {
			if f.Shorthand != "" {
				check("letter", "-"+f.Shorthand, f.Name, cmd.CommandPath(), names)
			}
			check("letter of", "--"+f.Name, f.Shorthand, cmd.CommandPath(), letters)
			if f.Name == "json" && f.Value.Type() != "bool" {
				t.Errorf("%s --json: got a %s, want a boolean", cmd.CommandPath(), f.Value.Type())
			}
		}
		cmd.LocalFlags().VisitAll(see)
		cmd.InheritedFlags().VisitAll(see)
	})
	expect.That(t, len(names) >= 5, "got letters %v, want those of every command", names)
}
