// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/cloister/internal/farmworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/spf13/cobra"
)

func joinCommand() *cobra.Command {
	c := farmworker.Config{Config: node.NewConfig()}
	c.Fleet = true
	cmd := &cobra.Command{
		Use:   "join ADDRESS",
		Short: "Execute actions from a scheduler",
		Long: `Join takes actions from the scheduler at ADDRESS, grpc://HOST:PORT or grpcs://HOST:PORT, and executes them in the
sandbox. The scheduler is cloister serve --worker-listen or Buildbarn's bb_scheduler; it sees --jobs workers.

Inputs come from the store that the scheduler's clients use, and outputs go there: the server of --cas, by default
the scheduler itself. The local directory caches what was used recently. Join takes no actions while that store is
unreachable or the disk is full.

Ctrl-C drains: running actions finish. A second Ctrl-C, or the end of --drain-timeout, returns them (docs/farm.md).`,
		Example: `  cloister join grpc://head:8983
  cloister join grpcs://head:8983 --tls-cert w.pem --tls-key w.key --property OSFamily=linux --property pool=big
  cloister join grpc://bb-scheduler:8983 --cas grpc://bb-storage:8980 --instance main \
      --property OSFamily=linux --property container-image=docker://registry.example.com/image@sha256:...`,
		Args: func(cmd *cobra.Command, args []string) error {
			if c.Scheduler != "" {
				return cobra.MaximumNArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				if config.Origin(cmd.Flag("scheduler")) == "flag" {
					return errors.New("ADDRESS and --scheduler are mutually exclusive: pass one of them")
				}
				c.Scheduler = args[0]
			}
			if err := c.Check(cmd); err != nil {
				return err
			}
			return farmworker.Run(cmd.Context(), &c, unlessQuiet(cmd, cmd.OutOrStdout()))
		},
	}
	config.Register(cmd)
	c.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
	return cmd
}
