// SPDX-License-Identifier: Apache-2.0

package main

import (
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/cmd/cloister/internal/server"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/spf13/cobra"
)

func serveCommand() *cobra.Command {
	c := server.Config{Config: node.NewConfig(), History: history.DefaultBytes}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serves remote execution and its cache on this machine",
		Long: `Serve executes the actions of Bazel and other clients of the Remote Execution API in the sandbox, and
keeps inputs, outputs and results in a directory. It needs no configuration, accepts every instance
name and keeps each apart. Ctrl-C drains: no new actions, running ones finish; a second Ctrl-C stops.

A blob that a client was told is there stays for the time of --lease. With --cas or --store the directory
is in front of another server, or of a bucket, which then has everything, too; what only that has, it
keeps for as long as it likes. docs/store.md says more.

It listens on loopback unless told otherwise, and whoever reaches the port can execute commands in the
sandbox. With --tls-client-ca that is who has a certificate, with --auth who may by a file of callers and
their rights; docs/auth.md says how one is written.

With --worker-listen other machines execute actions, too: cloister join takes them from that port, and
finds there all that it needs for them. With --jobs 0 this one executes none, and needs no sandbox. What
runs on a machine that is lost runs again on another. docs/farm.md says more.`,
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
			return server.Run(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	c.Config.Register(cmd)
	c.Upstream.Register(cmd)
	c.Sampling.Register(cmd)
	c.Workers.Register(cmd)
	f := cmd.Flags()
	c.Auth.Register(f)
	f.StringVar(&c.Listen, "listen", client.DefaultAddress, "address and port of the gRPC services; port 0 chooses a free one")
	f.Var(&c.MaxBlob, "max-blob", "size of the largest blob that is taken (default: half of --max-size, which is the most)")
	flags.HideDefault(f, "max-blob")
	f.Var(&c.History, "history-size", "size of the record of what was asked for, which action ls and diff look into; the oldest goes first; 0 keeps none")
	f.Var(&c.DigestFunctions, "digest-function", "[INSTANCE=]FUNCTION that is meant by a client that states none, of those with hashes of equal length; Buck2 with BLAKE3 needs blake3")
	return cmd
}
