// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func actionLsCommand() *cobra.Command {
	var c actions.List
	cmd := &cobra.Command{
		Use:   "ls [--target LABEL] [--mnemonic NAME] [--invocation ID] [--stage STAGE] [--failed] [--all] [--wide] [--limit N] [--server URL] [--json]",
		Short: "List current and past executions",
		Long: `Ls prints the executions that a server knows, newest first: queued, running, and for some time completed ones (serve
keeps the last 10,000 for five minutes). It works with every server that implements google.longrunning.Operations. With
--all, --target, --mnemonic, --invocation or --failed it also reads the history of a server that keeps one (serve:
--history-size), which survives a restart and includes action cache lookups. --stage lists executions only. Without
--instance it covers all instances that the caller may see.

Digests and invocation ids are shortened; other commands accept the short forms if the server keeps a history. --wide
prints complete ones, and adds the operation name for cloister action log -f or, for history entries, the time. A
trailing * in a filter matches every ending, and --target //pkg/... all targets in and below a package.

The exit code is 1 if the server lists no executions, and 5 if it cannot be reached.`,
		Example: `  cloister action ls
  cloister action ls --failed --limit 10
  cloister action ls --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f --mnemonic CppCompile
  cloister action ls --stage EXECUTING --target '//server/*' --server grpc://build.example.com:8980`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Limit < 1 {
				return fmt.Errorf("--limit %d: write a positive number", c.Limit)
			}
			if _, known := repb.ExecutionStage_Value_value[c.Stage]; c.Stage != "" && !known {
				return fmt.Errorf("--stage %q: write QUEUED, EXECUTING, COMPLETED or CACHE_CHECK", c.Stage)
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			c.Notes = unlessQuiet(cmd, cmd.ErrOrStderr())
			return c.From.Explain(c.Run(ctx, cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.Target, "target", "", "only actions of this target")
	f.StringVar(&c.Mnemonic, "mnemonic", "", "only actions of this kind")
	f.StringVar(&c.Invocation, "invocation", "", "only actions of this build: its id, at least 8 digits of it, or ^1 for the latest")
	f.StringVar(&c.Stage, "stage", "", "only executions in this stage: QUEUED, EXECUTING, COMPLETED, CACHE_CHECK")
	f.BoolVar(&c.All, "all", false, "everything in the history")
	f.BoolVar(&c.Failed, "failed", false, "only failures")
	f.IntVar(&c.Limit, "limit", 100, "maximum number of lines")
	f.BoolVar(&c.Wide, "wide", false, "print complete digests and invocation ids, and operation names or times")
	render.JSONFlag(f, &c.JSON, "print a JSON list", []actions.Execution{})
	c.From.Complete(cmd)
	return cmd
}
