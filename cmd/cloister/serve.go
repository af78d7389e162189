// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/cmd/cloister/internal/buildevents"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/config"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/server"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/spf13/cobra"
)

func serveCommand() *cobra.Command {
	c := server.Config{Config: node.NewConfig(), History: history.DefaultBytes, BuildEvents: buildevents.DefaultBytes, CallerLimits: quota.Default(), InstanceLimits: quota.DefaultInstance()}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve remote execution and a cache",
		Long: `Serve executes the actions of Bazel and other Remote Execution API clients in the sandbox, and keeps
inputs, outputs and results in a directory. It needs no configuration and keeps instances apart. Ctrl-C
drains: running actions finish, and their clients download the outputs. A second Ctrl-C stops at once.

By default it listens on loopback, and everyone who can connect may run commands in the sandbox.
--tls-client-ca and --auth restrict access (docs/auth.md). Blobs reported present are kept for --lease.
--cas and --store put another server or a bucket behind the directory (docs/store.md).

With --worker-listen, machines that run cloister join execute actions too. With --jobs 0 only they do,
and this machine needs no sandbox (docs/farm.md).`,
		Example: `  cloister serve
  cloister serve --listen 127.0.0.1:9000 --dir /var/cache/cloister --jobs 4 --max-size 50GiB
  cloister serve --cas grpcs://cache.example.com:443 --cas-write back
  cloister serve --listen 0.0.0.0:8980 --tls-cert server.pem --tls-key server.key --auth auth.yaml
  cloister serve --store 's3://builds/cache?region=eu-central-1' --lease 12h
  cloister serve --listen 0.0.0.0:8980 --worker-listen 0.0.0.0:8983 --jobs 0

  bazel build --remote_executor=grpc://127.0.0.1:8980 //...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.Check(cmd); err != nil {
				return err
			}
			return server.Run(cmd.Context(), &c, unlessQuiet(cmd, cmd.OutOrStdout()))
		},
	}
	config.Register(cmd)
	c.Config.Register(cmd)
	c.Sandbox.RegisterImages(cmd)
	c.Upstream.Register(cmd)
	c.Sampling.Register(cmd)
	c.Workers.Register(cmd)
	f := cmd.Flags()
	c.Auth.Register(f)
	c.Web.Register(f)
	f.StringVar(&c.Listen, "listen", client.DefaultAddress, "address and port of the gRPC services; port 0 selects a free one")
	f.Var(&c.MaxBlob, "max-blob", "size limit of a blob (default: half of --max-size, which is the maximum)")
	flags.HideDefault(f, "max-blob")
	f.IntVar(&c.MaxQueued, "max-queued", 100_000, "limit of requests that wait or run, of all clients; more get RESOURCE_EXHAUSTED")
	f.Var(&c.CallerLimits, "caller-limit", "per-caller limits, [CALLER=]NAME=NUMBER; calls beyond one fail with RESOURCE_EXHAUSTED; repeatable")
	f.Var(&c.InstanceLimits, "instance-limit", "per-instance limits of all callers together, [INSTANCE=]NAME=NUMBER; repeatable")
	f.DurationVar(&c.StreamIdle, "stream-idle", time.Minute, "time after which an upload or download ends if its client neither sends nor receives data")
	f.BoolVar(&c.StrictProperties, "strict-properties", false, "refuse actions with platform properties that have no effect here")
	f.StringVar(&c.ToolchainDrift, "toolchain-drift", "", "treatment of cached results of another toolchain of this machine: allow serves them (default: they are misses)")
	f.Var(&c.History, "history-size", "size limit of the history, and of the results and logs of failed actions that it protects; 0 disables it")
	f.Var(&c.BuildEvents, "build-events-size", "size limit of stored build events (Bazel's --bes_backend); 0 disables the Build Event Service")
	f.Var(&c.DigestFunctions, "digest-function", "default digest function among those of equal hash length, [INSTANCE=]FUNCTION (default: learned from uploads)")
	flags.Repeatable(f, "caller-limit", "instance-limit", "digest-function")
	return cmd
}
