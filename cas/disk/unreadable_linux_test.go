// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// obstacles replace a file by something that cannot be read as one.
var obstacles = []struct {
	name   string
	reason string // in reports
	put    func(t *testing.T, path string)
}{
	{"pipe", "not a regular file", func(t *testing.T, path string) { must.Succeed(t, syscall.Mkfifo(path, 0o600)) }},
	{"directory", "directory", func(t *testing.T, path string) { must.Succeed(t, os.Mkdir(path, 0o700)) }},
	{"full directory", "directory", func(t *testing.T, path string) { must.Succeed(t, os.MkdirAll(filepath.Join(path, "x"), 0o700)) }},
	{"symlink", "symbolic links", func(t *testing.T, path string) {
		must.Succeed(t, os.Symlink(filepath.Base(path), path))
	}},
	{"socket", "no such device", func(t *testing.T, path string) {
		t.Chdir(filepath.Dir(path)) // addresses are short
		l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: "socket"}))(t)
		l.SetUnlinkOnClose(false)
		must.Succeed(t, errors.Join(l.Close(), os.Rename("socket", path)))
	}},
}

// fileUses use a blob that is a file.
var fileUses = []struct {
	name string
	use  func(t *testing.T, c *disk.Cache, s *disk.Store, d cas.Digest) error
}{
	{"Open", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error { return openAt(t, s, d, 0) }},
	{"Open from within", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error { return openAt(t, s, d, 1) }},
	{"File", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error {
		_, _, err := s.File(t.Context(), d, false)
		return err
	}},
	{"executable File", func(t *testing.T, _ *disk.Cache, s *disk.Store, d cas.Digest) error {
		_, _, err := s.File(t.Context(), d, true)
		return err
	}},
	{"Verify", func(t *testing.T, c *disk.Cache, _ *disk.Store, d cas.Digest) error {
		r, err := c.Verify(t.Context(), disk.VerifyOptions{})
		if err != nil || r.Blobs != 3 || len(r.Damaged) != 1 || r.Damaged[0].Digest != d {
			t.Errorf("Verify: got %+v, %v, want one of 3 blobs damaged", r, err)
			return err
		}
		return cas.ErrNotFound
	}},
}

func openAt(t *testing.T, s cas.Store, d cas.Digest, off int64) error {
	r, err := s.Open(t.Context(), d, off)
	if err == nil {
		err = r.Close()
	}
	return err
}

// wantReplaced uses blob 1 of size large, which cannot be read: it is absent then, was reported once, and can be put
// again. Blobs 0 and 2 are sound.
func wantReplaced(
	t *testing.T, c *disk.Cache, use func(*testing.T, *disk.Cache, *disk.Store, cas.Digest) error, reason string, reports *[]string,
) {
	t.Helper()
	s, d := store(t, c, ""), digestOfBlob(1, large)
	if err := use(t, c, s, d); !errors.Is(err, cas.ErrNotFound) && !errors.Is(err, cas.ErrCorrupt) {
		t.Errorf("got %v, want ErrNotFound or ErrCorrupt", err)
	}
	expect.That(t, !has(t, s, d), "the blob is present")
	expect.That(t, len(*reports) == 1 && strings.Contains((*reports)[0], reason) && c.Stats().Corrupt == 1,
		"got reports %q, want one with %q", *reports, reason)
	putSize(t, s, 1, large)
	for i := range byte(3) {
		read(t, s, i, large)
	}
}

// threeFiles puts blobs 0 to 2 of size large, and returns what Corrupt reports.
func threeFiles(t *testing.T, config *disk.Config) (*disk.Cache, *[]string) {
	t.Helper()
	reports := new([]string)
	config.MaxBytes = 4 << 20
	config.Corrupt = func(_ string, d cas.Digest, where string) { *reports = append(*reports, d.String()+" "+where) }
	c := open(t, *config)
	for i := range byte(3) {
		putSize(t, store(t, c, ""), i, large)
	}
	return c, reports
}

