// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"context"
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/diskctl"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
)

// Measure returns the statistics of a store, and what could be removed from it now.
func Measure(ctx context.Context, store *diskctl.Client) (s disk.Stats, r disk.CollectReport, err error) {
	if s, err = store.Stats(ctx); err == nil {
		r, err = store.Collect(ctx, disk.CollectOptions{OlderThan: time.Duration(flags.MaxDuration), DryRun: true})
	}
	return s, r, err
}

// A Usage is the usage of a store in JSON.
type Usage struct {
	Dir          string   `json:"dir"`    // "": that of the server
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
	Quarantined  int      `json:"quarantined"` // in dir
	Ages         []AgeRow `json:"ages"`
}

// NewUsage returns what Measure found.
func NewUsage(s *disk.Stats, r *disk.CollectReport) *Usage {
	return &Usage{
		Blobs: s.Blobs, Results: s.Results, Bytes: s.Bytes, MaxBytes: Budget(s.MaxBytes), Files: s.Files, MaxFiles: Budget(s.MaxFiles),
		Segments: s.Segments, Lease: max(s.Lease, 0).Seconds(), Leased: r.Leased, Pinned: r.Pinned,
		EvictedBlobs: s.EvictedBlobs, EvictedBytes: s.EvictedBytes, Corrupt: s.Corrupt, Held: s.HeldBytes, Ages: AgeRows(r.Ages),
	}
}

// PrintLeases prints what cannot be removed, and why.
func PrintLeases(p *render.Page, r *disk.CollectReport, lease time.Duration, now time.Time) {
	if lease < 0 {
		p.Line("leased", "nothing, because there is no lease")
	} else {
		text := fmt.Sprintf("%s: used in the last %s", sandbox.Bytes(r.Leased), (*flags.Duration)(&lease))
		if r.Leased > 0 {
			// The store counts a lease from the end of the interval in which it does not record another use.
			text += "; unless used again it can be removed by " + now.Add(lease+min(lease/8, 15*time.Minute)).Format("Jan 2 15:04")
		}
		p.Line("leased", text)
	}
	if r.Pinned > 0 {
		p.Line("pinned", sandbox.Bytes(r.Pinned)+": mounted by running actions")
	}
}

// PrintAges prints a table of the blobs by their last use.
func PrintAges(out io.Writer, rows []disk.AgeBucket) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nlast used\tblobs\tsize")
	for _, a := range rows {
		label := a.Label
		if a.Leased {
			label = "leased: too recent to remove"
		}
		fmt.Fprintf(w, "%s\t%d\t%s\n", label, a.Blobs, sandbox.Bytes(a.Bytes))
	}
	return w.Flush()
}

// An AgeRow is a disk.AgeBucket in JSON.
type AgeRow struct {
	Label  string `json:"label"`
	Leased bool   `json:"leased"`
	Blobs  int64  `json:"blobs"`
	Bytes  int64  `json:"bytes"`
}

// AgeRows converts rows for JSON.
func AgeRows(rows []disk.AgeBucket) []AgeRow {
	out := make([]AgeRow, len(rows))
	for i, a := range rows {
		out[i] = AgeRow(a)
	}
	return out
}

// Budget returns a limit for JSON, in which 0 means no limit.
func Budget(n int64) int64 {
	if n == math.MaxInt64 {
		return 0
	}
	return n
}
