// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

const (
	// nowhere is a file whose beginning cannot be read: EIO, as from a bad sector.
	nowhere = "/proc/self/mem"
	// nothing is a file that accepts all writes and cannot be synced.
	nothing = "/dev/null"
)

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

// replaceOpen replaces a file that this process has open by another one, until the result is called or the test ends.
// If both paths are equal, the open file becomes write-only.
func replaceOpen(t *testing.T, path, by string) (restore func()) {
	t.Helper()
	fds := must.Get(os.ReadDir("/proc/self/fd"))(t)
	for _, e := range fds {
		var fd int
		if link, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err != nil || link != path {
			continue
		}
		must.Get(fmt.Sscan(e.Name(), &fd))(t)
		saved := must.Get(unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0))(t)
		flags := os.O_RDWR
		switch {
		case by == nowhere || isDir(by):
			flags = os.O_RDONLY
		case by == path:
			flags = os.O_WRONLY
		}
		other := must.Get(os.OpenFile(by, flags, 0))(t)
		defer other.Close()
		must.Succeed(t, unix.Dup3(int(other.Fd()), fd, unix.O_CLOEXEC))
		link := must.Get(os.Readlink(filepath.Join("/proc/self/fd", e.Name())))(t)
		restore = sync.OnceFunc(func() {
			// The store may have closed it.
			if now, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && now == link {
				expect.Error(t, unix.Dup3(saved, fd, unix.O_CLOEXEC), nil)
			}
			expect.Error(t, unix.Close(saved), nil)
		})
		t.Cleanup(restore)
		return restore
	}
	t.Fatalf("%s is not open", path)
	return nil
}

// twoSegments opens a store whose first segment is full and holds blob 0, and none of blobs 1 to 9.
func twoSegments(t *testing.T, config disk.Config) (*disk.Cache, *disk.Store) {
	t.Helper()
	c, s := openStore(t, config)
	put(t, s, 0)
	for i := byte(100); len(segmentFiles(t, config.Dir, ".data")) < 2; i++ {
		put(t, s, i)
	}
	for i := byte(1); i < 10; i++ {
		putSize(t, s, i, 500)
	}
	return c, s
}

// TestUnreadableBlobIsDamaged: a read error of the disk counts as damage to this blob only.
func TestUnreadableBlobIsDamaged(t *testing.T) {
	const lease = time.Hour
	for _, how := range []struct {
		name string
		use  func(*testing.T, *disk.Cache, *disk.Store, cas.Digest) error
		want error
	}{
		{"Open", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error {
			_, err := s.Open(t.Context(), d, 0)
			return err
		}, cas.ErrCorrupt},
		{"File", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error {
			_, _, err := s.File(t.Context(), d, false)
			return err
		}, cas.ErrNotFound},
		{"Collect", func(t *testing.T, c *disk.Cache, _ *disk.Store, _ cas.Digest) error {
			_, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease})
			return err
		}, nil},
		{"Verify", func(t *testing.T, c *disk.Cache, _ *disk.Store, _ cas.Digest) error {
			r, err := c.Verify(t.Context(), disk.VerifyOptions{})
			expect.Equal(t, r.Blobs, int64(c.Stats().Blobs+len(r.Damaged)), "blobs that Verify read")
			return err
		}, nil},
	} {
		t.Run(how.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				reported := map[string]int{}
				config := disk.Config{Dir: t.TempDir(), Lease: lease, Corrupt: func(_ string, d cas.Digest, _ string) { reported[d.String()]++ }}
				c, s := twoSegments(t, config)
				_, d := castest.Blob(0, block)
				time.Sleep(2 * lease)
				if !has(t, s, d) { // renews the only lease
					t.Fatal("absent")
				}
				restore := replaceOpen(t, filepath.Join(config.Dir, firstData), nowhere)
				expect.Error(t, how.use(t, c, s, d), how.want)
				expect.That(t, !has(t, s, d), "the blob is present")
				expect.Equal(t, reported[d.String()], 1, "calls of Corrupt")
				put(t, s, 0)
				restore()
				read(t, s, 0, block)
				if how.name != "Collect" {
					read(t, s, 1, 500)
				}
			})
		})
	}
}

