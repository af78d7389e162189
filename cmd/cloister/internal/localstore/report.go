// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/cmd/internal/flags"
	"github.com/cloister-build/cloister/sandbox"
)

// PrintLeases prints why something could not go.
func PrintLeases(p *render.Page, r *disk.CollectReport, lease time.Duration, now time.Time) {
	if lease < 0 {
		p.Line("leased", "nothing: there is no lease")
	} else {
		text := fmt.Sprintf("%s: used in the last %s", sandbox.Bytes(r.Leased), (*flags.Duration)(&lease))
		if r.Leased > 0 {
			// A lease is counted from the end of the time within which a use is not noted again.
			text += "; what is not used again may go by " + now.Add(lease+min(lease/8, 15*time.Minute)).Format("Jan 2 15:04")
		}
		p.Line("leased", text)
	}
	if r.Pinned > 0 {
		p.Line("pinned", sandbox.Bytes(r.Pinned)+": mounted by running actions")
	}
}

// PrintAges prints how much was used last when.
func PrintAges(out io.Writer, rows []disk.AgeBucket) error {
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

// An ageRow is a disk.AgeBucket for programs.
type AgeRow struct {
	Label  string `json:"label"`
	Leased bool   `json:"leased"`
	Blobs  int64  `json:"blobs"`
	Bytes  int64  `json:"bytes"`
}

func AgeRows(rows []disk.AgeBucket) []AgeRow {
	out := make([]AgeRow, len(rows))
	for i, a := range rows {
		out[i] = AgeRow(a)
	}
	return out
}

// Budget returns a budget for programs: 0 is none.
func Budget(n int64) int64 {
	if n == math.MaxInt64 {
		return 0
	}
	return n
}
