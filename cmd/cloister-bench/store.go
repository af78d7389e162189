// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cmd/cloister-bench/internal/load"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/spf13/cobra"
)

func storeCommand() *cobra.Command {
	c := load.StoreConfig{Size: 256}
	var file string
	cmd := &cobra.Command{
		Use:   "store --dir DIR [--blobs N]",
		Short: "Measure a local store of small blobs",
		Long: `Create a store, fill it with small blobs, close it and open it again. The output shows the times,
the memory per blob, and how fast blobs are looked up and read. The store remains: a second run only
opens it.

The operating system still caches files just written, so opening is as fast as after a restart of the
server, not of the machine.`,
		Example: "  cloister-bench store --dir /var/tmp/store --blobs 5000000",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case c.Dir == "":
				return errors.New("--dir: name a new directory, or that of an earlier run")
			case c.Blobs < 1 || c.Reads < 0:
				return errors.New("--blobs must be at least 1, and --reads at least 0")
			case c.Size < 8 || c.Size > 32<<10:
				return fmt.Errorf("--size %s: write 8B to 32KiB", (*flags.Bytes)(&c.Size))
			}
			return benchStore(cmd.Context(), c, file, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Dir, "dir", "", "directory of the store; required")
	f.StringVar(&c.Salt, "salt", "", "seed of the contents")
	f.IntVar(&c.Blobs, "blobs", 1_000_000, "number of blobs")
	f.Var((*flags.Bytes)(&c.Size), "size", "size of a blob, from 8B to 32KiB")
	f.IntVar(&c.Reads, "reads", 100_000, "number of random reads")
	f.BoolVar(&c.Sync, "sync", false, "sync each batch to disk before the next one")
	f.StringVar(&file, "report", "", "file for all measurements, as JSON")
	return cmd
}

// benchStore measures a store, and prints the result to out and to file, if not empty.
func benchStore(ctx context.Context, c load.StoreConfig, file string, out io.Writer) error {
	r, err := load.RunStore(ctx, c)
	if err != nil {
		return exit.New(exit.No, err)
	}
	if err := writeReport(file, r); err != nil {
		return err
	}
	if r.Filled {
		fmt.Fprintf(out, "put      %.0f blobs of %d bytes per second\n", r.Put, r.Size)
	}
	fmt.Fprintf(out, "closed   in %.2f s\n", r.Close)
	fmt.Fprintf(out, "opened   %d blobs in %.2f s", r.Blobs, r.Open)
	if r.OpenCPU > 0 {
		fmt.Fprintf(out, ", %.2f s of CPU time", r.OpenCPU)
	}
	fmt.Fprintf(out, "\nmemory   %.1f bytes of heap per blob", r.Heap)
	if r.Resident > 0 {
		fmt.Fprintf(out, ", %.1f resident", r.Resident)
	}
	_, err = fmt.Fprintf(out, "\nlookup   %.0f blobs per second\nread     %.0f blobs per second\n", r.Missing, r.Read)
	return err
}