// TestSegmentStaysIfMoveCannotBeFlushed, until the recovery from the failed flush has written its blobs elsewhere.
func TestSegmentStaysIfMoveCannotBeFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Hour
		config := disk.Config{Dir: t.TempDir(), Lease: lease}
		c, s := openStore(t, config)
		// The first Collect creates the segment for moves.
		put(t, s, 0)
		put(t, s, 1)
		time.Sleep(2 * lease)
		read(t, s, 0, block)
		collect := func() error {
			_, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease})
			return err
		}
		must.Succeed(t, collect())
		moved := segmentFiles(t, config.Dir, ".log")
		must.Be(t, len(moved) == 1, "got segments %q", moved)
		put(t, s, 2)
		put(t, s, 3)
		source := segmentFiles(t, config.Dir, ".data")[1]
		time.Sleep(2 * lease)
		must.Be(t, len(missing(t, s, digestOfBlob(0, block), digestOfBlob(2, block))) == 0, "blobs were lost")
		restore := replaceOpen(t, moved[0], nothing)
		for n := range 3 {
			switch err := collect(); {
			case n > 0 && err == nil: // after the recovery
			case !errors.Is(err, syscall.EINVAL):
				t.Errorf("got %v, want the error of fdatasync", err)
			case !exists(source):
				t.Fatal("the segment was removed")
			}
		}
		restore()
		must.Succeed(t, c.Close())
		// What was written to the replaced file is lost, but is in the old segment or in the one of the recovery.
		s = store(t, open(t, config), "")
		read(t, s, 0, block)
		read(t, s, 2, block)
	})
}

// faultVar holds the directory in which TestFaultChild mounts files over those of stores.
const faultVar = "CLOISTER_DISK_TEST_FAULT"

func TestFaultsOfFiles(t *testing.T) { runInNamespace(t, "TestFaultChild", faultVar) }

func TestFaultChild(t *testing.T) {
	dir := inNamespace(t, faultVar)
	// cover mounts one file over another, which can then not be removed.
	cover := func(t *testing.T, path, by string) (uncover func()) {
		t.Helper()
		if err := syscall.Mount(by, path, "", syscall.MS_BIND, ""); err != nil {
			t.Fatalf("mount %s on %s: %v", by, path, err)
		}
		return func() {
			expect.Error(t, syscall.Unmount(path, 0), nil)
		}
	}
	t.Run("Open with a smaller budget", func(t *testing.T) {
		config := disk.Config{Dir: filepath.Join(dir, "budget"), Lease: none}
		c, s := openStore(t, config)
		var paths []string
		for i := range byte(8) {
			paths = append(paths, filePath(config.Dir, putSize(t, s, i, 70_000)))
		}
		closeStore(t, c)
		config.MaxBytes = 200_000
		for _, path := range paths {
			defer cover(t, path, path)()
		}
		c = must.Get(disk.Open(config))(t)
		read(t, store(t, c, ""), 0, 70_000)
		if err := putOther(t, store(t, c, ""), 0); !errors.Is(err, cas.ErrFull) || !errors.Is(err, syscall.EBUSY) {
			t.Errorf("got %v, want ErrFull with the reason", err)
		}
		expect.Error(t, c.Close(), nil)
	})
	for _, power := range []bool{false, true} {
		t.Run(fmt.Sprintf("bad sector,power=%v", power), func(t *testing.T) {
			config := disk.Config{Dir: filepath.Join(dir, fmt.Sprint(power)), MaxBytes: 1 << 20}
			c, s := openStore(t, config)
			d := putSize(t, s, 0, 70_000)
			put(t, s, 1)
			closeStore(t, c)
			if power {
				write(t, filepath.Join(config.Dir, "boot"), "another start of the machine\n")
			}
			uncover := cover(t, filePath(config.Dir, d), nowhere)
			c, err := disk.Open(config)
			must.Be(t, err == nil, "Open fails because of one blob: %v", err)
			s = store(t, c, "")
			if r, err := s.Open(t.Context(), d, 0); err == nil {
				t.Error("the blob can be read")
				r.Close()
			} else if !errors.Is(err, cas.ErrCorrupt) && !errors.Is(err, cas.ErrNotFound) {
				t.Errorf("got %v", err)
			}
			read(t, s, 1, block)
			expect.Error(t, c.Close(), nil)
			uncover()
		})
	}
}

