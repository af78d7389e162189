// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/must"
)

// failFlush makes the next n flushes fail as a disk with a bad sector does: part of what was written is dropped, which
// drop does, and the next flush succeeds.
func failFlush(t *testing.T, n int, drop func()) {
	t.Helper()
	disk.SetFlush(t, func() error {
		if n--; n < 0 {
			return nil
		}
		drop()
		return os.NewSyscallError("syncfs", syscall.EIO)
	})
}

// zero replaces n bytes of a file by zeros, and leaves its size and times.
func zero(t *testing.T, path string, n int) {
	t.Helper()
	fi, err := os.Stat(path)
	must.Succeed(t, err)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must.Succeed(t, err)
	_, err = f.WriteAt(make([]byte, n), 0)
	must.Succeed(t, errors.Join(err, f.Close(), os.Chtimes(path, fi.ModTime(), fi.ModTime())))
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	fi, err := os.Stat(path)
	must.Succeed(t, err)
	return fi.Sys().(*syscall.Stat_t).Ino
}

func wantUnwritable(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, cas.ErrUnwritable) || !errors.Is(err, syscall.EIO) {
		t.Errorf("%s: got %v, want ErrUnwritable and EIO", what, err)
	}
}

// TestFailedFlush: puts are refused until everything that the kernel may have dropped was written again. What it has
// dropped is absent, and the rest survives.
func TestFailedFlush(t *testing.T) {
	for _, restart := range []bool{false, true} {
		var log bytes.Buffer
		config := disk.Config{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}
		c, s := openStore(t, config)
		old := putSize(t, s, 0, large)
		c.Maintain()
		var small []cas.Digest
		for i := range byte(5) {
			small = append(small, put(t, s, i))
		}
		big, dropped := putSize(t, s, 1, large), putSize(t, s, 2, large)
		must.Succeed(t, s.Record(t.Context(), old, &repb.ActionResult{ExitCode: 3}))
		before := inode(t, filePath(config.Dir, big))
		held, err := os.Open(filePath(config.Dir, big)) // no other file gets its inode
		must.Succeed(t, err)
		defer held.Close()
		first := segmentFiles(t, config.Dir, ".data")
		failFlush(t, 4, func() {
			if has(t, s, dropped) {
				zero(t, filePath(config.Dir, dropped), block)
				zero(t, first[0], block)
			}
		})
		for range 2 { // fails before and after it has written everything again
			c.Maintain()
			wantUnwritable(t, "CheckWritable", c.CheckWritable())
			b, d := castest.Blob(1, large)
			wantUnwritable(t, "Put of a blob that is present", s.Put(t.Context(), d, bytes.NewReader(b)))
			wantUnwritable(t, "Record", s.Record(t.Context(), big, &repb.ActionResult{}))
			wantUnwritable(t, "PutAll", errors.Join(s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...))
			read(t, s, 1, large)
		}
		if restart {
			closeStore(t, c)
			c, s = openStore(t, config)
		}
		for c.CheckWritable() != nil { // Open does the same in the background
			c.Maintain()
		}
		putSize(t, s, 9, large)
		if lost := missing(t, s, slices.Concat(small, []cas.Digest{old, big, dropped})...); !slices.Equal(lost, []cas.Digest{small[0], dropped}) {
			t.Errorf("restart %v: got missing %v, want what was dropped", restart, lost)
		}
		if r, err := s.Lookup(t.Context(), old); err != nil || r.ExitCode != 3 {
			t.Errorf("result: got %v, %v", r, err)
		}
		if inode(t, filePath(config.Dir, big)) == before {
			t.Error("a file that was put after the last successful flush was not rewritten")
		}
		for _, path := range first {
			if exists(path) {
				t.Errorf("%s was not rewritten", filepath.Base(path))
			}
		}
		if n := strings.Count(log.String(), "could not be flushed"); n < 4 || !strings.Contains(log.String(), "has recovered") {
			t.Errorf("the log reports %d failures: %s", n, log.String())
		}
		closeStore(t, c)
		if b, err := os.ReadFile(filepath.Join(config.Dir, "boot")); err != nil || string(b) == "flush failed\n" {
			t.Errorf("boot: got %q, %v", b, err)
		}
	}
}

// TestPutDuringFailedFlush: such a put is not acknowledged, since its content may have been dropped before its record
// was written.
func TestPutDuringFailedFlush(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir()})
	put(t, s, 0)
	failFlush(t, 1, func() {})
	b, d := castest.Blob(1, large)
	half, rest := bytes.NewReader(b[:large/2]), bytes.NewReader(b[large/2:])
	flushing := readerFunc(func([]byte) (int, error) { c.Maintain(); return 0, io.EOF })
	if err := s.Put(t.Context(), d, io.MultiReader(half, flushing, rest)); err == nil || has(t, s, d) {
		t.Errorf("Put: got %v, want an error", err)
	}
	putSize(t, s, 1, large)
	if got := c.Stats().FailedFlushes; got != 1 {
		t.Errorf("FailedFlushes: got %d, want 1", got)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
