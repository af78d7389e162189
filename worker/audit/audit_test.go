// SPDX-License-Identifier: Apache-2.0

package audit_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/audit"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// entry returns an entry that depends on n.
func entry(n int) audit.Entry {
	return audit.Entry{
		Time:   time.Date(2026, 11, 21, 12, 0, n, 5, time.UTC),
		Action: fmt.Sprintf("%064x/142", n), Instance: "main", Target: "//app:bin", Mnemonic: "CppCompile",
		Invocation: "7d0c", Worker: "w1", Exit: n % 3, Unrecorded: n % 2,
		Events: []sandbox.Event{
			{Kind: sandbox.EventConnect, Subject: "tcp 10.0.0.1:443", Syscall: "connect", Process: "curl", Count: 2},
			{Kind: sandbox.EventLimit, Subject: "memory", Count: 1, Actual: "4.0 GiB", Limit: "4.0 GiB", Detail: "set limit.memory"},
		},
	}
}

func open(t testing.TB, dir string) *audit.Log {
	t.Helper()
	return openConfig(t, audit.Config{Dir: dir})
}

// openConfig opens a log, which is closed at the end of the test.
func openConfig(t testing.TB, c audit.Config) *audit.Log {
	t.Helper()
	l, err := audit.Open(c)
	if errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("no file lock: %v", err)
	}
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, l.Close()) })
	return l
}

func appendAll(t testing.TB, l *audit.Log, entries ...audit.Entry) {
	t.Helper()
	for _, e := range entries {
		must.Succeed(t, l.Append(e))
	}
}

// appendEntries appends n entries.
func appendEntries(t testing.TB, l *audit.Log, n int) {
	t.Helper()
	for i := range n {
		appendAll(t, l, entry(i))
	}
}

func read(t testing.TB, dir string) []audit.Record {
	t.Helper()
	var rs []audit.Record
	must.Succeed(t, audit.Read(dir, func(r audit.Record) error { rs = append(rs, r); return nil }))
	return rs
}

func verify(t testing.TB, dir, head string) *audit.Report {
	t.Helper()
	return must.Get(audit.Verify(dir, head))(t)
}

// segments returns the paths of the segments of dir, oldest first.
func segments(t testing.TB, dir string) []string {
	t.Helper()
	return must.Get(filepath.Glob(filepath.Join(dir, "*.jsonl")))(t)
}

// filled creates a log of 12 entries in segments of four.
func filled(t testing.TB) (dir, head string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "audit")
	l := open(t, dir)
	l.SetSegmentBytes(3000)
	appendEntries(t, l, 12)
	must.Succeed(t, l.Close())
	for _, path := range segments(t, dir) {
		b, err := os.ReadFile(path)
		must.Be(t, err == nil && bytes.Count(b, []byte("\n")) == 4,
			"%s has %d lines (%v), want 4", path, bytes.Count(b, []byte("\n")), err)
	}
	return dir, verify(t, dir, "").Head
}

func TestReadReturnsEntries(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "audit")
	l := open(t, dir)
	want := []audit.Entry{entry(1), entry(2), {}, entry(3)}
	want[0].OnViolation, want[1].OnViolation = "fail", "kill"
	want[2].Time = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	appendAll(t, l, want...)
	prev := strings.Repeat("0", 64)
	rs := read(t, dir) // while the log is open
	for i, r := range rs {
		expect.Equal(t, cmp.Diff(want[i], r.Entry), "", "entry %d (-want +got)", i+1)
		expect.That(t, r.Seq == uint64(i+1) && r.Prev == prev && r.Note == "",
			"entry %d: got number %d, note %q, previous hash %s, want no note, %s", i+1, r.Seq, r.Note, r.Prev, prev)
		prev = r.Hash
	}
	expect.Equal(t, len(rs), len(want), "entries")
	report := verify(t, dir, prev)
	expect.Equal(t, *report, audit.Report{Entries: 4, First: 1, Begins: entry(1).Time, Head: prev})
	for _, path := range append(segments(t, dir), dir) {
		expect.Equal(t, must.Get(os.Stat(path))(t).Mode().Perm()&0o077, 0, "%s", path)
	}
}

