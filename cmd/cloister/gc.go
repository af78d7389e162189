// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

// reach is the flags that say which store an operator means. It is also what became of them.
type reach struct {
	dir   string
	lease span
	json  bool

	*diskctl.Client
}

func (r *reach) register(cmd *cobra.Command) {
	r.lease = span(disk.DefaultLease)
	f := cmd.Flags()
	f.StringVar(&r.dir, "dir", "", "directory of the store (default: cloister in the user's cache directory)")
	f.Var(&r.lease, "lease", "how long what was used stays, where no serve holds the store and says it")
	f.BoolVar(&r.json, "json", false, "print one JSON object")
}

// open reaches the store, which the caller closes.
func (r *reach) open(ctx context.Context) error {
	var err error
	if r.dir, err = storeDir(r.dir); err != nil {
		return err
	}
	if r.Client, err = diskctl.Open(ctx, r.dir, leaseOf(r.lease)); errors.Is(err, diskctl.ErrNoStore) {
		err = fmt.Errorf("%w: state with --dir the directory that serve was given", err)
	}
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	return nil
}

// leaseOf returns what disk.Config says of a lease: 0 is none.
func leaseOf(s span) time.Duration {
	if s == 0 {
		return -1
	}
	return time.Duration(s)
}

// holder says who answers.
func (r *reach) holder() string {
	if pid := r.Holder(); pid > 0 {
		return fmt.Sprintf("held by process %d, which was asked", pid)
	}
	return "held by nobody, opened for this"
}

// stop returns a context that ends with Ctrl-C, and then has an *interrupted as its cause.
func stop(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		select {
		case s := <-signals:
			cancel(&interrupted{s})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel(nil)
	}
}

// stopped returns the error of what a signal has ended, which text explains, and else err as one of this host.
func stopped(ctx context.Context, err error, text string) error {
	var by *interrupted
	if errors.As(context.Cause(ctx), &by) {
		return newExit(by.exitCode(), errors.New(text))
	}
	return newExit(exitEnvironment, err)
}

// gcConfig is what the flags of gc say.
type gcConfig struct {
	store     reach
	maxSize   size
	olderThan span
	dryRun    bool
	atMost    bool // neither a size nor an age is stated: what could go at all
}

