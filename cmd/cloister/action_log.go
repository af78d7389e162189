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
		Use:   "log OPERATION|DIGEST [-f] [--stderr] [--cas URL] [--instance NAME]",
		Short: "Prints what an action says, or has said",
		Long: `Log prints the stdout of an action, or with --stderr its stderr: of one that has ended, as its result has
it; with -f also of one that runs, as it comes and to its end, or that is yet to run.

OPERATION is the name of an execution, as action ls, clients and messages print it, for as long as the
server knows it. DIGEST is that of an action, as for cloister action show: then the result in the action cache counts, or else its
latest execution, if the server lists executions; with -f first an execution that has not ended.

It exits with 1 if the action has not ended and -f is not given, or if it ended without a result; with 4 if the
operation, or the result, or what it said is absent; and with 5 if the server cannot be reached.`,
		Example: `  cloister action log e3b0...55/142
  cloister action log -f operations/5f1d6c0e3b0a4f7c9d1e2a3b4c5d6e7f
  cloister action log -f --stderr e3b0...55/142 --cas grpc://build.example.com:8980`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.From.Explain(c.Print(cmd.Context(), args[0], cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.BoolVarP(&c.Follow, "follow", "f", false, "go on until the action has ended")
	f.BoolVar(&c.Stderr, "stderr", false, "print its stderr and not its stdout")
	return cmd
}
