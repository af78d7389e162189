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

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/google/go-cmp/cmp"
)

// bound is the size of eight segments of four entries.
const bound = 24_000

// bounded creates a log of at most bound bytes, to which it appends n entries.
func bounded(t testing.TB, n int) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "audit")
	l := openConfig(t, audit.Config{Dir: dir, MaxBytes: bound})
	appendEntries(t, l, n)
	must.Succeed(t, l.Close())
	return dir
}

// bytesOf returns the size of the segments of dir.
func bytesOf(t testing.TB, dir string) (n int64) {
	t.Helper()
	for _, path := range segments(t, dir) {
		n += must.Get(os.Stat(path))(t).Size()
	}
	return n
}

// TestLogStaysBelowLimit checks the size after each entry, and that one entry announces each deleted segment.
func TestLogStaysBelowLimit(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := openConfig(t, audit.Config{Dir: dir, MaxBytes: bound})
	most := int64(0)
	for i := range 200 {
		appendAll(t, l, entry(i))
		n := bytesOf(t, dir)
		if most = max(most, n); n > bound {
			t.Fatalf("got %d bytes after %d entries, want at most %d", n, i+1, bound)
		}
		r := verify(t, dir, "")
		must.Be(t, r.Announced() && (r.First > 1) == (r.Dropped != nil),
			"after %d entries: the log begins with entry %d and announces %+v", i+1, r.First, r.Dropped)
	}
	expect.That(t, most >= bound*3/4, "got at most %d bytes, want most of %d", most, bound)
	rs := read(t, dir)
	r := verify(t, dir, rs[0].Prev)
	first := rs[0]
	var drops []audit.Drop
	for _, r := range rs {
		if r.Dropped == nil {
			continue
		}
		drops = append(drops, *r.Dropped)
		want := fmt.Sprintf("entries %d to %d are deleted to keep the log below 24000 bytes", r.Dropped.First, r.Dropped.Last)
		expect.That(t, r.Note == want && !r.Time.IsZero() && len(r.Lines("note")) == 1 && len(r.Events) == 0,
			"entry %d: got %+v, want the note %q", r.Seq, r, want)
	}
	last := drops[len(drops)-1]
	if last != *r.Dropped.Dropped || last.Last != first.Seq-1 || last.Until != first.Time || !last.Since.Before(last.Until) || last.First >= last.Last {
		t.Errorf("the last drop is %+v, but the log begins with entry %d of %v", last, first.Seq, first.Time)
	}
	for i := 1; i < len(drops); i++ {
		expect.That(t, drops[i].First == drops[i-1].Last+1 && drops[i].Since == drops[i-1].Until,
			"got %+v after %+v", drops[i], drops[i-1])
	}
}

func TestUnlimitedLogKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	l.SetSegmentBytes(3000)
	appendEntries(t, l, 200)
	if r := verify(t, dir, ""); r.Entries != 200 || r.First != 1 || r.Dropped != nil || !r.Announced() {
		t.Errorf("got %+v, want all of 200", *r)
	}
}

func TestOpenWithAnotherLimit(t *testing.T) {
	dir := bounded(t, 200)
	before := verify(t, dir, "")
	for _, most := range []int64{bound / 2, bound, 0} {
		l := openConfig(t, audit.Config{Dir: dir, MaxBytes: most})
		if n := bytesOf(t, dir); most > 0 && n > most {
			t.Errorf("limit %[2]d: got %[1]d bytes", n, most)
		}
		appendEntries(t, l, 40)
		if n := bytesOf(t, dir); most > 0 && n > most {
			t.Errorf("limit %[2]d: got %[1]d bytes", n, most)
		}
		must.Succeed(t, l.Close())
		if r := verify(t, dir, ""); !r.Announced() || r.First <= before.First {
			t.Errorf("limit %d: got %+v", most, *r)
		}
	}
	// A segment of an unlimited log is larger than the whole limit.
	dir = filepath.Join(t.TempDir(), "large")
	l := open(t, dir)
	appendEntries(t, l, 200)
	must.Succeed(t, l.Close())
	openConfig(t, audit.Config{Dir: dir, MaxBytes: bound})
	if n, r := bytesOf(t, dir), verify(t, dir, ""); n > bound || !r.Announced() || r.First != 201 {
		t.Errorf("got %d bytes, %+v, want at most %d bytes from entry 201", n, *r, bound)
	}
}

