// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/operator"
	"github.com/spf13/cobra"
)

func topCommand() *cobra.Command {
	var c operator.Top
	cmd := &cobra.Command{
		Use:   "top [--interval TIME] [--updates N] [--server URL]",
		Short: "Show live server activity",
		Long: `Top shows what cloister status prints, refreshed every second, until q or Ctrl-C. If the output is not a terminal it
prints one line per interval. It keeps retrying if the server becomes unreachable.

The exit code is 5 if the server cannot be reached at first.`,
		Example: `  cloister top
  cloister top --interval 10s --server grpcs://build.example.com:8980 | tee -a build.log`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Interval < 100*time.Millisecond {
				return fmt.Errorf("--interval %s: write at least 100ms", c.Interval)
			}
			if c.Rounds < 0 {
				return fmt.Errorf("--updates %d: write a positive number, or 0 for no limit", c.Rounds)
			}
			return c.Watch(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.DurationVar(&c.Interval, "interval", time.Second, "time between updates")
	f.IntVar(&c.Rounds, "updates", 0, "number of updates; 0 means no limit")
	return cmd
}
