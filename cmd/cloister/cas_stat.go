// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/cloister-build/cloister/cmd/cloister/internal/blobs"
	"github.com/cloister-build/cloister/cmd/cloister/internal/client"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localstore"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/spf13/cobra"
)

// A present is what stat and verify print of a blob.
type present struct {
	Digest string `json:"digest"`
	State  string `json:"state"` // present, absent, sound, damaged
}

// casPresent queries a server for blobs, and with read also verifies them.
func casPresent(ctx context.Context, from *client.Server, args []string, read, asJSON bool, out io.Writer) error {
	if err := client.CheckNames(args...); err != nil {
		return err
	}
	code := 0
	var rows []present
	err := blobs.WithStore(ctx, from, args, func(ctx context.Context, s *remote.Store) error {
		ds, err := blobs.FindAll(ctx, from, s, args)
		if err != nil {
			return err
		}
		missing, err := s.Missing(ctx, ds)
		if err != nil {
			return err
		}
		for _, d := range ds {
			state := "present"
			if slices.Contains(missing, d) {
				state, code = "absent", max(code, exit.Absent)
			} else if read {
				state = "sound"
				switch err := blobs.Verify(ctx, s, d); {
				case errors.Is(err, cas.ErrCorrupt):
					state, code = "damaged", max(code, exit.No)
				case errors.Is(err, cas.ErrNotFound): // the server dropped it as damaged
					state, code = "damaged or gone", max(code, exit.Absent)
				case err != nil:
					return err
				}
			}
			rows = append(rows, present{d.String(), state})
			if asJSON {
				continue
			}
			if _, err := fmt.Fprintf(out, "%-8s %10s  %s\n", state, sandbox.Bytes(d.Size()), d); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && asJSON {
		err = render.JSON(out, rows)
	}
	if err == nil && code != 0 {
		err = exit.New(code, nil)
	}
	return err
}

func casStatCommand() *cobra.Command {
	var store localstore.Store
	var from client.Server
	cmd := &cobra.Command{
		Use:   "stat [--dir DIR | --server URL] [--json] | stat DIGEST... [--server URL] [--instance NAME] [--json]",
		Short: "Show the usage of a store, or find blobs on a server",
		Long: `Stat prints size and limits of the local store, how much of it is leased, when the rest was last used, and what was
evicted and found damaged since serve started. With --server and without --dir the store is that of the server, which
shows it only with --auth, to callers with the right operate.

With digests it asks the server of --server whether it has them. The exit code is 4 if one is absent.`,
		Example: `  cloister cas stat
  cloister cas stat --dir /var/cache/cloister --json
  cloister cas stat 9f2c...e1/142 --server grpc://cache.example.com:9092`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return casPresent(cmd.Context(), &from, args, false, store.JSON, cmd.OutOrStdout())
			}
			return casStat(cmd.Context(), &store, cmd.OutOrStdout())
		},
	}
	from.Register(cmd)
	store.Register(cmd, &from, &localstore.Usage{}, []present{})
	from.Complete(cmd)
	return cmd
}

func casStat(ctx context.Context, store *localstore.Store, out io.Writer) error {
	if err := store.Open(ctx); err != nil {
		return err
	}
	defer store.Close()
	s, r, err := localstore.Measure(ctx, store.Client)
	var kept []os.DirEntry
	if err == nil && !store.Remote() {
		kept, err = os.ReadDir(filepath.Join(store.Dir, "quarantine"))
	}
	if err != nil {
		return store.Explain(err)
	}
	if store.JSON {
		u := localstore.NewUsage(&s, &r)
		u.Dir, u.Holder, u.Quarantined = store.Dir, store.Holder(), len(kept)
		err = render.JSON(out, u)
	} else {
		err = statText(out, store, &s, &r, len(kept))
	}
	if err != nil {
		return exit.New(exit.Environment, err)
	}
	return nil
}

func statText(out io.Writer, store *localstore.Store, s *disk.Stats, r *disk.CollectReport, quarantined int) error {
	p := &render.Page{W: out}
	p.Line("store", store.Description())
	size, files := sandbox.Bytes(s.Bytes), fmt.Sprint(s.Files)
	if s.MaxBytes < math.MaxInt64 {
		size += " of " + sandbox.Bytes(s.MaxBytes)
	}
	if budget := localstore.Budget(s.MaxFiles); budget > 0 {
		files += fmt.Sprintf(" of %d", budget)
	}
	p.Line("size", size)
	p.Line("files", files+fmt.Sprintf(", including those of %d segments", s.Segments))
	p.Line("blobs", fmt.Sprintf("%d, and %d action results", s.Blobs, s.Results))
	localstore.PrintLeases(p, r, s.Lease, time.Now())
	if store.Remote() || store.Holder() > 0 {
		p.Line("evicted", fmt.Sprintf("%s, %s, since serve started", render.Count(s.EvictedBlobs, "blob"), sandbox.Bytes(s.EvictedBytes)))
		p.Line("damaged", render.Count(s.Corrupt, "blob")+" since then")
		if s.HeldBytes > 0 {
			p.Line("held", sandbox.Bytes(s.HeldBytes)+" of it, removed but still mounted as inputs")
		}
	}
	if !store.Remote() {
		p.Line("quarantine", fmt.Sprintf("%s in %s", render.Count(quarantined, "blob"), filepath.Join(store.Dir, "quarantine")))
	}
	if p.Err == nil {
		p.Err = localstore.PrintAges(out, r.Ages)
	}
	return p.Err
}