func TestUnannouncedDeletion(t *testing.T) {
	dir := bounded(t, 200)
	announced := verify(t, dir, "").Dropped.Dropped.Last
	must.Succeed(t, os.Remove(segments(t, dir)[0]))
	if r := verify(t, dir, ""); r.Announced() || r.Dropped.Dropped.Last != announced || r.First <= announced+1 {
		t.Errorf("got %+v, want an unannounced deletion", *r)
	}
	dir, _ = filled(t)
	must.Succeed(t, os.Remove(segments(t, dir)[0]))
	if r := verify(t, dir, ""); r.Announced() {
		t.Errorf("unlimited log: got %+v, want an unannounced deletion", *r)
	}
}

// TestFailedDeletion checks that a log whose oldest segment cannot be deleted grows, warns and retries.
func TestFailedDeletion(t *testing.T) {
	dir := bounded(t, 200)
	oldest := segments(t, dir)[0]
	aside := filepath.Join(t.TempDir(), "aside")
	must.Succeed(t, errors.Join(os.Rename(oldest, aside), os.MkdirAll(filepath.Join(oldest, "x"), 0o700)))
	var logged bytes.Buffer
	l := openConfig(t, audit.Config{Dir: dir, MaxBytes: bound, Log: slog.New(slog.NewTextHandler(&logged, nil))})
	appendEntries(t, l, 40)
	if n := strings.Count(logged.String(), "cannot be deleted"); n == 0 || n > 20 {
		t.Errorf("got %d warnings for 40 entries in some ten segments:\n%s", n, logged.String())
	}
	must.Succeed(t, errors.Join(os.RemoveAll(oldest), os.Rename(aside, oldest)))
	if r := verify(t, dir, ""); !r.Announced() {
		t.Errorf("got %+v", *r)
	}
	appendEntries(t, l, 8)
	if n, r := bytesOf(t, dir), verify(t, dir, ""); n > bound || !r.Announced() {
		t.Errorf("after the retry: got %d bytes, want at most %d; %+v", n, bound, *r)
	}
}

func TestVerifyDuringDeletion(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := openConfig(t, audit.Config{Dir: dir, MaxBytes: bound})
	appendAll(t, l, entry(0))
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for n := 0; ; n++ {
				r, err := audit.Verify(dir, "")
				if err != nil || !r.Announced() {
					t.Errorf("during appends: %+v, %v", r, err)
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
	appendEntries(t, l, 300)
	close(done)
	wg.Wait()
}

// TestDropFormat checks the format in docs/audit.md.
func TestDropFormat(t *testing.T) {
	dir := bounded(t, 200)
	for _, r := range read(t, dir) {
		if r.Dropped == nil {
			continue
		}
		d := r.Dropped
		want := fmt.Sprintf(`"dropped":{"first":%d,"last":%d,"since":%q,"until":%q}`, d.First, d.Last, d.Since.Format(time.RFC3339Nano), d.Until.Format(time.RFC3339Nano))
		expect.Text(t, r.JSON(), want)
		expect.Equal(t, cmp.Diff(audit.Entry{Time: r.Time}, r.Entry), "", "entry (-want +got)")
		return
	}
	t.Error("nothing was deleted")
}

// TestUnfinishedLineBeforeRotation opens a log that ends in an unfinished line with a limit that begins a new segment.
// The old segment must not keep the line: Verify would call it tampered with.
func TestUnfinishedLineBeforeRotation(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	l := open(t, dir)
	appendEntries(t, l, 200)
	must.Succeed(t, l.Close())
	path := segments(t, dir)[0]
	whole := must.Get(os.ReadFile(path))(t)
	must.Succeed(t, os.WriteFile(path, whole[:len(whole)-10], 0o600))
	l = openConfig(t, audit.Config{Dir: dir, MaxBytes: int64(len(whole)) + bound})
	appendAll(t, l, entry(200))
	if n := len(segments(t, dir)); n < 2 {
		t.Fatalf("got %d segments, want a new one", n)
	}
	if r := verify(t, dir, ""); r.Entries != 201 || r.Unfinished != 0 {
		t.Errorf("got %+v, want 201 entries: 199, the note and the new one", *r)
	}
}
