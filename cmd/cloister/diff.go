// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func diffCommand() *cobra.Command {
	var c comparison.Config
	cmd := &cobra.Command{
		Use: "diff A B [--as KIND] [--results] [--names] [--server URL] [--instance NAME] [--json]\n" +
			"  cloister diff --invocation ID ID [--names] [--server URL] [--instance NAME] [--json]",
		Short: "Compare files, actions, results or builds",
		Long: `Diff compares A and B. Each is a file or directory of this host, or the digest of something on a server: HASH/SIZE or a
prefix of at least 8 digits. ^1 is the latest action in the server's history, ^2 the one before, and a target the latest
action of that target. Diff detects what a digest names; --as overrides it.

For two actions it explains why their cache keys differ: arguments, variables, platform, timeout or inputs.
--results compares their cached results instead. Differing files are compared by format unless --names is given.
--invocation compares two builds in the server's history: actions of only one build, changed actions with the cause, and
actions that are not reproducible. It takes ids, their first digits, or ^1 for the latest build.

The exit code is 0 without differences, 1 with differences, 5 if the server cannot be reached, and 2 on other failures.`,
		Example: `  cloister diff 9f2c...e1/142 77ab...02/142    # why was this a cache miss?
  cloister diff ^2 ^1
  cloister diff ^2 ^1 --results
  cloister diff bazel-bin/app.jar /tmp/app.jar
  cloister diff --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f a0b1c2d3-e4f5-4607-8819-2a3b4c5d6e7f`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.As != "" && !slices.Contains(comparison.Kinds, c.As) {
				return fmt.Errorf("--as %q: write one of %s", c.As, strings.Join(comparison.Kinds, ", "))
			}
			if err := comparison.CheckDiffoscope(c.Diffoscope); err != nil {
				return err
			}
			ctx, end := interrupt.Context(cmd.Context())
			defer end()
			same, err := c.Run(ctx, args[0], args[1], cmd.OutOrStdout())
			switch {
			case ctx.Err() != nil:
				return exit.New(exit.Trouble, context.Cause(ctx))
			case err != nil:
				return exit.Compared(err)
			case !same:
				return exit.New(exit.No, nil)
			}
			return nil
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.As, "as", "", "kind of A and B: "+strings.Join(comparison.Kinds, ", ")+" (default: detected)")
	f.BoolVar(&c.Results, "results", false, "compare the cached results of actions A and B")
	f.BoolVar(&c.Names, "names", false, "name differing files without comparing their contents")
	f.BoolVar(&c.Invocation, "invocation", false, "compare all actions of builds A and B")
	render.JSONFlag(f, &c.JSON, "print a JSON object", comparison.Reports...)
	f.BoolVar(&c.Diffoscope, "diffoscope", false, comparison.DiffoscopeHelp)
	cmd.MarkFlagsMutuallyExclusive("as", "results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("invocation", "diffoscope")
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if c.Invocation {
			return c.From.CompleteInvocations(cmd, args, typed)
		}
		return c.From.CompleteActions(cmd, args, typed)
	}
	return cmd
}
