// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"bytes"
	"context"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

const budget = 64 << 20

// A countingStore counts the blobs that are opened and those whose lease is renewed by Missing.
type countingStore struct {
	*counter
	memory  *castest.Memory
	renewed map[cas.Digest]int // guarded by counter.mu
}

func newCountingStore() *countingStore {
	m := castest.NewMemory()
	return &countingStore{&counter{Store: m, opened: map[cas.Digest]int{}}, m, map[cas.Digest]int{}}
}

func (l *countingStore) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	l.mu.Lock()
	for _, d := range ds {
		l.renewed[d]++
	}
	l.mu.Unlock()
	return l.Store.Missing(ctx, ds)
}

// counts returns the numbers of blobs opened and renewed since the last call.
func (l *countingStore) counts() (opened, renewed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	opened, renewed = len(l.opened), len(l.renewed)
	clear(l.opened)
	clear(l.renewed)
	return opened, renewed
}

func (l *countingStore) want(t *testing.T, opened, renewed int) {
	t.Helper()
	if o, a := l.counts(); o != opened || a != renewed {
		t.Errorf("%d blobs were opened and %d renewed, want %d and %d", o, a, opened, renewed)
	}
}

// instance returns an instance with a store.
func instance(name string, s cas.Store) *cas.Instance { return &cas.Instance{Name: name, Store: s} }

// loaded loads root, which must succeed.
func loaded(t testing.TB, c *tree.Cache, in *cas.Instance, root cas.Digest) *tree.Input {
	t.Helper()
	return must.Get(c.Load(t.Context(), in, root))(t)
}

// wantMissing checks that Load reports exactly the blobs want as missing.
func wantMissing(t *testing.T, c *tree.Cache, in *cas.Instance, root cas.Digest, want ...cas.Digest) {
	t.Helper()
	_, err := c.Load(t.Context(), in, root)
	wantMissingBlobs(t, err, want...)
}

// forest returns a root of n directories, whose files have the given versions.
func forest(version func(i int) int, n int) *node {
	root := dirNode()
	for i := range n {
		root.set(fmt.Sprintf("d%d/changed", i), &node{content: fmt.Sprint(i, " ", version(i))})
		root.set(fmt.Sprintf("d%d/same", i), &node{content: fmt.Sprint(i)})
	}
	return root
}

func TestCacheReadsOnlyWhatChanged(t *testing.T) {
	s := newCountingStore()
	in, c := instance("", s), tree.NewCache(budget, time.Hour)
	first := forest(func(int) int { return 0 }, 100).put(t, s.memory)
	second := forest(func(i int) int { return 1 - min(1, i%10) }, 100).put(t, s.memory)
	loaded(t, c, in, first)
	s.want(t, 101, 200)
	all := c.Bytes()
	loaded(t, c, in, second)
	s.want(t, 11, 20)
	if more := c.Bytes() - all; more <= 0 || more > all/3 {
		t.Errorf("the second tree takes %d bytes, the first %d; want at most a third", more, all)
	}
	got, want := loaded(t, c, in, second), load(t, s.memory, forest(func(i int) int { return 1 - min(1, i%10) }, 100))
	s.want(t, 0, 0)
	if got.Digest() != want.Digest() || got.Files() != 200 || got.Bytes() != want.Bytes() ||
		!slices.Equal(slices.Collect(got.AllFiles()), slices.Collect(want.AllFiles())) {
		t.Errorf("from the cache: got %v with %d files of %d bytes", got.Digest(), got.Files(), got.Bytes())
	}
	loaded(t, c, in, first)
	s.want(t, 0, 0)
}

func TestCacheKeepsItsBudget(t *testing.T) {
	s := newCountingStore()
	in := instance("", s)
	size := func(n *node) int64 {
		c := tree.NewCache(budget, time.Hour)
		loaded(t, c, in, n.put(t, s.memory))
		return c.Bytes()
	}
	shared := forest(func(int) int { return 0 }, 50)
	with := func(i int) *node {
		n := dirNode()
		n.set("shared", shared)
		n.set("own/f", &node{content: fmt.Sprint("own ", i)})
		return n
	}
	max := size(with(0)) * 3 / 2
	c := tree.NewCache(max, time.Hour)
	s.counts()
	for i := range 500 { // each evicts the one before the last, but not the shared directories
		loaded(t, c, in, with(i).put(t, s.memory))
		must.Be(t, c.Bytes() <= max, "the cache takes %d bytes after %d trees, want at most %d", c.Bytes(), i, max)
	}
	if opened, _ := s.counts(); opened != 53+499*2 {
		t.Errorf("%d blobs were read, want %d, each once", opened, 53+499*2)
	}
	loaded(t, c, in, with(0).put(t, s.memory))
	s.want(t, 2, 1)
	// Shared directories are evicted once nothing references them.
	loaded(t, c, in, forest(func(i int) int { return -i }, 50).put(t, s.memory))
	loaded(t, c, in, forest(func(i int) int { return -2 * i }, 50).put(t, s.memory))
	s.counts()
	loaded(t, c, in, shared.put(t, s.memory))
	if opened, _ := s.counts(); opened < 40 {
		t.Errorf("%d evicted blobs were read again, want at least 40", opened)
	}
	// A tree larger than the budget is loaded, but not cached.
	loaded(t, c, in, forest(func(i int) int { return i + 7 }, 200).put(t, s.memory))
	expect.That(t, c.Bytes() <= max, "the cache takes %d bytes, want at most %d", c.Bytes(), max)
}

// TestCacheEstimatesMemory checks that the estimate is not far below the growth of the heap.
func TestCacheEstimatesMemory(t *testing.T) {
	s := castest.NewMemory()
	root := &repb.Directory{}
	for i := range 100 {
		m := &repb.Directory{}
		for j := range 500 {
			d := cas.SHA256.Sum(fmt.Append(nil, i, " ", j))
			m.Files = append(m.Files, &repb.FileNode{Name: fmt.Sprintf("source file %04d.cc", j), Digest: d.Proto()})
		}
		root.Directories = append(root.Directories, &repb.DirectoryNode{
			Name:   fmt.Sprintf("%03d", i),
			Digest: putProto(t, s, m).Proto(),
		})
	}
	in := instance("", completeStore{s})
	d := putProto(t, s, root)
	c := tree.NewCache(budget, time.Hour)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.GC() // empties pools
	runtime.ReadMemStats(&before)
	loaded(t, c, in, d)
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&after)
	if real := int64(after.HeapAlloc) - int64(before.HeapAlloc); real > c.Bytes()*11/10 {
		t.Errorf("the heap grew by %d bytes, but the estimate is %d", real, c.Bytes())
	}
	runtime.KeepAlive(c)
	runtime.KeepAlive(s)
}

// TestCacheCountsDecodedSize: a small blob may be a large message.
func TestCacheCountsDecodedSize(t *testing.T) {
	s := castest.NewMemory()
	d := putBytes(t, s, bytes.Repeat([]byte{2<<3 | 2, 0}, 100_000)) // environment variables without a name
	c := tree.NewCache(budget, time.Hour)
	m := must.Get(tree.Read(t.Context(), c, instance("", s), d, &repb.Command{}))(t)
	if n := int64(len(m.EnvironmentVariables)); n != 100_000 || c.Bytes() < 64*n {
		t.Errorf("got %d variables and an estimate of %d bytes, want 100000 and at least 64 each", n, c.Bytes())
	}
}

// A completeStore claims to have every blob.
type completeStore struct{ cas.Store }

func (completeStore) Missing(context.Context, []cas.Digest) ([]cas.Digest, error) { return nil, nil }

// TestCacheKeepsInstancesApart checks that an instance learns nothing of the blobs of another.
func TestCacheKeepsInstancesApart(t *testing.T) {
	a, b := newCountingStore(), newCountingStore()
	c := tree.NewCache(budget, time.Hour)
	n := parse(t, "d/f = 1", "e/g = 2")
	root := n.put(t, a.memory)
	loaded(t, c, instance("a", a), root)
	wantMissing(t, c, instance("b", b), root, root)
	// Having part of a tree reveals nothing of the rest.
	d := n.kids["d"].put(t, b.memory)
	b.memory.Delete(cas.SHA256.Sum([]byte("1")))
	wantMissing(t, c, instance("b", b), d, cas.SHA256.Sum([]byte("1")))
	putProto(t, b.memory, parent("d", d))
	wantMissing(t, c, instance("b", b), n.kids["e"].put(t, castest.NewMemory()),
		n.kids["e"].put(t, castest.NewMemory()))

	command := putProto(t, a.memory, &repb.Command{Arguments: []string{"secret"}})
	must.Get(tree.Read(t.Context(), c, instance("a", a), command, &repb.Command{}))(t)
	_, err := tree.Read(t.Context(), c, instance("b", b), command, &repb.Command{})
	wantError(t, err, cas.ErrNotFound, "")
}

func TestReadIsOncePerType(t *testing.T) {
	s := newCountingStore()
	in, c := instance("", s), tree.NewCache(budget, time.Hour)
	// Field 1 is a list of strings in a Command and a message in an Action: these bytes are both.
	d := putProto(t, s.memory, &repb.Action{CommandDigest: &repb.Digest{Hash: "x"}})
	for range 3 {
		a := must.Get(tree.Read(t.Context(), c, in, d, &repb.Action{}))(t)
		b := must.Get(tree.Read(t.Context(), c, in, d, &repb.Command{}))(t)
		expect.That(t, a.CommandDigest.GetHash() == "x" && len(b.Arguments) == 1, "got %v and %v", a, b)
	}
	expect.Equal(t, s.opened[d], 2, "read N times (once per type)")
	small := tree.NewCache(0, time.Hour)
	must.Get(tree.Read(t.Context(), small, in, d, &repb.Action{}))(t)
	expect.Equal(t, small.Bytes(), 0, "a cache of budget 0 takes")
}

// TestCacheRenewsLeases checks that the leases of used blobs are renewed, but not at every use.
func TestCacheRenewsLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newCountingStore()
		in, c := instance("", s), tree.NewCache(budget, 10*time.Minute)
		old := parse(t, "old/a = 1", "old/b = 2")
		both := parse(t, "old/a = 1", "old/b = 2", "new/c = 3", "new/d = 4")
		command := putProto(t, s.memory, &repb.Command{})
		read := func() {
			t.Helper()
			must.Get(tree.Read(t.Context(), c, in, command, &repb.Command{}))(t)
		}
		loaded(t, c, in, old.put(t, s.memory))
		read()
		s.want(t, 2+1, 2)
		time.Sleep(9 * time.Minute)
		loaded(t, c, in, old.put(t, s.memory))
		loaded(t, c, in, both.put(t, s.memory))
		read()
		s.want(t, 2, 2) // new/ and the root
		time.Sleep(time.Minute)
		loaded(t, c, in, both.put(t, s.memory))
		s.want(t, 0, 4) // the root, old/ and its files
		read()
		s.want(t, 1, 0)
		time.Sleep(9 * time.Minute)
		loaded(t, c, in, both.put(t, s.memory))
		s.want(t, 0, 4) // the root, new/ and its files
		loaded(t, c, in, old.put(t, s.memory))
		s.want(t, 0, 1)
	})
}

func TestCacheNoticesLostBlobs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := castest.NewMemory()
		in, c := instance("a", s), tree.NewCache(budget, 10*time.Minute)
		n := parse(t, "d/lost = 1", "d/kept = 2", "e/f = 3")
		root := n.put(t, s)
		loaded(t, c, in, root)

		lost, d := cas.SHA256.Sum([]byte("1")), n.kids["d"].put(t, castest.NewMemory())
		s.Delete(lost)
		loaded(t, c, in, root) // it was present recently
		c.Invalidate("a")
		wantMissing(t, c, in, root, lost)
		wantMissing(t, c, in, root, lost) // the failed query renews nothing
		s.Delete(d)
		wantMissing(t, c, in, root, d, lost)
		n.put(t, s)
		loaded(t, c, in, root)
		s.Delete(lost)
		time.Sleep(10 * time.Minute)
		wantMissing(t, c, in, root, lost)
	})
	// Invalidating an instance does not affect another.
	s, other := newCountingStore(), newCountingStore()
	c := tree.NewCache(budget, time.Hour)
	root := parse(t, "d/f = 1").put(t, s.memory)
	parse(t, "d/f = 1").put(t, other.memory)
	loaded(t, c, instance("a", s), root)
	loaded(t, c, instance("b", other), root)
	s.counts()
	other.counts()
	c.Invalidate("a")
	loaded(t, c, instance("a", s), root)
	loaded(t, c, instance("b", other), root)
	s.want(t, 0, 3)
	other.want(t, 0, 0)
}

// TestCacheIsNotPoisoned checks that only blobs that match their digest are cached.
func TestCacheIsNotPoisoned(t *testing.T) {
	s := castest.NewMemory()
	in, c := instance("", s), tree.NewCache(budget, time.Hour)
	n := parse(t, "d/f = 1")
	root, d := n.put(t, s), n.kids["d"].put(t, s)
	s.Corrupt(d)
	_, err := c.Load(t.Context(), in, root)
	wantError(t, err, cas.ErrCorrupt, "")
	n.put(t, s)
	expect.Equal(t, loaded(t, c, in, root).Files(), 1, "files")
	bad := putProto(t, s, files("b", "a"))
	for range 2 {
		_, err = c.Load(t.Context(), in, bad)
		wantError(t, err, cas.ErrInvalid, "must ascend")
	}
}

// TestLoadRenewsPresentBlobs checks that absent and damaged blobs do not prevent the renewal of others.
func TestLoadRenewsPresentBlobs(t *testing.T) {
	s := newCountingStore()
	n := parse(t, "a = 1", "b/c = 2", "d/e = 3", "f/g = 4")
	root := n.put(t, s.memory)
	s.memory.Corrupt(n.kids["b"].put(t, castest.NewMemory()))
	s.memory.Delete(n.kids["d"].put(t, castest.NewMemory()))
	_, err := tree.Load(t.Context(), s, root)
	wantError(t, err, cas.ErrCorrupt, "")
	for _, content := range []string{"1", "4"} {
		expect.Equal(t, s.renewed[cas.SHA256.Sum([]byte(content))], 1, "renewals of %q", content)
	}
}

// TestLimitsApplyToCachedTrees checks that the limits include cached subtrees.
func TestLimitsApplyToCachedTrees(t *testing.T) {
	s := castest.NewMemory()
	in := instance("", s)
	above := func(d cas.Digest, depth int, name string) cas.Digest {
		for range depth {
			d = putProto(t, s, parent(name, d))
		}
		return d
	}
	deep := chain(t, s, 600, "d", files("f"))
	long := chain(t, s, 20, strings.Repeat("n", 99), files("f"))
	many := putProto(t, s, files("f"))
	ten := func(d cas.Digest, n int) cas.Digest {
		m := &repb.Directory{}
		for i := range n {
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: fmt.Sprintf("%02d", i), Digest: d.Proto()})
		}
		return putProto(t, s, m)
	}
	for range 5 {
		many = ten(many, 10)
	}
	for _, c := range []struct {
		name          string
		known, ok, no cas.Digest
		want          string
	}{
		{"depth", deep, above(deep, 400, "d"), above(deep, 401, "d"), "deeper than 1000"},
		{
			"path", long, above(long, 19, strings.Repeat("n", 99)), above(long, 21, strings.Repeat("n", 99)),
			"longer than 4000",
		},
		{"entries", many, ten(many, 4), ten(many, 10), "more than 1000000 entries"},
	} {
		cache := tree.NewCache(budget, time.Hour)
		loaded(t, cache, in, c.known)
		loaded(t, cache, in, c.ok)
		for range 2 {
			_, err := cache.Load(t.Context(), in, c.no)
			wantError(t, err, cas.ErrInvalid, c.want)
		}
	}
}

// TestCacheIsConcurrent loads overlapping trees in parallel, while others are evicted.
func TestCacheIsConcurrent(t *testing.T) {
	t.Parallel()
	s := newCountingStore()
	in := instance("", s)
	var roots []cas.Digest
	for v := range 20 {
		roots = append(roots, forest(func(i int) int { return v * (i % 3) }, 12).put(t, s.memory))
	}
	for _, max := range []int64{0, 20 << 10, budget} {
		c := tree.NewCache(max, time.Nanosecond)
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				for i := range 40 {
					root := roots[(g*7+i*3)%len(roots)]
					input, err := c.Load(t.Context(), in, root)
					expect.That(t, err == nil && input.Digest() == root && input.Files() == 24,
						"got %v, %v, want %v with 24 files", input, err, root)
					if i%10 == 0 {
						c.Invalidate("")
					}
				}
			})
		}
		wg.Wait()
		expect.That(t, c.Bytes() <= max, "the cache takes %d bytes, want at most %d", c.Bytes(), max)
		if max < budget {
			continue
		}
		// Each directory is cached once.
		once := tree.NewCache(max, time.Hour)
		for _, root := range roots {
			loaded(t, once, in, root)
		}
		expect.Equal(t, c.Bytes(), once.Bytes(), "bytes of the cache")
	}
}
