// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/cloister-build/cloister/cmd/cloister/internal/farmworker"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/spf13/cobra"
)

func joinCommand() *cobra.Command {
	c := farmworker.Config{Config: node.NewConfig()}
	c.Fleet = true
	cmd := &cobra.Command{
		Use:   "join ADDRESS",
		Short: "Executes actions that a scheduler hands out",
		Long: `Join takes actions from the scheduler at ADDRESS, grpc://HOST:PORT or grpcs://HOST:PORT, and executes them in
the sandbox as serve does. The scheduler is cloister serve --worker-listen, or Buildbarn's bb_scheduler.

Inputs come from the store at --cas, and outputs go there: it is the one that the scheduler's clients use. The
directory is in front of it, so that what was used lately is near. Without --cas the scheduler has the store, as
cloister serve does.

Each of the --jobs is a worker of its own to the scheduler. It takes no action while the store does not answer or
the disk is full. Ctrl-C drains: running actions finish; a second Ctrl-C, or the end of --drain-timeout, gives them
back. docs/farm.md says more.`,
		Example: `  cloister join grpc://head:8983
  cloister join grpcs://head:8983 --tls-cert w.pem --tls-key w.key --property OSFamily=linux --property pool=big
  cloister join grpc://bb-scheduler:8983 --cas grpc://bb-storage:8980 --instance main \
      --property OSFamily=linux --property container-image=docker://ghcr.io/example/image@sha256:...`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c.Scheduler = args[0]
			if err := c.Check(cmd); err != nil {
				return err
			}
			return farmworker.Run(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	c.Register(cmd)
	return cmd
}
