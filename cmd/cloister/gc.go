// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/storedir"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

// gcConfig is the flags of gc.
type gcConfig struct {
	from      client.Server
	store     localstore.Store
	maxSize   flags.Size
	olderThan flags.Duration
	dryRun    bool
	atMost    bool // without a size and an age: report the maximum
}

func gcCommand() *cobra.Command {
	var c gcConfig
	cmd := &cobra.Command{
		Use:   "gc [--dir DIR] [--max-size SIZE] [--older-than TIME] [--dry-run] [--server URL] [--json]",
		Short: "Free space in a store",
		Long: `Gc removes the least recently used blobs: with --max-size down to that size, with --older-than those not used for that
time, and with both only such blobs, down to that size. It never removes leased blobs, which clients rely on, or
inputs mounted by running actions. A running serve also evicts blobs when its store is full.

Gc asks the process that holds the store, or opens the store if no process does and nothing waits to be sent upstream.
With --server and without --dir it asks that server, if that has --auth and the caller the right operate.
--dry-run changes nothing, and without a size or age reports what could be removed at most. The exit code is 1 if the
size of --max-size cannot be reached.`,
		Example: `  cloister gc --dry-run                        # what could be removed
  cloister gc --older-than 14d
  cloister gc --max-size 20GiB --older-than 2d --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set := cmd.Flags().Changed
			switch {
			case set("older-than") && c.olderThan < flags.Duration(time.Second):
				return fmt.Errorf("--older-than %s: write at least 1s", &c.olderThan)
			case !set("max-size") && !set("older-than") && !c.dryRun:
				return errors.New("select blobs with --max-size or --older-than, or only report with --dry-run")
			case !set("max-size") && !set("older-than"):
				c.olderThan, c.atMost = flags.Duration(time.Second), true
			}
			if c.store.Remote() && c.maxSize.Percent > 0 {
				return fmt.Errorf("--max-size %s: write a size such as 20GiB; percentages work only for local stores", &c.maxSize)
			}
			return gc(cmd.Context(), &c, cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr()))
		},
	}
	f := cmd.Flags()
	f.Var(&c.maxSize, "max-size", "target size, such as 20GiB or a percentage of the disk")
	f.Var(&c.olderThan, "older-than", "minimum age of removed blobs: 36h, 14d")
	flags.HideDefault(f, "max-size", "older-than")
	f.BoolVar(&c.dryRun, "dry-run", false, "only report what would be removed")
	c.from.RegisterAddress(cmd)
	c.store.Register(cmd, &c.from, collected{})
	return cmd
}

// gc collects garbage and prints a report to out, and its progress to info if that is a terminal.
func gc(ctx context.Context, c *gcConfig, out, info io.Writer) (err error) {
	ctx, end := interrupt.Context(ctx)
	defer end()
	if err := c.store.Open(ctx); err != nil {
		return err
	}
	defer c.store.Finish(&err)
	if !c.store.Remote() && c.store.Holder() == 0 && !c.dryRun {
		if err := c.checkPending(); err != nil {
			return exit.New(exit.Environment, err)
		}
	}
	size, err := c.maxSize.Of(c.store.Dir)
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	stats, err := c.store.Stats(ctx)
	var r disk.CollectReport
	if err == nil {
		o := disk.CollectOptions{MaxBytes: size, OlderThan: time.Duration(c.olderThan), DryRun: c.dryRun}
		r, err = c.collect(ctx, o, stats.Bytes, terminal.NewProgress(info, "gc       "))
	}
	if err != nil {
		return interrupt.Explain(ctx, err, "stopped; blobs removed so far are gone")
	}
	if c.store.JSON {
		err = c.json(out, &r, stats.Lease)
	} else {
		err = c.text(out, &r, stats.Lease)
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	if size > 0 && r.Bytes > size {
		return exit.New(exit.No, fmt.Errorf("%s remain, more than --max-size %s: leased, pinned and younger blobs stay", sandbox.Bytes(r.Bytes), &c.maxSize))
	}
	return nil
}

// progressInterval is the interval at which gc looks how much is gone.
const progressInterval = 200 * time.Millisecond

// collect removes what o selects from the store, which has before bytes, and shows in line how much of it is gone.
// Other writes to the store count against that.
func (c *gcConfig) collect(ctx context.Context, o disk.CollectOptions, before int64, line *terminal.Progress) (r disk.CollectReport, err error) {
	if line == nil || o.DryRun {
		return c.store.Collect(ctx, o)
	}
	plan := o
	plan.DryRun = true
	planned, err := c.store.Collect(ctx, plan)
	if err != nil {
		return planned, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r, err = c.store.Collect(ctx, o)
	}()
	defer line.Clear()
	for tick := time.Tick(progressInterval); ; {
		select {
		case <-done:
			return r, err
		case <-tick:
			if s, err := c.store.Stats(ctx); err == nil {
				line.Show(min(max(before-s.Bytes, 0), planned.Freed), planned.Freed, "")
			}
		}
	}
}

// checkPending returns an error if blobs wait to be sent upstream, because only a serve that sends them keeps their
// leases.
func (c *gcConfig) checkPending() error {
	n, err := storedir.Pending(c.store.Dir)
	if err == nil && n > 0 {
		err = fmt.Errorf("%d blobs and results wait to be sent upstream and could be lost: run gc while cloister serve --cas-write back runs, or remove %s to discard them",
			n, storedir.Journal(c.store.Dir))
	}
	return err
}

// text prints a report for a person.
func (c *gcConfig) text(out io.Writer, r *disk.CollectReport, lease time.Duration) error {
	p := &render.Page{W: out}
	p.Line("store", c.store.Description())
	var why []string
	switch {
	case c.atMost:
		why = append(why, "at most, with --older-than "+c.olderThan.String())
	case c.olderThan > 0:
		why = append(why, "not used for "+c.olderThan.String())
	}
	if c.maxSize != (flags.Size{}) {
		why = append(why, "the oldest, down to "+c.maxSize.String())
	}
	did := "removed"
	if c.dryRun {
		did = "would go"
	}
	p.Line(did, fmt.Sprintf("%s: %s", sandbox.Bytes(r.Freed), strings.Join(why, "; ")))
	if r.Files > 0 {
		p.Line("", render.Count(r.Files, "large blob"))
	}
	if r.Copies > 0 {
		p.Line("", fmt.Sprintf("%d executable copies of blobs", r.Copies))
	}
	switch {
	case r.Segments > 0 && c.dryRun:
		p.Line("", render.Count(r.Segments, "segment")+" of small blobs")
	case r.Segments > 0:
		p.Line("", render.Count(r.Blobs, "small blob")+", with "+render.Count(r.Segments, "segment"))
	}
	if r.Moved > 0 {
		p.Line("moved", fmt.Sprintf("%s of small blobs that share a segment with removed ones", sandbox.Bytes(r.Moved)))
	}
	stays := sandbox.Bytes(r.Bytes)
	if r.MaxBytes < math.MaxInt64 {
		stays += " of " + sandbox.Bytes(r.MaxBytes)
	}
	p.Line("stays", stays)
	localstore.PrintLeases(p, r, lease, time.Now())
	if p.Err == nil {
		p.Err = localstore.PrintAges(out, r.Ages)
	}
	return p.Err
}

// A collected is the JSON form of a report.
type collected struct {
	Dir      string              `json:"dir"`    // "" for the store of a server
	Holder   int                 `json:"holder"` // process that has the store open, or 0
	DryRun   bool                `json:"dry_run"`
	Blobs    int                 `json:"blobs"`    // small ones that were removed; 0 with dry_run
	Files    int                 `json:"files"`    // large blobs that were removed
	Copies   int                 `json:"copies"`   // executable copies of blobs that were removed
	Segments int                 `json:"segments"` // files with small blobs that were removed
	Freed    int64               `json:"freed_bytes"`
	Moved    int64               `json:"moved_bytes"` // of small blobs that share a segment with removed ones
	Bytes    int64               `json:"bytes"`       // that stay
	MaxBytes int64               `json:"max_bytes"`   // limit of the store; 0 for none
	Leased   int64               `json:"leased_bytes"`
	Pinned   int64               `json:"pinned_bytes"` // mounted by running actions
	Lease    float64             `json:"lease_seconds"`
	Ages     []localstore.AgeRow `json:"ages"`
}

func (c *gcConfig) json(out io.Writer, r *disk.CollectReport, lease time.Duration) error {
	return render.JSON(out, collected{
		c.store.Dir, c.store.Holder(), c.dryRun, r.Blobs, r.Files, r.Copies, r.Segments, r.Freed, r.Moved, r.Bytes, localstore.Budget(r.MaxBytes),
		r.Leased, r.Pinned, max(lease, 0).Seconds(), localstore.AgeRows(r.Ages),
	})
}
