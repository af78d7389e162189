// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// open opens a log and returns the records that it replays. The record "bad" counts as damaged.
func open(t *testing.T, c Config) (l *Log, records []string) {
	t.Helper()
	c.Replay = func(r []byte) error {
		if string(r) == "bad" {
			return ErrDamaged
		}
		records = append(records, string(r))
		return nil
	}
	l = must.Get(Open(c))(t)
	t.Cleanup(func() { l.Close() })
	return l, records
}

func appendTo(t *testing.T, l *Log, records ...string) {
	t.Helper()
	var b [][]byte
	for _, r := range records {
		b = append(b, []byte(r))
	}
	must.Succeed(t, l.Append(b...))
}

func wantRecords(t *testing.T, got []string, want ...string) {
	t.Helper()
	expect.Slices(t, got, want, "records")
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	expect.Equal(t, string(must.Get(os.ReadFile(path))(t)), want, "%s", filepath.Base(path))
}

// TestLogKilledAtEveryByte cuts a log off at each of its bytes, as a crash during a write does.
func TestLogKilledAtEveryByte(t *testing.T) {
	for _, c := range []Config{{}, {Checksum: true}, {Sync: true}} {
		c.Path = filepath.Join(t.TempDir(), "log")
		l, _ := open(t, c)
		appendTo(t, l, "one", "", "three 3")
		whole := must.Get(os.ReadFile(c.Path))(t)
		for n := range len(whole) + 1 {
			must.Succeed(t, os.WriteFile(c.Path, whole[:n], 0o600))
			want := []string{"one", "", "three 3"}[:bytes.Count(whole[:n], []byte("\n"))]
			l, got := open(t, c)
			wantRecords(t, got, want...)
			expect.That(t, l.Damaged() == 0 && l.Size()+l.Torn() == int64(n),
				"%d bytes: got %d damaged lines, size %d, torn %d", n, l.Damaged(), l.Size(), l.Torn())
			appendTo(t, l, "next")
			l.Close()
			_, got = open(t, c)
			wantRecords(t, got, append(want, "next")...)
		}
	}
}

func TestLogDropsDamagedLines(t *testing.T) {
	c := Config{Path: filepath.Join(t.TempDir(), "log")}
	text := "one\nbad\n\x00\x00two\nbad\nunfini"
	must.Succeed(t, os.WriteFile(c.Path, []byte(text), 0o600))
	l, got := open(t, c)
	wantRecords(t, got, "one", "two")
	expect.That(t, l.Damaged() == 2 && l.Torn() == 6,
		"got %d damaged lines, %d bytes torn, want 2, 6", l.Damaged(), l.Torn())
	wantFile(t, c.Path, text)
	appendTo(t, l, "three")
	wantFile(t, c.Path+DamagedSuffix, text)
	wantFile(t, c.Path, "one\ntwo\nthree\n")
}

func TestLogVerifiesChecksums(t *testing.T) {
	c := Config{Path: filepath.Join(t.TempDir(), "log"), Checksum: true}
	l, _ := open(t, c)
	appendTo(t, l, "one", "two", "three")
	text := must.Get(os.ReadFile(c.Path))(t)
	must.Succeed(t, os.WriteFile(c.Path, bytes.Replace(text, []byte("two"), []byte("tvo"), 1), 0o600))
	l, got := open(t, c)
	wantRecords(t, got, "one", "three")
	expect.Equal(t, l.Damaged(), 1, "damaged lines")
}

func TestLogReplayErrorEndsOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	must.Succeed(t, os.WriteFile(path, []byte("one\ntwo\n"), 0o600))
	_, err := Open(Config{Path: path, Replay: func(r []byte) error {
		if string(r) == "two" {
			return errors.New("unknown verb")
		}
		return nil
	}})
	if want := "open log " + path + ": line 2: unknown verb"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// TestLogWithoutReplayAppends opens a log longer than one block from its end.
func TestLogWithoutReplayAppends(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	whole := strings.Repeat("0123456789abcde\n", 5000)
	for _, torn := range []int{0, 1, 64 << 10, 100_000} {
		must.Succeed(t, os.WriteFile(path, []byte(whole+strings.Repeat("x", torn)), 0o600))
		l := must.Get(Open(Config{Path: path}))(t)
		expect.That(t, l.Size() == int64(len(whole)) && l.Torn() == int64(torn),
			"got size %d, torn %d, want %d, %d", l.Size(), l.Torn(), len(whole), torn)
		appendTo(t, l, "next")
		wantFile(t, path, whole+"next\n")
		l.Close()
	}
}

func TestLogRewriteReplacesRecords(t *testing.T) {
	c := Config{Path: filepath.Join(t.TempDir(), "log"), Sync: true}
	l, _ := open(t, c)
	appendTo(t, l, "one", "two")
	must.Succeed(t, os.Mkdir(c.Path+".new", 0o700))
	expect.That(t, l.Rewrite(slices.Values([][]byte{[]byte("two")})) != nil,
		"got no error from a rewrite that cannot create its file")
	appendTo(t, l, "three")
	wantFile(t, c.Path, "one\ntwo\nthree\n")
	must.Succeed(t, os.Remove(c.Path+".new"))
	must.Succeed(t, l.Rewrite(slices.Values([][]byte{[]byte("two")})))
	appendTo(t, l, "four")
	wantFile(t, c.Path, "two\nfour\n")
}

