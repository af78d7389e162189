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
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
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
	fi := must.Get(os.Stat(path))(t)
	return fi.Sys().(*syscall.Stat_t).Ino
}

// heldInode returns the inode of a file, which no other file gets during the test.
func heldInode(t *testing.T, path string) uint64 {
	t.Helper()
	f := must.Get(os.Open(path))(t)
	t.Cleanup(func() { f.Close() })
	return inode(t, path)
}

func wantUnwritable(t *testing.T, what string, err error) {
	t.Helper()
	expect.That(t, errors.Is(err, cas.ErrUnwritable) && errors.Is(err, syscall.EIO),
		"%s: got %v, want ErrUnwritable and EIO", what, err)
}

// TestFailedFlush: puts are refused until everything that the kernel may have dropped was written again. What it has
// dropped is absent, and the rest survives.
func TestFailedFlush(t *testing.T) {
	for _, restart := range []bool{false, true} {
		var log syncbuf.Buffer
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
		before := heldInode(t, filePath(config.Dir, big))
		first := segmentFiles(t, config.Dir, ".data")
		var once sync.Once
		failFlush(t, 4, func() {
			once.Do(func() {
				zero(t, filePath(config.Dir, dropped), block)
				zero(t, first[0], block)
			})
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
		expect.Slices(t, missing(t, s, slices.Concat(small, []cas.Digest{old, big, dropped})...), []cas.Digest{small[0], dropped},
			"restart %v: missing", restart)
		if r, err := s.Lookup(t.Context(), old); err != nil || r.ExitCode != 3 {
			t.Errorf("result: got %v, %v", r, err)
		}
		expect.That(t, inode(t, filePath(config.Dir, big)) != before,
			"a file that was put after the last successful flush was not rewritten")
		for _, path := range first {
			expect.That(t, !exists(path), "%s was not rewritten", filepath.Base(path))
		}
		must.Hold(t, "the log reports the recovery", func() bool { return strings.Contains(log.String(), "has recovered") })
		if n := strings.Count(log.String(), "could not be flushed"); n < 4 {
			t.Errorf("the log reports %d failures: %s", n, log.String())
		}
		closeStore(t, c)
		if b, err := os.ReadFile(filepath.Join(config.Dir, "boot")); err != nil || string(b) == "flush failed\n" {
			t.Errorf("boot: got %q, %v", b, err)
		}
	}
}

// TestRecoveryIsRecordedLater: if DIR/boot cannot be written at the end of a recovery, this is retried.
func TestRecoveryIsRecordedLater(t *testing.T) {
	var log syncbuf.Buffer
	config := disk.Config{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	c, s := openStore(t, config)
	put(t, s, 0)
	boot := filepath.Join(config.Dir, "boot")
	intact := must.Get(os.ReadFile(boot))(t)
	failed := false
	disk.SetFlush(t, func() error {
		if !failed {
			failed = true
			return os.NewSyscallError("syncfs", syscall.EIO)
		}
		return errors.Join(os.RemoveAll(boot), os.MkdirAll(filepath.Join(boot, "stuck"), 0o700))
	})
	c.Maintain()
	must.Succeed(t, c.CheckWritable())
	expect.That(t, !strings.Contains(log.String(), "has recovered from a failed flush:"), "got the log %s", log.String())
	expect.Text(t, log.String(), "cannot record that the store has recovered")
	must.Succeed(t, os.RemoveAll(boot))
	c.Maintain()
	expect.Text(t, log.String(), "has recovered from a failed flush:")
	expect.Equal(t, string(must.Get(os.ReadFile(boot))(t)), string(intact))
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
	if err := s.Put(t.Context(), d, io.MultiReader(half, flushing, rest)); !errors.Is(err, cas.ErrUnwritable) || has(t, s, d) {
		t.Errorf("Put: got %v, want ErrUnwritable", err)
	}
	putSize(t, s, 1, large)
	expect.Equal(t, c.Stats().FailedFlushes, 1, "FailedFlushes")
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestEvictionBeforeFlushIsRepeated: the record of a file that a failed flush may have lost stays in its segment until
// the file was written again.
func TestEvictionBeforeFlushIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, s := openStore(t, disk.Config{Dir: dir, Lease: time.Minute})
		for i := range byte(5) {
			put(t, s, i)
		}
		big := putSize(t, s, 9, large)
		failing := true
		disk.SetFlush(t, func() error {
			if failing {
				return os.NewSyscallError("syncfs", syscall.EIO)
			}
			return nil
		})
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		read(t, s, 9, large)
		expect.That(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Hour})) != nil,
			"a segment with the record of the file was removed")
		must.Be(t, len(missing(t, s, big)) == 0, "the file was removed")
		was := heldInode(t, filePath(dir, big))
		failing = false
		c.Maintain()
		must.Succeed(t, c.CheckWritable())
		expect.That(t, inode(t, filePath(dir, big)) != was,
			"a file that a failed flush may have lost was not written again")
		read(t, s, 9, large)
	})
}

