// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/runnerserver"
	"github.com/spf13/cobra"
)

func runnerCommand() *cobra.Command {
	c := runnerserver.Config{Mode: 0o600}
	cmd := &cobra.Command{
		Use:   "runner --socket PATH --build-dir DIR",
		Short: "Runs the commands of a Buildbarn worker in the sandbox",
		Long: `Runner takes the place of bb_runner: it serves Buildbarn's protocol for runners on a unix socket, so that an
existing bb_worker has its commands run in this sandbox. --build-dir is the build directory of bb_worker's
configuration, by the same path or another one that leads to the same files.

A command finds its input root in /build and the host's toolchain where it always is. Its inputs are on
read-only mounts; what it makes is copied into bb_worker's directory once it has ended. docs/runner.md says what
this guarantees, and what only bb_worker can. Whoever can open the socket can execute commands in the sandbox:
if bb_worker is another user, let a group of both own the socket's directory and use --socket-mode 0660.

SIGTERM drains: no new commands, running ones finish; a second one, or the end of --drain-timeout, stops them.`,
		Example: `  cloister runner --socket /worker/runner --build-dir /worker/build
  cloister runner --socket /worker/runner --build-dir /worker/build --jobs 8 --policy policy.yaml

  # In the configuration of bb_worker:
  runners: [{ endpoint: { address: 'unix:///worker/runner' }, concurrency: 8, ... }]`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if c.Jobs < 1 {
				return fmt.Errorf("--jobs %d: at least one command must be able to run", c.Jobs)
			}
			return runnerserver.Run(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Socket, "socket", "", "path of the unix socket, which bb_worker's configuration names as the runner's endpoint")
	f.Var(&c.Mode, "socket-mode", "permissions of the socket")
	f.StringVar(&c.BuildDir, "build-dir", "", "bb_worker's build directory")
	f.IntVar(&c.Jobs, "jobs", runtime.GOMAXPROCS(0), "how many commands run at once; a command that waits uses up its timeout, so give it at least bb_worker's concurrency")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", 10*time.Minute, "how long running commands may take after SIGTERM")
	c.Sandbox.Register(cmd)
	for _, name := range []string{"socket", "build-dir"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // there is no such flag
		}
	}
	return cmd
}
