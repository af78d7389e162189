// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/cloister-build/cloister/cmd/cloister/internal/operator"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/spf13/cobra"
)

func drainCommand() *cobra.Command {
	var c operator.Drain
	cmd := &cobra.Command{
		Use:   "drain WORKER | --all [--reason TEXT] [--wait [--timeout TIME]] [--server URL] [--json]",
		Short: "Stop giving actions to a worker",
		Long: `Drain stops a cloister serve from giving actions to a worker, or with --all to all workers, including later ones.
Running actions finish; queued ones wait for other workers. WORKER is the name that cloister status prints. The worker
stays drained until cloister undrain, even if it rejoins or the server restarts. A server with only drained workers is
not ready.

--wait returns when the workers are idle, so that the machine can be switched off. The worker process itself keeps
running.

The exit code is 4 if no worker has this name, 5 if the server cannot be reached, and 6 if --timeout ends first; the
worker stays drained then.`,
		Example: `  cloister drain build-7 --reason 'new kernel' --wait --timeout 30m && ssh build-7 reboot
  cloister drain --all --server grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case c.Timeout < 0:
				return fmt.Errorf("--timeout %s: write 90s or 30m, or 0 for no limit", c.Timeout)
			case c.Timeout > 0 && !c.Wait:
				return errors.New("--timeout needs --wait")
			}
			if err := c.Name(args); err != nil {
				return err
			}
			return c.Run(cmd.Context(), cmd.OutOrStdout())
		},
	}
	c.From.Register(cmd)
	f := cmd.Flags()
	f.BoolVar(&c.All, "all", false, "drain all workers, also those that join later")
	f.StringVar(&c.Reason, "reason", "", "text for cloister status to show")
	f.BoolVar(&c.Wait, "wait", false, "return when the workers are idle")
	render.JSONFlag(f, &c.JSON, "print a JSON object", &operator.Drained{})
	f.DurationVar(&c.Timeout, "timeout", 0, "time limit of --wait; 0 means no limit")
	return cmd
}

func undrainCommand() *cobra.Command {
	var c operator.Drain
	cmd := &cobra.Command{
		Use:   "undrain WORKER | --all [--server URL] [--json]",
		Short: "Resume giving actions to a worker",
		Long: `Undrain reverts cloister drain for one worker, or with --all for all workers.

The exit code is 4 if no worker has this name, and 5 if the server cannot be reached.`,
		Example: `  cloister undrain build-7
  cloister undrain --all --server grpcs://build.example.com:8980`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.Name(args); err != nil {
				return err
			}
			return c.Undo(cmd.Context(), cmd.OutOrStdout())
		},
	}
	c.From.Register(cmd)
	cmd.Flags().BoolVar(&c.All, "all", false, "undrain all workers")
	render.JSONFlag(cmd.Flags(), &c.JSON, "print a JSON object", &operator.Drained{})
	return cmd
}