// unstatedVar names the environment variable with the directory of the store that TestUnstatedChild opens.
const unstatedVar = "CLOISTER_DISK_TEST_UNSTATED"

// TestFileStaysIfOpenLacksMemory: Open keeps a file without a record if this process lacks the memory to inspect it,
// and the next Open adopts it.
func TestFileStaysIfOpenLacksMemory(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	c, s := openStore(t, config)
	big := putSize(t, s, 9, large)
	closeStore(t, c)
	must.Succeed(t, os.RemoveAll(filepath.Join(config.Dir, "segments"))) // with its record
	path := filePath(config.Dir, big)
	strace := []string{"-f", "-qq", "-o", os.DevNull, "-e", "trace=newfstatat", "-e", "inject=newfstatat:error=ENOMEM", "-P", path}
	if out, err := exec.Command("strace", append(strace, "true")...).CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "strace", fmt.Sprintf("%v: %s", err, out))
	}
	self := must.Get(os.Executable())(t)
	cmd := exec.CommandContext(t.Context(), "strace", append(strace, self, "-test.run=^TestUnstatedChild$")...)
	cmd.Env = append(os.Environ(), unstatedVar+"="+config.Dir)
	out, err := cmd.CombinedOutput()
	must.Be(t, err == nil, "%v\n%s", err, out)
	_, s = openStore(t, config)
	read(t, s, 9, large)
}

func TestUnstatedChild(t *testing.T) {
	dir := os.Getenv(unstatedVar)
	if dir == "" {
		t.Skip("child of another test")
	}
	c, s := openStore(t, disk.Config{Dir: dir})
	expect.That(t, !has(t, s, digestOfBlob(9, large)), "got the blob, want it absent: the file cannot be inspected")
	closeStore(t, c)
}

// TestVerifySkipsUnknownErrors: if reading a blob fails for an unknown reason, Verify continues with the next blob and
// returns that error. The blob does not count as damaged.
func TestVerifySkipsUnknownErrors(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	c, s := twoSegments(t, config)
	behind, _ := castest.Blob(1, 500)
	damageBlob(t, config.Dir, behind)
	pipe := filepath.Join(t.TempDir(), "pipe") // without offsets
	must.Succeed(t, syscall.Mkfifo(pipe, 0o600))
	restore := replaceOpen(t, segmentFiles(t, config.Dir, ".data")[0], pipe)
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	expect.Error(t, err, syscall.ESPIPE)
	expect.That(t, len(r.Damaged) == 1 && r.Damaged[0].Digest == digestOfBlob(1, 500),
		"got damaged %v, want the blob behind", r.Damaged)
	restore()
	read(t, s, 0, block)
}

// TestVerifySkipsUnreadableLogs: Verify skips a segment whose log it cannot read, and returns the error. Otherwise,
// every later Verify would stop there.
func TestVerifySkipsUnreadableLogs(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	c, s := twoSegments(t, config)
	behind, _ := castest.Blob(1, 500)
	damageBlob(t, config.Dir, behind)
	log := segmentFiles(t, config.Dir, ".log")[0]
	restore := replaceOpen(t, log, log)
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	expect.Error(t, err, syscall.EBADF)
	expect.That(t, len(r.Damaged) == 1 && r.Damaged[0].Digest == digestOfBlob(1, 500),
		"got damaged %v, want the blob of the second segment", r.Damaged)
	restore()
	r, err = c.Verify(t.Context(), disk.VerifyOptions{})
	expect.That(t, err == nil && !r.Resumed, "readable again: got %v, resumed %v", err, r.Resumed)
	read(t, s, 0, block)
}
