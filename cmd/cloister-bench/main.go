// SPDX-License-Identifier: Apache-2.0

// Command cloister-bench measures Remote Execution API servers against the machine itself. It is a tool for
// contributors and is not part of the release.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func main() {
	root := rootCommand()
	flags.ExplainMistakes(root)
	exit.End("cloister-bench", root.ExecuteContext(context.Background()))
}

func rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cloister-bench",
		Short: "Measure servers and compare them with this machine",
		Long: `Put Remote Execution API servers under load, check every answer, and compare the servers with each
other and with the bare machine. Only figures of one run are comparable: within it, the servers and the
machine alternate.`,
		Example: `  cloister-bench table                         # starts its own server
  cloister-bench noop --executor 127.0.0.1:8980 -c 8
  cloister-bench blobs --executor 127.0.0.1:8980`,
		Args:          cobra.NoArgs,
		SilenceErrors: true, SilenceUsage: true, // main prints errors, and usage errors name --help
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	// The first signal removes files and stops servers. A second one ends the program at once.
	cmd.PersistentPreRun = func(cmd *cobra.Command, _ []string) {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		context.AfterFunc(ctx, stop)
		cmd.SetContext(ctx)
	}
	cmd.AddCommand(tableCommand(), execCommand(load.Noop), execCommand(load.Trees), execCommand(load.Outputs),
		execCommand(load.Compiles), blobsCommand(), soakCommand(), scaleCommand())
	return cmd
}