// TestReleasedFormat reads and continues a log that an earlier version wrote.
func TestReleasedFormat(t *testing.T) {
	const head = "cd2a1e5a5d7bde09332c832dd755543a941620e4e8496cd14fa1ecde3e0e4906"
	dir := t.TempDir()
	must.Succeed(t, os.CopyFS(dir, os.DirFS("testdata/v1")))
	report := verify(t, dir, head)
	expect.That(t, report.Entries == 18 && report.First == 85 && report.Announced(),
		"got %+v, want 18 entries from 85", *report)
	if r := read(t, dir)[1]; r.Target != "//app:b\u00fcn\x1b\\xff" || r.Events[0].Subject != "tcp 10.0.0.1:443" {
		t.Errorf("got target %q, events %v", r.Target, r.Events)
	}
	appendAll(t, open(t, dir), entry(1))
	expect.Equal(t, verify(t, dir, head).Entries, 19, "after an append: entries")
}

func TestTimeIsRecordedInUTC(t *testing.T) {
	dir := t.TempDir()
	e := entry(1)
	e.Time = e.Time.In(time.FixedZone("", 3600))
	appendAll(t, open(t, dir), e)
	expect.Equal(t, read(t, dir)[0].Time, e.Time.UTC())
}

func TestChainSpansSegmentsAndWriters(t *testing.T) {
	dir, head := filled(t)
	if n := len(segments(t, dir)); n != 3 {
		t.Fatalf("got %d segments, want 3", n)
	}
	l := open(t, dir)
	appendAll(t, l, entry(12))
	report := verify(t, dir, head)
	expect.That(t, report.Entries == 13 && report.Head != head, "got %+v, want 13 entries and another head", report)
}

func TestOldestSegmentsMayBeDeleted(t *testing.T) {
	dir, head := filled(t)
	anchor := read(t, dir)[4].Prev
	l := open(t, dir) // the writer need not stop
	must.Succeed(t, os.Remove(segments(t, dir)[0]))
	for _, h := range []string{"", head, anchor} {
		if r := verify(t, dir, h); r.First != 5 || r.Entries != 8 {
			t.Errorf("head %q: got %+v, want 8 entries from 5", h, r)
		}
	}
	appendAll(t, l, entry(12))
	if rs := read(t, dir); rs[0].Seq != 5 || rs[len(rs)-1].Seq != 13 {
		t.Errorf("got entries %d to %d, want 5 to 13", rs[0].Seq, rs[len(rs)-1].Seq)
	}
	// A head from the deleted part is not found.
	if _, err := audit.Verify(dir, strings.Repeat("a", 64)); !errors.Is(err, audit.ErrTampered) || !strings.Contains(err.Error(), "before entry 5") {
		t.Errorf("got %v, want ErrTampered with the first entry", err)
	}
}

func TestReadWhileTheOldestSegmentsAreDeleted(t *testing.T) {
	dir, _ := filled(t)
	paths := segments(t, dir)
	var got []uint64
	err := audit.Read(dir, func(r audit.Record) error {
		got = append(got, r.Seq)
		if r.Seq == 2 {
			return errors.Join(os.Remove(paths[0]), os.Remove(paths[1]))
		}
		return nil
	})
	if want := []uint64{1, 2, 3, 4, 9, 10, 11, 12}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got entries %d, %v, want %d", got, err, want)
	}
}

// TestVerifyMissingFile checks that a listed file that never appears ends the retries.
func TestVerifyMissingFile(t *testing.T) {
	dir, head := filled(t)
	path := segments(t, dir)[1]
	must.Succeed(t, errors.Join(os.Remove(path), os.Symlink("nowhere", path)))
	expect.Error(t, expect.Err(audit.Verify(dir, head)), fs.ErrNotExist)
}

// rehash returns a line with the correct hash.
func rehash(line []byte) []byte {
	head, _, _ := bytes.Cut(line, []byte(`,"hash":"`))
	sum := sha256.Sum256(head)
	return fmt.Appendf(slices.Clone(head), `,"hash":"%s"}`, hex.EncodeToString(sum[:]))
}

