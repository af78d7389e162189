// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// HideDefault has --help say no default of flags for which zero is none.
func HideDefault(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f.Lookup(name).DefValue = ""
	}
}

// ExplainMistakes has cmd, and all commands below it, say of a mistake in the command line what would be right, where
// cobra says what it counted and Go's parsers what they are called.
func ExplainMistakes(cmd *cobra.Command) {
	cmd.SetFlagErrorFunc(explainFlag)
	var below func(*cobra.Command)
	below = func(cmd *cobra.Command) {
		fit := cmd.Args
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if fit != nil && fit(cmd, args) != nil {
				return explainArgs(cmd, args)
			}
			return explainTogether(cmd) // what cobra asks next
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
	return fmt.Errorf("%s has no command %+.200q: %s", cmd.CommandPath(), args[0], hint)
}

// explainFlag returns the error of a flag.
func explainFlag(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := dashed(unknown.GetSpecifiedName(), unknown.GetSpecifiedShortnames())
		if near := nearestFlag(cmd.Flags(), unknown.GetSpecifiedName()); near != "" {
			return fmt.Errorf("%s has no flag %s: did you mean --%s?", cmd.CommandPath(), name, near)
		}
		return fmt.Errorf("%s has no flag %s: %[1]s --help lists them", cmd.CommandPath(), name)
	}
	if bare, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return fmt.Errorf("%s needs a value: %s", dashed(bare.GetSpecifiedName(), bare.GetSpecifiedShortnames()), bare.GetFlag().Usage)
	}
	if bad, ok := errors.AsType[*pflag.InvalidSyntaxError](err); ok {
		return fmt.Errorf("%s has no flag %s: %[1]s --help lists them", cmd.CommandPath(), ascii(bad.GetSpecifiedFlag()))
	}
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
	case "float64":
		why = "write a number"
	case "duration":
		why = "write it as 90s, 5m or 2h"
	case "bool":
		why = "write true or false, or the flag alone"
	}
	if errors.Is(err, strconv.ErrRange) {
		why = "it is too large a number"
	}
	return fmt.Errorf("--%s %+.200q: %s", flag.Name, wrong.GetValue(), why)
}

// dashed is a flag as it was written: by its name, or by its letter among several. Of a letter of more than one byte pflag
// names the first byte alone, but the letters begin with the whole of it.
func dashed(name, letters string) string {
	if letters == "" {
		return "--" + ascii(name)
	}
	return "-" + ascii(string([]rune(letters)[:1]))
}

// ascii returns s, shortened, with escapes for all that is not printable ASCII.
func ascii(s string) string {
	q := fmt.Sprintf("%+.200q", s)
	return q[1 : len(q)-1]
}

// nearestFlag returns the flag whose name is nearest to one that there is not, "" if none is near: one that begins so, or
// has no more than two other letters.
func nearestFlag(flags *pflag.FlagSet, name string) string {
	nearest, least := "", 3
	flags.VisitAll(func(f *pflag.Flag) {
		d := distance(f.Name, name)
		if len(name) > 2 && strings.HasPrefix(f.Name, name) {
			d = 1
		}
		if !f.Hidden && d < least && d < len(name) {
			nearest, least = f.Name, d
		}
	})
	return nearest
}

// distance is how many bytes must be added, left out or replaced to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for k := range row {
		row[k] = k
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for k := range len(b) {
			replaced := diagonal
			if a[i] != b[k] {
				replaced++
			}
			diagonal = row[k+1]
			row[k+1] = min(replaced, diagonal+1, row[k]+1)
		}
	}
	return row[len(b)]
}

// exclusive is the annotation by which cobra knows flags that exclude each other: the names of each group.
const exclusive = "cobra_annotation_mutually_exclusive"

// explainTogether returns the error of flags of which one is absent that must be there, or that exclude each other.
func explainTogether(cmd *cobra.Command) error {
	if err := cmd.ValidateRequiredFlags(); err != nil {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if len(f.Annotations[cobra.BashCompOneRequiredFlag]) > 0 && !f.Changed {
				err = fmt.Errorf("--%s is missing: %s", f.Name, f.Usage)
			}
		})
		return err
	}
	err := cmd.ValidateFlagGroups()
	if err == nil {
		return nil
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		for _, group := range f.Annotations[exclusive] {
			var given []string
			for _, name := range strings.Fields(group) {
				if cmd.Flags().Changed(name) {
					given = append(given, "--"+name)
				}
			}
			if len(given) > 1 {
				err = fmt.Errorf("%s exclude each other: give one of them", strings.Join(given, " and "))
			}
		}
	})
	return err
}
