// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/interrupt"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/cloister/internal/terminal"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

func casVerifyCommand() *cobra.Command {
	var store localstore.Store
	var o disk.VerifyOptions
	var limit flags.Rate
	var from client.Server
	cmd := &cobra.Command{
		Use:   "verify [--dir DIR | --server URL] [--rate RATE] [--restart] [--json] | verify DIGEST... [--server URL] [--instance NAME] [--json]",
		Short: "Verify blobs against their digests",
		Long: `Verify reads the whole local store and reports every blob that does not match its digest. Such a blob becomes absent, so
that clients upload it again or actions recreate it; the directory "quarantine" of the store keeps the bytes. Ctrl-C
stops it; unless --restart is given, the next run resumes there, or at the position of serve --scrub.

With --server and without --dir the store is that of the server, if that has --auth and the caller the right operate. With
digests verify reads these blobs from the server.

The exit code is 0 if everything is sound, 1 if something is damaged, 3 if the store cannot be read, and 4 if a named
blob is absent.`,
		Example: `  cloister cas verify
  cloister cas verify --rate 50MiB             # while others work with the disk
  cloister cas verify --restart --json
  cloister cas verify 9f2c...e1/142 --server grpc://cache.example.com:9092`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return casPresent(cmd.Context(), &from, args, true, store.JSON, cmd.OutOrStdout())
			}
			o.BytesPerSecond = int64(limit)
			return casVerify(cmd.Context(), &store, o, cmd.OutOrStdout(), unlessQuiet(cmd, cmd.ErrOrStderr()))
		},
	}
	f := cmd.Flags()
	f.Var(&limit, "rate", "read limit in bytes per second; 0 means no limit")
	f.BoolVar(&o.Restart, "restart", false, "start over instead of resuming an earlier run")
	from.Register(cmd)
	store.Register(cmd, &from, verified{}, []present{})
	from.Complete(cmd)
	return cmd
}

// casVerify prints damaged blobs to out, and its progress to info if that is a terminal.
func casVerify(ctx context.Context, store *localstore.Store, o disk.VerifyOptions, out, info io.Writer) (err error) {
	ctx, end := interrupt.Context(ctx)
	defer end()
	if err := store.Open(ctx); err != nil {
		return err
	}
	defer store.Finish(&err)
	progress := terminal.NewProgress(info, "verify   ")
	if progress != nil {
		o.Progress = func(r disk.VerifyReport) {
			progress.Show(r.Bytes, r.TotalBytes, fmt.Sprintf(" · %d blobs · %d damaged", r.Blobs, len(r.Damaged)))
		}
	}
	began := time.Now()
	r, verr := store.Verify(ctx, o)
	progress.Clear()
	if store.JSON {
		err = verifyJSON(out, store, &r, verr == nil)
	} else {
		err = verifyText(out, store, &r, verr == nil, time.Since(began))
	}
	switch {
	case verr != nil:
		// The findings so far are printed above.
		return interrupt.Explain(ctx, verr, fmt.Sprintf("stopped after %s of about %s; the next cloister cas verify resumes there",
			sandbox.Bytes(r.Bytes), sandbox.Bytes(r.TotalBytes)))
	case err != nil:
		return exit.New(exit.Environment, err)
	case len(r.Damaged) > 0:
		return exit.New(exit.No, nil)
	}
	return nil
}

// unnamed describes a blob whose digest the store cannot reconstruct (disk.Config.Corrupt).
const unnamed = "a blob or result with a SHA384 or SHA512 digest, of which the store keeps only a hash"

func verifyText(out io.Writer, store *localstore.Store, r *disk.VerifyReport, whole bool, took time.Duration) error {
	p := &render.Page{W: out}
	p.Line("store", store.Description())
	if r.Resumed {
		p.Line("begins", "where an earlier run stopped")
	}
	for _, d := range r.Damaged {
		name, kept := d.Digest.String(), diskctl.Quarantine(store.Dir, d.Digest)
		switch {
		case d.Digest.IsZero():
			name, kept = unnamed, "in "+filepath.Join(store.Dir, "quarantine")+", if there was room"
		case store.Remote():
			kept = "on the server, in quarantine, if there was room"
		case kept == "":
			kept = "nowhere: the quarantine is full, or the blob was too large or gone"
		}
		p.Line("damaged", name)
		p.Line("  instance", render.Quote(d.Instance))
		p.Line("  was in", d.Where)
		p.Line("  kept as", kept)
	}
	if !whole {
		return p.Err
	}
	word := "sound"
	if n := len(r.Damaged); n > 0 {
		word = fmt.Sprintf("%d damaged; they are absent until uploaded again", n)
	}
	p.Line("verified", fmt.Sprintf("%d blobs and results, %s in %s: %s", r.Blobs, sandbox.Bytes(r.Bytes), took.Round(time.Millisecond), word))
	return p.Err
}

// A verified is the JSON form of a report.
type verified struct {
	Dir        string   `json:"dir"`      // "" for the store of a server
	Holder     int      `json:"holder"`   // process that has the store open, or 0
	Complete   bool     `json:"complete"` // verify was not interrupted
	Resumed    bool     `json:"resumed"`  // verify began where an earlier run stopped
	Blobs      int64    `json:"blobs"`
	Bytes      int64    `json:"bytes"`
	TotalBytes int64    `json:"total_bytes"`
	Damaged    []damage `json:"damaged"`
}

// A damage is a damaged blob.
type damage struct {
	Instance string `json:"instance"`
	Digest   string `json:"digest"` // "" if the store keeps only a hash of it, as for SHA384 and SHA512
	Where    string `json:"where"`
	Kept     string `json:"kept"` // file in the quarantine; "" if there is none, or without a digest
}

func verifyJSON(out io.Writer, store *localstore.Store, r *disk.VerifyReport, whole bool) error {
	damaged := []damage{}
	for _, d := range r.Damaged {
		found := damage{Instance: d.Instance, Where: d.Where}
		if !d.Digest.IsZero() {
			found.Digest, found.Kept = d.Digest.String(), diskctl.Quarantine(store.Dir, d.Digest)
		}
		damaged = append(damaged, found)
	}
	return render.JSON(out, verified{store.Dir, store.Holder(), whole, r.Resumed, r.Blobs, r.Bytes, r.TotalBytes, damaged})
}