func TestVerifyDetectsTampering(t *testing.T) {
	// edit changes the lines of one segment.
	edit := func(segment int, change func(lines [][]byte) [][]byte) func(*testing.T, []string) {
		return func(t *testing.T, paths []string) {
			b := must.Get(os.ReadFile(paths[segment]))(t)
			lines := change(bytes.Split(bytes.TrimSuffix(b, []byte("\n")), []byte("\n")))
			b = bytes.Join(lines, []byte("\n"))
			if len(lines) > 0 {
				b = append(b, '\n')
			}
			must.Succeed(t, os.WriteFile(paths[segment], b, 0o600))
		}
	}
	replace := func(line int, old, new string, fix bool) func([][]byte) [][]byte {
		return func(lines [][]byte) [][]byte {
			l := bytes.Replace(lines[line], []byte(old), []byte(new), 1)
			if bytes.Equal(l, lines[line]) {
				panic("nothing was replaced")
			}
			if fix {
				l = rehash(l)
			}
			lines[line] = l
			return lines
		}
	}
	remove := func(segment int) func(*testing.T, []string) {
		return func(t *testing.T, paths []string) {
			must.Succeed(t, os.Remove(paths[segment]))
		}
	}
	for _, c := range []struct {
		name   string
		change func(*testing.T, []string)
		// segment and line are the first that are wrong; line is 0 if only the head reveals the change.
		segment, line int
		why           string
	}{
		{"a byte", edit(1, replace(2, "curl", "curk", false)), 1, 3, "was changed"},
		{"a byte of the last line", edit(2, replace(3, `"exit":2`, `"exit":0`, false)), 2, 4, "was changed"},
		{"a byte of a hash", edit(0, replace(1, `,"hash":"`, `,"hash":"x`, false)), 0, 2, "does not end with a hash"},
		{"a line's end", edit(0, func(l [][]byte) [][]byte { l[1] = append(l[1], ' '); return l }), 0, 2, "does not end with a hash"},
		{"one line with its hash", edit(1, replace(1, "curl", "wget", true)), 1, 3, "was replaced"},
		{"the last line of a segment with its hash", edit(0, replace(3, "curl", "wget", true)), 1, 1, "was replaced"},
		{"the previous hash of the first line", edit(0, replace(0, `"prev":"0`, `"prev":"1`, true)), 0, 1, "was replaced"},
		{"a number", edit(1, replace(1, `"seq":6`, `"seq":7`, true)), 1, 2, "this is entry 7, expected entry 6"},
		{"malformed JSON", edit(1, replace(1, `{`, `[`, true)), 1, 2, "is not an entry"},
		{"a line deleted", edit(1, func(l [][]byte) [][]byte { return slices.Delete(l, 1, 2) }), 1, 2, "this is entry 7, expected entry 6"},
		{"the first line deleted", edit(0, func(l [][]byte) [][]byte { return l[1:] }), 0, 1, "this is entry 2, expected entry 1"},
		{"the last line of a segment deleted", edit(0, func(l [][]byte) [][]byte { return l[:3] }), 1, 1, "expected entry 4"},
		{"a line duplicated", edit(1, func(l [][]byte) [][]byte { return slices.Insert(l, 2, l[1]) }), 1, 3, "this is entry 6, expected entry 7"},
		{"an empty line", edit(1, func(l [][]byte) [][]byte { return slices.Insert(l, 2, nil) }), 1, 3, "does not end with a hash"},
		{"lines swapped", edit(1, func(l [][]byte) [][]byte { l[1], l[2] = l[2], l[1]; return l }), 1, 2, "this is entry 7, expected entry 6"},
		{"a long line", edit(1, func(l [][]byte) [][]byte { l[1] = make([]byte, audit.MaxLine); return l }), 1, 2, "is longer than"},
		{"a middle segment deleted", remove(1), 2, 1, "expected entry 5"},
		{"a middle segment emptied", edit(1, func([][]byte) [][]byte { return nil }), 2, 1, "expected entry 5"},
		{"a middle segment truncated within a line", func(t *testing.T, paths []string) {
			fi, err := os.Stat(paths[1])
			if err == nil {
				err = os.Truncate(paths[1], fi.Size()-1)
			}
			must.Succeed(t, err)
		}, 1, 4, "is truncated"},
		{"a segment renamed", func(t *testing.T, paths []string) {
			must.Succeed(t, os.Rename(paths[2], strings.Replace(paths[2], "009.", "010.", 1)))
		}, 2, 1, "expected entry 9"},
		{"the end removed", edit(2, func(l [][]byte) [][]byte { return l[:3] }), 2, 0, "no line has the hash"},
		{"the end truncated within a line", func(t *testing.T, paths []string) {
			must.Succeed(t, os.Truncate(paths[2], 100))
		}, 2, 0, "no line has the hash"},
		{"the last segment deleted", remove(2), 2, 0, "no line has the hash"},
		{"everything deleted", func(t *testing.T, paths []string) {
			for i := range paths {
				remove(i)(t, paths)
			}
		}, 2, 0, "no line has the hash"},
		{"the last line with its hash", edit(2, replace(3, "curl", "wget", true)), 2, 0, "no line has the hash"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, head := filled(t)
			c.change(t, segments(t, dir))
			want := ": " + c.why
			if c.line > 0 {
				want = fmt.Sprintf("%020d.v1.jsonl:%d: ", 1+4*c.segment, c.line)
				if c.name == "a segment renamed" {
					want = strings.Replace(want, "009.", "010.", 1)
				}
			}
			_, err := audit.Verify(dir, head)
			if !errors.Is(err, audit.ErrTampered) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), c.why) {
				t.Errorf("got %v, want ErrTampered with %q and %q", err, want, c.why)
			}
			// Only the head reveals changes at the end.
			if _, err := audit.Verify(dir, ""); errors.Is(err, audit.ErrTampered) != (c.line > 0) {
				t.Errorf("without the head: %v", err)
			}
			if err := audit.Read(dir, func(audit.Record) error { return nil }); errors.Is(err, audit.ErrTampered) != (c.line > 0) {
				t.Errorf("Read: %v", err)
			}
		})
	}
}

