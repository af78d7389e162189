// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/operator"
	"github.com/spf13/cobra"
)

func drainCommand() *cobra.Command {
	var c operator.Drain
	cmd := &cobra.Command{
		Use:   "drain [WORKER] [--reason TEXT] [--wait [--timeout TIME]] [--cas URL]",
		Short: "Gives a worker of a server no more actions",
		Long: `Drain tells a cloister serve to give a worker no more actions, or, without a WORKER, all of them and those that join
later. What they execute, they go on with; what waits, waits for other workers. A worker is called as cloister status
calls it. It stays drained until cloister undrain, also if it leaves and joins again, or the server is restarted.
A server all of whose workers are drained is not ready.

With --wait it returns once the workers execute nothing, so that the machine can be switched off. That is another thing
than to end the worker: that drains itself when it is told to end.

It exits with 4 if no worker is called so, with 5 if the server cannot be reached, and with 6 if the time of --timeout
is over and something still runs; the worker stays drained then.`,
		Example: `  cloister drain build-7 --reason 'new kernel' --wait --timeout 30m && ssh build-7 reboot
  cloister drain --cas grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case c.Timeout < 0:
				return fmt.Errorf("--timeout %s: write it as 90s or 30m, or 0 for as long as it takes", c.Timeout)
			case c.Timeout > 0 && !c.Wait:
				return errors.New("--timeout is for how long to --wait: state that, too")
			}
			return c.Named(args, func() error { return c.Run(cmd.Context(), cmd.OutOrStdout()) })
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.StringVar(&c.Reason, "reason", "", "what cloister status is to say of it")
	f.BoolVar(&c.Wait, "wait", false, "return once the workers execute nothing")
	f.DurationVar(&c.Timeout, "timeout", 0, "how long to wait at most; 0 is as long as it takes")
	return cmd
}

func undrainCommand() *cobra.Command {
	var c operator.Drain
	cmd := &cobra.Command{
		Use:   "undrain [WORKER] [--cas URL]",
		Short: "Gives a drained worker actions again",
		Long: `Undrain ends what cloister drain began: of one worker, or, without a WORKER, of all.

It exits with 4 if no worker is called so, and with 5 if the server cannot be reached.`,
		Example: `  cloister undrain build-7
  cloister undrain --cas grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return c.Named(args, func() error { return c.Undo(cmd.Context(), cmd.OutOrStdout()) })
		},
	}
	c.From.Register(cmd)
	return cmd
}
