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
		Use:   "top [--interval TIME] [-n N] [--cas URL]",
		Short: "Shows what a server and its workers do, again and again",
		Long: `Top shows on a terminal what cloister status prints, and shows it anew every second, until q or Ctrl-C. Where its
output is no terminal it prints one line each time. A server that goes away is asked again until it is back.

It exits with 5 if the server cannot be reached at first.`,
		Example: `  cloister top
  cloister top --interval 10s --cas grpcs://build.example.com:8980 | tee -a build.log`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Interval < 100*time.Millisecond {
				return fmt.Errorf("--interval %s: write at least 100ms", c.Interval)
			}
			if c.Rounds < 0 {
				return fmt.Errorf("-n %d: write a positive number, or 0 for no end", c.Rounds)
			}
			return c.Watch(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.DurationVar(&c.Interval, "interval", time.Second, "how often to ask")
	f.IntVarP(&c.Rounds, "number", "n", 0, "how often to ask at all; 0 is without end")
	return cmd
}