func TestVerifyDetectsEveryChangedByte(t *testing.T) {
	dir := t.TempDir()
	appendAll(t, open(t, dir), entry(1))
	path := segments(t, dir)[0]
	b := must.Get(os.ReadFile(path))(t)
	for i := range len(b) - 1 { // not the line end, without which the line is unfinished
		b[i] ^= 1
		must.Succeed(t, os.WriteFile(path, b, 0o600))
		expect.Error(t, expect.Err(audit.Verify(dir, "")), audit.ErrTampered, "changed byte %d, %q", i, b[i]^1)
		b[i] ^= 1
	}
}

func TestOpenRefusesDamagedLog(t *testing.T) {
	dir, _ := filled(t)
	paths := segments(t, dir)
	b := must.Get(os.ReadFile(paths[2]))(t)
	must.Succeed(t, os.WriteFile(paths[2], bytes.Replace(b, []byte("curl"), []byte("wget"), 1), 0o600))
	for range 2 { // the lock was released
		if _, err := audit.Open(audit.Config{Dir: dir}); !errors.Is(err, audit.ErrTampered) || !strings.Contains(err.Error(), "move "+dir+" aside") {
			t.Errorf("got %v, want ErrTampered and advice", err)
		}
	}
}

func TestOpenEmptySegment(t *testing.T) {
	t.Run("after another", func(t *testing.T) {
		dir, head := filled(t)
		must.Succeed(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%020d.v1.jsonl", 13)), nil, 0o600))
		appendAll(t, open(t, dir), entry(12))
		if r := verify(t, dir, head); r.Entries != 13 || len(segments(t, dir)) != 4 {
			t.Errorf("got %+v, want 13 entries in 4 segments", r)
		}
	})
	t.Run("alone", func(t *testing.T) {
		dir := t.TempDir()
		must.Succeed(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%020d.v1.jsonl", 13)), nil, 0o600))
		if l, err := audit.Open(audit.Config{Dir: dir}); !errors.Is(err, audit.ErrTampered) && !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("got %v, %v, want ErrTampered: there is no hash to continue from", l, err)
		}
	})
}

func TestReadMissingLog(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	expect.Error(t, audit.Read(dir, nil), fs.ErrNotExist, "Read")
	expect.Error(t, expect.Err(audit.Verify(dir, "")), fs.ErrNotExist, "Verify")
	open(t, dir)
	zeros := strings.Repeat("0", 64)
	expect.Equal(t, *verify(t, dir, zeros), audit.Report{Head: zeros}, "empty log")
}

func TestReadEndsAtErrorOfVisit(t *testing.T) {
	dir, _ := filled(t)
	end, n := errors.New("enough"), 0
	if err := audit.Read(dir, func(audit.Record) error { n++; return end }); !errors.Is(err, end) || n != 1 {
		t.Errorf("got %v after %d entries, want %v after 1", err, n, end)
	}
}

func TestConcurrentAppends(t *testing.T) {
	const writers, each = 8, 100
	dir := t.TempDir()
	l := open(t, dir)
	l.SetSegmentBytes(20_000)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				e := entry(i)
				e.Worker = fmt.Sprint(w)
				expect.Error(t, l.Append(e), nil)
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			expect.Error(t, expect.Err(audit.Verify(dir, "")), nil, "during appends")
		}
	})
	wg.Wait()
	next := map[string]int{}
	for _, r := range read(t, dir) {
		if diff := cmp.Diff(entry(next[r.Worker]), r.Entry, cmpopts.IgnoreFields(audit.Entry{}, "Worker")); diff != "" {
			t.Fatalf("worker %s (-want +got):\n%s", r.Worker, diff)
		}
		next[r.Worker]++
	}
	for w := range writers {
		expect.Equal(t, next[fmt.Sprint(w)], each, "entries of worker %d", w)
	}
}

