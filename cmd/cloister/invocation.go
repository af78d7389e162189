// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/actions"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func invocationCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "invocation",
		Short: "Show the builds of a server",
		Example: `  cloister invocation ls
  cloister invocation show ^1
  cloister diff --invocation ^2 ^1`,
		Args: cobra.NoArgs,
		RunE: showHelp,
	}
	cmd.AddCommand(invocationLsCommand(), invocationShowCommand())
	return cmd
}

func invocationShowCommand() *cobra.Command {
	var from client.Server
	var asJSON bool
	var profile string
	cmd := &cobra.Command{
		Use:   "show INVOCATION [--profile FILE] [--server URL] [--instance NAME] [--json]",
		Short: "Show the targets and tests of a build",
		Long: `Show prints what Bazel published about a build with --bes_backend: its outcome, targets that were not built,
failed actions, and each attempt of each test with the digest of its log, which cloister cas cat prints. With --json it
also prints command lines, metrics and Bazel's output. With --profile it instead writes a trace for Perfetto: Bazel's own
profile, and when the server queued, prepared and ran each action.

INVOCATION is the invocation id. If the server keeps a history, it can also be its first eight digits, ^1 for the latest
build, or ^2 for the one before. The exit code is 4 if the server has no events of the build, and 5 if it cannot be
reached.`,
		Example: `  cloister invocation show ^1
  cloister invocation show 5f1d6c0e --json | jq .metrics
  cloister invocation show ^1 --profile build.profile.gz`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			if profile != "" {
				return from.Explain(actions.SaveProfile(ctx, &from, args[0], profile, cmd.ErrOrStderr()), exit.No)
			}
			return from.Explain(actions.ShowBuild(ctx, &from, args[0], asJSON, cmd.OutOrStdout()), exit.No)
		},
	}
	from.Register(cmd)
	f := cmd.Flags()
	render.JSONFlag(f, &asJSON, "print a JSON object", &buildevents.Build{})
	f.StringVar(&profile, "profile", "", "file for the profile, compressed if its name ends in .gz")
	cmd.MarkFlagsMutuallyExclusive("json", "profile")
	return cmd
}

func invocationLsCommand() *cobra.Command {
	var c actions.Invocations
	cmd := &cobra.Command{
		Use:   "ls [--limit N] [--server URL] [--instance NAME] [--json]",
		Short: "List builds, the latest first",
		Long: `Ls prints the builds in the history of a cloister serve: the invocation id from the client, the time of the latest
answer, the status, and the numbers of actions that were executed, were found in the action cache, and failed. The status
of a build that was published with --bes_backend is running, succeeded, failed, or interrupted if the client left before
the build ended. It is - for a build that was not published.

Other commands accept the id, its first eight digits, ^1 for the latest build with actions, or ^2 for the one before. The
exit code is 1 if the server keeps no history, and 5 if it cannot be reached.`,
		Example: `  cloister invocation ls --limit 5
  cloister diff --invocation ^2 ^1
  cloister action ls --invocation ^1 --failed`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Limit < 1 {
				return fmt.Errorf("--limit %d: write a positive number", c.Limit)
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			return c.From.Explain(c.Run(ctx, cmd.OutOrStdout()), exit.No)
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.IntVar(&c.Limit, "limit", 20, "maximum number of lines")
	render.JSONFlag(f, &c.JSON, "print a JSON list", []*actions.Invocation{})
	return cmd
}
