// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// blobs calls Blobs on two strings. The test fails on errors and unprintable differences.
func blobs(t testing.TB, name, a, b string, k Known) []Difference {
	t.Helper()
	ds := must.Get(Blobs(t.Context(), name, section([]byte(a)), section([]byte(b)), k))(t)
	checkDifferences(t, ds)
	return ds
}

func checkDifferences(t testing.TB, ds []Difference) {
	t.Helper()
	if len(ds) > maxDifferences+1 {
		t.Errorf("%d differences", len(ds))
	}
	for _, d := range ds {
		if len(d.Where) == 0 || len(d.Where) > maxNames+4 || d.Offset < -1 {
			t.Errorf("bad difference %+v", d)
		}
		for _, s := range append([]string{d.What, d.A, d.B, d.Fix}, d.Where...) {
			if len(s) > maxText || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("not printable, or %d bytes: %q", len(s), s)
			}
		}
	}
}

func TestEqualBlobsHaveNoDifferences(t *testing.T) {
	for _, s := range []string{"", "x", strings.Repeat("word ", 50_000), "\x1f\x8b damaged"} {
		if ds := blobs(t, "x", s, s, Known{}); ds != nil {
			t.Errorf("%.20q: %v", s, ds)
		}
	}
}

func TestBlobsReportsTheFirstDifferentByte(t *testing.T) {
	same := strings.Repeat("\x00\x01", 100_000)
	for _, row := range []struct {
		name, a, b string
		offset     int64
		what       string
	}{
		{"in the middle", same + "\x00A" + same, same + "\x00B" + same, 200_001, "content"},
		{"at the end", same + "\x00", same, 200_000, "content, of 200001 and 200000 bytes"},
		{"at the beginning", "\x00", "", 0, "content, of 1 and 0 bytes"},
	} {
		t.Run(row.name, func(t *testing.T) {
			ds := blobs(t, "x", row.a, row.b, Known{})
			if len(ds) != 1 || ds[0].Offset != row.offset || ds[0].What != row.what {
				t.Errorf("got %+v", ds)
			}
		})
	}
}

func TestFindingsAreLimited(t *testing.T) {
	c := newComparison(t.Context(), Known{})
	for i := range 300 {
		c.within(fmt.Sprint("m", i)).differ("mtime", "1", "2", -1, Timestamp)
		c.within(fmt.Sprint("m", i)).differ(fmt.Sprint("field ", i), "1", "2", -1, Unknown)
	}
	if !c.found.full() {
		t.Error("full() is false after 600 differences")
	}
	ds := c.found.all()
	checkDifferences(t, ds)
	if len(ds) != maxDifferences+1 || !strings.Contains(ds[len(ds)-1].What, "more differences") {
		t.Errorf("%d differences, the last %+v", len(ds), ds[len(ds)-1])
	}
	n := 0
	for _, d := range ds {
		if d.What == "mtime" {
			n++
		}
	}
	if n != maxAlike {
		t.Errorf("%d of the same, want %d", n, maxAlike)
	}
}
