// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// fullVar holds the directory in which TestFullChild mounts small file systems.
const fullVar = "CLOISTER_DISK_TEST_FULL"

// TestFullFileSystemIsErrFull mounts small file systems in a mount namespace that ends with the child.
func TestFullFileSystemIsErrFull(t *testing.T) {
	runInNamespace(t, "TestFullChild", fullVar)
}

// runInNamespace runs another test in a child with its own user and mount namespaces, and passes it a directory.
func runInNamespace(t *testing.T, test, variable string) {
	t.Helper()
	runPrepared(t, test, variable, func(*testing.T, string) {})
}

// runPrepared is runInNamespace with a directory that prepare fills first.
func runPrepared(t *testing.T, test, variable string, prepare func(t *testing.T, dir string)) {
	t.Helper()
	dir := t.TempDir()
	prepare(t, dir)
	self := must.Get(os.Executable())(t)
	cmd := exec.CommandContext(t.Context(), self, "-test.run=^"+test+"$", "-test.v", "-test.timeout=15m")
	cmd.Env = append(os.Environ(), variable+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	expect.That(t, err == nil, "%v\n%s", err, out)
}

// inNamespace returns the directory passed by runInNamespace, and makes the mounts of this child private.
func inNamespace(t *testing.T, variable string) (dir string) {
	t.Helper()
	if dir = os.Getenv(variable); dir == "" {
		t.Skip("child of another test")
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		t.Fatalf("make mounts private: %v", err)
	}
	return dir
}

// fullCases are operations on a file system without free blocks or inodes.
var fullCases = []struct {
	name   string
	do     func(t *testing.T, f *fullStore, n int) error
	bytes  bool // must fail without blocks
	inodes bool // must fail without inodes
}{
	{"Put of a small blob", func(t *testing.T, f *fullStore, n int) error { return putOther(t, f.store, n) }, true, false},
	{"Put of a large blob", func(t *testing.T, f *fullStore, n int) error {
		b, d := castest.Blob(byte(n), 50_000)
		return f.store.Put(t.Context(), d, bytes.NewReader(b))
	}, true, true},
	{"PutAll", func(t *testing.T, f *fullStore, n int) error {
		var blobs []cas.Blob
		for i := range byte(5) {
			b, d := castest.Blob(byte(n)+i, 1500)
			blobs = append(blobs, cas.Blob{Digest: d, Data: b})
		}
		return errors.Join(f.store.PutAll(t.Context(), blobs)...)
	}, true, false},
	{"Record", func(t *testing.T, f *fullStore, n int) error {
		_, d := castest.Blob(byte(n), 10)
		return f.store.Record(t.Context(), d, &repb.ActionResult{StdoutRaw: make([]byte, 10*n)})
	}, true, false},
	{"File", func(t *testing.T, f *fullStore, n int) error {
		for _, d := range f.digests { // the copies together exceed a page
			_, release, err := f.store.File(t.Context(), d, true)
			if err != nil {
				return err
			}
			release()
		}
		return nil
	}, true, true},
	{"Missing", func(t *testing.T, f *fullStore, n int) error { // writes stamps if it can
		time.Sleep(time.Hour)
		expect.Slices(t, missing(t, f.store, f.digests...), nil, "Missing")
		return nil
	}, false, false},
	{"Collect", func(t *testing.T, f *fullStore, n int) error { // moves leased entries
		r, err := f.cache.Collect(t.Context(), disk.CollectOptions{OlderThan: fullLease})
		if err == nil && n == 0 && r.Moved == 0 {
			t.Errorf("nothing was moved: %+v", r)
		}
		return err
	}, true, true},
	{"first blob of an instance", func(t *testing.T, f *fullStore, n int) error {
		return putOther(t, store(t, f.cache, fmt.Sprintf("%0200d", n)), n)
	}, true, false},
	{"maintenance", func(t *testing.T, f *fullStore, n int) error { f.cache.Maintain(); return nil }, false, false},
}

const fullLease = 10 * time.Hour

type fullStore struct {
	cache   *disk.Cache
	store   *disk.Store
	digests []cas.Digest // of leased blobs
}

// read reads everything that is leased.
func (f *fullStore) read(t *testing.T) {
	t.Helper()
	for i := range byte(10) {
		read(t, f.store, i, 3000)
	}
	read(t, f.store, 0, 60_000)
	for i := range byte(3) {
		_, d := castest.Blob(i, 10)
		if r, err := f.store.Lookup(t.Context(), d); err != nil || r.ExitCode != int32(i) && len(r.StdoutRaw) == 0 {
			t.Errorf("result %d: %v, %v", i, r, err)
		}
	}
}

func TestFullChild(t *testing.T) {
	dir := inNamespace(t, fullVar)
	syscall.Umask(0o077) // must not affect file modes
	for _, inodes := range []bool{false, true} {
		for _, c := range fullCases {
			t.Run(fmt.Sprintf("%s,inodes=%v", c.name, inodes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					mountSmall(t, dir, inodes)
					whenFull(t, filepath.Join(dir, "store"), inodes, c.do, c.bytes && !inodes || c.inodes && inodes)
				})
			})
		}
		t.Run(fmt.Sprintf("Open,inodes=%v", inodes), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mountSmall(t, dir, inodes)
				openWhenFull(t, dir, inodes)
			})
		})
	}
}

// mountSmall mounts a file system of one megabyte, or with few inodes, until the end of the test.
func mountSmall(t *testing.T, dir string, inodes bool) {
	t.Helper()
	options := "size=1m,mode=700"
	if inodes {
		options = "size=8m,nr_inodes=100,mode=700"
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatalf("mount tmpfs: %v", err)
	}
	t.Cleanup(func() {
		expect.Error(t, syscall.Unmount(dir, 0), nil, "unmount")
	})
}

// exhaust uses up the file system of dir, until the result is called.
func exhaust(t *testing.T, dir string, inodes bool) (free func()) {
	t.Helper()
	room := filepath.Join(dir, "..", "filler")
	must.Succeed(t, os.MkdirAll(room, 0o700))
	for i := range 10_000 {
		f, err := os.Create(filepath.Join(room, fmt.Sprint(i)))
		if err == nil && !inodes {
			for err == nil {
				_, err = f.Write(make([]byte, block))
			}
		}
		if f != nil {
			f.Close()
		}
		if err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			return func() {
				must.Succeed(t, os.RemoveAll(room))
			}
		}
	}
	t.Fatal("the file system does not fill up")
	return nil
}

func whenFull(t *testing.T, dir string, inodes bool, do func(*testing.T, *fullStore, int) error, fails bool) {
	config := disk.Config{Dir: dir, MaxBytes: 64 << 20, MaxFiles: 1 << 20, Pack: 20_000, Lease: fullLease}
	f := &fullStore{cache: open(t, config)}
	f.store = store(t, f.cache, "")
	for i := range byte(20) {
		putSize(t, f.store, i, 3000)
	}
	putSize(t, f.store, 0, 60_000)
	fill := func() {
		for i := range byte(10) {
			_, d := castest.Blob(i, 3000)
			f.digests = append(f.digests, d)
		}
		_, d := castest.Blob(0, 60_000)
		f.digests = append(f.digests, d)
		for i := range byte(3) {
			_, d := castest.Blob(i, 10)
			must.Succeed(t, f.store.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(i)}))
		}
	}
	time.Sleep(fullLease)
	fill()
	if lost := missing(t, f.store, f.digests...); len(lost) > 0 {
		t.Fatal(lost)
	}
	time.Sleep(fullLease / 2) // the other half of the small blobs has expired

	free := exhaust(t, dir, inodes)
	var err error
	for n := range 200 { // the last page may have room
		if err = do(t, f, n); err != nil || !fails && n == 20 {
			break
		}
	}
	if fails && !errors.Is(err, cas.ErrFull) || !fails && err != nil {
		t.Errorf("got %v, want ErrFull: %v", err, fails)
	}
	if fails {
		wantLimit(t, err, cas.LimitDisk)
	}
	if fails &&
		(!errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "free space")) {
		t.Errorf("got %q, want it to name the store and give advice", err)
	}
	f.read(t)
	expect.Error(t, f.cache.Check(t.Context()), nil, "on a full file system")
	free()
	expect.Error(t, do(t, f, 1000), nil, "after space was freed")
	f.read(t)
	closeStore(t, f.cache)
	f.cache = open(t, config)
	f.store = store(t, f.cache, "")
	f.read(t)
	closeStore(t, f.cache)
	fi, err := os.Lstat(filePath(dir, f.digests[10]))
	if err != nil || fi.Mode() != 0o644 {
		t.Errorf("with umask 077: got mode %v, %v", fi.Mode(), err)
	}
}

// TestOpenOnFullFileSystem: Open succeeds or returns ErrFull, and loses nothing.
func openWhenFull(t *testing.T, dir string, inodes bool) {
	config := disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 64 << 20, MaxFiles: 1 << 20}
	c := open(t, config)
	put(t, store(t, c, ""), 0)
	closeStore(t, c)
	free := exhaust(t, config.Dir, inodes)
	c, err := disk.Open(config)
	switch {
	case err == nil:
		read(t, store(t, c, ""), 0, block)
		closeStore(t, c)
	case !errors.Is(err, cas.ErrFull):
		t.Errorf("Open: got %v, want ErrFull", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "filler", "new"), 0o700); !inodes && err != nil {
		t.Fatal(err)
	}
	fresh := disk.Config{Dir: filepath.Join(dir, "filler", "new"), MaxBytes: 64 << 20}
	if _, err := disk.Open(fresh); !errors.Is(err, cas.ErrFull) || !strings.Contains(err.Error(), fresh.Dir) {
		t.Errorf("Open of a new store: got %v, want ErrFull naming it", err)
	}
	free()
	fresh.Dir = filepath.Join(dir, "new")
	for i, config := range []disk.Config{config, fresh} {
		c := open(t, config)
		if i == 0 {
			read(t, store(t, c, ""), 0, block)
		}
		put(t, store(t, c, ""), 1)
		closeStore(t, c)
	}
}