func TestAppendToClosedLog(t *testing.T) {
	l := open(t, t.TempDir())
	must.Succeed(t, l.Close())
	expect.Error(t, l.Append(entry(1)), os.ErrClosed)
}

func TestSyncedEntries(t *testing.T) {
	dir := t.TempDir()
	l := openConfig(t, audit.Config{Dir: dir, Sync: true})
	appendAll(t, l, entry(1), entry(2))
	expect.Equal(t, verify(t, dir, "").Entries, 2, "entries")
}

// hostile are texts with control characters or syntax of the log.
var hostile = []string{
	"a\n{\"seq\":9}", "\r\x1b[2J\x1b]0;title\a", "\x9b31m", "\u009b31m", "\u202egpj.exe", "\u2028", "\x7f", "\"},\"hash\":\"", "é 日 😀 <&>", `\x1b`, "\x00",
}

func TestTextCannotForgeLines(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	for _, s := range hostile {
		appendAll(t, l, audit.Entry{
			Action: s, Instance: s, Target: s, Mnemonic: s, Invocation: s, Worker: s,
			Events: []sandbox.Event{{Kind: sandbox.EventKind(s), Subject: s, Syscall: s, Process: s, Count: 1, Actual: s, Limit: s, Detail: s}},
		})
	}
	stored := must.Get(os.ReadFile(segments(t, dir)[0]))(t)
	for i, b := range stored {
		if (b < ' ' || b > '~') && b != '\n' {
			t.Fatalf("byte %d of the log is %#x, in %q", i, b, stored[max(0, i-30):i+1])
		}
	}
	rs := read(t, dir)
	must.Be(t, len(rs) == len(hostile) && bytes.Count(stored, []byte("\n")) == len(hostile),
		"got %d entries, %d lines, want %d", len(rs), bytes.Count(stored, []byte("\n")), len(hostile))
	for i, r := range rs {
		want := hostile[i]
		if want == "\x9b31m" {
			want = `\x9b31m` // not UTF-8
		}
		expect.That(t, r.Events[0].Subject == want && r.Target == want,
			"got %q and %q, want %q", r.Target, r.Events[0].Subject, want)
		lines := r.Lines("")
		expect.That(t, len(lines) == 1, "%q: got %d lines for one event: %q", want, len(lines), lines)
		for _, text := range append(lines, strings.ReplaceAll(r.Text(), "\n", " ")) {
			if j := strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 || r >= 0x2028 && r <= 0x202e }); j >= 0 {
				t.Errorf("shown as %q", text)
			}
		}
		expect.Equal(t, strings.Count(r.Text(), "\n"), 12, "%q: lines of\n%s", want, r.Text())
	}
}

