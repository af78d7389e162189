// SPDX-License-Identifier: Apache-2.0

// Command cloister executes build actions of the Remote Execution API in a sandbox, or serves those
// who want them executed. It holds no logic of its own: each subcommand turns flags into the
// configuration of a package and prints what the package says.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

// Exit codes, the same for every subcommand but run, which returns its command's own.
const (
	exitNo          = 1 // the answer is no
	exitUsage       = 2
	exitEnvironment = 3   // the host cannot do it
	exitAbsent      = 4   // blobs are absent from a server's store
	exitConnect     = 5   // a server cannot be reached
	exitTimeout     = 6   // the time that the command line gives is over
	exitOurs        = 125 // of run: cloister itself failed
)

// An exit is an error with its exit code. A nil err has been told already.
type exit struct {
	code int
	err  error
}

// newExit returns err with an exit code. A nil err prints nothing.
func newExit(code int, err error) *exit { return &exit{code, err} }

func (e *exit) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

func main() {
	err := rootCommand().Execute()
	if err == nil {
		return
	}
	var e *exit
	if !errors.As(err, &e) {
		// What cobra finds is a mistake in the command line.
		e = newExit(exitUsage, err)
	}
	if e.err != nil {
		fmt.Fprintf(os.Stderr, "cloister: %v\n", e.err)
	}
	os.Exit(e.code)
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
	root.AddCommand(serveCommand(), joinCommand(), runnerCommand(), runCommand(), reproCommand(), actionCommand(), auditCommand(), policyCommand(), checkCommand(), diffCommand(), attemptsCommand(), gcCommand(), casCommand(), cacheCommand(), attestCommand(), benchCommand(), statusCommand(), topCommand(), drainCommand(), undrainCommand(), versionCommand())
	root.InitDefaultCompletionCmd() // else cobra adds it later, and it is not told of
	explainMistakes(root)
	return root
}
