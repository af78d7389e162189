// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// explainMistakes has cmd, and all commands below it, say of a mistake in the command line what would be right, where
// cobra says what it counted and Go's parsers what they are called.
func explainMistakes(cmd *cobra.Command) {
	cmd.SetFlagErrorFunc(explainFlag)
	var below func(*cobra.Command)
	below = func(cmd *cobra.Command) {
		if fit := cmd.Args; fit != nil {
			cmd.Args = func(cmd *cobra.Command, args []string) error {
				if fit(cmd, args) == nil {
					return nil
				}
				return explainArgs(cmd, args)
			}
		}
		for _, c := range cmd.Commands() {
			below(c)
		}
	}
	below(cmd)
}

// explainArgs returns the error of args, which do not fit cmd.
func explainArgs(cmd *cobra.Command, args []string) error {
	if !cmd.HasAvailableSubCommands() {
		return fmt.Errorf("%d arguments do not fit: write it as %s", len(args), strings.ReplaceAll(cmd.UseLine(), "\n ", ", or"))
	}
	cmd.SuggestionsMinimumDistance = 2 // letters that are wrong
	hint := fmt.Sprintf("%s --help lists them", cmd.CommandPath())
	if names := cmd.SuggestionsFor(args[0]); len(names) > 0 {
		hint = "did you mean " + strings.Join(names, " or ") + "?"
	}
	return fmt.Errorf("%s has no command %q: %s", cmd.CommandPath(), args[0], hint)
}

// explainFlag returns the error of a flag.
func explainFlag(_ *cobra.Command, err error) error {
	wrong, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag := wrong.GetFlag()
	why := fmt.Sprint(wrong.Unwrap())
	switch flag.Value.Type() {
	case "int", "int32", "int64":
		why = "write a whole number"
	case "uint32", "uint64":
		why = "write a whole number that is not negative"
	case "duration":
		why = "write it as 90s, 5m or 2h"
	case "bool":
		why = "write true or false, or the flag alone"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, wrong.GetValue(), why)
}
