// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

// blobBench is the configuration of cloister-bench blobs.
type blobBench struct {
	load    load.Config
	servers serverFlags
}

func blobsCommand() *cobra.Command {
	c := blobBench{load: load.Config{Salt: rand.Text(), Size: 1 << 10, Large: 256 << 20, Lookups: 1_000_000}}
	cmd := &cobra.Command{
		Use:   "blobs --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: "Measure how fast servers write and read blobs",
		Long: `Put the content-addressable storage of Remote Execution API servers under load: small blobs of 1 KiB in
batches and in one stream each, a million lookups, half of them of absent blobs, and one large blob in
a stream. The blobs are half compressible and remain on the server.

Servers alternate step by step. The table shows medians over all rounds, and the ratio of the first
server's rate to that of each other server. With --watch it also shows CPU time per step and memory. A
failed call or a wrong answer exits with 1.`,
		Example: `  cloister-bench blobs --executor 127.0.0.1:8980
  cloister-bench blobs --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092 --watch other=other.pid`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if l := &c.load; l.Blobs < 0 || l.Lookups < 0 || l.Parallel < 1 || l.Rounds < 1 {
				return errors.New("-c and --rounds must be at least 1, and --blobs and --lookups at least 0")
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	c.servers.register(f, defaultAddress)
	f.IntVar(&c.load.Blobs, "blobs", 10_000, "number of small blobs per step; 0 skips these steps")
	f.IntVar(&c.load.Lookups, "lookups", c.load.Lookups, "number of digests to look up, half of them absent; 0 skips this step")
	f.Var((*flags.Bytes)(&c.load.Large), "large", "size of the large blob; 0 skips its steps")
	f.BoolVar(&c.load.Compressed, "compressed", false, "also read the large blob compressed with Zstandard, and decompress it")
	f.IntVarP(&c.load.Parallel, "concurrency", "c", 4, "number of calls in flight")
	f.IntVar(&c.load.Rounds, "rounds", 3, "number of rounds")
	return cmd
}

// run measures, prints the result to out, and its progress to info.
func (c *blobBench) run(ctx context.Context, out, info io.Writer) error {
	l := &c.load
	l.Settle = c.servers.settle
	servers, err := c.servers.dial(ctx)
	for _, s := range servers {
		defer s.Close()
	}
	if err != nil {
		return err
	}
	l.Progress = func(round int) { fmt.Fprintf(info, "round %d of %d\n", round, l.Rounds) }
	report, err := load.Run(ctx, *l, servers)
	if err != nil {
		return exit.New(exit.No, err)
	}
	fmt.Fprintf(out, "%d blobs of %s, large %s, %d calls in flight, medians of %d rounds\n",
		l.Blobs, (*flags.Bytes)(&l.Size), (*flags.Bytes)(&l.Large), l.Parallel, l.Rounds)
	return report.Text(out)
}
