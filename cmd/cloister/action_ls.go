// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func actionLsCommand() *cobra.Command {
	var c actions.List
	cmd := &cobra.Command{
		Use:   "ls [--target LABEL] [--mnemonic NAME] [--invocation ID] [--stage STAGE] [--failed] [--all] [-n N] [--cas URL] [--instance NAME] [--json]",
		Short: "Lists what a server executes and has executed",
		Long: `Ls prints the executions that a server knows, the newest first: those that wait, those that run, and those that
have ended, for as long as the server keeps them (serve: five minutes, and the last 10,000). It is what
google.longrunning.Operations lists, and works with every server that serves that.

With --all, --target, --mnemonic, --invocation or --failed it goes on with the history of a server that keeps one, which
outlives that and a restart (serve: --history-size), and has besides what clients looked up in the action cache
themselves: found or absent. Of what has ended it lists that alone then. --stage wants executions.

Each line says how far the execution has come or how it ended, how long it ran, what it was for, its action, by which
cloister action show and cloister run --action find it, and the name by which cloister action log -f follows it, or in
the history the time of the answer. A text that ends in an asterisk stands for all that begin so.

It exits with 1 if the server does not list executions, and with 5 if it cannot be reached.`,
		Example: `  cloister action ls
  cloister action ls --failed -n 10
  cloister action ls --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f --mnemonic CppCompile
  cloister action ls --stage EXECUTING --target '//server/*' --cas grpc://build.example.com:8980`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Limit < 1 {
				return fmt.Errorf("-n %d: write a positive number", c.Limit)
			}
			if _, known := repb.ExecutionStage_Value_value[c.Stage]; c.Stage != "" && !known {
				return fmt.Errorf("--stage %q: there are QUEUED, EXECUTING, COMPLETED and CACHE_CHECK", c.Stage)
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			return c.From.Explain(c.Run(ctx, cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.Target, "target", "", "only executions for this target")
	f.StringVar(&c.Mnemonic, "mnemonic", "", "only actions of this kind")
	f.StringVar(&c.Invocation, "invocation", "", "only executions of this build")
	f.StringVar(&c.Stage, "stage", "", "only those in this stage: QUEUED, EXECUTING, COMPLETED, CACHE_CHECK")
	f.BoolVar(&c.All, "all", false, "everything that the server remembers")
	f.BoolVar(&c.Failed, "failed", false, "only those that ended otherwise than with exit code 0")
	f.IntVarP(&c.Limit, "number", "n", 100, "how many to print at most")
	f.BoolVar(&c.JSON, "json", false, "print one JSON list")
	return cmd
}
