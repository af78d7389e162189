// SPDX-License-Identifier: Apache-2.0

// Package config sets the flags of long-running commands from environment variables and a configuration file. It knows
// no flag: it walks those that a command registers.
package config

import (
	"encoding/csv"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// DefaultFile is read if neither --config nor CLOISTER_CONFIG names another file.
const DefaultFile = "/etc/cloister/config.yaml"

// Register adds --config to cmd, which makes it a command that Enable configures.
func Register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.String("config", "", "configuration file, YAML or JSON, or - for standard input (default: "+DefaultFile+" if it exists)")
	flags.Share(f, "config")
}

// Commands returns the commands below root that have a configuration.
func Commands(root *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(root.Commands()), func(c *cobra.Command) bool {
		return c.Flags().Lookup("config") == nil
	})
}

// Enable makes the commands below root load their configuration before they check their flags. It comes after
// flags.ExplainMistakes.
func Enable(root *cobra.Command) {
	for _, c := range Commands(root) {
		check, run := c.Args, c.RunE
		var from *File
		c.Args = func(cmd *cobra.Command, args []string) (err error) {
			if err := checkFormer(); err != nil {
				return err
			}
			if from, err = Load(cmd); err != nil {
				return err
			}
			return addOrigins(cmd, check(cmd, args))
		}
		c.RunE = func(cmd *cobra.Command, args []string) error {
			for _, note := range misspelt(cmd) {
				slog.Warn(note)
			}
			defer from.watch()()
			return addOrigins(cmd, run(cmd, args))
		}
	}
}

// checkFormer returns an error if CLOISTER_FLAGS contains words that the command line lacks. Units of earlier packages
// passed it on: its --auth must not vanish when the package is upgraded.
func checkFormer() error {
	lacks := func(word string) bool { return !slices.Contains(os.Args, word) }
	former := flags.Variable("flags")
	if !slices.ContainsFunc(strings.Fields(os.Getenv(former)), lacks) {
		return nil
	}
	return fmt.Errorf("%s has no effect: move its flags to %s, and remove it from /etc/cloister/serve.env or join.env",
		former, DefaultFile)
}

// Load sets the flags that the command line of cmd omits: first from the environment, then from the file, which it
// returns. Those that have been set are Changed, as if they were on the command line.
func Load(cmd *cobra.Command) (*File, error) {
	layer, err := environment(cmd)
	if err == nil {
		err = apply(cmd, layer)
	}
	if err != nil {
		return nil, err
	}
	name := cmd.Flags().Lookup("config")
	if name.Changed && name.Value.String() == "" {
		return nil, nil // flags.ExplainMistakes refuses it
	}
	f, err := Open(name.Value.String())
	if f == nil || err != nil {
		return nil, err
	}
	return f, f.Apply(cmd)
}

// A setting is the value of a flag from the environment or the file.
type setting struct {
	origin string
	values []string                     // several for repeatable flags
	fail   func(i int, err error) error // adds the place of a value to an error
}

// apply sets the flags in layer. A flag that an earlier layer sets keeps its value, and so do those that exclude it.
func apply(cmd *cobra.Command, layer map[string]setting) error {
	set := cmd.Flags()
	var unset []*pflag.Flag
	set.VisitAll(func(f *pflag.Flag) {
		if _, ok := layer[f.Name]; ok && !flags.Taken(set, f) {
			unset = append(unset, f)
		}
	})
	for _, f := range unset {
		s := layer[f.Name]
		for i, value := range s.values {
			if err := set.Set(f.Name, value); err != nil {
				return s.fail(i, cmd.FlagErrorFunc()(cmd, err))
			}
		}
		if err := flags.CheckEmpty(f); err != nil {
			return s.fail(0, err)
		}
		if err := set.SetAnnotation(f.Name, originKey, []string{s.origin}); err != nil {
			return err
		}
	}
	return nil
}

// environment returns the settings of the environment variables, and an error if one is not a list of values.
func environment(cmd *cobra.Command) (map[string]setting, error) {
	layer := map[string]setting{}
	var malformed error
	each(cmd, func(f *pflag.Flag) {
		variable := flags.Variable(f.Name)
		text, ok := os.LookupEnv(variable)
		if !ok {
			return
		}
		values := []string{text}
		if flags.IsRepeatable(f) {
			records, err := csv.NewReader(strings.NewReader(text)).ReadAll()
			if err != nil || len(records) > 1 {
				malformed = fmt.Errorf(`%s: write values separated by commas, on one line, and a value with a comma or quotes `+
					`as "a,""b"""`, variable)
			}
			if len(records) == 1 {
				values = records[0]
			}
		}
		layer[f.Name] = setting{"env " + variable, values, func(_ int, err error) error {
			return fmt.Errorf("%s: %w", variable, err)
		}}
	})
	return layer, malformed
}

// each calls visit with the flags of a command.
func each(cmd *cobra.Command, visit func(*pflag.Flag)) {
	cmd.InheritedFlags() // adds them to Flags
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			visit(f)
		}
	})
}

// misspelt returns warnings about environment variables that resemble one of a flag of cmd.
func misspelt(cmd *cobra.Command) (notes []string) {
	known := map[string]bool{}
	for _, c := range Commands(cmd.Root()) {
		each(c, func(f *pflag.Flag) { known[flags.Variable(f.Name)] = true })
	}
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		// Kubernetes sets variables such as CLOISTER_PORT=tcp://10.0.0.1:8980 for a service called cloister.
		if !strings.HasPrefix(name, flags.Variable("")) || known[name] || strings.HasPrefix(value, "tcp://") {
			continue
		}
		each(cmd, func(f *pflag.Flag) {
			if near := flags.Variable(f.Name); levenshtein.ComputeDistance(name, near) <= 2 {
				notes = append(notes, fmt.Sprintf("the environment variable %s matches no flag: did you mean %s?", name, near))
			}
		})
	}
	return notes
}

// originKey is the annotation of flags that apply sets.
const originKey = "cloister_origin"

// Origin returns where the value of a flag comes from: flag, env NAME, FILE:LINE, or default.
func Origin(f *pflag.Flag) string {
	switch from := f.Annotations[originKey]; {
	case from != nil:
		return from[0]
	case f.Changed:
		return "flag"
	}
	return "default"
}

var flagName = regexp.MustCompile(`--([a-z][a-z0-9-]*[a-z0-9])`)

// addOrigins appends to an error the origins of the flags that it names, except those from the command line.
func addOrigins(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	var notes []string
	for _, m := range flagName.FindAllStringSubmatch(err.Error(), -1) {
		f := cmd.Flags().Lookup(m[1])
		if f == nil || f.Annotations[originKey] == nil {
			continue
		}
		if note := fmt.Sprintf("(--%s: %s)", f.Name, Origin(f)); !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	if notes == nil {
		return err
	}
	coded, ok := err.(*exit.Error) //nolint:errorlint // a wrapped one has a text of its own
	if !ok {
		return fmt.Errorf("%w %s", err, strings.Join(notes, " "))
	}
	return exit.New(coded.Code, fmt.Errorf("%w %s", coded.Err, strings.Join(notes, " ")))
}