func gcCommand() *cobra.Command {
	var c gcConfig
	cmd := &cobra.Command{
		Use:   "gc [--dir DIR] [--max-size SIZE] [--older-than TIME] [--dry-run] [--json]",
		Short: "Frees space in the store, or says what would go, what would stay, and why",
		Long: `Gc removes from a store what was not used for some time, the oldest first: down to a size with --max-size,
all that is older with --older-than, and with both what is older down to the size. It never removes what
is leased, that is, what was used so recently that clients rely on it, nor what a running action has
mounted. A store that serve holds evicts by itself when it is full: gc is for freeing the disk before.

It asks the process that holds the store, or opens the store where none does and nothing is yet to be sent
upstream. With --dry-run it changes nothing, and without a size and an age says what could go at most. It
exits with 1 if the size of --max-size cannot be reached.`,
		Example: `  cloister gc --dry-run                        # what could go, and what could not
  cloister gc --older-than 14d
  cloister gc --max-size 20GiB --older-than 2d --dry-run`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			set := cmd.Flags().Changed
			switch {
			case set("older-than") && c.olderThan < span(time.Second):
				return fmt.Errorf("--older-than %s: write at least 1s", &c.olderThan)
			case !set("max-size") && !set("older-than") && !c.dryRun:
				return errors.New("state what is to go, with --max-size or --older-than; --dry-run alone says what could")
			case !set("max-size") && !set("older-than"):
				c.olderThan, c.atMost = span(time.Second), true
			}
			return gc(cmd.Context(), &c, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.Var(&c.maxSize, "max-size", "down to this size, in bytes with a unit or as a share of the disk")
	f.Var(&c.olderThan, "older-than", "only what was not used for so long: 36h, 14d")
	noDefault(f, "max-size", "older-than")
	f.BoolVar(&c.dryRun, "dry-run", false, "remove nothing, and say what would go")
	c.store.register(cmd)
	return cmd
}

// gc does what the flags say and prints what became of it.
func gc(ctx context.Context, c *gcConfig, out io.Writer) error {
	ctx, end := stop(ctx)
	defer end()
	if err := c.store.open(ctx); err != nil {
		return err
	}
	defer c.store.Close()
	if c.store.Holder() == 0 && !c.dryRun {
		if err := c.unsent(); err != nil {
			return newExit(exitEnvironment, err)
		}
	}
	size, err := c.maxSize.on(c.store.dir)
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	stats, err := c.store.Stats(ctx)
	var r disk.CollectReport
	if err == nil {
		r, err = c.store.Collect(ctx, disk.CollectOptions{MaxBytes: size, OlderThan: time.Duration(c.olderThan), DryRun: c.dryRun})
	}
	if err != nil {
		return stopped(ctx, err, "stopped; what was removed until now is gone, and all else is as it was")
	}
	if c.store.json {
		err = c.json(out, &r, stats.Lease)
	} else {
		err = c.text(out, &r, stats.Lease)
	}
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	if size > 0 && r.Bytes > size {
		return newExit(exitNo, fmt.Errorf("%s remain, which is more than --max-size %s: what is leased, pinned or too young stays", sandbox.Bytes(r.Bytes), &c.maxSize))
	}
	return nil
}

// unsent returns an error if something is yet to be sent upstream: only a serve that sends it keeps its lease.
func (c *gcConfig) unsent() error {
	n, err := unsent(c.store.dir)
	if err == nil && n > 0 {
		err = fmt.Errorf("%d blobs and results are yet to be sent upstream, and could go: run cloister serve with --cas-write back and this beside it, or remove %s to give them up",
			n, journalOf(c.store.dir))
	}
	return err
}

// text prints an account for a person.
func (c *gcConfig) text(out io.Writer, r *disk.CollectReport, lease time.Duration) error {
	p := &page{w: out}
	p.line("store", c.store.dir+", "+c.store.holder())
	var why []string
	switch {
	case c.atMost:
		why = append(why, "at most, with --older-than "+c.olderThan.String())
	case c.olderThan > 0:
		why = append(why, "not used for "+c.olderThan.String())
	}
	if c.maxSize != (size{}) {
		why = append(why, "the oldest, down to "+c.maxSize.String())
	}
	did := "removed"
	if c.dryRun {
		did = "would go"
	}
	p.line(did, fmt.Sprintf("%s: %s", sandbox.Bytes(r.Freed), strings.Join(why, "; ")))
	if r.Files > 0 {
		p.line("", fmt.Sprintf("%d large blobs", r.Files))
	}
	if r.Copies > 0 {
		p.line("", fmt.Sprintf("%d copies of blobs that were executed", r.Copies))
	}
	switch {
	case r.Segments > 0 && c.dryRun:
		p.line("", fmt.Sprintf("%d segments of small blobs", r.Segments))
	case r.Segments > 0:
		p.line("", fmt.Sprintf("%d small blobs and results, with %d segments", r.Blobs, r.Segments))
	}
	if r.Moved > 0 {
		p.line("moved", fmt.Sprintf("%s of small blobs that stay, and shared a segment with what goes", sandbox.Bytes(r.Moved)))
	}
	stays := sandbox.Bytes(r.Bytes)
	if r.MaxBytes < math.MaxInt64 {
		stays += " of " + sandbox.Bytes(r.MaxBytes)
	}
	p.line("stays", stays)
	account(p, r, lease, time.Now())
	if p.err == nil {
		p.err = ages(out, r.Ages)
	}
	return p.err
}

// account prints why something could not go.
func account(p *page, r *disk.CollectReport, lease time.Duration, now time.Time) {
	if lease < 0 {
		p.line("leased", "nothing: there is no lease")
	} else {
		text := fmt.Sprintf("%s: used in the last %s", sandbox.Bytes(r.Leased), (*span)(&lease))
		if r.Leased > 0 {
			// A lease is counted from the end of the time within which a use is not noted again.
			text += "; what is not used again may go by " + now.Add(lease+min(lease/8, 15*time.Minute)).Format("Jan 2 15:04")
		}
		p.line("leased", text)
	}
	if r.Pinned > 0 {
		p.line("pinned", sandbox.Bytes(r.Pinned)+": mounted by running actions")
	}
}

// ages prints how much was used last when.
func ages(out io.Writer, rows []disk.AgeBucket) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nlast used\tblobs\tsize")
	for _, a := range rows {
		label := a.Label
		if a.Leased {
			label = "leased: too recently to go"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", label, a.Blobs, sandbox.Bytes(a.Bytes))
	}
	return w.Flush()
}

// An ageRow is a disk.AgeRow for programs.
type ageRow struct {
	Label  string `json:"label"`
	Leased bool   `json:"leased"`
	Blobs  int64  `json:"blobs"`
	Bytes  int64  `json:"bytes"`
}

func ageRows(rows []disk.AgeBucket) []ageRow {
	out := make([]ageRow, len(rows))
	for i, a := range rows {
		out[i] = ageRow(a)
	}
	return out
}

// budgetOf returns a budget for programs: 0 is none.
func budgetOf(n int64) int64 {
	if n == math.MaxInt64 {
		return 0
	}
	return n
}

func (c *gcConfig) json(out io.Writer, r *disk.CollectReport, lease time.Duration) error {
	return printJSON(out, struct {
		Dir      string   `json:"dir"`
		Holder   int      `json:"holder"` // 0: nobody held it
		DryRun   bool     `json:"dry_run"`
		Blobs    int      `json:"blobs"`
		Files    int      `json:"files"`
		Copies   int      `json:"copies"`
		Segments int      `json:"segments"`
		Freed    int64    `json:"freed_bytes"`
		Moved    int64    `json:"moved_bytes"`
		Bytes    int64    `json:"bytes"`
		MaxBytes int64    `json:"max_bytes"`
		Leased   int64    `json:"leased_bytes"`
		Pinned   int64    `json:"pinned_bytes"`
		Lease    float64  `json:"lease_seconds"`
		Ages     []ageRow `json:"ages"`
	}{
		c.store.dir, c.store.Holder(), c.dryRun, r.Blobs, r.Files, r.Copies, r.Segments, r.Freed, r.Moved, r.Bytes, budgetOf(r.MaxBytes),
		r.Leased, r.Pinned, max(lease, 0).Seconds(), ageRows(r.Ages),
	})
}

func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}
