// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cloister-bench",
		Short: "Measure servers, a local store and the machine itself",
		Long: `Cloister-bench loads Remote Execution API servers, checks every answer, and compares the servers with each other and with
the machine itself. Within a run they alternate; compare only measurements of the same run.`,
		Example: `  cloister-bench table                         # with its own server
  cloister-bench noop --executor 127.0.0.1:8980 -c 8
  cloister-bench blobs --executor 127.0.0.1:8980
  cloister-bench store --dir /var/tmp/store -n 1000000`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	// An interrupted command removes its files and its server; a second signal does not wait for that.
	cmd.PersistentPreRun = func(cmd *cobra.Command, _ []string) {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		context.AfterFunc(ctx, stop)
		cmd.SetContext(ctx)
	}
	cmd.AddCommand(benchTableCommand())
	for _, kind := range []load.Kind{load.Noop, load.Trees, load.Outputs, load.Mixed} {
		cmd.AddCommand(benchExecCommand(kind))
	}
	cmd.AddCommand(benchLocalCommand(), benchBlobsCommand(), benchStoreCommand())
	return cmd
}

// benchBlobs is the flags of blobs.
type benchBlobs struct {
	load  load.Config
	peers peers
	json  string
}

func benchBlobsCommand() *cobra.Command {
	c := benchBlobs{load: load.Config{Size: 1 << 10, Large: 256 << 20, Chunk: 1 << 20}}
	cmd := &cobra.Command{
		Use:   "blobs --executor [NAME=]ADDRESS [--against NAME=ADDRESS]...",
		Short: "Measure reading and writing blobs at servers",
		Long: `Blobs puts the content-addressable storage of any server of the Remote Execution API under load: small
blobs in batches and by one stream each, questions for missing blobs (every second of them is), and one
large blob by a stream. The blobs are half compressible. They stay at the server.

Several servers take turns, step by step. The table shows the median of all rounds, and how many times
as fast the first server is as each other one. With --watch it also shows the CPU time of a server in
each step, and its memory. It exits with 1 if a call fails or an answer is wrong.`,
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
	c.peers.register(f, defaultAddress)
	f.StringVar(&c.load.Salt, "salt", "", "what the contents depend on; servers must not have seen it before (default: a random one)")
	f.IntVarP(&c.load.Blobs, "blobs", "n", 10_000, "small blobs of a step; 0 leaves these steps out")
	f.Var((*flags.Bytes)(&c.load.Size), "size", "size of a small blob, at most 1MiB")
	f.Var((*flags.Bytes)(&c.load.Large), "large", "size of the large blob; 0 leaves its steps out")
	f.Var((*flags.Bytes)(&c.load.Chunk), "chunk", "size of a piece in which the large blob is sent, at most 3MiB")
	f.IntVarP(&c.load.Parallel, "concurrency", "c", 4, "calls in flight")
	f.IntVar(&c.load.Lookups, "lookups", 1_000_000, "digests asked for in a step")
	f.IntVar(&c.load.Rounds, "rounds", 3, "how often each step is done")
	f.BoolVar(&c.load.Zstd, "zstd", false, "measure compressed blobs, too, where a server takes them")
	f.BoolVar(&c.load.Verify, "verify", false, "at the end read everything once more, and compare")
	f.StringVar(&c.json, "json", "", "write everything that was measured to this file")
	return cmd
}

// check validates the flags.
func (c *benchBlobs) check() error {
	switch l := &c.load; {
	case l.Blobs < 0 || l.Lookups < 1 || l.Parallel < 1 || l.Rounds < 1:
		return errors.New("-c, --lookups and --rounds take numbers from 1, and -n from 0")
	case l.Size < 1 || l.Size > 1<<20:
		return fmt.Errorf("--size %s: a small blob has from 1 byte to 1MiB, since it goes into a batch", (*flags.Bytes)(&l.Size))
	case l.Chunk < 1 || l.Chunk > 3<<20:
		return fmt.Errorf("--chunk %s: a piece has from 1 byte to 3MiB, since it goes into a message", (*flags.Bytes)(&l.Chunk))
	}
	return nil
}

// run measures, prints the report to out, and its progress to info.
func (c *benchBlobs) run(ctx context.Context, out, info io.Writer) error {
	if c.load.Salt == "" {
		c.load.Salt = rand.Text()
	}
	servers, err := c.peers.dial(ctx)
	for _, s := range servers {
		defer s.Close()
	}
	if err != nil {
		return err
	}
	c.load.Progress = func(round int) { fmt.Fprintf(info, "round %d of %d\n", round, c.load.Rounds) }
	report, err := load.Run(ctx, c.load, servers)
	if err != nil {
		return exit.New(exit.No, err)
	}
	if err := writeReport(c.json, report); err != nil {
		return err
	}
	fmt.Fprintf(out, "%d blobs of %s, large %s in pieces of %s, %d calls at once, medians of %d rounds, salt %s\n",
		c.load.Blobs, (*flags.Bytes)(&c.load.Size), (*flags.Bytes)(&c.load.Large), (*flags.Bytes)(&c.load.Chunk), c.load.Parallel, c.load.Rounds, c.load.Salt)
	return report.Text(out)
}

// writeReport writes a report as JSON, unless file is empty.
func writeReport(file string, report any) error {
	if file == "" {
		return nil
	}
	b, err := json.MarshalIndent(report, "", "  ")
	if err == nil {
		err = os.WriteFile(file, append(b, '\n'), 0o644)
	}
	if err != nil {
		return exit.New(exit.Environment, fmt.Errorf("--json: %w", err))
	}
	return nil
}

func benchStoreCommand() *cobra.Command {
	c := load.StoreConfig{Size: 256}
	var file string
	cmd := &cobra.Command{
		Use:   "store --dir DIR [-n N]",
		Short: "Fill a local store and measure it",
		Long: `Store makes a store in a directory of its own, puts small blobs into it, closes it, and opens it again. It
prints how long that takes, how much memory the store needs for each blob, and how many blobs can be
asked for and read. The store stays: a second run finds it, and opens it only.

Files that were just written are in the memory of the operating system, so that opening them is as fast
as it is after a restart of the server, not of the machine.`,
		Example: "  cloister-bench store --dir /var/tmp/store -n 5000000",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case c.Dir == "":
				return errors.New("--dir: name a directory for the store, which holds nothing else")
			case c.Blobs < 1 || c.Reads < 0:
				return errors.New("-n takes a number from 1, and --reads one from 0")
			case c.Size < 8 || c.Size > 32<<10:
				return fmt.Errorf("--size %s: a blob has from 8 bytes to 32KiB", (*flags.Bytes)(&c.Size))
			}
			return benchStore(cmd.Context(), c, file, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Dir, "dir", "", "directory of the store; required")
	f.StringVar(&c.Salt, "salt", "", "what the contents depend on")
	f.IntVarP(&c.Blobs, "blobs", "n", 1_000_000, "blobs of the store")
	f.Var((*flags.Bytes)(&c.Size), "size", "size of a blob, from 8 bytes to 32KiB")
	f.IntVar(&c.Reads, "reads", 100_000, "blobs that are read, at random")
	f.BoolVar(&c.Sync, "sync", false, "write each batch to the disk before the next one is put")
	f.StringVar(&file, "json", "", "write what was measured to this file")
	return cmd
}

// benchStore measures a store and prints the report.
func benchStore(ctx context.Context, c load.StoreConfig, file string, out io.Writer) error {
	r, err := load.RunStore(ctx, c)
	if err != nil {
		return exit.New(exit.No, err)
	}
	if err := writeReport(file, r); err != nil {
		return err
	}
	if r.Filled {
		fmt.Fprintf(out, "put      %.0f blobs of %d bytes a second\n", r.Put, r.Size)
	}
	fmt.Fprintf(out, "closed   in %.2f s\n", r.Close)
	fmt.Fprintf(out, "opened   %d blobs in %.2f s", r.Blobs, r.Open)
	if r.OpenCPU > 0 {
		fmt.Fprintf(out, ", %.2f s of CPU time", r.OpenCPU)
	}
	fmt.Fprintf(out, "\nmemory   %.1f bytes a blob in the heap", r.Heap)
	if r.Resident > 0 {
		fmt.Fprintf(out, ", %.1f resident", r.Resident)
	}
	_, err = fmt.Fprintf(out, "\nasked    for %.0f blobs a second\nread     %.0f blobs a second\n", r.Missing, r.Read)
	return err
}
