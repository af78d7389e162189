// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/diskctl"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

func casCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cas",
		Short: "Puts blobs into a server's store, gets and lists them; says how full this machine's store is, and verifies it",
		Long: `Put, get, cat, ls and tree speak the Remote Execution API with the server that --cas names, of whatever make. So
do stat and verify when they are given digests; else they look at the store of serve on this machine, while serve runs and
while it does not: they ask the process that holds the store, or open the store where none does. What frees space is
cloister gc.

DIGEST is HASH/SIZE. The length of the hash says which function it is of: 64 digits are SHA-256, 40 SHA-1; of functions
that this cannot tell it begins with the name, as put prints it: blake3:HASH/SIZE.`,
		Example: `  cloister cas put src                         # prints the digest of its Directory
  cloister cas ls 77ab...02/310
  cloister cas cat 9f2c...e1/142
  cloister cas stat
  cloister cas verify --rate 50MiB`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(casPutCommand(), casGetCommand(), casCatCommand(), casLsCommand(), casTreeCommand(), casStatCommand(), casVerifyCommand())
	return cmd
}

func casStatCommand() *cobra.Command {
	var store reach
	var from origin
	cmd := &cobra.Command{
		Use:   "stat [--dir DIR] [--json] | stat DIGEST... [--cas URL] [--instance NAME] [--json]",
		Short: "Says how much the store holds, and how much of that may go; or whether a server has blobs",
		Long: `Stat prints the size of the store and its budgets, how much of it is leased, when the rest was used last,
and what was evicted and found damaged since serve has started.

With digests it asks the server that --cas names whether it has them, and exits with 4 if it lacks one.`,
		Example: `  cloister cas stat
  cloister cas stat --dir /var/cache/cloister --json
  cloister cas stat 9f2c...e1/142 --cas grpc://cache.example.com:9092`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return casPresent(cmd.Context(), &from, args, false, store.json, cmd.OutOrStdout())
			}
			return casStat(cmd.Context(), &store, cmd.OutOrStdout())
		},
	}
	store.register(cmd)
	from.register(cmd)
	return cmd
}

func casStat(ctx context.Context, store *reach, out io.Writer) error {
	if err := store.open(ctx); err != nil {
		return err
	}
	defer store.Close()
	s, err := store.Stats(ctx)
	var r disk.CollectReport
	if err == nil {
		r, err = store.Collect(ctx, disk.CollectOptions{OlderThan: time.Duration(maxSpan), DryRun: true})
	}
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	kept, err := os.ReadDir(filepath.Join(store.dir, "quarantine"))
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	if store.json {
		err = printJSON(out, struct {
			Dir          string   `json:"dir"`
			Holder       int      `json:"holder"` // 0: nobody held it
			Blobs        int      `json:"blobs"`
			Results      int      `json:"results"`
			Bytes        int64    `json:"bytes"`
			MaxBytes     int64    `json:"max_bytes"`
			Files        int64    `json:"files"`
			MaxFiles     int64    `json:"max_files"`
			Segments     int      `json:"segments"`
			Lease        float64  `json:"lease_seconds"`
			Leased       int64    `json:"leased_bytes"`
			Pinned       int64    `json:"pinned_bytes"`
			EvictedBlobs int64    `json:"evicted_blobs"`
			EvictedBytes int64    `json:"evicted_bytes"`
			Corrupt      int64    `json:"corrupt"`
			Held         int64    `json:"held_bytes"`
			Quarantined  int      `json:"quarantined"`
			Ages         []ageRow `json:"ages"`
		}{
			store.dir, store.Holder(), s.Blobs, s.Results, s.Bytes, budgetOf(s.MaxBytes), s.Files, budgetOf(s.MaxFiles), s.Segments, max(s.Lease, 0).Seconds(),
			r.Leased, r.Pinned, s.EvictedBlobs, s.EvictedBytes, s.Corrupt, s.HeldBytes, len(kept), ageRows(r.Ages),
		})
	} else {
		err = statText(out, store, &s, &r, len(kept))
	}
	if err != nil {
		return newExit(exitEnvironment, err)
	}
	return nil
}

func statText(out io.Writer, store *reach, s *disk.Stats, r *disk.CollectReport, quarantined int) error {
	p := &page{w: out}
	p.line("store", store.dir+", "+store.holder())
	size, files := sandbox.Bytes(s.Bytes), fmt.Sprint(s.Files)
	if s.MaxBytes < math.MaxInt64 {
		size += " of " + sandbox.Bytes(s.MaxBytes)
	}
	if budget := budgetOf(s.MaxFiles); budget > 0 {
		files += fmt.Sprintf(" of %d", budget)
	}
	p.line("size", size)
	p.line("files", files+fmt.Sprintf(", among them those of %d segments", s.Segments))
	p.line("blobs", fmt.Sprintf("%d, and %d action results", s.Blobs, s.Results))
	account(p, r, s.Lease, time.Now())
	if store.Holder() > 0 {
		p.line("evicted", fmt.Sprintf("%d blobs, %s, since that process began", s.EvictedBlobs, sandbox.Bytes(s.EvictedBytes)))
		p.line("damaged", fmt.Sprintf("%d blobs since then", s.Corrupt))
		if s.HeldBytes > 0 {
			p.line("held", sandbox.Bytes(s.HeldBytes)+" besides, removed but still read through images of inputs")
		}
	}
	p.line("quarantine", fmt.Sprintf("%d blobs in %s", quarantined, filepath.Join(store.dir, "quarantine")))
	if p.err == nil {
		p.err = ages(out, r.Ages)
	}
	return p.err
}