func TestLogFailedAppendLeavesNothing(t *testing.T) {
	c := Config{Path: filepath.Join(t.TempDir(), "log")}
	l, _ := open(t, c)
	appendTo(t, l, "one")
	expect.That(t, l.Append([]byte("two"), []byte("with\nnewline")) != nil, "got no error for a record with a newline")
	file := l.file
	l.file, _ = os.Open(c.Path) // not writable
	expect.That(t, l.Append([]byte("two")) != nil, "got no error for a failed write")
	l.file.Close()
	l.file = file
	must.Get(file.WriteAt([]byte("a part of two"), l.size))(t)
	appendTo(t, l, "three")
	wantFile(t, c.Path, "one\nthree\n")
	must.Succeed(t, errors.Join(l.Close(), l.Close()))
	expect.Error(t, l.Append([]byte("four")), os.ErrClosed, "append to a closed log")
}

func TestWriteFileReplacesAtomically(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for _, text := range []string{"old", "new"} {
		must.Succeed(t, WriteFile(path, []byte(text), 0o640))
		wantFile(t, path, text)
	}
	failure := errors.New("failure")
	err := WriteFunc(path, 0o640, func(f *os.File) error {
		_, err := f.WriteString("half")
		return errors.Join(err, failure)
	})
	expect.Error(t, err, failure)
	wantFile(t, path, "new")
	expect.Equal(t, len(must.Get(os.ReadDir(dir))(t)), 1)
}

func TestSegmentsExcess(t *testing.T) {
	s := Segments{Dir: t.TempDir(), Suffix: ".v1.jsonl"}
	for _, first := range []uint64{200, 1, 100} {
		l := must.Get(s.Create(first, true))(t)
		appendTo(t, l, strings.Repeat("x", 99))
		l.Close()
	}
	expect.Error(t, expect.Err(s.Create(100, false)), fs.ErrExist, "create a segment twice")
	must.Succeed(t, os.WriteFile(filepath.Join(s.Dir, "1.v1.jsonl"), nil, 0o600))
	expect.Slices(t, must.Get(s.List())(t), []uint64{1, 100, 200}, "List")
	year := time.Now().AddDate(-1, 0, 0)
	for _, test := range []struct {
		name   string
		limit  int64
		oldest time.Time
		want   []uint64
		next   uint64
	}{
		{"within both limits", 350, year, nil, 0},
		{"too large", 349, year, []uint64{1}, 100},
		{"all too large", 0, year, []uint64{1, 100}, 200},
		{"too old", 350, time.Now().Add(time.Hour), []uint64{1, 100}, 200},
	} {
		got, next, err := s.Excess(150, test.limit, test.oldest)
		expect.That(t, err == nil && slices.Equal(got, test.want) && next == test.next,
			"%s: got %v, %d, %v, want %v, %d", test.name, got, next, err, test.want, test.next)
	}
}

// TestLogCompactKeepsAppends compacts a log that others append to while the lock is released.
func TestLogCompactKeepsAppends(t *testing.T) {
	for _, sync := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "log")
		l, _ := open(t, Config{Path: path, Sync: sync})
		must.Succeed(t, l.Append([]byte("one"), []byte("two")))
		released := &duringUnlock{f: func() {
			expect.Error(t, l.Append([]byte("three")), nil)
			wantFile(t, path, "one\ntwo\nthree\n")
		}}
		must.Succeed(t, l.Compact(released, slices.Values([][]byte{[]byte("two")})))
		wantFile(t, path, "two\nthree\n")
		must.Succeed(t, l.Append([]byte("four")))
		wantFile(t, path, "two\nthree\nfour\n")
		released.f = func() { l.Close() }
		expect.Error(t, l.Compact(released, slices.Values([][]byte(nil))), os.ErrClosed, "closed")
		wantFile(t, path, "two\nthree\nfour\n")
		expect.Error(t, expect.Err(os.Stat(path+".new")), fs.ErrNotExist, "the new file is left")
	}
}

// A duringUnlock is a sync.Locker that calls f when it is released.
type duringUnlock struct{ f func() }

func (d *duringUnlock) Unlock() { d.f() }
func (d *duringUnlock) Lock()   {}

// TestLogFlushRepairs flushes logs that another process has written. Rotations rely on it: nothing but records may be
// left in a file that is followed by another one.
func TestLogFlushRepairs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for _, test := range []struct{ name, text, want string }{
		{"intact", "one\ntwo\n", "one\ntwo\n"},
		{"unfinished", "one\ntwo\nthr", "one\ntwo\n"},
		{"damaged", "one\nbad\ntwo\n", "one\ntwo\n"},
	} {
		must.Succeed(t, os.WriteFile(path, []byte(test.text), 0o600))
		l, _ := open(t, Config{Path: path})
		expect.Error(t, l.Flush(), nil, "%s", test.name)
		wantFile(t, path, test.want)
	}
	l, _ := open(t, Config{Path: path + "-absent"})
	must.Succeed(t, l.Flush())
	expect.Error(t, expect.Err(os.Stat(path+"-absent")), fs.ErrNotExist, "flush of an empty log created the file")
}
