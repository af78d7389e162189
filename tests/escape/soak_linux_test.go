// SPDX-License-Identifier: Apache-2.0

package escape_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var soak = flag.Int("soak", 400, "number of runs of TestSoak")

// soakSlots is the number of concurrent runs.
const soakSlots = 8

// soakAttacks are the attacks of the runs, in turn. Some are harmless, some leave things behind, some fail.
var soakAttacks = [][]string{
	{"daemon"},
	{"input-write", "/in/file", "/in/host"},
	{"input-write", "/blobs/0", "/blobs/1"},
	{"input-name", "/blobs/2", "/blobs"},
	{"input-tree", "/build/tree/sub", "/build/tree"},
	{"input-write", "/build/tree/sub"},
	{"input-metadata", "/build/tree/sub"},
	{"input-copy", "/build/tree/huge", "/build/tree", fmt.Sprint(huge)},
	{"files", "/build/tree", "3000", "/build/tree/sub"},
	{"leave", "/tmp", "/dev/shm", "/build"},
	{"fill", "/tmp/big", "64"},
	{"outside", "/", "/in/open"},
	{"forks", "32"},
	{"links", "/etc/shadow"},
	{"swap", "/etc/shadow"},
	{"syscalls"},
	{"userns"},
	{"kill-all"},
	{"fds", "500"},
	{"names"},
	{"identity"},
	{"memory", "memfd", "4"},
	{"stubborn"},
	{"no such attack"},
}

// blobs are blobs of a disk store that are inputs of every run.
type blobs struct {
	store   cas.Store
	digests []cas.Digest
	inputs  []sandbox.Input
}

// newBlobs creates a store with blobs.
func newBlobs(t *testing.T) *blobs {
	t.Helper()
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	cache := must.Get(disk.Open(disk.Config{Dir: filepath.Join(dir, "store"), MaxBytes: 1 << 30}))(t)
	t.Cleanup(func() { cache.Close() })
	b := &blobs{store: must.Get(cache.Instance(""))(t).Store}
	for i := range 16 {
		d := must.Get(cas.PutBytes(t.Context(), b.store, cas.SHA256, bytes.Repeat([]byte(strconv.Itoa(i)), 100_000)))(t)
		filer, _ := cas.As[cas.Filer](b.store)
		file, release, err := filer.File(t.Context(), d, i%2 == 0)
		must.Succeed(t, err)
		t.Cleanup(release)
		b.digests = append(b.digests, d)
		b.inputs = append(b.inputs, sandbox.Input{Target: fmt.Sprintf("/blobs/%d", i), Content: d.String(), Source: file})
	}
	return b
}

// verify checks the digest of every blob, in the store and in the file that runs were given.
func (b *blobs) verify(t *testing.T) {
	t.Helper()
	for i, d := range b.digests {
		expect.Error(t, expect.Err(cas.ReadAll(t.Context(), b.store, d, 1<<20)), nil, "blob %d", i)
		given, err := os.ReadFile(b.inputs[i].Source)
		expect.That(t, err == nil && cas.SHA256.Sum(given) == d,
			"the file of blob %d has %d other bytes (%v)", i, len(given), err)
	}
}

// TestSoak compares the host before and after many hostile and ordinary runs.
func TestSoak(t *testing.T) {
	w := newFixture(t)
	b := w.backend(t, nil)
	must.Succeed(t, w.resetStore())
	must.Succeed(t, w.fillSlots(t.Context(), b))
	blobs := newBlobs(t)
	before := settled(t, w, nil)
	var all sync.WaitGroup
	next := make(chan int)
	for range soakSlots {
		all.Go(func() {
			for i := range next {
				spec := w.spec(append(slices.Clone(soakAttacks[i%len(soakAttacks)]), w.soakMark(i)...))
				spec.Inputs = append(spec.Inputs, blobs.inputs...)
				if slices.ContainsFunc(spec.Args, func(a string) bool { return strings.HasPrefix(a, "/build/tree") }) {
					overTree(spec)
				}
				if spec.Args[1] == "stubborn" {
					spec.Timeout, spec.Grace = 50*time.Millisecond, 20*time.Millisecond
				}
				if _, _, err := w.run(t.Context(), b, spec, nil, nil); err != nil {
					t.Errorf("run %d, %v: %v", i, spec.Args, err)
				}
			}
		})
	}
	for i := range *soak {
		next <- i
	}
	close(next)
	all.Wait()
	after := settled(t, w, before)
	for what, want := range before {
		expect.Equal(t, after[what], want, "%s after %d runs", what, *soak)
	}
	must.Succeed(t, w.checkInputs())
	blobs.verify(t)
	if left := w.survivors(); len(left) > 0 {
		t.Errorf("processes %v are still alive", left)
	}
	for _, what := range slices.Sorted(maps.Keys(after)) {
		t.Logf("after as before: %s %.60s", what, after[what])
	}
	t.Logf("%d runs, %d at once", *soak, soakSlots)
}

// soakMark returns the mark for the command lines of attacks whose processes could survive.
func (w *fixture) soakMark(i int) []string {
	if a := soakAttacks[i%len(soakAttacks)][0]; a == "stubborn" || a == "daemon" || a == "swap" {
		return []string{w.mark}
	}
	return nil
}

// fillSlots starts soakSlots concurrent runs, so that the backend allocates everything that it keeps.
func (w *fixture) fillSlots(parent context.Context, b sandbox.Backend) error {
	ctx, cancel := context.WithTimeout(parent, time.Minute)
	defer cancel()
	var all, ready sync.WaitGroup
	ready.Add(soakSlots)
	errs := make(chan error, soakSlots)
	for range soakSlots {
		all.Go(func() {
			once := sync.OnceFunc(ready.Done)
			defer once()
			if _, text, err := w.run(ctx, b, w.spec([]string{"stubborn", w.mark}), func(string) { once() }, nil); err != nil || !strings.HasPrefix(text, "ready") {
				errs <- fmt.Errorf("waiting run: %q, %w", text, err)
			}
		})
	}
	ready.Wait()
	cancel()
	all.Wait()
	close(errs)
	return <-errs
}

// A census counts the resources of this process on the host.
type census map[string]string

// settled returns a census once it equals want, or after a minute, because the kernel cleans up with a delay. If
// want is nil, it waits until two censuses are equal.
func settled(t *testing.T, w *fixture, want census) census {
	t.Helper()
	var got census
	for range 600 {
		next := must.Get(count(w))(t)
		same := func(a, b census) bool { return fmt.Sprint(a) == fmt.Sprint(b) }
		if want != nil && same(next, want) || want == nil && same(next, got) {
			return next
		}
		got = next
		time.Sleep(100 * time.Millisecond)
	}
	return got
}

func count(w *fixture) (census, error) {
	c := census{}
	number := func(what string, n int) { c[what] = strconv.Itoa(n) }
	tree, err := descendants()
	if err != nil {
		return nil, err
	}
	number("processes", len(tree))
	spaces, mounts := map[string]bool{}, map[string]int{}
	for _, pid := range tree {
		links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", pid))
		for _, l := range links {
			if to, err := os.Readlink(l); err == nil {
				spaces[to] = true
			}
		}
		name := "worker"
		if pid != os.Getpid() {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			name = string(bytes.TrimRight(bytes.SplitN(line, []byte{0}, 2)[0], "\x00"))
		}
		c["descriptors of "+name] = descriptors(pid)
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid)); err == nil {
			// Of the slots that with most: one that replaced a killed slot has no template yet.
			mounts[name] = max(mounts[name], bytes.Count(text, []byte("\n")))
			number("mounts of "+name, mounts[name])
		}
	}
	number("namespaces", len(spaces))
	groups := 0
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		// Only those of this worker; others may run on the same host.
		if err == nil && e.IsDir() && strings.Contains(path, "cloister") && strings.Contains(path, strconv.Itoa(os.Getpid())) {
			groups++
		}
		return nil // groups may disappear during the walk
	})
	number("groups", groups)
	files := 0
	err = filepath.WalkDir(w.store, func(string, fs.DirEntry, error) error { files++; return nil })
	number("files in the store", files)
	return c, err
}

// descriptors returns the open files of a process, by kind.
func descriptors(pid int) string {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	kinds := map[string]int{}
	for _, l := range links {
		to, err := os.Readlink(l)
		if err != nil {
			continue // the descriptor of this directory
		}
		if kind, _, ok := strings.Cut(to, ":["); ok && kind != "anon_inode" {
			to = kind // the rest is a number
		}
		kinds[to]++
	}
	// The Go runtime creates one of each when it first needs it.
	for _, lazy := range []string{"anon_inode:[eventpoll]", "anon_inode:[eventfd]"} {
		kinds[lazy] = max(kinds[lazy], 1)
	}
	return fmt.Sprint(kinds)
}

// descendants returns this process and its descendants.
func descendants() ([]int, error) {
	children := map[int][]int{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	for _, s := range stats {
		b, err := os.ReadFile(s)
		if err != nil {
			continue // it has ended
		}
		// The name is in parentheses and may contain anything; state and parent follow the last one.
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		pid, err1 := strconv.Atoi(filepath.Base(filepath.Dir(s)))
		parent, err2 := strconv.Atoi(f[1])
		if err1 == nil && err2 == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	tree := []int{os.Getpid()}
	for i := 0; i < len(tree); i++ {
		tree = append(tree, children[tree[i]]...)
	}
	slices.Sort(tree)
	return tree, nil
}
