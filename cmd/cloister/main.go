// SPDX-License-Identifier: Apache-2.0

// Command cloister executes Remote Execution API actions in a sandbox. Each subcommand has a file here that parses its
// flags and prints results; the packages in internal do the work.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	_ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit"
	"github.com/spf13/cobra"
)

func main() {
	err := rootCommand().Execute()
	if err == nil {
		return
	}
	e, ok := errors.AsType[*exit.Error](err)
	if !ok { // cobra found a mistake in the command line
		e = exit.New(exit.Usage, err)
	}
	if e.Err != nil {
		fmt.Fprintf(os.Stderr, "cloister: %v\n", e.Err)
	}
	os.Exit(e.Code)
}

// groups are the sections of --help.
var groups = []struct {
	id, title string
	commands  []func() *cobra.Command
}{
	{"serve", "Serve and farm", []func() *cobra.Command{serveCommand, joinCommand, runnerCommand}},
	{"run", "Run and debug", []func() *cobra.Command{runCommand, actionCommand, invocationCommand, diffCommand, checkCommand, policyCommand}},
	{"storage", "Storage", []func() *cobra.Command{casCommand, cacheCommand, gcCommand}},
	{"repro", "Reproducibility", []func() *cobra.Command{reproCommand, attestCommand}},
	{"operations", "Operations", []func() *cobra.Command{statusCommand, topCommand, drainCommand, undrainCommand, authCommand, auditCommand}},
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "cloister",
		Short: "Run build actions in a hermetic sandbox",
		Long: `Cloister runs build actions in a sandbox, for Bazel and every other client of the Remote Execution API. An action sees
only its declared inputs and the host's toolchain.`,
		Example: `  cloister serve                               # then, in a Bazel workspace:
  bazel build --remote_executor=grpc://127.0.0.1:8980 //...

  cloister serve --worker-listen 0.0.0.0:8983  # a head; on worker machines:
  cloister join grpc://HEAD:8983
  cloister status                              # queue and workers

  cloister run -- /bin/sh -c 'id; ls -l /'     # one command in the same sandbox
  cloister check                               # supported protections`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          showHelp,
		Version:       versionLine(),
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().BoolP("version", "v", false, "print version, revision, Go version and platform")
	for _, g := range groups {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title + ":"})
		for _, command := range g.commands {
			c := command()
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.AddCommand(versionCommand(), attemptsCommand())
	root.InitDefaultCompletionCmd() // now, so that its mistakes are explained too
	flags.ExplainMistakes(root)
	return root
}

// showHelp is the action of commands that only group others.
func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }
