// SPDX-License-Identifier: Apache-2.0

package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// lacks skips the test because the host lacks what, or fails it if CLOISTER_REQUIRE lists namespaces.
func lacks(t testing.TB, what string, reason error) {
	t.Helper()
	must.Be(t, os.Getuid() != 0 || !slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces"),
		"%s is required by CLOISTER_REQUIRE and missing: %v", what, reason)
	t.Skipf("no %s: %v", what, reason)
}

// realDir returns a directory on a disk file system: images cannot lie on a memory-backed one.
func realDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(dir, &st))
	if st.Type != unix.TMPFS_MAGIC {
		return dir
	}
	dir, err := os.MkdirTemp("/var/tmp", "erofs-test-")
	if err != nil {
		lacks(t, "directory on a disk", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// mount mounts the image without a path and returns its root.
func mount(t testing.TB, image []byte, devices []string) int {
	t.Helper()
	p := filepath.Join(realDir(t), "image")
	must.Succeed(t, os.WriteFile(p, image, 0o600))
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		lacks(t, "EROFS mount", err)
	}
	defer unix.Close(fsfd)
	err = unix.FsconfigSetString(fsfd, "source", p)
	for _, d := range devices {
		err = errors.Join(err, unix.FsconfigSetString(fsfd, "device", d))
	}
	must.Succeed(t, err)
	if err := unix.FsconfigCreate(fsfd); errors.Is(err, unix.ENOTBLK) || errors.Is(err, unix.EPERM) {
		lacks(t, "EROFS mount of files", err)
	} else if err != nil {
		log := make([]byte, 4096)
		n, _ := unix.Read(fsfd, log)
		t.Fatalf("mounting an image of %d bytes with %d devices: %v: %s", len(image), len(devices), err,
			log[:max(n, 0)])
	}
	root := must.Get(unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY))(t)
	t.Cleanup(func() { unix.Close(root) })
	return root
}

// open opens name in the directory at.
func open(t testing.TB, at int, name string, flags int) *os.File {
	t.Helper()
	fd, err := unix.Openat(at, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	must.Be(t, err == nil, "%s: %v", name, err)
	return os.NewFile(uintptr(fd), name)
}

// compare checks that the directory at equals n, with file contents from segments, and closes it.
func compare(t testing.TB, at *os.File, n *node, segments [][]byte) {
	t.Helper()
	defer at.Close()
	names := must.Get(at.Readdirnames(-1))(t)
	want := slices.Sorted(maps.Keys(n.kids))
	if slices.Sort(names); !slices.Equal(names, want) {
		t.Fatalf("got %d names %.500q, want %d %.500q", len(names), names, len(want), want)
	}
	fd := int(at.Fd())
	for _, name := range want {
		k := n.kids[name]
		var st unix.Stat_t
		if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			t.Fatalf("%q: %v", name, err)
		}
		mode, kindLinks := uint32(unix.S_IFREG|k.mode), uint64(1)
		switch {
		case k.kids != nil:
			mode, kindLinks = uint32(unix.S_IFDIR|k.mode), uint64(st.Nlink) // checked when it is compared
		case k.target != "":
			mode = unix.S_IFLNK | 0o777
		}
		if st.Mode != mode || st.Uid != 0 || st.Gid != 0 || uint64(st.Nlink) != kindLinks ||
			!time.Unix(st.Mtim.Unix()).Equal(time.Unix(erofs.Time, 0).Add(k.after)) || st.Ino == 0 {
			t.Fatalf("%q: got %+v, want mode %o and %v after", name, st, mode, k.after)
		}
		switch {
		case k.kids != nil:
			sub := open(t, fd, name, unix.O_RDONLY|unix.O_DIRECTORY)
			compare(t, sub, k, segments)
		case k.target != "":
			target := make([]byte, 4096)
			if n, err := unix.Readlinkat(fd, name, target); err != nil || string(target[:n]) != k.target {
				t.Fatalf("%q: a link to %.40q... of %d bytes, %v; want %.40q...", name, target, n, err, k.target)
			}
		default:
			f := open(t, fd, name, unix.O_RDONLY)
			got, err := io.ReadAll(f)
			f.Close()
			if err != nil || int64(len(got)) != k.size || k.size > 0 &&
				!bytes.Equal(got, segments[k.device][k.offset:][:k.size]) {
				t.Fatalf("%q: %d bytes and %v, want the %d at %d of %d", name, len(got), err, k.size, k.offset,
					k.device)
			}
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Nlink != 1 {
		t.Fatalf("%v: %d links, want 1", err, st.Nlink)
	}
}

// segments creates n devices of random bytes.
func segments(t testing.TB, r *rand.Rand, n, size int) (paths []string, data [][]byte, sizes []int64) {
	dir := realDir(t)
	for i := range n {
		b := make([]byte, size)
		for j := range b {
			b[j] = byte(r.Uint32())
		}
		p := filepath.Join(dir, fmt.Sprint(i))
		must.Succeed(t, os.WriteFile(p, b, 0o600))
		paths, data, sizes = append(paths, p), append(data, b), append(sizes, int64(size))
	}
	return paths, data, sizes
}

// TestKernelReadsImages checks that the kernel shows the tree of an image, read-only.
func TestKernelReadsImages(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct{ entries, devices int }{{0, 0}, {40, 0}, {1, 1}, {300, 2}, {1500, 5}, {600, 200}} {
		t.Run(fmt.Sprintf("%d entries %d devices", c.entries, c.devices), func(t *testing.T) {
			paths, data, sizes := segments(t, r, c.devices, 128<<10)
			n := random(r, c.entries, c.devices, 128<<10)
			root := mount(t, encode(t, n, sizes, nil), paths)
			compare(t, open(t, root, ".", unix.O_RDONLY), n, data)
			for name, k := range n.kids {
				if k.kids != nil {
					continue
				}
				if _, err := unix.Openat(root, name, unix.O_WRONLY|unix.O_NOFOLLOW, 0); k.target == "" &&
					err != unix.EROFS {
					t.Errorf("writing to %q: %v", name, err)
				}
				if err := unix.Unlinkat(root, name, 0); err != unix.EROFS {
					t.Errorf("removing %q: %v", name, err)
				}
			}
			if err := unix.Mkdirat(root, "new", 0o755); err != unix.EROFS {
				t.Errorf("making a directory: %v", err)
			}
		})
	}
}

// TestKernelReadsLongDirectories reads 20,000 names and links of all lengths.
func TestKernelReadsLongDirectories(t *testing.T) {
	t.Parallel()
	n := &node{mode: 0o555, kids: map[string]*node{}}
	for i := range 20_000 {
		n.kids[fmt.Sprintf("%x%s", i, strings.Repeat("n", i%250))] = &node{mode: 0o444}
	}
	for _, length := range []int{1, 479, 480, 481, 511, 512, 513, 4094, 4095} {
		n.kids[fmt.Sprintf("link%d", length)] = &node{target: strings.Repeat("t", length)}
	}
	root := mount(t, encode(t, n, nil, nil), nil)
	compare(t, open(t, root, ".", unix.O_RDONLY), n, nil)
}

// TestKernelReadsManyDirectories exceeds the link count of a compact inode.
func TestKernelReadsManyDirectories(t *testing.T) {
	t.Parallel()
	n := &node{mode: 0o555, kids: map[string]*node{}}
	for i := range 66_000 {
		n.kids[fmt.Sprint(i)] = &node{mode: 0o555, kids: map[string]*node{}}
	}
	root := mount(t, encode(t, n, nil, nil), nil)
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil || st.Nlink != 1 || st.Mtim.Sec != erofs.Time {
		t.Errorf("got %+v, %v", st, err)
	}
	open(t, root, "65999", unix.O_RDONLY).Close()
}

// TestKernelReadsLargeTrees reads 200,000 files and a thousand nested directories.
func TestKernelReadsLargeTrees(t *testing.T) {
	t.Parallel()
	paths, data, sizes := segments(t, rand.New(rand.NewPCG(5, 6)), 1, 1<<20)
	n := &node{mode: 0o555, kids: map[string]*node{}}
	for i := range 2000 {
		d := &node{mode: 0o555, kids: map[string]*node{}}
		for j := range 100 {
			d.kids[fmt.Sprintf("f%d", j)] = &node{
				mode: 0o444, size: int64(1 + j),
				offset: int64((i*100 + j) % 2000 * 512),
			}
		}
		n.kids[fmt.Sprintf("d%d", i)] = d
	}
	deep := n
	for range 1000 {
		next := &node{mode: 0o555, kids: map[string]*node{}}
		deep.kids["d"] = next
		deep = next
	}
	deep.kids["f"] = &node{mode: 0o555, size: 1000, offset: 512}
	root := mount(t, encode(t, n, sizes, nil), paths)
	for name := range n.kids {
		if name != "d" && !strings.HasSuffix(name, "7") {
			delete(n.kids, name) // compare a tenth
		}
	}
	for name, k := range n.kids {
		sub := open(t, root, name, unix.O_RDONLY)
		if name == "d" {
			for range 999 {
				k = k.kids["d"]
				next := open(t, int(sub.Fd()), "d", unix.O_RDONLY)
				sub.Close()
				sub = next
			}
		}
		compare(t, sub, k, data)
	}
}

// TestKernelSeesZerosBehindFiles checks that a mapped file shows nothing of the next file in a zero-padded segment.
func TestKernelSeesZerosBehindFiles(t *testing.T) {
	p := filepath.Join(realDir(t), "segment")
	segment := make([]byte, 4096)
	copy(segment, "first")
	copy(segment[512:], "second")
	must.Succeed(t, os.WriteFile(p, segment, 0o600))
	n := &node{mode: 0o555, kids: map[string]*node{"f": {mode: 0o444, size: 5}}}
	root := mount(t, encode(t, n, []int64{4096}, nil), []string{p})
	f := open(t, root, "f", unix.O_RDONLY)
	defer f.Close()
	m := must.Get(unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED))(t)
	defer unix.Munmap(m)
	expect.Equal(t, string(bytes.TrimRight(m, "\x00")), "first")
	if err := unix.Fchmod(int(f.Fd()), 0o777); !errors.Is(err, fs.ErrPermission) && err != unix.EROFS {
		t.Errorf("changing the mode: %v", err)
	}
}
