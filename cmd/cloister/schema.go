// SPDX-License-Identifier: Apache-2.0

package main

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
)

// schemas has a JSON schema for each command with --json. TestSchemasAreCurrent generates them from the types that the
// commands print.
//
//go:embed schemas/*.json
var schemas embed.FS

func schemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "schema [COMMAND]",
		Short: "Print the JSON schema of the output of a command",
		Long: `Schema prints the JSON Schema of the --json output of COMMAND, such as action show. Without an argument it lists the
commands that have one. docs/json.md describes the output.`,
		Example: `  cloister schema status > status.schema.json
  cloister schema action show`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				var failed error
				visitCommands(cmd.Root(), func(c *cobra.Command) {
					if render.Printed(c) != nil && failed == nil {
						_, failed = fmt.Fprintln(cmd.OutOrStdout(), strings.TrimPrefix(c.CommandPath(), "cloister "))
					}
				})
				return failed
			}
			words := strings.Fields(strings.TrimPrefix(strings.Join(args, " "), "cloister "))
			text, err := schemas.ReadFile("schemas/" + strings.Join(words, "_") + ".json")
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
				return fmt.Errorf("%+.80q has no JSON schema; cloister schema lists the commands that have one", strings.Join(words, " "))
			}
			if err == nil {
				_, err = cmd.OutOrStdout().Write(text)
			}
			return err
		},
	}
}

// visitCommands calls visit with c and the commands below it.
func visitCommands(c *cobra.Command, visit func(*cobra.Command)) {
	visit(c)
	for _, sub := range c.Commands() {
		visitCommands(sub, visit)
	}
}
