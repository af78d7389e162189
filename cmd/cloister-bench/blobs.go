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
	report  string
}

func blobsCommand() *cobra.Command {
	c := blobBench{load: load.Config{Size: 1 << 10, Large: 256 << 20, Chunk: 1 << 20}}
	cmd := &cobra.Command{
		Use:   "blobs --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: "Measure how fast servers write and read blobs",
		Long: `Put the content-addressable storage of Remote Execution API servers under load: small blobs in
batches and in one stream each, lookups of which every second is missing, and one large blob in a
stream. The blobs are half compressible and remain on the server.

Servers alternate step by step. The table shows medians over all rounds, and the ratio of the first
server's rate to that of each other server. With --watch it also shows CPU time per step and memory. A
failed call or a wrong answer exits with 1.`,
		Example: `  cloister-bench blobs --executor 127.0.0.1:8980
  cloister-bench blobs --executor cloister=127.0.0.1:8980 --against other=127.0.0.1:9092 --watch other=other.pid`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(); err != nil {
				return err
			}
			return c.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	c.servers.register(f, defaultAddress)
	f.StringVar(&c.load.Salt, "salt", "", "seed of the contents, unknown to the servers (default: random)")
	f.IntVar(&c.load.Blobs, "blobs", 10_000, "number of small blobs per step; 0 skips these steps")
	f.Var((*flags.Bytes)(&c.load.Size), "size", "size of a small blob, at most 1MiB")
	f.Var((*flags.Bytes)(&c.load.Large), "large", "size of the large blob; 0 skips its steps")
	f.Var((*flags.Bytes)(&c.load.Chunk), "chunk", "message size of the large blob's stream, at most 3MiB")
	f.IntVarP(&c.load.Parallel, "concurrency", "c", 4, "number of calls in flight")
	f.IntVar(&c.load.Lookups, "lookups", 1_000_000, "number of digests to look up per step")
	f.IntVar(&c.load.Rounds, "rounds", 3, "number of rounds")
	f.BoolVar(&c.load.Zstd, "zstd", false, "also measure compressed blobs on servers that support them")
	f.BoolVar(&c.load.Verify, "verify", false, "read and compare everything again at the end")
	f.StringVar(&c.report, "report", "", "file for all measurements, as JSON")
	return cmd
}

func (c *blobBench) check() error {
	switch l := &c.load; {
	case l.Blobs < 0 || l.Lookups < 1 || l.Parallel < 1 || l.Rounds < 1:
		return errors.New("-c, --lookups and --rounds must be at least 1, and --blobs at least 0")
	case l.Size < 1 || l.Size > 1<<20:
		return fmt.Errorf("--size %s: write 1B to 1MiB, which fits into a batch", (*flags.Bytes)(&l.Size))
	case l.Chunk < 1 || l.Chunk > 3<<20:
		return fmt.Errorf("--chunk %s: write 1B to 3MiB, which fits into a message", (*flags.Bytes)(&l.Chunk))
	}
	return nil
}

// run measures, prints the result to out, and its progress to info.
func (c *blobBench) run(ctx context.Context, out, info io.Writer) error {
	l := &c.load
	if l.Salt == "" {
		l.Salt = rand.Text()
	}
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
	if err := writeReport(c.report, report); err != nil {
		return err
	}
	fmt.Fprintf(out, "%d blobs of %s, large %s in chunks of %s, %d calls in flight, medians of %d rounds, salt %s\n",
		l.Blobs, (*flags.Bytes)(&l.Size), (*flags.Bytes)(&l.Large), (*flags.Bytes)(&l.Chunk),
		l.Parallel, l.Rounds, l.Salt)
	return report.Text(out)
}
