// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func actionLogCommand() *cobra.Command {
	var c actions.Log
	cmd := &cobra.Command{
		Use:   "log OPERATION|DIGEST [-f | --failed] [--stderr] [--server URL] [--instance NAME]",
		Short: "Print the output of an action",
		Long: `Log prints the stdout of an action, or with --stderr its stderr. With -f it follows a queued or running action to its
end.

OPERATION is the name of an execution, as action ls, clients and messages print it. DIGEST names an action as for
cloister action show: log prints the output of its latest run, or with --failed that of its latest failure, even if the
action succeeded later. With -f it prefers an unfinished execution.

The exit code is 1 if the action ended without a result or, without -f, has not ended; 4 if the operation, the result or
its output is absent; and 5 if the server cannot be reached.`,
		Example: `  cloister action log e3b0...55/142
  cloister action log --failed //server:test
  cloister action log -f operations/5f1d6c0e3b0a4f7c9d1e2a3b4c5d6e7f
  cloister action log -f --stderr e3b0...55/142 --server grpc://build.example.com:8980`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Notes = unlessQuiet(cmd, cmd.ErrOrStderr())
			return c.From.Explain(c.Print(cmd.Context(), args[0], cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.BoolVarP(&c.Follow, "follow", "f", false, "follow the output until the action ends")
	f.BoolVar(&c.Failed, "failed", false, "print the output of the latest failure, even if the action succeeded later")
	cmd.MarkFlagsMutuallyExclusive("follow", "failed")
	f.BoolVar(&c.Stderr, "stderr", false, "print stderr instead of stdout")
	c.From.Complete(cmd)
	return cmd
}