// TestUnopenableFileIsReplaced: a file that cannot be opened is absent and reported, and can be put again. Nothing
// waits for the other end of a pipe.
func TestUnopenableFileIsReplaced(t *testing.T) {
	for _, o := range obstacles {
		for _, u := range fileUses {
			for _, reopen := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s,%s,reopen=%v", o.name, u.name, reopen), func(t *testing.T) {
					config := disk.Config{Dir: t.TempDir()}
					c, reports := threeFiles(t, &config)
					path := filePath(config.Dir, digestOfBlob(1, large))
					if reopen {
						must.Succeed(t, c.Close())
						c = open(t, config)
					}
					must.Succeed(t, os.Remove(path))
					o.put(t, path)
					wantReplaced(t, c, u.use, "", reports)
				})
			}
		}
	}
}

// TestUnreadableFileOfRootIsReplaced: root may read any file, but actions may not.
func TestUnreadableFileOfRootIsReplaced(t *testing.T) {
	for _, u := range fileUses[2:] {
		if u.name == "executable File" && os.Getuid() == 0 {
			continue // a copy is readable
		}
		config := disk.Config{Dir: t.TempDir()}
		c, reports := threeFiles(t, &config)
		must.Succeed(t, os.Chmod(filePath(config.Dir, digestOfBlob(1, large)), 0))
		wantReplaced(t, c, u.use, "permission denied", reports)
	}
}

// deniedVar holds the directory in which TestDeniedChild finds stores with files that it may not read.
const deniedVar = "CLOISTER_DISK_TEST_DENIED"

// TestDeniedFileIsReplaced: EACCES, as after a change of permissions or by a security module.
func TestDeniedFileIsReplaced(t *testing.T) {
	runPrepared(t, "TestDeniedChild", deniedVar, prepareDenied)
}

func prepareDenied(t *testing.T, dir string) {
	for _, u := range fileUses {
		config := disk.Config{Dir: filepath.Join(dir, u.name)}
		c, _ := threeFiles(t, &config)
		must.Succeed(t, c.Close())
		deny(t, filePath(config.Dir, digestOfBlob(1, large)), 0o400)
	}
	config := disk.Config{Dir: filepath.Join(dir, "directory")}
	c, _ := threeFiles(t, &config)
	must.Succeed(t, c.Close())
	deny(t, filepath.Dir(filePath(config.Dir, digestOfBlob(1, large))), 0o700)
}

// deny makes a file or directory with this mode unreadable in the namespace.
func deny(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	must.Succeed(t, os.Chmod(path, mode))
	if os.Getuid() == 0 {
		must.Succeed(t, os.Chown(path, 63210, 63210)) // who is nobody in the namespace
		return
	}
	must.Succeed(t, os.Chmod(path, 0))
	t.Cleanup(func() { must.Succeed(t, os.Chmod(path, mode)) })
}

func TestDeniedChild(t *testing.T) {
	dir := inNamespace(t, deniedVar)
	for _, u := range fileUses {
		t.Run(u.name, func(t *testing.T) {
			var reports []string
			c := open(t, disk.Config{
				Dir: filepath.Join(dir, u.name), MaxBytes: 4 << 20,
				Corrupt: func(_ string, _ cas.Digest, where string) { reports = append(reports, where) },
			})
			wantReplaced(t, c, u.use, "permission denied", &reports)
		})
	}
	c := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "directory"), MaxBytes: 4 << 20}))(t)
	defer c.Close()
	expect.Equal(t, c.Stats().LogLost, 1, "blobs lost with an unreadable directory")
	s := store(t, c, "")
	expect.That(t, !has(t, s, digestOfBlob(1, large)) && has(t, s, digestOfBlob(2, large)), "the wrong blobs are present")
}

// TestLackOfDescriptorsIsNotDamage: EMFILE is about this process, not about the file.
func TestLackOfDescriptorsIsNotDamage(t *testing.T) {
	runInNamespace(t, "TestDescriptorsChild", descriptorsVar)
}

const descriptorsVar = "CLOISTER_DISK_TEST_DESCRIPTORS"

func TestDescriptorsChild(t *testing.T) {
	dir := inNamespace(t, descriptorsVar)
	config := disk.Config{Dir: filepath.Join(dir, "store")}
	c, reports := threeFiles(t, &config)
	must.Succeed(t, c.Close())
	c = open(t, config)
	s := store(t, c, "")
	var was syscall.Rlimit
	must.Succeed(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was))
	starve := func() {
		must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: was.Max}))
	}
	feed := func() { must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was)) }
	for _, u := range fileUses[:4] {
		starve()
		err := u.use(t, c, s, digestOfBlob(1, large))
		feed()
		expect.Error(t, err, syscall.EMFILE, "%s", u.name)
	}
	starve()
	r, err := c.Verify(t.Context(), disk.VerifyOptions{})
	feed()
	expect.That(t, errors.Is(err, syscall.EMFILE) && len(r.Damaged) == 0, "Verify: got %+v, %v, want EMFILE", r, err)
	for i := range byte(3) {
		read(t, s, i, large)
	}
	expect.That(t, len(*reports) == 0, "got reports %q", *reports)
}

// TestFileThatCannotBeRemovedIsAbsent, and stays absent when the store is opened again.
func TestFileThatCannotBeRemovedIsAbsent(t *testing.T) {
	runInNamespace(t, "TestStuckChild", stuckVar)
}

const stuckVar = "CLOISTER_DISK_TEST_STUCK"

func TestStuckChild(t *testing.T) {
	dir := inNamespace(t, stuckVar)
	var log bytes.Buffer
	config := disk.Config{Dir: filepath.Join(dir, "store"), Log: slog.New(slog.NewTextHandler(&log, nil))}
	c, _ := threeFiles(t, &config)
	d := digestOfBlob(1, large)
	path := filePath(config.Dir, d)
	for _, by := range []string{nothing, nowhere} {
		must.Succeed(t, syscall.Mount(by, path, "", syscall.MS_BIND, ""))
		for round := range 2 {
			s := store(t, c, "")
			expect.That(t, round <= 0 || !has(t, s, d), "the blob is present again")
			if err := openAt(t, s, d, 1); !errors.Is(err, cas.ErrNotFound) && !errors.Is(err, cas.ErrCorrupt) {
				t.Errorf("got %v, want ErrNotFound or ErrCorrupt", err)
			}
			expect.That(t, !has(t, s, d), "the blob is present")
			b, _ := castest.Blob(1, large)
			expect.Error(t, s.Put(t.Context(), d, bytes.NewReader(b)), syscall.EBUSY, "Put")
			must.Succeed(t, c.Close())
			c = must.Get(disk.Open(config))(t)
		}
		must.Succeed(t, syscall.Unmount(path, 0))
		if s := store(t, c, ""); !has(t, s, d) {
			putSize(t, s, 1, large)
		}
		read(t, store(t, c, ""), 1, large)
	}
	must.Succeed(t, c.Close())
	expect.That(t, strings.Contains(log.String(), "remove its file"), "the log has no advice: %s", &log)
}

// TestUnopenableSegmentIsLost alone: Open reports it, and adopts large files whose records it had.
func TestUnopenableSegmentIsLost(t *testing.T) {
	missing := obstacles[:0:0]
	missing = append(missing, obstacles...)
	missing = append(missing, struct {
		name, reason string
		put          func(*testing.T, string)
	}{"nothing", "missing", func(*testing.T, string) {}})
	for _, o := range missing {
		for _, suffix := range []string{".data", ".log"} {
			t.Run(o.name+suffix, func(t *testing.T) {
				var log bytes.Buffer
				config := disk.Config{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}
				c, _ := twoSegments(t, config)
				closeStore(t, c)
				config.Pack = everyFile // the record of a file in the second segment
				c = open(t, config)
				d := put(t, store(t, c, ""), 200)
				closeStore(t, c)
				path := segmentFiles(t, config.Dir, suffix)[1]
				must.Succeed(t, os.Remove(path))
				o.put(t, path)
				c = open(t, config)
				s := store(t, c, "")
				read(t, s, 0, block)
				read(t, s, 200, block)
				expect.That(t, has(t, s, d) && !has(t, s, digestOfBlob(1, 500)), "the wrong blobs are present")
				putSize(t, s, 1, 500)
				if c.Stats().LostSegments != 1 || !strings.Contains(log.String(), "segment is lost") ||
					!strings.Contains(log.String(), o.reason) {
					t.Errorf("lost %d segments, logged %s, want %q", c.Stats().LostSegments, &log, o.reason)
				}
				closeStore(t, c)
				if c = open(t, config); c.Stats().LostSegments != 0 && o.name != "full directory" {
					t.Errorf("opened again: lost %d segments", c.Stats().LostSegments)
				}
			})
		}
	}
}

// TestUnreadableLogIsLost: Open reports and removes a segment whose log can be opened, but not read.
func TestUnreadableLogIsLost(t *testing.T) {
	var log bytes.Buffer
	config := disk.Config{Dir: t.TempDir()}
	c, _ := twoSegments(t, config)
	closeStore(t, c)
	data, logs := segmentFiles(t, config.Dir, ".data"), segmentFiles(t, config.Dir, ".log")
	must.Succeed(t, os.Remove(data[1]))
	dir := unreadable(t)
	spoil := sync.OnceFunc(func() { replaceOpen(t, logs[0], dir) })
	config.Log = slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		spoil() // the first line reports the missing file, when Open has opened all logs and read none
		return log.Write(p)
	}), nil))
	c = open(t, config)
	s := store(t, c, "")
	expect.That(t, c.Stats().LostSegments == 2 && strings.Contains(log.String(), "cannot be read: read "+logs[0]),
		"lost %d segments, logged %s", c.Stats().LostSegments, &log)
	expect.That(t, !has(t, s, digestOfBlob(0, block)), "a blob of the lost segment is present")
	putSize(t, s, 0, block)
	closeStore(t, c)
	config.Log = nil
	c = open(t, config)
	expect.Equal(t, c.Stats().LostSegments, 0, "lost segments after opening again")
	read(t, store(t, c, ""), 0, block)
}

// unreadable returns the path of a directory, which cannot be read as a file. It has more bytes than Open skips as bad
// sectors.
func unreadable(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; ; i++ {
		fi := must.Get(os.Stat(dir))(t)
		if fi.Size() > 1<<20 {
			return dir
		}
		must.Succeed(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%0200d", i)), nil, 0o600))
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestManyUnopenableSegmentsAreKept: damage is then an unlikely cause.
func TestManyUnopenableSegmentsAreKept(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	c, _ := twoSegments(t, config)
	closeStore(t, c)
	paths := segmentFiles(t, config.Dir, ".data")
	for _, path := range paths {
		must.Succeed(t, errors.Join(os.Rename(path, path+".kept"), os.Mkdir(path, 0o700)))
	}
	config.MaxBytes = 1 << 20
	if _, err := disk.Open(config); err == nil || !strings.Contains(err.Error(), "2 of 2 segments cannot be opened; make them readable") {
		t.Errorf("got %v, want advice", err)
	}
	for _, path := range paths {
		must.Succeed(t, errors.Join(os.Remove(path), os.Rename(path+".kept", path)))
	}
	read(t, store(t, open(t, config), ""), 0, block)
}

// TestOpenDoesNotWaitForPipes in place of its files. It succeeds, or says what to do.
func TestOpenDoesNotWaitForPipes(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"boot", ""},
		{"verify", ""},
		{"checkpoint", ""},
		{"instances", "make it readable"},
		{"version", "not a regular file"},
		{"lock", "choose another"},
	} {
		t.Run(c.name, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20}
			cache := open(t, config)
			put(t, store(t, cache, ""), 0)
			closeStore(t, cache)
			path := filepath.Join(config.Dir, c.name)
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
			must.Succeed(t, syscall.Mkfifo(path, 0o600))
			cache, err := disk.Open(config)
			if err != nil {
				if c.want == "" || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), config.Dir) {
					t.Errorf("got %v, want %q", err, c.want)
				}
				return
			}
			defer cache.Close()
			read(t, store(t, cache, ""), 0, block)
			if _, err := cache.Verify(t.Context(), disk.VerifyOptions{}); err != nil || c.want != "" {
				t.Errorf("Open succeeded, Verify: %v", err)
			}
		})
	}
}