// TestFileWithTwoRecordsIsWrittenAgain: a restart prefers the durable record of a file that was evicted since.
func TestFileWithTwoRecordsIsWrittenAgain(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), Lease: -1}
	c, s := openStore(t, config)
	put(t, s, 0)
	big := putSize(t, s, 9, large)
	c.Maintain()
	if r, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: c.Stats().Bytes - 1}); err != nil || r.Files != 1 {
		t.Fatalf("Collect: got %+v, %v", r, err)
	}
	putSize(t, s, 9, large)
	closeStore(t, c)
	was := heldInode(t, filePath(config.Dir, big))
	must.Succeed(t, os.WriteFile(filepath.Join(config.Dir, "boot"), []byte("flush failed\n"), 0o600))
	c, s = openStore(t, config)
	for c.CheckWritable() != nil {
		c.Maintain()
	}
	expect.That(t, inode(t, filePath(config.Dir, big)) != was,
		"a file that was put after the last good flush was not written again")
	read(t, s, 9, large)
}

// TestFullStoreRecoversFromFailedFlush although everything in it is leased.
func TestFullStoreRecoversFromFailedFlush(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20, Lease: time.Hour})
	var err error
	for i := byte(0); err == nil && i < 255; i++ {
		b, d := castest.Blob(i, 10*large)
		err = s.Put(t.Context(), d, bytes.NewReader(b))
	}
	must.Be(t, errors.Is(err, cas.ErrFull), "got %v, want a full store", err)
	failFlush(t, 1, func() {})
	c.Maintain()
	must.Succeed(t, c.CheckWritable())
}

// TestWhatFailedFlushMayLoseIsNotShown to later actions.
func TestWhatFailedFlushMayLoseIsNotShown(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir()})
	d := put(t, s, 0)
	at := must.Get(s.Locate(t.Context(), []cas.Digest{d}))(t)
	defer at.Release()
	path, release, err := s.File(t.Context(), d, true)
	must.Succeed(t, err)
	defer release()
	was := heldInode(t, path)
	failFlush(t, 1, func() {})
	c.Maintain()
	expect.That(t, !at.Valid(), "the location in the lost segment is valid")
	path, again, err := s.File(t.Context(), d, true)
	must.Succeed(t, err)
	defer again()
	expect.That(t, inode(t, path) != was, "File returned the copy that was made before the flush failed")
}

// TestFailedFlushLosesLog: blobs whose records cannot be read any more are kept, and the store recovers.
func TestFailedFlushLosesLog(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir})
	small, big := put(t, s, 0), putSize(t, s, 1, large)
	must.Succeed(t, s.Record(t.Context(), big, &repb.ActionResult{}))
	was := heldInode(t, filePath(dir, big))
	failFlush(t, 1, func() { zero(t, segmentFiles(t, dir, ".log")[0], 3*64) })
	c.Maintain()
	must.Succeed(t, c.CheckWritable())
	if lost := missing(t, s, small, big); len(lost) > 0 || inode(t, filePath(dir, big)) == was {
		t.Errorf("lost %v, or did not write the file again", lost)
	}
	expect.Error(t, expect.Err(s.Lookup(t.Context(), big)), cas.ErrNotFound, "the result without a record")
}

// TestAdoptedFileIsWrittenAgain if the flush failed before the restart that adopts it.
func TestAdoptedFileIsWrittenAgain(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	big := putSize(t, s, 9, large)
	closeStore(t, c)
	must.Succeed(t, os.RemoveAll(filepath.Join(config.Dir, "segments"))) // with its record
	must.Succeed(t, os.WriteFile(filepath.Join(config.Dir, "boot"), []byte("flush failed\n"), 0o600))
	was := heldInode(t, filePath(config.Dir, big))
	c, s = openStore(t, config)
	for c.CheckWritable() != nil {
		c.Maintain()
	}
	if lost := missing(t, s, big); len(lost) > 0 || inode(t, filePath(config.Dir, big)) == was {
		t.Errorf("lost %v, or did not write the file again", lost)
	}
}
