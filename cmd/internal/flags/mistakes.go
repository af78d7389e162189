// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// HideDefault omits the default of flags from --help, for flags whose zero value means "not given".
func HideDefault(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f.Lookup(name).DefValue = ""
	}
}

// ExplainMistakes makes cmd and all commands below it answer a mistake in the command line with a correction, instead
// of the messages of cobra and of Go's parsers, and refuse empty values (see AllowEmpty).
func ExplainMistakes(cmd *cobra.Command) {
	cmd.SetFlagErrorFunc(explainFlag)
	explainArgsBelow(cmd)
}

func explainArgsBelow(cmd *cobra.Command) {
	validate := cmd.Args
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := explainEmpty(cmd); err != nil {
			return err
		}
		if validate != nil && validate(cmd, args) != nil {
			return explainArgs(cmd, args)
		}
		return explainGroups(cmd) // before cobra checks them
	}
	for _, c := range cmd.Commands() {
		explainArgsBelow(c)
	}
}

func explainArgs(cmd *cobra.Command, args []string) error {
	if !cmd.HasAvailableSubCommands() {
		usage := strings.ReplaceAll(cmd.UseLine(), "\n ", ", or")
		if missing := missingArgument(cmd, args); missing != "" {
			return fmt.Errorf("missing argument %s: write %s", missing, usage)
		}
		return fmt.Errorf("wrong number of arguments (%d): write %s", len(args), usage)
	}
	// Short names are all near each other: foo is not top.
	cmd.SuggestionsMinimumDistance = max(1, min(2, len(args[0])-2))
	hint := fmt.Sprintf("see %s --help", cmd.CommandPath())
	if names := cmd.SuggestionsFor(args[0]); len(names) > 0 {
		hint = "did you mean " + strings.Join(names, " or ") + "?"
	}
	return fmt.Errorf("%s has no command %+.200q: %s", cmd.CommandPath(), args[0], hint)
}

// missingArgument returns the first argument of the usage that the command line lacks, such as ADDRESS, or "".
func missingArgument(cmd *cobra.Command, args []string) string {
	words := strings.Fields(cmd.Use)[1:]
	if len(words) <= len(args) {
		return ""
	}
	for _, word := range words[:len(args)+1] {
		if strings.ToUpper(word) != word || strings.ContainsAny(word, "[]|()-") {
			return ""
		}
	}
	return strings.TrimSuffix(words[len(args)], "...")
}

func explainFlag(cmd *cobra.Command, err error) error {
	if unknown, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := dashed(unknown.GetSpecifiedName(), unknown.GetSpecifiedShortnames())
		if nearest := nearestFlag(cmd.Flags(), unknown.GetSpecifiedName()); nearest != "" {
			return fmt.Errorf("%s has no flag %s: did you mean --%s?", cmd.CommandPath(), name, nearest)
		}
		return fmt.Errorf("%s has no flag %s: see %[1]s --help", cmd.CommandPath(), name)
	}
	if bare, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		name := dashed(bare.GetSpecifiedName(), bare.GetSpecifiedShortnames())
		return fmt.Errorf("%s needs a value: %s", name, bare.GetFlag().Usage)
	}
	if bad, ok := errors.AsType[*pflag.InvalidSyntaxError](err); ok {
		return fmt.Errorf("%s has no flag %s: see %[1]s --help", cmd.CommandPath(), ascii(bad.GetSpecifiedFlag()))
	}
	invalid, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag := invalid.GetFlag()
	want := fmt.Sprint(invalid.Unwrap())
	switch flag.Value.Type() {
	case "int", "int32", "int64":
		want = "write a whole number"
	case "uint32", "uint64":
		want = "write a whole number from 0"
	case "float64":
		want = "write a number"
	case "duration":
		if _, ours := flag.Value.(*Duration); !ours {
			want = "write 90s, 5m or 2h"
		}
	case "bool":
		want = "write true or false, or the flag alone"
	}
	if errors.Is(err, strconv.ErrRange) {
		want = "the number is too large"
	}
	return fmt.Errorf("--%s %+.200q: %s", flag.Name, invalid.GetValue(), want)
}

// dashed returns a flag as it was typed: its name, or its letter among several. pflag reports only the first byte of a
// letter that has several, but letters begins with all of it.
func dashed(name, letters string) string {
	if letters == "" {
		return "--" + ascii(name)
	}
	return "-" + ascii(string([]rune(letters)[:1]))
}

// ascii returns s, shortened, with escapes for everything but printable ASCII.
func ascii(s string) string {
	q := fmt.Sprintf("%+.200q", s)
	return q[1 : len(q)-1]
}

// nearestFlag returns the flag closest to a mistyped name: one with that prefix, or at most two edits away; else "".
func nearestFlag(flags *pflag.FlagSet, name string) string {
	nearest, least := "", 3
	flags.VisitAll(func(f *pflag.Flag) {
		d := levenshtein.ComputeDistance(f.Name, name)
		if len(name) > 2 && strings.HasPrefix(f.Name, name) {
			d = 1
		}
		if !f.Hidden && d < least && d < len(name) {
			nearest, least = f.Name, d
		}
	})
	return nearest
}

// exclusive is cobra's annotation of mutually exclusive flags. Its values are the names in each group.
const exclusive = "cobra_annotation_mutually_exclusive"

// Taken reports whether f or a flag that is mutually exclusive with it was given.
func Taken(set *pflag.FlagSet, f *pflag.Flag) bool {
	return f.Changed || slices.ContainsFunc(f.Annotations[exclusive], func(group string) bool {
		return slices.ContainsFunc(strings.Fields(group), set.Changed)
	})
}

// explainGroups returns an error if a required flag is missing or mutually exclusive flags are combined.
func explainGroups(cmd *cobra.Command) error {
	if err := cmd.ValidateRequiredFlags(); err != nil {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if len(f.Annotations[cobra.BashCompOneRequiredFlag]) > 0 && !f.Changed {
				err = fmt.Errorf("--%s is missing: %s", f.Name, f.Usage)
			}
		})
		return err
	}
	return CheckExclusive(cmd)
}

// CheckExclusive returns an error if mutually exclusive flags are combined.
func CheckExclusive(cmd *cobra.Command) error {
	err := cmd.ValidateFlagGroups()
	if err == nil {
		return nil
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		for _, group := range f.Annotations[exclusive] {
			var given []string
			for name := range strings.FieldsSeq(group) {
				if cmd.Flags().Changed(name) {
					given = append(given, "--"+name)
				}
			}
			if len(given) > 1 {
				err = fmt.Errorf("%s are mutually exclusive: pass one of them", strings.Join(given, " and "))
			}
		}
	})
	return err
}