func casVerifyCommand() *cobra.Command {
	var store reach
	var o disk.VerifyOptions
	var limit rate
	var from origin
	cmd := &cobra.Command{
		Use:   "verify [--dir DIR] [--rate RATE] [--restart] [--json] | verify DIGEST... [--cas URL] [--instance NAME] [--json]",
		Short: "Reads every blob and compares it with its digest; or those of a server that are named",
		Long: `Verify reads all of the store, and names every blob that is not what its digest says. Such a blob is
absent from then on, so that a client uploads it again or an action makes it again, and its bytes are
kept in the directory "quarantine" of the store, for a person to look at.

Ctrl-C stops it, and the next one goes on there unless --restart is given; where serve verifies by itself
(--scrub), it goes on where that is. It exits with 0 if all that it read is sound, with 1 if something was
damaged, and with 3 if the store cannot be read.

With digests it reads these from the server that --cas names, and exits with 4 if one is absent.`,
		Example: `  cloister cas verify
  cloister cas verify --rate 50MiB             # while others work with the disk
  cloister cas verify --restart --json
  cloister cas verify 9f2c...e1/142 --cas grpc://cache.example.com:9092`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return casPresent(cmd.Context(), &from, args, true, store.json, cmd.OutOrStdout())
			}
			o.BytesPerSecond = int64(limit)
			return casVerify(cmd.Context(), &store, o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.Var(&limit, "rate", "how many bytes to read a second at most; 0 is as many as the disk gives")
	f.BoolVar(&o.Restart, "restart", false, "begin anew, and not where an earlier verify was stopped")
	store.register(cmd)
	from.register(cmd)
	return cmd
}

// casVerify prints what is damaged to out, and how far it has come to info, if that is a terminal.
func casVerify(ctx context.Context, store *reach, o disk.VerifyOptions, out, info io.Writer) error {
	ctx, end := stop(ctx)
	defer end()
	if err := store.open(ctx); err != nil {
		return err
	}
	defer store.Close()
	progress := isTerminal(info)
	if progress {
		o.Progress = func(r disk.VerifyReport) {
			fmt.Fprintf(info, "\r\x1b[Kverify   %s of %s · %d blobs · %d damaged", sandbox.Bytes(r.Bytes), sandbox.Bytes(r.TotalBytes), r.Blobs, len(r.Damaged))
		}
	}
	began := time.Now()
	r, verr := store.Verify(ctx, o)
	if progress {
		fmt.Fprint(info, "\r\x1b[K")
	}
	var err error
	if store.json {
		err = verifyJSON(out, store, &r, verr == nil)
	} else {
		err = verifyText(out, store, &r, verr == nil, time.Since(began))
	}
	switch {
	case verr != nil:
		// What was found before it ended stands above.
		return stopped(ctx, verr, fmt.Sprintf("stopped after %s of about %s; the next cloister cas verify goes on there",
			sandbox.Bytes(r.Bytes), sandbox.Bytes(r.TotalBytes)))
	case err != nil:
		return newExit(exitEnvironment, err)
	case len(r.Damaged) > 0:
		return newExit(exitNo, nil)
	}
	return nil
}

// unnamed stands for a digest that the store cannot tell (disk.Config.Corrupt).
const unnamed = "a blob or result named by SHA384 or SHA512, of which the store keeps no more than it needs to know them again"

func verifyText(out io.Writer, store *reach, r *disk.VerifyReport, whole bool, took time.Duration) error {
	p := &page{w: out}
	p.line("store", store.dir+", "+store.holder())
	if r.Resumed {
		p.line("begins", "where an earlier one was stopped")
	}
	for _, d := range r.Damaged {
		name, kept := d.Digest.String(), diskctl.Quarantine(store.dir, d.Digest)
		if kept == "" {
			kept = "nowhere: quarantine is full, or the blob was too large for it or gone"
		}
		if d.Digest.IsZero() {
			name, kept = unnamed, "in "+filepath.Join(store.dir, "quarantine")+", if there was room"
		}
		p.line("damaged", name)
		p.line("  instance", quote(d.Instance))
		p.line("  was in", d.Where)
		p.line("  kept as", kept)
	}
	if !whole {
		return p.err
	}
	word := "sound"
	if n := len(r.Damaged); n > 0 {
		word = fmt.Sprintf("%d damaged, and absent now, so that clients upload them again", n)
	}
	p.line("verified", fmt.Sprintf("%d blobs and results, %s in %s: %s", r.Blobs, sandbox.Bytes(r.Bytes), took.Round(time.Millisecond), word))
	return p.err
}

func verifyJSON(out io.Writer, store *reach, r *disk.VerifyReport, whole bool) error {
	type damage struct {
		Instance string `json:"instance"`
		Digest   string `json:"digest"` // "": of SHA384 or SHA512, which the store cannot tell
		Where    string `json:"where"`
		Kept     string `json:"kept"` // "": nowhere, or not known without the digest
	}
	damaged := []damage{}
	for _, d := range r.Damaged {
		found := damage{Instance: d.Instance, Where: d.Where}
		if !d.Digest.IsZero() {
			found.Digest, found.Kept = d.Digest.String(), diskctl.Quarantine(store.dir, d.Digest)
		}
		damaged = append(damaged, found)
	}
	return printJSON(out, struct {
		Dir        string   `json:"dir"`
		Holder     int      `json:"holder"` // 0: nobody held it
		Complete   bool     `json:"complete"`
		Resumed    bool     `json:"resumed"`
		Blobs      int64    `json:"blobs"`
		Bytes      int64    `json:"bytes"`
		TotalBytes int64    `json:"total_bytes"`
		Damaged    []damage `json:"damaged"`
	}{store.dir, store.Holder(), whole, r.Resumed, r.Blobs, r.Bytes, r.TotalBytes, damaged})
}

// isTerminal reports whether w is a terminal, or another device that a person may look at.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0
}
