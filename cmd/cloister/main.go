// SPDX-License-Identifier: Apache-2.0

// Command cloister executes build actions of the Remote Execution API in a sandbox, or serves those
// who want them executed. It holds no logic of its own: each subcommand turns flags into the
// configuration of a package and prints what the package says.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func main() {
	err := rootCommand().Execute()
	if err == nil {
		return
	}
	var e *exit.Error
	if !errors.As(err, &e) {
		// What cobra finds is a mistake in the command line.
		e = exit.New(exit.Usage, err)
	}
	if e.Err != nil {
		fmt.Fprintf(os.Stderr, "cloister: %v\n", e.Err)
	}
	os.Exit(e.Code)
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "cloister",
		Short: "Runs build actions in a sandbox, for Bazel and every other client of the Remote Execution API",
		Long: `Cloister runs build actions in a sandbox that is hermetic by default: an action sees the inputs it
declares, the host's toolchain and nothing else.`,
		Example: `  cloister serve                               # then, in a Bazel workspace:
  bazel build --remote_executor=grpc://127.0.0.1:8980 //...

  cloister serve --worker-listen 0.0.0.0:8983  # a head; on other machines, which execute for it:
  cloister join grpc://HEAD:8983
  cloister status                              # what waits, what runs, and where

  cloister run -- /bin/sh -c 'id; ls -l /'     # one command in the same sandbox
  cloister check                               # what this machine can enforce`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.AddCommand(serveCommand(), joinCommand(), runnerCommand(), runCommand(), reproCommand(), actionCommand(), auditCommand(), policyCommand(), checkCommand(), diffCommand(), attemptsCommand(), gcCommand(), casCommand(), cacheCommand(), attestCommand(), statusCommand(), topCommand(), drainCommand(), undrainCommand(), versionCommand())
	root.InitDefaultCompletionCmd() // else cobra adds it later, and it is not told of
	flags.ExplainMistakes(root)
	return root
}
