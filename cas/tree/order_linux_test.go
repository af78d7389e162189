// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// inMemory returns an empty directory on a tmpfs, like a workspace.
func inMemory(t *testing.T) *os.Root {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &st); err != nil || st.Type != unix.TMPFS_MAGIC {
		sandboxtest.Unavailable(t, "tmpfs", "/dev/shm is not a tmpfs")
	}
	dir := must.Get(os.MkdirTemp("/dev/shm", "cloister-order-"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	ws := must.Get(os.OpenRoot(dir))(t)
	t.Cleanup(func() { ws.Close() })
	return ws
}

// listings returns the entries of each directory of a workspace in listing order.
func listings(t *testing.T, ws *os.Root) map[string]string {
	t.Helper()
	all := map[string]string{}
	must.Succeed(t, fs.WalkDir(ws.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		f, err := ws.Open(p)
		if err != nil {
			return err
		}
		defer f.Close()
		names, err := f.Readdirnames(-1)
		all[p] = strings.Join(names, " ")
		return err
	}))
	return all
}

func TestDirectoriesListInTheOrderOfTheLayout(t *testing.T) {
	store := castest.NewMemory()
	in := load(t, store, parse(t,
		"a = 1", "b = 2", "c -> a", "d/x = 3", "d/y = 4", "d/e/p = 5", "d/e/q -> p", "d/e/r/s = 6", "d/e/t = 7",
		"w/k = 1", "w/l = 2", "w/m -> k", "w/n/1 = 1", "w/n/2 = 2", "w/n/3 = 3"))
	l := plan(t, in, "w", []string{"w/n", "w/sub/out"}, nil)
	list := func(seed uint64) map[string]string {
		ws := inMemory(t)
		s := must.Get(l.WithOrder(seed).Stage(t.Context(), store, ws))(t)
		s.Release()
		return listings(t, ws)
	}
	one, two := list(1), list(2)
	// The root, an input directory and its subdirectory, the working directory, a private directory.
	dirs := []string{"out", "out/d", "out/d/e", "out/w", "out/w/n"}
	for _, p := range dirs {
		expect.That(t, one[p] != "" && one[p] != two[p], "%s lists %q with seed 1, %q with seed 2", p, one[p], two[p])
		a, b := strings.Fields(one[p]), strings.Fields(two[p])
		if slices.Sort(a); !slices.IsSorted(b) {
			slices.Sort(b)
		}
		expect.Slices(t, a, b, "entries of %s", p)
	}
	for range 3 {
		if again := list(1); again["out"] != one["out"] || again["out/d/e"] != one["out/d/e"] ||
			again["out/w/n"] != one["out/w/n"] {
			t.Errorf("one seed gave\n%v\nand\n%v", one, again)
		}
	}
}

// TestCopiesListSorted checks that copied directories list their entries sorted, as images do, although files are
// written in parallel.
func TestCopiesListSorted(t *testing.T) {
	probe := inMemory(t)
	must.Succeed(t, probe.Mkdir("b", 0o700))
	must.Succeed(t, probe.Mkdir("a", 0o700))
	if listings(t, probe)["."] != "a b" {
		t.Skip("the tmpfs of this kernel does not list the newest entry first")
	}
	store := castest.NewMemory()
	var notation []string
	for _, dir := range []string{"", "d/", "w/", "w/n/"} {
		for i := range 300 {
			notation = append(notation, fmt.Sprintf("%sf%d = %d", dir, i, i%7))
		}
		for i := range 3 {
			notation = append(notation, fmt.Sprintf("%sf%d- -> f1", dir, i), fmt.Sprintf("%sf%d+/x = 1", dir, i))
		}
	}
	in := load(t, store, parse(t, notation...))
	l := plan(t, in, "w", []string{"w/n/x", "w/out"}, nil)
	for range 3 {
		ws := inMemory(t)
		s := must.Get(l.Stage(t.Context(), store, ws))(t)
		s.Release()
		listed := 0
		for p, names := range listings(t, ws) {
			list := strings.Fields(names)
			if p == "." || p == "in" || len(list) < 300 { // the run sees neither of the first two
				continue
			}
			if listed++; !slices.IsSorted(list) {
				t.Errorf("%s lists %.200q", p, names)
			}
		}
		expect.Equal(t, listed, 4, "directories are large")
	}
}

// TestOrderRequiresCopies: an image would list its entries sorted.
func TestOrderRequiresCopies(t *testing.T) {
	r := newRig(t, 1<<20)
	l := plan(t, load(t, r.store, leaves(3, 20, nil)), "", []string{"o"}, nil)
	for seed, want := range map[uint64]tree.Form{0: tree.FormImage, 1: tree.FormCopy} {
		laid := l
		if seed != 0 {
			laid = l.WithOrder(seed)
		}
		_, s := r.stageLayout(t, "", laid)
		expect.Equal(t, s.Form, want, "seed %d (%s)", seed, s.CopyReason)
		s.Release()
	}
}
