// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/worker/audit"
	"github.com/google/go-cmp/cmp"
)

// bound is one of eight segments, each of four entries.
const bound = 24_000

// openBounded opens a log with the bound; it is closed with the test.
func openBounded(t testing.TB, dir string, most int64, log *slog.Logger) *audit.Log {
	t.Helper()
	l, err := audit.Open(audit.Config{Dir: dir, MaxBytes: most, Log: log})
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("no file lock: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// bounded makes a log with the bound to which n entries were appended.
func bounded(t testing.TB, n int) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "audit")
	l := openBounded(t, dir, bound, nil)
	for i := range n {
		appendAll(t, l, entry(i))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

// bytesOf returns the size of the segments of dir.
func bytesOf(t testing.TB, dir string) (n int64) {
	t.Helper()
	for _, path := range segments(t, dir) {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		n += info.Size()
	}
	return n
}

// TestBoundIsKept: after each entry, and the log says what it deleted: one entry for each segment that goes.
func TestBoundIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := openBounded(t, dir, bound, nil)
	most := int64(0)
	for i := range 200 {
		appendAll(t, l, entry(i))
		n := bytesOf(t, dir)
		if most = max(most, n); n > bound {
			t.Fatalf("%d bytes after %d entries, want at most %d", n, i+1, bound)
		}
		r := verify(t, dir, "")
		if !r.Announced() || (r.First > 1) != (r.Dropped != nil) {
			t.Fatalf("after %d entries: it begins with entry %d, and says %+v", i+1, r.First, r.Dropped)
		}
	}
	if most < bound*3/4 {
		t.Errorf("at most %d bytes were kept of %d", most, bound)
	}
	rs := read(t, dir)
	r := verify(t, dir, rs[0].Prev)
	first := rs[0]
	var drops []audit.Drop
	for _, r := range rs {
		if r.Dropped == nil {
			continue
		}
		drops = append(drops, *r.Dropped)
		want := fmt.Sprintf("entries %d to %d are deleted, so that the log stays below 24000 bytes", r.Dropped.First, r.Dropped.Last)
		if r.Note != want || r.Time.IsZero() || len(r.Lines("note")) != 1 || len(r.Events) > 0 {
			t.Errorf("entry %d: %+v, want the note %q", r.Seq, r, want)
		}
	}
	last := drops[len(drops)-1]
	if last != *r.Dropped.Dropped || last.Last != first.Seq-1 || last.Until != first.Time || !last.Since.Before(last.Until) || last.First >= last.Last {
		t.Errorf("the last says %+v, and the log begins with entry %d of %v", last, first.Seq, first.Time)
	}
	for i := 1; i < len(drops); i++ {
		if drops[i].First != drops[i-1].Last+1 || drops[i].Since != drops[i-1].Until {
			t.Errorf("after %+v comes %+v", drops[i-1], drops[i])
		}
	}
}

func TestWithoutABoundEverythingStays(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	l.SetSegmentBytes(3000)
	for i := range 200 {
		appendAll(t, l, entry(i))
	}
	if r := verify(t, dir, ""); r.Entries != 200 || r.First != 1 || r.Dropped != nil || !r.Announced() {
		t.Errorf("got %+v, want all of 200", *r)
	}
}

// TestAnotherBound: a log that is opened with a lower bound comes below it at once, and one that is opened with a higher one,
// or none, goes on.
func TestAnotherBound(t *testing.T) {
	dir := bounded(t, 200)
	before := verify(t, dir, "")
	for _, most := range []int64{bound / 2, bound, 0} {
		l := openBounded(t, dir, most, nil)
		if n := bytesOf(t, dir); most > 0 && n > most {
			t.Errorf("%d bytes with the bound %d", n, most)
		}
		for i := range 40 {
			appendAll(t, l, entry(i))
		}
		if n := bytesOf(t, dir); most > 0 && n > most {
			t.Errorf("%d bytes with the bound %d", n, most)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if r := verify(t, dir, ""); !r.Announced() || r.First <= before.First {
			t.Errorf("with the bound %d: got %+v", most, *r)
		}
	}
	// Segments of a log without a bound are larger than all of this one.
	dir = filepath.Join(t.TempDir(), "large")
	l := open(t, dir)
	for i := range 200 {
		appendAll(t, l, entry(i))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	openBounded(t, dir, bound, nil)
	if n, r := bytesOf(t, dir), verify(t, dir, ""); n > bound || !r.Announced() || r.First != 201 {
		t.Errorf("%d bytes, %+v: want less than %d, and a log that begins with entry 201", n, *r, bound)
	}
}

// TestDeletedBySomebodyElse: what the log did not say is told from what it did.
func TestDeletedBySomebodyElse(t *testing.T) {
	dir := bounded(t, 200)
	said := verify(t, dir, "").Dropped.Dropped.Last
	if err := os.Remove(segments(t, dir)[0]); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, ""); r.Announced() || r.Dropped.Dropped.Last != said || r.First <= said+1 {
		t.Errorf("got %+v: a segment more than the log said is gone", *r)
	}
	dir, _ = filled(t)
	if err := os.Remove(segments(t, dir)[0]); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, ""); r.Announced() {
		t.Errorf("got %+v of a log that deletes nothing", *r)
	}
}

// TestWhatCannotBeDeleted: entries go on, the operator is told, and it is tried again.
func TestWhatCannotBeDeleted(t *testing.T) {
	dir := bounded(t, 200)
	oldest := segments(t, dir)[0]
	aside := filepath.Join(t.TempDir(), "aside")
	if err := errors.Join(os.Rename(oldest, aside), os.MkdirAll(filepath.Join(oldest, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	l := openBounded(t, dir, bound, slog.New(slog.NewTextHandler(&said, nil)))
	for i := range 40 {
		appendAll(t, l, entry(i))
	}
	if n := strings.Count(said.String(), "cannot be deleted"); n == 0 || n > 20 {
		t.Errorf("40 entries in some ten segments, and it was told of %d times:\n%s", n, said.String())
	}
	if err := errors.Join(os.RemoveAll(oldest), os.Rename(aside, oldest)); err != nil {
		t.Fatal(err)
	}
	if r := verify(t, dir, ""); !r.Announced() {
		t.Errorf("got %+v", *r)
	}
	for i := range 8 {
		appendAll(t, l, entry(i))
	}
	if n, r := bytesOf(t, dir), verify(t, dir, ""); n > bound || !r.Announced() {
		t.Errorf("once it can be deleted: %d bytes of %d, %+v", n, bound, *r)
	}
}

// TestReadersOfALogThatDeletes: somebody who looks on sees a log that fits, and that says why it does not begin with entry 1.
func TestReadersOfALogThatDeletes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := openBounded(t, dir, bound, nil)
	appendAll(t, l, entry(0))
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for n := 0; ; n++ {
				r, err := audit.Verify(dir, "")
				if err != nil || !r.Announced() {
					t.Errorf("while it is written: %+v, %v", r, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	for i := range 300 {
		appendAll(t, l, entry(i))
	}
	close(done)
	wg.Wait()
}

// TestLinesOfADrop: the words of docs/audit.md.
func TestLinesOfADrop(t *testing.T) {
	dir := bounded(t, 200)
	for _, r := range read(t, dir) {
		if r.Dropped == nil {
			continue
		}
		d := r.Dropped
		want := fmt.Sprintf(`"dropped":{"first":%d,"last":%d,"since":%q,"until":%q}`, d.First, d.Last, d.Since.Format(time.RFC3339Nano), d.Until.Format(time.RFC3339Nano))
		if !strings.Contains(r.JSON(), want) {
			t.Errorf("got %s, want %s", r.JSON(), want)
		}
		if diff := cmp.Diff(audit.Entry{Time: r.Time}, r.Entry); diff != "" {
			t.Errorf("the entry says more (-want +got):\n%s", diff)
		}
		return
	}
	t.Error("nothing was deleted")
}
