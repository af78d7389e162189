// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/cloister/internal/runnerserver"
	"github.com/spf13/cobra"
)

func runnerCommand() *cobra.Command {
	c := runnerserver.Config{Mode: 0o600}
	cmd := &cobra.Command{
		Use:   "runner --socket PATH --build-dir DIR",
		Short: "Run a Buildbarn worker's commands in the sandbox",
		Long: `Runner replaces bb_runner: it serves Buildbarn's runner protocol on a unix socket, so that an existing bb_worker runs
its commands in this sandbox. --build-dir is the build directory in bb_worker's configuration; its path may differ if it
leads to the same files.

A command finds its input root at /build, with read-only inputs, and the host's toolchain in its usual place. Its
outputs are copied into bb_worker's directory when it has ended (docs/runner.md). Anyone who can open the socket can run
commands in the sandbox. If bb_worker is another user, give both a common group that owns the socket's directory, and
use --socket-mode 0660.

SIGTERM drains: running commands finish. A second SIGTERM, or the end of --drain-timeout, stops them.`,
		Example: `  cloister runner --socket /worker/runner --build-dir /worker/build
  cloister runner --socket /worker/runner --build-dir /worker/build --jobs 8 --policy policy.yaml

  # In the configuration of bb_worker:
  runners: [{ endpoint: { address: 'unix:///worker/runner' }, concurrency: 8, ... }]`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Jobs < 1 {
				return fmt.Errorf("--jobs %d: write 1 or more", c.Jobs)
			}
			return runnerserver.Run(cmd.Context(), &c, unlessQuiet(cmd, cmd.OutOrStdout()))
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Socket, "socket", "", "path of the unix socket, the runner endpoint in bb_worker's configuration")
	f.Var(&c.Mode, "socket-mode", "permissions of the socket")
	f.StringVar(&c.BuildDir, "build-dir", "", "bb_worker's build directory")
	f.IntVar(&c.Jobs, "jobs", runtime.GOMAXPROCS(0), "number of concurrent commands, at least bb_worker's concurrency because waiting counts against a command's timeout")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Minute, "time limit of running commands after SIGTERM")
	c.Sandbox.Register(cmd)
	config.Register(cmd)
	for _, name := range []string{"socket", "build-dir"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // there is no such flag
		}
	}
	return cmd
}
