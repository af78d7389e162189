// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cmd/cloister/internal/comparison"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/spf13/cobra"
)

func diffCommand() *cobra.Command {
	var c comparison.Config
	cmd := &cobra.Command{
		Use: "diff A B [--as KIND] [--results] [--names] [--cas URL] [--instance NAME] [--json]\n" +
			"  cloister diff --invocation ID ID [--names] [--cas URL] [--instance NAME] [--json]",
		Short: "Says how two blobs, directories, actions, results, manifests or builds differ",
		Long: `Diff compares A and B, each of which is a file or a directory of this host, or the digest of something that a
server has: HASH/SIZE; at a server that keeps a history also the beginning of the digest of an action, of at least
8 digits, or ^1 for the action that was asked for last, ^2 for the one before.

Of actions it says why the result of the one is not found for the other: other arguments, variables, platform, timeout,
inputs. With --results it compares what the action cache has of them. What a digest names is recognised, and stated
with --as where that is not what was meant: action, command, directory, tree, manifest, blob. Files that differ are
compared in the words of their formats, unless --names says that their names are enough.

With --invocation it compares two builds by the server's history: which actions one alone has, which were others
and why, which are so only because of others, and which are the same with another result, and so not reproducible.

It exits with 0 if there is no difference, with 1 if there is one, and with 2 if it cannot say.`,
		Example: `  cloister diff 9f2c...e1/142 77ab...02/142    # why was this a cache miss?
  cloister diff ^2 ^1
  cloister diff ^2 ^1 --results
  cloister diff bazel-bin/app.jar /tmp/app.jar
  cloister diff --invocation 5f1d6c0e-3b0a-4f7c-9d1e-2a3b4c5d6e7f a0b1c2d3-e4f5-4607-8819-2a3b4c5d6e7f`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.As != "" && !slices.Contains(comparison.Kinds, c.As) {
				return fmt.Errorf("--as %q: there are %s", c.As, strings.Join(comparison.Kinds, ", "))
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
				return exit.New(exit.Trouble, err)
			case !same:
				return exit.New(exit.No, nil)
			}
			return nil
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.As, "as", "", "what A and B are: "+strings.Join(comparison.Kinds, ", ")+" (default: recognised)")
	f.BoolVar(&c.Results, "results", false, "A and B are actions: compare their results in the action cache")
	f.BoolVar(&c.Names, "names", false, "say which files differ, and not how")
	f.BoolVar(&c.Invocation, "invocation", false, "A and B are ids of builds: compare all actions of them")
	f.BoolVar(&c.JSON, "json", false, "print one JSON object")
	f.BoolVar(&c.Diffoscope, "diffoscope", false, comparison.DiffoscopeHelp)
	cmd.MarkFlagsMutuallyExclusive("as", "results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("results", "invocation")
	cmd.MarkFlagsMutuallyExclusive("invocation", "diffoscope")
	return cmd
}
