// SPDX-License-Identifier: Apache-2.0

// Command cloister executes Remote Execution API actions in a sandbox. Each subcommand has a file here that parses its
// flags and prints results; the packages in internal do the work.
package main

import (
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	_ "github.com/cloister-build/cloister/sandbox/namespace/earlyinit"
	"github.com/spf13/cobra"
)

func main() {
	exit.End("cloister", rootCommand().Execute())
}

// A group is a section of --help.
type group struct {
	id, title string
	commands  []func() *cobra.Command
}

func groups() []group {
	return []group{
		{"serve", "Serve and farm", []func() *cobra.Command{serveCommand, joinCommand, runnerCommand}},
		{"run", "Run and debug", []func() *cobra.Command{runCommand, sandboxCommand, gateCommand, actionCommand, invocationCommand, diffCommand, checkCommand, explainCommand, policyCommand}},
		{"storage", "Storage", []func() *cobra.Command{casCommand, cacheCommand, imageCommand, gcCommand}},
		{"repro", "Reproducibility", []func() *cobra.Command{reproCommand, attestCommand}},
		{"operations", "Operations", []func() *cobra.Command{statusCommand, topCommand, drainCommand, undrainCommand, authCommand, configCommand, auditCommand, schemaCommand}},
	}
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "cloister",
		Short: "Run build actions in a hermetic sandbox",
		Long:  `Cloister runs actions of Remote Execution API clients. Each sees only its declared inputs and the host's toolchain.`,
		Example: `  cloister serve                               # then, in a Bazel workspace:
  bazel build --remote_executor=grpc://127.0.0.1:8980 //...
  cloister run -- /bin/sh -c 'id; ls -l /'     # one command in the same sandbox`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if verbose(cmd) { // alone it asks for the version, as in many programs
				_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
				return err
			}
			return showHelp(cmd, args)
		},
		Version: versionLine(),
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().Bool("version", false, "print version, revision, Go version and platform; so does -v alone")
	root.Flags().Lookup("version").Hidden = true // the command version is listed
	new(render.Output).Register(root)
	for _, g := range groups() {
		root.AddGroup(&cobra.Group{ID: g.id, Title: g.title + ":"})
		for _, command := range g.commands {
			c := command()
			c.GroupID = g.id
			root.AddCommand(c)
		}
	}
	root.AddCommand(versionCommand(), attemptsCommand())
	flags.SetHelp(root, "cloister help flags")
	root.AddCommand(flagsTopic(root))
	root.InitDefaultCompletionCmd() // now, so that its mistakes are explained too
	flags.ExplainMistakes(root)
	config.Enable(root)
	return root
}

// flagsTopic returns the page that explains the flags of many commands.
func flagsTopic(root *cobra.Command) *cobra.Command {
	topic := &cobra.Command{
		Use:   "flags",
		Short: "Explain the flags that many commands share",
		Long:  "The flags of the server, of the sandbox and of the output mean the same in every command that has them.",
	}
	topic.SetHelpFunc(func(c *cobra.Command, _ []string) {
		fmt.Fprintf(c.OutOrStdout(), "%s\n\n%s", c.Long, flags.SharedUsages(root))
	})
	return topic
}

// verbose reports whether -v is given.
func verbose(cmd *cobra.Command) bool {
	v, _ := cmd.Flags().GetBool("verbose") // every command has it
	return v
}

// unlessQuiet returns w for notes, progress and banners, or with -q a writer that drops them.
func unlessQuiet(cmd *cobra.Command, w io.Writer) io.Writer {
	if q, _ := cmd.Flags().GetBool("quiet"); q {
		return io.Discard
	}
	return w
}

// showHelp is the action of commands that only group others.
func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }
