// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A mounter mounts images without a path.
type mounter struct {
	mu    sync.Mutex
	roots map[string]int // by name: descriptors of mounted images
	made  int
	err   error  // returned by every Mount
	first func() // called once, before the next Mount
}

func newMounter(t testing.TB) *mounter {
	t.Helper()
	m := &mounter{roots: map[string]int{}}
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err == nil {
		unix.Close(fsfd)
	}
	if err == nil && os.Getuid() != 0 {
		err = unix.EPERM
	}
	if err != nil {
		if slices.Contains(strings.Split(os.Getenv("CLOISTER_REQUIRE"), ","), "namespaces") && os.Getuid() == 0 {
			t.Fatalf("CLOISTER_REQUIRE requires mounts of EROFS images: %v", err)
		}
		t.Skipf("EROFS images cannot be mounted: %v", err)
	}
	t.Cleanup(func() {
		expect.Equal(t, m.mounted(), 0, "images are still mounted")
	})
	return m
}

// imageDir returns a directory for images on a disk file system: they cannot lie on a memory-backed one.
func imageDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(dir, &st))
	if st.Type != unix.TMPFS_MAGIC {
		return dir
	}
	dir, err := os.MkdirTemp("/var/tmp", "cloister-images-")
	if err != nil {
		sandboxtest.Unavailable(t, "disk", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (m *mounter) Mount(_ context.Context, image *os.File, devices []*os.File) (tree.Mount, error) {
	if f := m.first; f != nil {
		m.first = nil
		f()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return nil, m.err
	}
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fsfd)
	err = unix.FsconfigSetString(fsfd, "source", fmt.Sprintf("/proc/self/fd/%d", image.Fd()))
	for _, d := range devices {
		err = errors.Join(err, unix.FsconfigSetString(fsfd, "device", fmt.Sprintf("/proc/self/fd/%d", d.Fd())))
	}
	if err = errors.Join(err, unix.FsconfigCreate(fsfd)); err != nil {
		return nil, err
	}
	root, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		return nil, err
	}
	m.made++
	mt := &mount{m, fmt.Sprint("image ", m.made)}
	m.roots[mt.name] = root
	return mt, nil
}

// mounted returns the number of mounted images.
func (m *mounter) mounted() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.roots)
}

// root opens the root of an image.
func (m *mounter) root(t testing.TB, name string) *os.Root {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	fd, ok := m.roots[name]
	must.Be(t, ok, "image %q is not mounted", name)
	return must.Get(os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", fd)))(t)
}

type mount struct {
	m    *mounter
	name string
}

func (m *mount) Name() string { return m.name }

func (m *mount) Close() error {
	m.m.mu.Lock()
	defer m.m.mu.Unlock()
	fd, ok := m.m.roots[m.name]
	if !ok {
		return errors.New("closed twice")
	}
	delete(m.m.roots, m.name)
	return unix.Close(fd)
}

// A segmented store has small blobs in two segment files, and is a cas.Filer for the others.
type segmented struct {
	*filer
	mu      sync.Mutex
	files   []*os.File
	at      map[cas.Digest]cas.Extent
	end     int64
	ages    int  // number of calls of damage
	held    int  // locations not released
	removed bool // both files are
	placed  int  // blobs, over all calls
	renewed int  // digests passed to Missing
	packs   bool // put large blobs into segments, too
}

func newSegmented(t testing.TB) *segmented {
	t.Helper()
	s := &segmented{filer: newFiler(t), at: map[cas.Digest]cas.Extent{}}
	for range 2 {
		f := must.Get(os.Create(filepath.Join(t.TempDir(), "segment")))(t)
		t.Cleanup(func() { f.Close() })
		s.files = append(s.files, f)
	}
	t.Cleanup(func() {
		expect.That(t, s.held == 0 && s.lent.Load() == 0,
			"%d locations and %d files were not released", s.held, s.lent.Load())
	})
	return s
}

func (s *segmented) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	missing, err := s.Memory.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &location{s: s, age: s.ages}
	for _, d := range ds {
		x, ok := s.at[d]
		switch {
		case slices.Contains(missing, d):
			x = cas.Extent{File: cas.Absent}
		case d.IsEmpty() || d.Size() >= tree.LargeFile && !s.packs:
			x = cas.Extent{File: cas.Unpacked}
		case !ok:
			b, err := cas.ReadAll(ctx, s, d, d.Size())
			if err != nil {
				return nil, err
			}
			x = cas.Extent{File: int32(len(s.at) % 2), Offset: s.end}
			padded := append(bytes.Clone(b), make([]byte, -len(b)&(cas.ExtentAlign-1))...)
			if _, err := s.files[x.File].WriteAt(padded, x.Offset); err != nil {
				return nil, err
			}
			s.end += int64(len(padded))
			s.at[d] = x
		}
		p.extents = append(p.extents, x)
	}
	s.placed += len(ds)
	s.held++
	return p, nil
}

func (s *segmented) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	s.mu.Lock()
	s.renewed += len(ds)
	s.mu.Unlock()
	return s.Memory.Missing(ctx, ds)
}

// counts returns the numbers of blobs placed and renewed since the last call.
func (s *segmented) counts() (placed, renewed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	placed, renewed = s.placed, s.renewed
	s.placed, s.renewed = 0, 0
	return placed, renewed
}

// damage overwrites all segments, as a foreign process might.
func (s *segmented) damage(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.files {
		must.Get(f.WriteAt(bytes.Repeat([]byte{'!'}, int(must.Get(f.Stat())(t).Size())), 0))(t)
	}
	s.ages++
	clear(s.at)
}

type location struct {
	s       *segmented
	age     int
	extents []cas.Extent
	gone    bool
}

func (p *location) Extents() []cas.Extent { return p.extents }
func (p *location) Files() []*os.File     { return p.s.files }

func (p *location) Removed() bool {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.s.removed
}

func (p *location) Valid() bool {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	return p.age == p.s.ages && !p.gone
}

func (p *location) Release() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if !p.gone {
		p.gone = true
		p.s.held--
	}
}

// A rig stages trees as images.
type rig struct {
	t     testing.TB
	store *segmented
	*mounter
	*tree.Stager
}

const plenty = 1 << 30

func newRig(t testing.TB, budget int64) *rig {
	t.Helper()
	m := newMounter(t)
	r := &rig{
		t: t, store: newSegmented(t), mounter: m,
		Stager: tree.NewStager(tree.StagerConfig{Mounter: m, Dir: imageDir(t), Budget: budget}),
	}
	t.Cleanup(func() { must.Succeed(t, r.Stager.Close()) })
	return r
}

// stage stages n as an image.
func (r *rig) stage(instance string, n *node, outputs ...string) (*os.Root, *tree.Staged) {
	r.t.Helper()
	l := plan(r.t, load(r.t, r.store, n), "", outputs, nil)
	ws, s := r.stageLayout(r.t, instance, l)
	must.Be(r.t, s.Form == tree.FormImage && s.CopyReason == "", "got form %q (%s), want image", s.Form, s.CopyReason)
	return ws, s
}

func (r *rig) in(instance string) *cas.Instance { return &cas.Instance{Name: instance, Store: r.store} }

// into always returns ws as the workspace.
func into(ws *os.Root) func(bytes, files int64) (*os.Root, error) {
	return func(_, _ int64) (*os.Root, error) { return ws, nil }
}

// stageSized stages l in a new workspace, and checks that its size is the requested one.
func stageSized(t testing.TB, s *tree.Stager, l *tree.Layout, in *cas.Instance) (*os.Root, *tree.Staged) {
	t.Helper()
	ws := newRoot(t)
	var bytes, files int64
	staged := must.Get(s.Stage(t.Context(), l, in, func(b, f int64) (*os.Root, error) {
		bytes, files = b, f
		return ws, nil
	}))(t)
	if b, f := taken(t, ws, staged); b != bytes || f != files {
		t.Errorf("requested a workspace of %d bytes in %d files, used %d in %d", bytes, files, b, f)
	}
	return ws, staged
}

// stageLayout stages l, and allows the reuse of its mounts.
func (r *rig) stageLayout(t testing.TB, instance string, l *tree.Layout) (*os.Root, *tree.Staged) {
	t.Helper()
	ws, s := stageSized(t, r.Stager, l, r.in(instance))
	s.AllowReuse() // as after a clean run
	return ws, s
}

// TestRunsShareNoMount checks that concurrent runs have separate mounts of cached images, so that file locks do not
// cross runs, and that the mounts of an unclean run are not reused.
func TestRunsShareNoMount(t *testing.T) {
	r := newRig(t, plenty)
	l := plan(t, load(t, r.store, leaves(2, 10, nil)), "", nil, nil)
	for range 2 {
		_, s := r.stageLayout(t, "", l)
		s.Release()
	}
	used := func(s *tree.Staged) map[string]bool {
		names := map[string]bool{}
		for _, name := range images(s) {
			names[name] = true
		}
		return names
	}
	made := r.made
	_, a := r.stageLayout(t, "", l)
	expect.Equal(t, r.made, made+2, "mounted images")
	_, b := r.stageLayout(t, "", l)
	for name := range used(b) {
		expect.That(t, !used(a)[name], "two concurrent runs share the mount %q", name)
	}
	unclean := must.Get(r.Stager.Stage(t.Context(), l, r.in(""), into(newRoot(t))))(t)
	spoiled := used(unclean)
	for _, s := range []*tree.Staged{a, b, unclean} {
		s.Release()
	}
	var next []*tree.Staged
	for range 3 {
		_, s := r.stageLayout(t, "", l)
		next = append(next, s)
		for name := range used(s) {
			expect.That(t, !spoiled[name], "the mount %q of an unclean run is reused", name)
		}
	}
	for _, s := range next {
		s.Release()
	}
	expect.Equal(t, r.mounted(), 3, "mounts are cached (the number of concurrent runs)")
}

// see returns the exec root that a run sees.
func (r *rig) see(ws *os.Root, s *tree.Staged) *node {
	r.t.Helper()
	mounted := r.overlay(r.t, ws, s)
	defer mounted.Close()
	root := read(r.t, mounted, ".")
	bindAll(r.t, root, ws, s)
	return root
}

// overlay returns the exec root of s without its binds.
func (m *mounter) overlay(t testing.TB, ws *os.Root, s *tree.Staged) *os.Root {
	t.Helper()
	if len(s.Lower) == 0 {
		return must.Get(ws.OpenRoot("out"))(t)
	}
	fsfd := must.Get(unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC))(t)
	defer unix.Close(fsfd)
	must.Succeed(t, ws.MkdirAll("work", 0o700))
	layer := func(key string, dir *os.Root) {
		defer dir.Close()
		f := must.Get(dir.Open("."))(t)
		defer f.Close()
		must.Succeed(t, unix.FsconfigSetFd(fsfd, key, int(f.Fd())))
	}
	sub := func(name string) *os.Root {
		return must.Get(ws.OpenRoot(name))(t)
	}
	for _, l := range s.Lower {
		if l.Image == "" {
			layer("lowerdir+", sub(l.Source))
		} else {
			layer("lowerdir+", m.root(t, l.Image))
		}
	}
	layer("upperdir", sub("out"))
	layer("workdir", sub("work"))
	must.Succeed(t, unix.FsconfigSetString(fsfd, "redirect_dir", "follow"))
	must.Succeed(t, unix.FsconfigCreate(fsfd))
	fd := must.Get(unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0))(t)
	defer unix.Close(fd)
	return must.Get(os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", fd)))(t)
}

// leaves returns a tree of n directories with files files each. changed modifies the directories with these numbers.
func leaves(n, files int, changed map[int]string) *node {
	root := dirNode()
	for i := range n {
		for j := range files {
			root.set(fmt.Sprintf("a/%d/%d/f%d", i%10, i, j), &node{content: fmt.Sprint(i, j, changed[i])})
		}
	}
	return root
}

// images returns the names of the images that s uses, the one of its run first.
func images(s *tree.Staged) (names []string) {
	for _, l := range s.Lower {
		names = append(names, l.Image)
	}
	return names
}

// Rules 98 and 100: images show the same as copies, before, while and after subtrees are cached.
func TestImageShowsInputRootAndParentsOfOutputs(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty)
	large := strings.Repeat("L", tree.LargeFile)
	all := append(shapes(t), shape{
		name: "large", outputs: []string{"old", "out/x"},
		input: parse(t, "d/large = "+large, "d/e/tool *= "+large, "top = "+large, "old = "+large+"old", "out/in = 1",
			"empty = ", "d/empty *= ", "x *= 1", "l -> x", "d/l -> ../x", "none/", "d/none/"),
	})
	many := leaves(3, 12, nil)
	many.set("a/0/0/large", &node{content: large})
	many.set("a/large", &node{content: large, exec: true})
	many.set("a/empty", &node{})
	many.set("out/a", leaves(1, 9, nil).at("a")) // an input below an output
	all = append(all, shape{name: "cached", input: many, outputs: []string{"out", "b/c"}})
	for _, s := range all {
		if strings.HasPrefix(s.name, "error_") {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			l := plan(t, load(t, r.store, s.input), s.workdir, s.outputs, nil)
			for _, o := range s.outputs {
				if parent := path.Dir(o); parent != "." {
					s.input.set(parent, dirNode())
				}
			}
			for range 3 {
				ws, staged := r.stageLayout(t, "", l)
				must.Be(t, staged.Form == tree.FormImage,
					"got form %q (%s), want image", staged.Form, staged.CopyReason)
				same(t, "exec root", r.see(ws, staged), s.input)
				expect.That(t, expect.Err(ws.Lstat("in")) != nil, "in/ exists, though nothing is copied")
				staged.Release()
				staged.Release()
			}
		})
	}
}

// Rules 99 to 101; inputs are read-only.
func TestImageModesAndTimes(t *testing.T) {
	r := newRig(t, plenty)
	n := parse(t, "src/a = 1", "src/x *= 2", "src/sub/f = 3", "src/sub/x *= 3", "src/sub/e = ", "src/sub/s/f = 4",
		"old/f = 4")
	for i := range 10 {
		n.set(fmt.Sprintf("cached/%d", i), &node{content: "1", exec: i%2 == 0})
	}
	for i := range 3 {
		ws, s := r.stage("", n, "src/out", "old/f")
		same := func(where, got, want string) {
			expect.Equal(t, got, want, "stage %d, %s", i, where)
		}
		same("out", listing(t, ws, "out"), `dtrwxrwxrwx 
dtrwxrwxrwx /old
-rw-rw-rw- /old/f
dtrwxrwxrwx /src
`)
		root := r.overlay(t, ws, s)
		same("exec root", listing(t, root, "."), `dtrwxrwxrwx 
dtrwxrwxrwx cached
-rwxr-xr-x cached/0
-rw-r--r-- cached/1
-rwxr-xr-x cached/2
-rw-r--r-- cached/3
-rwxr-xr-x cached/4
-rw-r--r-- cached/5
-rwxr-xr-x cached/6
-rw-r--r-- cached/7
-rwxr-xr-x cached/8
-rw-r--r-- cached/9
dtrwxrwxrwx old
-rw-rw-rw- old/f
dtrwxrwxrwx src
-rw-r--r-- src/a
dtrwxrwxrwx src/sub
-rw-r--r-- src/sub/e
-rw-r--r-- src/sub/f
dtrwxrwxrwx src/sub/s
-rw-r--r-- src/sub/s/f
-rwxr-xr-x src/sub/x
-rwxr-xr-x src/x
`)
		must.Succeed(t, root.Close())
		s.Release()
	}
}

// TestOnlyChangedSubtreesAreWritten uses 2,000 files in 100 directories, and changes 10 directories each time.
func TestOnlyChangedSubtreesAreWritten(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty)
	for i, want := range []int{2000, 2000, 200, 200, 200} {
		changed := map[int]string{}
		for j := range 10 {
			changed[j*7] = fmt.Sprint("change ", i)
		}
		n := leaves(100, 20, changed)
		r.store.counts()
		ws, s := r.stage("", n)
		if placed, _ := r.store.counts(); placed != want {
			t.Errorf("stage %d wrote %d files into images, want %d", i, placed, want)
		}
		same(t, "exec root", r.see(ws, s), n)
		s.Release()
	}
	expect.Equal(t, r.mounted(), 1, "images are cached (with all recurring subtrees)")
}

// TestPartsOfCachedSubtreesAreFound checks that directories in a cached subtree are bound from there.
func TestPartsOfCachedSubtreesAreFound(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty)
	large := strings.Repeat("L", tree.LargeFile)
	with := func(changed map[int]string) *node {
		n := leaves(20, 10, changed)
		n.set("a/3/13/sub/large", &node{content: large})
		n.set("a/4/14/large", &node{content: large, exec: true})
		return n
	}
	for i, want := range []int{202, 202, 0, 10, 10} { // the third is bound whole
		changed := map[int]string{}
		if i > 2 {
			changed[7] = fmt.Sprint(i)
		}
		n := with(changed)
		r.store.counts()
		ws, s := r.stage("", n)
		if placed, _ := r.store.counts(); placed != want {
			t.Errorf("stage %d wrote %d files into images, want %d", i, placed, want)
		}
		same(t, "exec root", r.see(ws, s), n)
		s.Release()
	}
}

func TestInstancesShareNoMounts(t *testing.T) {
	r := newRig(t, plenty)
	n := leaves(3, 10, nil)
	seen := map[string]string{}
	for range 3 {
		for _, instance := range []string{"a", "b"} {
			_, s := r.stage(instance, n)
			for _, name := range images(s) {
				if other, ok := seen[name]; ok && other != instance {
					t.Errorf("image %s is bound for instances %q and %q", name, other, instance)
				}
				seen[name] = instance
			}
			s.Release()
		}
	}
	expect.Equal(t, r.mounted(), 2, "images are cached (one for each instance)")
}

// TestMountCacheKeepsItsBudget checks that the least recently used image is evicted, but not while a run uses it.
func TestMountCacheKeepsItsBudget(t *testing.T) {
	r := newRig(t, 100_000)
	n := func(name string) *node {
		root := dirNode()
		for i := range 10 {
			root.set(fmt.Sprintf("d/%d", i), &node{content: name + strings.Repeat("c", 4000)})
		}
		return root
	}
	stage := func(name string) *tree.Staged {
		_, s := r.stage("", n(name))
		return s
	}
	for range 2 { // caches two images of a little more than 40,000 bytes
		stage("a").Release()
		stage("b").Release()
	}
	if got := r.mounted(); got != 2 {
		t.Fatalf("%d images are cached, want 2", got)
	}
	inUse := stage("b")
	stage("a").Release() // so that b was used before a
	stage("c").Release()
	stage("c").Release()
	expect.Equal(t, r.mounted(), 5, "images are mounted (a, c, and b and the two of the run that uses it)")
	inUse.Release()
	expect.Equal(t, r.mounted(), 2, "images are cached (a and c)")
	r.store.counts()
	stage("a").Release()
	if placed, _ := r.store.counts(); placed != 0 {
		t.Errorf("%d files of a were placed again, want 0, since it is cached", placed)
	}
	stage("b").Release()
	if placed, _ := r.store.counts(); placed != 10 {
		t.Errorf("%d files of b were placed, want 10, since it was evicted", placed)
	}
	stage("b").Release()
	if placed, _ := r.store.counts(); placed != 0 {
		t.Errorf("%d files of b were placed, want 0, since it is cached again", placed)
	}
}

// TestDamagedImagesAreNotReused checks that runs and the cache notice changed segments.
func TestDamagedImagesAreNotReused(t *testing.T) {
	r := newRig(t, plenty)
	n := leaves(3, 10, map[int]string{1: "x"})
	n.set("f", &node{content: "not cached"})
	for range 3 {
		_, s := r.stage("", n)
		expect.That(t, s.Valid(), "Valid: got false before the damage")
		s.Release()
	}
	_, s := r.stage("", n)
	_, both := r.stage("", leaves(3, 10, map[int]string{1: "x"})) // only cached images
	r.store.damage(t)
	expect.That(t, !s.Valid() && !both.Valid(), "Valid: got true after the damage")
	s.Release()
	both.Release()
	r.store.counts()
	for i := range 2 {
		ws, s := r.stage("", n)
		expect.That(t, s.Valid(), "Valid: got false for a run after the damage")
		same(t, "exec root", r.see(ws, s), n)
		if placed, _ := r.store.counts(); i == 0 && placed != 31 || i == 1 && placed != 1 {
			t.Errorf("stage %d after the damage placed %d files, want 31, then 1", i, placed)
		}
		s.Release()
	}
}

func TestDamageOfUncachedImagesIsReported(t *testing.T) {
	r := newRig(t, 0)
	_, s := r.stage("", parse(t, "d/f = 1"))
	expect.That(t, s.Valid(), "Valid: got false before the damage")
	r.store.damage(t)
	expect.That(t, !s.Valid(), "Valid: got true after the damage")
	s.Release()
}

// TestSubtreesAreCachedOnce checks that a Stage does not cache what another one is caching.
func TestSubtreesAreCachedOnce(t *testing.T) {
	r := newRig(t, plenty)
	n := leaves(3, 10, nil)
	see := func() {
		ws, s := r.stage("", n)
		same(t, "exec root", r.see(ws, s), n)
		s.Release()
	}
	see()
	r.first = see
	see()
	see()
	if got := r.mounted(); got != 1 || r.made != 7 {
		t.Errorf("%d of %d images are cached, want 1 of 7, as each of 4 runs has its own, two of them twice", got, r.made)
	}
}

// TestLargeFilesAreBoundAsFiles: also if the store has packed them, so that the kernel caches their pages once.
func TestLargeFilesAreBoundAsFiles(t *testing.T) {
	r := newRig(t, plenty)
	r.store.packs = true
	n := parse(t, "d/large *= "+strings.Repeat("L", tree.LargeFile), "d/small = s")
	ws, s := r.stage("", n)
	same(t, "exec root", r.see(ws, s), n)
	expect.Equal(t, r.store.lent.Load(), 1, "files of the store are in use")
	s.Release()
}

// TestLeasesOfCachedSubtreesAreRenewed: but not at every use.
func TestLeasesOfCachedSubtreesAreRenewed(t *testing.T) {
	r := newRig(t, plenty)
	l := plan(t, load(t, r.store, leaves(3, 10, nil)), "", nil, nil)
	synctest.Test(t, func(t *testing.T) {
		renewed := func() int {
			r.store.counts()
			_, s := r.stageLayout(t, "", l)
			s.Release()
			_, n := r.store.counts()
			return n
		}
		renewed()
		renewed()
		for i, want := range []int{0, 0, 30, 0} {
			if i == 2 {
				time.Sleep(5 * time.Minute)
			}
			expect.Equal(t, renewed(), want, "use %d renewed N files", i)
		}
		time.Sleep(5 * time.Minute)
		lost := cas.SHA256.Sum([]byte(fmt.Sprint(1, 1, "")))
		r.store.Delete(lost)
		ws := newRoot(t)
		_, err := r.Stager.Stage(t.Context(), l, r.in(""), into(ws))
		wantMissingBlobs(t, err, lost)
		must.Succeed(t, r.Close()) // stops a timer of this bubble
	})
}

func TestImageReportsVanishedBlobs(t *testing.T) {
	large := strings.Repeat("L", tree.LargeFile)
	for _, lost := range []string{"small", large} {
		r := newRig(t, plenty)
		l := must.Get(load(t, r.store, parse(t, "d/a/kept = "+large+"kept", "d/x = "+lost, "d/y = "+lost)).Plan("", nil,
			nil))(t)
		d := cas.SHA256.Sum([]byte(lost))
		r.store.Delete(d)
		_, err := r.Stager.Stage(t.Context(), l, &cas.Instance{Store: r.store}, nil)
		wantMissingBlobs(t, err, d)
	}
}

// A fullSegmented store has no room for files.
type fullSegmented struct{ *segmented }

func (fullSegmented) File(context.Context, cas.Digest, bool) (string, func(), error) {
	return "", nil, cas.ErrFull
}

// A truncated store has lost the ends of its segments.
type truncated struct{ *segmented }

func (s truncated) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	p, err := s.segmented.Locate(ctx, ds)
	if err == nil {
		for _, f := range s.files {
			err = errors.Join(err, f.Truncate(0))
		}
	}
	return p, err
}

// A spread store has more segments than one mount can have.
type spread struct{ *segmented }

func (s spread) Locate(ctx context.Context, ds []cas.Digest) (cas.Location, error) {
	p, err := s.segmented.Locate(ctx, ds)
	return spreadPlacement{p}, err
}

type spreadPlacement struct{ cas.Location }

func (p spreadPlacement) Files() []*os.File { return slices.Repeat(p.Location.Files(), 126) }

// TestFallsBackToCopies checks that without images, Stage copies, reports the reason, and requests the right size.
func TestFallsBackToCopies(t *testing.T) {
	large := strings.Repeat("L", tree.LargeFile)
	n := parse(t, "d/e/large = "+large, "d/s = s", "top = "+large, "l -> top")
	for _, c := range []struct {
		name, why string
		store     func(*segmented) cas.Store
		change    func(*tree.StagerConfig)
	}{
		{"no mounter", "mounts no images", nil, func(c *tree.StagerConfig) { c.Mounter = nil }},
		{"no segments", "no segments", func(s *segmented) cas.Store { return s.filer }, nil},
		{"hidden segments", "hides the", func(s *segmented) cas.Store { return struct{ cas.Store }{s} }, nil},
		{
			"mount fails", "not today", nil,
			func(c *tree.StagerConfig) { c.Mounter = &mounter{err: errors.New("not today")} },
		},
		{"no directory", "no such file", nil, func(c *tree.StagerConfig) { c.Dir += "/absent" }},
		{"no room for files", "store is full", func(s *segmented) cas.Store { return fullSegmented{s} }, nil},
		{"short segments", "shorter", func(s *segmented) cas.Store { return truncated{s} }, nil},
		{"many segments", "252 of at most 250", func(s *segmented) cas.Store { return spread{s} }, nil},
		{"few", "so few", nil, func(c *tree.StagerConfig) { c.CopyUpTo = 6 }}, // d, e, large, s, top and l
		{"no files", "neither", func(s *segmented) cas.Store {
			return struct {
				cas.Store
				cas.Locator
			}{s, s}
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMounter(t)
			segments := newSegmented(t)
			var store cas.Store = segments
			if c.store != nil {
				store = c.store(segments)
			}
			config := tree.StagerConfig{Mounter: m, Dir: imageDir(t), Budget: plenty}
			if c.change != nil {
				c.change(&config)
			}
			s := tree.NewStager(config)
			l := plan(t, load(t, store, n), "", []string{"out"}, nil)
			for range 2 {
				ws, staged := stageSized(t, s, l, &cas.Instance{Store: store})
				expect.That(t, staged.Form == tree.FormCopy && strings.Contains(staged.CopyReason, c.why),
					"got form %q (%s), want copy (%s)", staged.Form, staged.CopyReason, c.why)
				same(t, "exec root", view(t, ws, staged), n)
				staged.Release()
			}
			must.Succeed(t, s.Close())
		})
	}
}

// TestCopyUpTo checks that few inputs are copied, unless cached images are bound, too.
func TestCopyUpTo(t *testing.T) {
	m := newMounter(t)
	store := newSegmented(t)
	s := tree.NewStager(tree.StagerConfig{Mounter: m, Dir: imageDir(t), Budget: plenty, CopyUpTo: 11})
	defer func() { must.Succeed(t, s.Close()) }()
	ten := leaves(1, 10, nil).at("a/0") // and 0, their parent
	for i, n := range []*node{ten, ten, ten, parse(t, "1 = 1", "2 = 2")} {
		root := dirNode()
		root.set("d", n)
		if i < 3 {
			root.set(fmt.Sprint("f", i), &node{content: fmt.Sprint(i)})
		}
		l := plan(t, load(t, store, root), "", nil, nil)
		ws := newRoot(t)
		staged := must.Get(s.Stage(t.Context(), l, &cas.Instance{Store: store}, into(ws)))(t)
		expect.Equal(t, staged.Form, []tree.Form{tree.FormImage, tree.FormImage, tree.FormImage, tree.FormCopy}[i],
			"form of stage %d (%s)", i, staged.CopyReason)
		staged.Release()
	}
}

// TestProbe checks that Probe leaves no mount, and that Stage copies after a failed Probe.
func TestProbe(t *testing.T) {
	r := newRig(t, 0)
	must.Succeed(t, r.Probe(t.Context()))
	expect.That(t, r.made == 1 && r.mounted() == 0,
		"%d images were mounted and %d still are, want 1 and 0", r.made, r.mounted())
	l := plan(t, load(t, r.store, leaves(2, 10, nil)), "", nil, nil)
	_, s := r.stageLayout(t, "", l)
	s.Release()
	expect.Equal(t, s.Form, tree.FormImage, "after a successful probe: form (%s)", s.CopyReason)

	broken := newMounter(t)
	for _, c := range []struct {
		name   string
		config tree.StagerConfig
		why    string
	}{
		{"no mounter", tree.StagerConfig{Dir: imageDir(t)}, "mounts no images"},
		{"a mount that fails", tree.StagerConfig{Mounter: broken, Dir: imageDir(t)}, "no such mount"},
		{"no directory", tree.StagerConfig{Mounter: r.mounter, Dir: filepath.Join(imageDir(t), "absent")}, "absent"},
	} {
		s := tree.NewStager(c.config)
		defer func() { must.Succeed(t, s.Close()) }()
		broken.err = errors.New("no such mount")
		why := s.Probe(t.Context())
		if why == nil || !strings.Contains(why.Error(), c.why) {
			t.Errorf("%s: got error %v, want one with %q", c.name, why, c.why)
			continue
		}
		broken.err = nil
		staged := must.Get(s.Stage(t.Context(), l, r.in(""), into(newRoot(t))))(t)
		staged.Release()
		expect.That(t, staged.Form == tree.FormCopy && staged.CopyReason == why.Error(),
			"%s: got form %q (%s), want copy (%v)", c.name, staged.Form, staged.CopyReason, why)
	}
}

func TestFailedStageReleasesImages(t *testing.T) {
	r := newRig(t, plenty)
	l := plan(t, load(t, r.store, leaves(2, 10, nil)), "", nil, nil)
	reason := errors.New("reason")
	for range 3 {
		_, err := r.Stager.Stage(t.Context(), l, r.in(""), func(_, _ int64) (*os.Root, error) { return nil, reason })
		wantError(t, err, reason, "")
		used := newRoot(t)
		must.Succeed(t, used.Mkdir("out", 0o777))
		_, err = r.Stager.Stage(t.Context(), l, r.in(""), into(used))
		wantError(t, err, os.ErrExist, "out")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	_, err := r.Stager.Stage(ctx, l, &cas.Instance{Store: r.store}, nil)
	wantError(t, err, reason, "")
	expect.Equal(t, r.mounted(), 1, "images are mounted (the cached one)")
}

// TestBindsFromCachedImagesAreLimited: the run still sees the subtrees beyond the limit.
func TestBindsFromCachedImagesAreLimited(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty)
	for i := range 4 {
		n := dirNode() // its subdirectories recur, but their parent changes
		for j := range 200 {
			for k := range 8 {
				n.set(fmt.Sprintf("a/%d/%d", j, k), &node{content: fmt.Sprint(j, k)})
			}
		}
		n.set("a/x", &node{content: fmt.Sprint(i)})
		ws, s := r.stage("", n)
		expect.Equal(t, len(images(s)), []int{1, 3, 3, 3}[i], "images of stage %d", i)
		same(t, "exec root", r.see(ws, s), n)
		s.Release()
	}
}

// TestCachedImagesExpire: used or not, but a run keeps its mount.
func TestCachedImagesExpire(t *testing.T) {
	r := newRig(t, plenty)
	var layouts []*tree.Layout
	for i := range 3 {
		l := plan(t, load(t, r.store, leaves(1, 10, map[int]string{0: fmt.Sprint(i)})), "", nil, nil)
		layouts = append(layouts, l)
	}
	synctest.Test(t, func(t *testing.T) {
		stage := func(i int) *tree.Staged {
			_, s := r.stageLayout(t, "", layouts[i])
			return s
		}
		for i := range layouts {
			stage(i).Release()
			stage(i).Release()
		}
		time.Sleep(15*time.Minute - time.Second)
		inUse := stage(0)
		expect.Equal(t, r.mounted(), 5, "images are mounted (the cached ones and the two of the run)")
		time.Sleep(time.Second)
		synctest.Wait() // for the timer of the images
		again := stage(0)
		expect.Equal(t, r.mounted(), 6, "images are mounted (the one in use, its replacement and two of each run)")
		inUse.Release()
		again.Release()
		expect.Equal(t, r.mounted(), 1, "images are mounted (the replacement)")
		must.Succeed(t, r.Close()) // stops a timer of this bubble
	})
}

// TestIdleImagesExpire checks that an image is unmounted although no action follows, each at its own time.
func TestIdleImagesExpire(t *testing.T) {
	r := newRig(t, plenty)
	var layouts []*tree.Layout
	for i := range 3 {
		l := plan(t, load(t, r.store, leaves(1, 10, map[int]string{0: fmt.Sprint(i)})), "", nil, nil)
		layouts = append(layouts, l)
	}
	synctest.Test(t, func(t *testing.T) {
		wantMounted := func(want int) {
			t.Helper()
			synctest.Wait()
			expect.Equal(t, r.mounted(), want, "images are mounted")
		}
		for _, l := range layouts {
			for range 2 {
				_, s := r.stageLayout(t, "", l)
				s.Release()
			}
			time.Sleep(time.Minute)
		}
		wantMounted(3)
		time.Sleep(12*time.Minute - time.Second)
		for want := range 3 {
			wantMounted(3 - want)
			time.Sleep(time.Minute)
		}
		wantMounted(0)
	})
}

// TestReleaseRemoved checks that images of removed segments are given up, but not while a run uses them.
func TestReleaseRemoved(t *testing.T) {
	r := newRig(t, plenty)
	stage := func(i int) *tree.Staged {
		_, s := r.stage("", leaves(1, 10, map[int]string{0: fmt.Sprint(i)}))
		return s
	}
	for i := range 3 {
		stage(i).Release()
		stage(i).Release()
	}
	expect.That(t, !r.ReleaseRemoved(), "released an image whose files the store still has")
	inUse := stage(0)
	r.store.removed = true
	for i, want := range []int{4, 3, 3} { // the one in use is the last one, and its run has two of its own
		expect.That(t, r.ReleaseRemoved() && r.mounted() == want,
			"call %d: %d images are mounted, want %d", i, r.mounted(), want)
	}
	expect.That(t, !r.ReleaseRemoved(), "released an image again")
	inUse.Release()
	expect.Equal(t, r.mounted(), 0, "images are mounted after the end of the run")
}

// TestMountedTreesStayWithinTheBudgetOfTheStore churns a small store while many trees stay mounted.
func TestMountedTreesStayWithinTheBudgetOfTheStore(t *testing.T) {
	m := newMounter(t)
	c := must.Get(disk.Open(disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20, Lease: -1}))(t)
	defer c.Close()
	s := tree.NewStager(tree.StagerConfig{Mounter: m, Dir: imageDir(t), Budget: plenty})
	defer s.Close()
	c.SetHolder(s.ReleaseRemoved)
	r := &rig{t: t, mounter: m, Stager: s}
	in := must.Get(c.Instance(""))(t)
	cached := 0
	for i := range 130 {
		n := leaves(1, 10, map[int]string{0: fmt.Sprint(i)})
		l := plan(t, load(t, in.Store, n), "", nil, nil)
		for range 2 {
			ws := newRoot(t)
			staged := must.Get(s.Stage(t.Context(), l, in, into(ws)))(t)
			same(t, "exec root", r.see(ws, staged), n)
			staged.AllowReuse()
			staged.Release()
		}
		for j := range 10 {
			_, err := cas.PutBytes(t.Context(), in.Store, cas.SHA256, bytes.Repeat(fmt.Appendf(nil, "%7d %2d ", i, j), 1000))
			must.Succeed(t, err)
		}
		stats := c.Stats()
		if stats.HeldBytes > stats.MaxBytes/4 || stats.Bytes > stats.MaxBytes {
			t.Fatalf("tree %d: the store has %d bytes, of which mounts keep %d, want at most %d and a quarter",
				i, stats.Bytes, stats.HeldBytes, stats.MaxBytes)
		}
		cached = max(cached, m.mounted())
	}
	expect.That(t, cached >= 20, "at most %d images were cached, want some 25 within a quarter of the budget", cached)
}

// TestConcurrentStages checks that each run sees its tree, whatever others mount and unmount.
func TestConcurrentStages(t *testing.T) {
	t.Parallel()
	r := newRig(t, 60_000) // too small for all
	var layouts []*tree.Layout
	var trees []*node
	for i := range 6 {
		n := leaves(8, 10, map[int]string{i: strings.Repeat("x", 500)})
		l := plan(t, load(t, r.store, n), "", nil, nil)
		trees, layouts = append(trees, n), append(layouts, l)
	}
	var group sync.WaitGroup
	for g := range 4 {
		group.Go(func() {
			for i := range 12 {
				at := (g + i) % len(layouts)
				ws, s := r.stageLayout(t, "", layouts[at])
				expect.Equal(t, s.Form, tree.FormImage, "form (%s)", s.CopyReason)
				same(t, "exec root "+strconv.Itoa(at), r.see(ws, s), trees[at])
				s.Release()
			}
		})
	}
	group.Wait()
}

// TestImageOverDisk uses the real store with segments.
func TestImageOverDisk(t *testing.T) {
	m := newMounter(t)
	dir := t.TempDir()
	c := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 30}))(t)
	defer c.Close()
	s := tree.NewStager(tree.StagerConfig{Mounter: m, Dir: imageDir(t), Budget: plenty})
	defer s.Close()
	r := &rig{t: t, mounter: m, Stager: s}
	n := leaves(3, 10, nil)
	n.set("a/large", &node{content: strings.Repeat("L", tree.LargeFile), exec: true})
	n.set("a/empty", &node{})
	n.set("f", &node{content: strings.Repeat("f", tree.LargeFile-1)})
	in := must.Get(c.Instance(""))(t)
	// Two blobs are stored as chunks.
	for name, size := range map[string]int{"a/chunks": 2 * tree.LargeFile, "few": 300} {
		content := strings.Repeat("c", size)
		half := cas.SHA256.Sum([]byte(content[:size/2]))
		must.Succeed(t, in.Store.Put(t.Context(), half, strings.NewReader(content[:size/2])))
		must.Succeed(t, in.Store.(cas.Splicer).Splice(t.Context(), cas.SHA256.Sum([]byte(content)),
			cas.ChunkList{Chunks: []cas.Digest{half, half}}))
		n.set(name, &node{content: content, exec: true})
	}
	l := plan(t, load(t, in.Store, n), "", nil, nil)
	for range 3 {
		in := must.Get(c.Instance(""))(t)
		ws := newRoot(t)
		staged := must.Get(s.Stage(t.Context(), l, in, into(ws)))(t)
		expect.That(t, staged.Form == tree.FormImage && staged.Valid(),
			"got form %q (%s), valid %v, want image and true", staged.Form, staged.CopyReason, staged.Valid())
		same(t, "exec root", r.see(ws, staged), n)
		staged.AllowReuse()
		staged.Release()
	}
	expect.Equal(t, m.mounted(), 1, "images are cached")
}

func BenchmarkStageForms(b *testing.B) {
	m := newMounter(b)
	c := must.Get(disk.Open(disk.Config{Dir: b.TempDir(), MaxBytes: plenty}))(b)
	defer c.Close()
	in := must.Get(c.Instance(""))(b)
	l := plan(b, load(b, in.Store, manyFiles()), "", []string{"out/x"}, nil)
	for _, c := range []struct {
		name   string
		mount  tree.Mounter
		budget int64
	}{{"copy", nil, 0}, {"image", m, 0}, {"cached", m, plenty}} {
		b.Run(c.name, func(b *testing.B) {
			s := tree.NewStager(tree.StagerConfig{Mounter: c.mount, Dir: imageDir(b), Budget: c.budget})
			dir := memoryDir(b)
			n := 0
			once := func() {
				n++
				p := filepath.Join(dir, fmt.Sprint(n))
				must.Succeed(b, os.Mkdir(p, 0o755))
				ws := must.Get(os.OpenRoot(p))(b)
				b.StartTimer()
				must.Get(s.Stage(b.Context(), l, in, into(ws)))(b).Release()
				b.StopTimer()
				must.Succeed(b, ws.Close())
				must.Succeed(b, os.RemoveAll(p))
			}
			b.StopTimer()
			for range 3 {
				once()
			}
			b.ResetTimer()
			for range b.N {
				once()
			}
			must.Succeed(b, s.Close())
		})
	}
}
