// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func actionCancelCommand() *cobra.Command {
	var c actions.Cancel
	cmd := &cobra.Command{
		Use:   "cancel [OPERATION|DIGEST|TARGET] [--invocation ID] [--server URL] [--instance NAME]",
		Short: "Cancel queued and running actions",
		Long: `Cancel ends unfinished executions: the one of an OPERATION, those of the action with a DIGEST (at least 8 digits),
those of a TARGET or of //pkg/..., or with ^1 the latest one, ^2 the one before. With --invocation it ends those of one build, or all of
it. Their clients, which may be of several builds, get CANCELLED. An action stops when no other client waits for it.

With --auth the caller needs the right to execute actions in the instance.

The exit code is 4 if nothing that is queued or running has the name, and 5 if the server cannot be reached.`,
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
	c.From.Complete(cmd)
	return cmd
}