func TestAppendTruncatesHugeEntry(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	long := strings.Repeat("\x01", 100_000)
	huge := audit.Entry{Time: entry(1).Time, Action: long, Instance: long, Target: long, Mnemonic: long, Invocation: long, Worker: long, Unrecorded: 7}
	for range sandbox.MaxEvents {
		huge.Events = append(huge.Events, sandbox.Event{Kind: "x", Subject: long, Process: long, Count: 1, Detail: long})
	}
	appendAll(t, l, entry(1), huge, entry(2))
	verify(t, dir, "")
	rs := read(t, dir)
	must.Be(t, len(rs) == 3, "got %d entries, want 3", len(rs))
	r := rs[1]
	if n := len(r.JSON()); n >= audit.MaxLine {
		t.Errorf("got a line of %d bytes", n)
	}
	left := sandbox.MaxEvents - len(r.Events)
	expect.That(t, len(r.Events) != 0 && left != 0 && r.Unrecorded == 7+left,
		"got %d events and %d unrecorded, want all events in one or the other", len(r.Events), r.Unrecorded)
	expect.Text(t, r.Note, fmt.Sprintf("texts were truncated to 4096 bytes; %d events were omitted", left), "note")
	expect.That(t, len(huge.Events) == sandbox.MaxEvents && len(huge.Events[0].Subject) == len(long),
		"Append modified the caller's entry")
}

func TestAppendTruncatesBetweenCharacters(t *testing.T) {
	dir := t.TempDir()
	appendAll(t, open(t, dir), audit.Entry{Target: "a" + strings.Repeat("日", 2000), Worker: strings.Repeat("\xbf", 5000)})
	r := read(t, dir)[0]
	if want := "a" + strings.Repeat("日", 1365); r.Target != want {
		t.Errorf("got %d bytes ending in %q", len(r.Target), r.Target[len(r.Target)-6:])
	}
	expect.That(t, strings.HasPrefix(r.Worker, `\xbf\xbf`), "got %.20q", r.Worker)
}

func TestLines(t *testing.T) {
	dir := t.TempDir()
	appendAll(t, open(t, dir), entry(1))
	r := read(t, dir)[0]
	got := strings.Join(r.Lines(""), "\n")
	const want = `2026-11-21T12:00:01Z  000000000000  connect  denied: connection to tcp 10.0.0.1:443 (no network) by curl (connect), 2 times; add what it needs to the inputs, or allow the endpoint in the policy
2026-11-21T12:00:01Z  000000000000  limit    reached the limit of memory: 4.0 GiB of 4.0 GiB; set limit.memory
2026-11-21T12:00:01Z  000000000000  more     1 more, not recorded`
	expect.Equal(t, got, want)
	if got := r.Lines(sandbox.EventLimit); len(got) != 1 || !strings.Contains(got[0], "  limit  ") {
		t.Errorf("lines of one kind: got %q", got)
	}
}

func BenchmarkAppend(b *testing.B) {
	for _, sync := range []bool{false, true} {
		b.Run(fmt.Sprintf("sync=%v", sync), func(b *testing.B) {
			l := openConfig(b, audit.Config{Dir: b.TempDir(), Sync: sync})
			e := entry(1)
			b.ReportAllocs()
			for b.Loop() {
				must.Succeed(b, l.Append(e))
			}
		})
	}
}

// BenchmarkOpen opens a log with two full segments, the slowest case.
func BenchmarkOpen(b *testing.B) {
	dir := b.TempDir()
	l := open(b, dir)
	for len(segments(b, dir)) < 3 {
		for i := range 1000 {
			appendAll(b, l, entry(i))
		}
	}
	must.Succeed(b, l.Close())
	for b.Loop() {
		must.Get(audit.Open(audit.Config{Dir: dir}))(b).Close()
	}
}

// TestFilesSince: files are omitted only if every entry is certainly older.
func TestFilesSince(t *testing.T) {
	dir := t.TempDir()
	l := must.Get(audit.Open(audit.Config{Dir: dir}))(t)
	must.Succeed(t, errors.Join(l.Append(audit.Entry{Time: time.Now()}), l.Close()))
	empty, err := audit.CreateFile(dir, 2) // as after a rotation, before the first entry
	must.Succeed(t, err)
	empty.Close()
	files, err := audit.Files(dir, time.Now().Add(-time.Hour))
	expect.That(t, err == nil && len(files) == 2 && files[0].First == 1 && files[1].First == 2,
		"got %v, %v, want both files", files, err)
	for _, f := range files {
		f.Close()
	}
}
