// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func actionCancelCommand() *cobra.Command {
	var c actions.Cancel
	cmd := &cobra.Command{
		Use:   "cancel [OPERATION|DIGEST|TARGET] [--invocation ID] [--server URL] [--instance NAME] [--json]",
		Short: "Cancel queued and running actions",
		Long: `Cancel ends queued and running executions: the one named OPERATION, those of the action DIGEST (at least 8 digits),
or those of TARGET or //pkg/...; ^1 is the latest one, ^2 the one before. --invocation selects those of one build; without
an argument, all of them. Their clients get CANCELLED. An action stops when no other client waits for it.

With --auth the caller needs the right to execute actions in the instance.

The exit code is 4 if no queued or running execution matches, and 5 if the server cannot be reached.`,
		Example: `  cloister action cancel 9f2c1e77
  cloister action cancel //server:test
  cloister action cancel --invocation 5f1d6c0e`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && c.Invocation == "" {
				return errors.New("missing argument OPERATION, DIGEST or TARGET, or --invocation")
			}
			return c.From.Explain(c.Run(cmd.Context(), append(args, "")[0], cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	cmd.Flags().StringVar(&c.Invocation, "invocation", "", "only actions of this build: its id, at least 8 digits of it, or ^1 for the latest")
	render.JSONFlag(cmd.Flags(), &c.JSON, "print a JSON list", []actions.Execution{})
	c.From.Complete(cmd)
	return cmd
}
