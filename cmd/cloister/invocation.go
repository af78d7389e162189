// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func invocationCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "invocation",
		Short: "List the builds in a server's history",
		Example: `  cloister invocation ls
  cloister diff --invocation ^2 ^1`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(invocationLsCommand())
	return cmd
}

func invocationLsCommand() *cobra.Command {
	var c actions.Invocations
	cmd := &cobra.Command{
		Use:   "ls [--limit N] [--server URL] [--instance NAME] [--json]",
		Short: "List builds, the latest first",
		Long: `Ls prints the builds in the history of a cloister serve: the invocation id from the client, the time of the latest
answer, and the numbers of actions that were executed, were found in the action cache, and failed.

Other commands accept the id, its first eight digits, ^1 for the latest build, or ^2 for the one before. The exit code is
1 if the server keeps no history, and 5 if it cannot be reached.`,
		Example: `  cloister invocation ls --limit 5
  cloister diff --invocation ^2 ^1
  cloister action ls --invocation ^1 --failed`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Limit < 1 {
				return fmt.Errorf("--limit %d: write a positive number", c.Limit)
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			return c.From.Explain(c.Run(ctx, cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.IntVar(&c.Limit, "limit", 20, "maximum number of lines")
	f.BoolVar(&c.JSON, "json", false, "print a JSON list")
	return cmd
}
