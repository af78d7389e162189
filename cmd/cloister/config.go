// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and check the configuration of serve, join and runner",
		Long: `Serve, join and runner take each flag from the command line, from the environment or from a configuration file, in
this order. docs/configuration.md describes the file.`,
		Example: `  cloister config show serve
  cloister config validate config.yaml
  cloister config schema`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(configShowCommand(), configValidateCommand(), configSchemaCommand())
	return cmd
}

func configShowCommand() *cobra.Command {
	var asJSON bool
	var file string
	cmd := &cobra.Command{
		Use:   "show [COMMAND [-- FLAGS...]]",
		Short: "Show each value and its origin",
		Long: `Show prints the value that each flag would have here, and its origin: flag, env NAME, FILE:LINE, or default. Write
flags of the command after --. The environment is that of this shell, which may differ from that of a service.`,
		Example: `  cloister config show join
  cloister config show serve --config config.yaml -- --jobs 4`,
		ValidArgs: []string{"serve", "join", "runner"},
		RunE: func(cmd *cobra.Command, args []string) error {
			var all []config.Value
			err := eachConfigured(func(c *cobra.Command) error {
				if len(args) > 0 && args[0] != c.Name() {
					return nil
				}
				values, err := configured(c, file, args[min(1, len(args)):])
				all = append(all, values...)
				return err
			})
			if err != nil {
				return err
			}
			if all == nil {
				return fmt.Errorf("%+.80q has no configuration: write serve, join or runner", args[0])
			}
			if asJSON {
				return render.JSON(cmd.OutOrStdout(), all)
			}
			return printValues(cmd, all)
		},
	}
	render.JSONFlag(cmd.Flags(), &asJSON, "print a JSON list", []config.Value{})
	cmd.Flags().StringVar(&file, "config", "", "configuration file, YAML or JSON, or - for standard input (default: "+config.DefaultFile+" if it exists)")
	return cmd
}

// eachConfigured calls visit with each command that has a configuration, before any of its flags is set.
func eachConfigured(visit func(*cobra.Command) error) error {
	for i := range config.Commands(rootCommand()) {
		if err := visit(config.Commands(rootCommand())[i]); err != nil { // commands of one root share flags
			return err
		}
	}
	return nil
}

// configured returns the values of the flags of c, given a configuration file and arguments of the command line.
func configured(c *cobra.Command, file string, args []string) ([]config.Value, error) {
	if file != "" {
		args = append([]string{"--config", file}, args...)
	}
	if err := c.ParseFlags(args); err != nil {
		return nil, c.FlagErrorFunc()(c, err)
	}
	if rest := c.Flags().Args(); len(rest) > 0 {
		return nil, fmt.Errorf("unexpected argument %+.80q: write flags of cloister %s", rest[0], c.Name())
	}
	if _, err := config.Load(c); err != nil {
		return nil, err
	}
	return config.Values(c), nil
}

// printValues prints a line for each value.
func printValues(cmd *cobra.Command, all []config.Value) error {
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	for _, v := range all {
		text := v.Value
		if text == "" || strings.ContainsFunc(text, func(r rune) bool { return r == ' ' || !unicode.IsPrint(r) }) {
			text = strconv.Quote(text)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", v.Command, v.Key, text, v.Origin)
	}
	return w.Flush()
}

func printIndented(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func configValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file",
		Long: `Validate checks the keys and the form of the values in a file, without the environment. Whether the values fit together
and to this machine is checked when the command starts. The exit code is 2 if the file has a mistake.`,
		Example: "  cloister config validate /etc/cloister/config.yaml",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := config.Open(args[0])
			if err != nil {
				return err
			}
			if f == nil {
				return errors.New("FILE is empty: write the name of a file")
			}
			err = eachConfigured(func(c *cobra.Command) error {
				if err := f.Apply(c); err != nil {
					return err
				}
				if err := flags.CheckExclusive(c); err != nil {
					return fmt.Errorf("%s: cloister %s: %w", args[0], c.Name(), err)
				}
				return nil
			})
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: valid\n", args[0])
			return err
		},
	}
}

func configSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON schema of configuration files",
		Example: "  cloister config schema",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return printIndented(cmd, config.Schema(rootCommand()))
		},
	}
}
