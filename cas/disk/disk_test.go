// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
)

const (
	block = 4096
	plain = 0o444
)

// open opens a store that is checked and closed at the end of the test, unless closeStore was called.
func open(t testing.TB, dir string, maxBytes int64) *disk.Cache {
	t.Helper()
	c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: maxBytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := errors.Join(c.Check(context.Background()), c.Close())
		if err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return c
}

func closeStore(t *testing.T, c *disk.Cache) {
	t.Helper()
	if err := errors.Join(c.Check(t.Context()), c.Close()); err != nil {
		t.Fatal(err)
	}
}

func store(t testing.TB, c *disk.Cache, instance string) *disk.Store {
	t.Helper()
	in, err := c.Instance(instance)
	if err != nil {
		t.Fatal(err)
	}
	return in.Store.(*disk.Store)
}

// put stores a blob of one block that seed decides.
func put(t testing.TB, s cas.Store, seed byte) cas.Digest {
	t.Helper()
	b, d := castest.Blob(seed, block)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	return d
}

// present returns the seeds below n whose blobs are in s. It marks them as used.
func present(t *testing.T, s cas.Store, n byte) []byte {
	t.Helper()
	var seeds []byte
	for i := range n {
		_, d := castest.Blob(i, block)
		missing, err := s.Missing(t.Context(), []cas.Digest{d})
		if err != nil {
			t.Fatal(err)
		}
		if len(missing) == 0 {
			seeds = append(seeds, i)
		}
	}
	return seeds
}

// pathOf returns the path of the file of a blob or result in the empty-named instance.
func pathOf(dir, kind string, d cas.Digest) string {
	return filepath.Join(dir, "instances", "@", kind, "sha256", d.Hash()[:2],
		fmt.Sprintf("%s-%d", d.Hash(), d.Size()))
}

// damage lets change rewrite the content of a file.
func damage(t *testing.T, path string, change func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, plain); err != nil {
		t.Fatal(err)
	}
}

// occupied returns the blocks of all files of the store, in bytes.
func occupied(t *testing.T, dir string) int64 {
	t.Helper()
	var n int64
	for _, sub := range []string{"tmp", "instances"} {
		err := filepath.WalkDir(filepath.Join(dir, sub), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			fi, err := e.Info()
			if err == nil {
				n += (fi.Size() + block - 1) / block * block
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return n
}

func TestContract(t *testing.T) {
	castest.TestStore(t, func(t *testing.T) cas.Store { return store(t, open(t, t.TempDir(), 32<<20), "") })
	castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return store(t, open(t, t.TempDir(), 32<<20), "a/b") })
}

func TestReopenKeepsEverything(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "store")
	instances := []string{"", "main", "Main", "a/b", "ünï"}
	c := open(t, dir, 1<<20)
	for i, name := range instances {
		s := store(t, c, name)
		d := put(t, s, byte(i))
		if _, release, err := s.File(t.Context(), d, true); err != nil {
			t.Fatal(err)
		} else {
			release()
		}
		if err := s.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(i)}); err != nil {
			t.Fatal(err)
		}
	}
	before := c.Stats()
	if want := (disk.Stats{Blobs: 5, Results: 5, Bytes: 15 * block, MaxBytes: 1 << 20}); before != want {
		t.Errorf("got %+v, want %+v", before, want)
	}
	closeStore(t, c)

	c = open(t, dir, 1<<20)
	if after := c.Stats(); after != before {
		t.Errorf("after reopening: got %+v, want %+v", after, before)
	}
	for i, name := range instances {
		s := store(t, c, name)
		if got := present(t, s, byte(len(instances))); !slices.Equal(got, []byte{byte(i)}) {
			t.Errorf("instance %q has the blobs %v, want %d alone", name, got, i)
		}
		b, d := castest.Blob(byte(i), block)
		if got, err := cas.ReadAll(t.Context(), s, d, block); err != nil || !bytes.Equal(got, b) {
			t.Errorf("instance %q: read %d bytes, %v", name, len(got), err)
		}
		if r, err := s.Lookup(t.Context(), d); err != nil || r.ExitCode != int32(i) {
			t.Errorf("instance %q: result %v, %v", name, r, err)
		}
	}
}

// Rule 22.
func TestInstancesAreIsolated(t *testing.T) {
	c := open(t, t.TempDir(), 1<<20)
	d := put(t, store(t, c, "a"), 0)
	if err := store(t, c, "a").Record(t.Context(), d, &repb.ActionResult{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"", "A", "b", "a/b", "a%2fb", "@a"} {
		s := store(t, c, name)
		if got := present(t, s, 1); len(got) != 0 {
			t.Errorf("instance %q has the blob of instance a", name)
		}
		if _, err := s.Open(t.Context(), d, 0); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("Open in instance %q: got %v, want ErrNotFound", name, err)
		}
		if _, _, err := s.File(t.Context(), d, false); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("File in instance %q: got %v, want ErrNotFound", name, err)
		}
		if _, err := s.Lookup(t.Context(), d); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("Lookup in instance %q: got %v, want ErrNotFound", name, err)
		}
	}
}

// Rule 21.
func TestInstanceRefusesReservedNames(t *testing.T) {
	c := open(t, t.TempDir(), 1<<20)
	for _, name := range []string{"blobs", "a/uploads/b", "/", "a//b", "\xff"} {
		if _, err := c.Instance(name); !errors.Is(err, cas.ErrInvalid) {
			t.Errorf("Instance(%q): got %v, want ErrInvalid", name, err)
		}
	}
}

func TestEvictsLeastRecentlyUsed(t *testing.T) {
	for _, c := range []struct {
		name string
		use  func(t *testing.T, s *disk.Store, d cas.Digest)
	}{
		{"Open", func(t *testing.T, s *disk.Store, d cas.Digest) {
			if _, err := cas.ReadAll(t.Context(), s, d, block); err != nil {
				t.Error(err)
			}
		}},
		{"Missing", func(t *testing.T, s *disk.Store, d cas.Digest) { // rule 24
			if _, err := s.Missing(t.Context(), []cas.Digest{d}); err != nil {
				t.Error(err)
			}
		}},
		{"Put", func(t *testing.T, s *disk.Store, d cas.Digest) { put(t, s, 0) }},
		{"File", func(t *testing.T, s *disk.Store, d cas.Digest) {
			_, release, err := s.File(t.Context(), d, false)
			if err != nil {
				t.Fatal(err)
			}
			release()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := store(t, open(t, t.TempDir(), 4*block), "")
			first := put(t, s, 0)
			for i := byte(1); i < 4; i++ {
				put(t, s, i)
			}
			c.use(t, s, first)
			put(t, s, 4)
			put(t, s, 5)
			if got, want := present(t, s, 6), []byte{0, 3, 4, 5}; !slices.Equal(got, want) {
				t.Errorf("got %v, want %v", got, want)
			}
		})
	}
}

func TestLookupMarksResultAsUsed(t *testing.T) {
	s := store(t, open(t, t.TempDir(), 3*block), "")
	var actions []cas.Digest
	for i := range byte(4) {
		_, d := castest.Blob(i, 10)
		actions = append(actions, d)
		if i == 3 {
			if _, err := s.Lookup(t.Context(), actions[0]); err != nil {
				t.Error(err)
			}
		}
		if err := s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []error{nil, cas.ErrNotFound, nil, nil} {
		if _, err := s.Lookup(t.Context(), actions[i]); !errors.Is(err, want) {
			t.Errorf("result %d: got %v, want %v", i, err, want)
		}
	}
}

func TestEvictionOrderSurvivesReopen(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 8*block)
	s := store(t, c, "")
	for i := range byte(4) {
		d := put(t, s, i)
		// Blob 0 is the youngest, 3 the oldest, all of them older than an hour.
		used := time.Now().Add(-time.Duration(i+2) * time.Hour)
		if err := disk.SetLastUse(pathOf(dir, "blobs", d), used); err != nil {
			t.Fatal(err)
		}
	}
	closeStore(t, c)

	c = open(t, dir, 8*block)
	_, oldest := castest.Blob(3, block)
	if _, err := cas.ReadAll(t.Context(), store(t, c, ""), oldest, block); err != nil {
		t.Fatal(err)
	}
	closeStore(t, c)

	// A smaller budget takes effect at once.
	c = open(t, dir, 3*block)
	if got, want := present(t, store(t, c, ""), 4), []byte{0, 1, 3}; !slices.Equal(got, want) {
		t.Errorf("after reopening with three blocks: got %v, want %v", got, want)
	}
}

func TestUseIsWrittenAtMostHourly(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 8*block)
	d := put(t, store(t, c, ""), 0)
	closeStore(t, c)
	path := pathOf(dir, "blobs", d)
	for _, test := range []struct {
		age       time.Duration
		refreshed bool
	}{{30 * time.Minute, false}, {2 * time.Hour, true}} {
		used := time.Now().Add(-test.age)
		if err := disk.SetLastUse(path, used); err != nil {
			t.Fatal(err)
		}
		c := open(t, dir, 8*block)
		present(t, store(t, c, ""), 1)
		closeStore(t, c)
		fi, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if refreshed := disk.LastUse(fi).After(used.Add(time.Minute)); refreshed != test.refreshed {
			t.Errorf("last use %v ago: time refreshed is %v, want %v", test.age, refreshed, test.refreshed)
		}
	}
}

// The disk is looked at when a Put has written everything and not yet committed: then the temporary file
// is there beside all that was not evicted.
func TestPutNeverExceedsBudget(t *testing.T) {
	const budget = 20 * block
	dir := t.TempDir()
	c := open(t, dir, budget)
	s := store(t, c, "")
	check := func() {
		if n := occupied(t, dir); n > budget {
			t.Errorf("files occupy %d bytes of a budget of %d", n, budget)
		}
		if st := c.Stats(); st.Bytes > budget {
			t.Errorf("the index counts %d bytes of a budget of %d", st.Bytes, budget)
		}
	}
	for i := range 60 {
		b, d := castest.Blob(byte(i), 1+i*977%(7*block))
		r := io.MultiReader(bytes.NewReader(b), checkReader(check))
		if err := s.Put(t.Context(), d, r); err != nil {
			t.Fatal(err)
		}
		check()
		if i%3 == 0 {
			_, release, err := s.File(t.Context(), d, true)
			if err != nil {
				t.Fatal(err)
			}
			check()
			release()
		}
		if err := s.Record(t.Context(), d, &repb.ActionResult{StdoutRaw: b[:len(b)/2]}); err != nil {
			t.Fatal(err)
		}
		check()
	}
	if st := c.Stats(); st.Blobs == 0 || st.Results == 0 || st.Bytes < budget/2 {
		t.Errorf("after all this the store holds only %+v", st)
	}
}

type checkReader func()

func (r checkReader) Read([]byte) (int, error) {
	r()
	return 0, io.EOF
}

func TestPutAboveBudgetIsFull(t *testing.T) {
	s := store(t, open(t, t.TempDir(), 4*block), "")
	for i := range byte(4) {
		put(t, s, i)
	}
	b, d := castest.Blob(9, 4*block+1)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, cas.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if got := present(t, s, 4); len(got) != 4 {
		t.Errorf("a blob that can never fit evicted all but %v", got)
	}
	b, d = castest.Blob(9, 4*block)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
		t.Errorf("Put of the whole budget: %v", err)
	}
}

// A client that states much and sends little costs the others little.
func TestPutMakesRoomAsBytesArrive(t *testing.T) {
	const least, blobs, size = 64 << 10, 8, 2 << 20
	c := open(t, t.TempDir(), blobs*size)
	s := store(t, c, "")
	var all []cas.Digest
	for i := range byte(blobs) {
		b, d := castest.Blob(i, size)
		if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	lost := func() int {
		missing, err := s.Missing(t.Context(), all)
		if err != nil {
			t.Fatal(err)
		}
		return len(missing)
	}
	b, d := castest.Blob(99, blobs*size-1)
	for _, sent := range []int{1, 5 << 20} {
		r := io.MultiReader(bytes.NewReader(b[:sent]), checkReader(func() {
			if n := c.Stats().Bytes; n > blobs*size {
				t.Errorf("the index counts %d bytes of a budget of %d", n, blobs*size)
			}
		}))
		if err := s.Put(t.Context(), d, r); !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("got %v, want ErrMismatch", err)
		}
		if n, most := lost(), (max(least, 2*sent)+size-1)/size; n > most {
			t.Errorf("%d bytes evicted %d blobs, want at most %d", sent, n, most)
		}
		if got, want := c.Stats().Bytes, int64(blobs-lost())*size; got != want {
			t.Errorf("a broken Put left %d bytes counted, want %d", got, want)
		}
	}
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil || lost() != blobs {
		t.Errorf("all of it: %v, with %d blobs evicted", err, lost())
	}
}

// When it turns out in the middle of a Put that there is no room, nothing of it stays.
func TestPutIsFullMidway(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 8<<20)
	s := store(t, c, "")
	_, release, err := s.File(t.Context(), put(t, s, 0), false)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	b, d := castest.Blob(1, 8<<20)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, cas.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if got := c.Stats(); got.Bytes != block || got.Blobs != 1 {
		t.Errorf("left behind: %+v", got)
	}
	if got := list(t, filepath.Join(dir, "tmp")); len(got) != 1 {
		t.Errorf("tmp holds %q", got)
	}
}

func TestRejectedPutGivesItsRoomBack(t *testing.T) {
	c := open(t, t.TempDir(), 4*block)
	s := store(t, c, "")
	_, d := castest.Blob(0, 4*block)
	for range 5 {
		if err := s.Put(t.Context(), d, strings.NewReader("wrong")); !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("got %v, want ErrMismatch", err)
		}
	}
	if got := c.Stats().Bytes; got != 0 {
		t.Errorf("rejected Puts left %d bytes counted", got)
	}
}

func TestFileIsNotEvictedBeforeRelease(t *testing.T) {
	for _, executable := range []bool{false, true} {
		t.Run(fmt.Sprintf("executable=%v", executable), func(t *testing.T) {
			s := store(t, open(t, t.TempDir(), 3*block), "")
			b, _ := castest.Blob(0, block)
			path, release, err := s.File(t.Context(), put(t, s, 0), executable)
			if err != nil {
				t.Fatal(err)
			}
			for i := byte(1); i < 10; i++ {
				put(t, s, i)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
				t.Errorf("the file handed out holds %d bytes, %v", len(got), err)
			}
			release()
			release() // a second call must not undo somebody else's pin
			for i := byte(10); i < 20; i++ {
				put(t, s, i)
			}
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after release: got %v, want the file evicted", err)
			}
		})
	}
}

// On Windows a file that is open cannot be removed; here a directory stands in for it.
func TestEvictionPassesOverWhatCannotBeRemoved(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 3*block), "")
	path := pathOf(dir, "blobs", put(t, s, 0))
	put(t, s, 1)
	put(t, s, 2)
	aside := filepath.Join(t.TempDir(), "aside")
	if err := errors.Join(os.Rename(path, aside), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(path, "file"), "")
	put(t, s, 3)
	if got := present(t, s, 4); !slices.Equal(got, []byte{0, 2, 3}) {
		t.Errorf("got %v, want 0, 2, 3", got)
	}
	b, d := castest.Blob(4, 3*block)
	err := s.Put(t.Context(), d, bytes.NewReader(b))
	if !errors.Is(err, cas.ErrFull) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want ErrFull that names %s", err, path)
	}
	if err := errors.Join(os.Remove(filepath.Join(path, "file")), os.Remove(path), os.Rename(aside, path)); err != nil {
		t.Fatal(err)
	}
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
		t.Errorf("once it can be removed: %v", err)
	}
}

func TestPutIsFullWhenEverythingIsPinned(t *testing.T) {
	s := store(t, open(t, t.TempDir(), 3*block), "")
	var release []func()
	for i := range byte(3) {
		_, r, err := s.File(t.Context(), put(t, s, i), false)
		if err != nil {
			t.Fatal(err)
		}
		release = append(release, r)
	}
	b, d := castest.Blob(3, block)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); !errors.Is(err, cas.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	if got := present(t, s, 4); !slices.Equal(got, []byte{0, 1, 2}) {
		t.Errorf("pinned: got %v, want 0, 1, 2", got)
	}
	release[1]()
	put(t, s, 3)
	if got := present(t, s, 4); !slices.Equal(got, []byte{0, 2, 3}) {
		t.Errorf("after release of 1: got %v, want 0, 2, 3", got)
	}
	release[0]()
	release[2]()
}

// Rule 53.
func TestOpenBlobIsReadToItsEndAfterEviction(t *testing.T) {
	s := store(t, open(t, t.TempDir(), 2*block), "")
	b, _ := castest.Blob(0, block)
	r, err := s.Open(t.Context(), put(t, s, 0), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	put(t, s, 1)
	put(t, s, 2)
	if got := present(t, s, 1); len(got) != 0 {
		t.Fatal("the blob was not evicted")
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, b) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
}

func TestDamagedBlobIsNotServedAndCanBePutAgain(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func([]byte) []byte
	}{
		{"bit flipped", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }},
		{"one byte short", func(b []byte) []byte { return b[:len(b)-1] }},
		{"one byte long", func(b []byte) []byte { return append(b, 0) }},
		{"empty", func(b []byte) []byte { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := store(t, open(t, dir, 1<<20), "")
			d := put(t, s, 0)
			if _, release, err := s.File(t.Context(), d, true); err != nil {
				t.Fatal(err)
			} else {
				release()
			}
			damage(t, pathOf(dir, "blobs", d), c.change)
			if got, err := cas.ReadAll(t.Context(), s, d, block); !errors.Is(err, cas.ErrCorrupt) {
				t.Errorf("read %d bytes, %v, want ErrCorrupt", len(got), err)
			}
			for _, kind := range []string{"blobs", "execs"} {
				if _, err := os.Lstat(pathOf(dir, kind, d)); !errors.Is(err, os.ErrNotExist) {
					t.Errorf("%s: got %v, want the file removed", kind, err)
				}
			}
			if got := present(t, s, 1); len(got) != 0 {
				t.Error("the damaged blob is still present")
			}
			put(t, s, 0)
			if _, err := cas.ReadAll(t.Context(), s, d, block); err != nil {
				t.Errorf("after another Put: %v", err)
			}
		})
	}
}

func TestTruncatedBlobIsNotServedFromAnOffset(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 1<<20), "")
	for i, off := range []int64{1, block / 2, block} {
		d := put(t, s, byte(i))
		damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { return b[:block/2] })
		r, err := s.Open(t.Context(), d, off)
		if !errors.Is(err, cas.ErrCorrupt) {
			t.Errorf("Open at %d: got %v, want ErrCorrupt", off, err)
		}
		if r != nil {
			r.Close()
		}
	}
	if got := present(t, s, 3); len(got) != 0 {
		t.Errorf("the truncated blobs %v are still present", got)
	}
}

func TestFileOfTruncatedBlobIsNotFound(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 1<<20), "")
	for _, executable := range []bool{false, true} {
		d := put(t, s, 0)
		damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { return b[:10] })
		if path, _, err := s.File(t.Context(), d, executable); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("executable %v: got %q, %v, want ErrNotFound", executable, path, err)
		}
	}
}

// A blob that was damaged while no process held the store, its size unchanged.
func TestBlobOfEarlierProcessIsVerifiedBeforeUse(t *testing.T) {
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	for _, c := range []struct {
		name string
		kind string // what is damaged
		use  func(s *disk.Store, d cas.Digest) error
		want error
	}{
		{"Open from within", "blobs", func(s *disk.Store, d cas.Digest) error {
			_, err := s.Open(t.Context(), d, block-1)
			return err
		}, cas.ErrCorrupt},
		{"File", "blobs", func(s *disk.Store, d cas.Digest) error {
			_, _, err := s.File(t.Context(), d, false)
			return err
		}, cas.ErrNotFound},
		{"File with a whole copy", "blobs", func(s *disk.Store, d cas.Digest) error {
			_, _, err := s.File(t.Context(), d, true)
			return err
		}, cas.ErrNotFound},
		{"File with a damaged copy", "execs", func(s *disk.Store, d cas.Digest) error {
			path, release, err := s.File(t.Context(), d, true)
			if err != nil {
				return err
			}
			defer release()
			if b, err := os.ReadFile(path); err != nil || cas.SHA256.Sum(b) != d {
				return fmt.Errorf("the file holds %d other bytes: %w", len(b), err)
			}
			return nil
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			earlier := open(t, dir, 1<<20)
			s := store(t, earlier, "")
			d := put(t, s, 0)
			if _, release, err := s.File(t.Context(), d, true); err != nil {
				t.Fatal(err)
			} else {
				release()
			}
			closeStore(t, earlier)
			damage(t, pathOf(dir, c.kind, d), flip)

			s = store(t, open(t, dir, 1<<20), "")
			if err := c.use(s, d); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if got := len(present(t, s, 1)); (got == 1) != (c.want == nil) {
				t.Errorf("the blob is present: %v", got == 1)
			}
			// Whatever is left is replaced by whole files.
			put(t, s, 0)
			if _, release, err := s.File(t.Context(), d, true); err != nil {
				t.Error(err)
			} else {
				release()
			}
		})
	}
}

// Verification is paid once: a file that is known to be whole is not read again, which shows in damage
// that is done to it later.
func TestBlobIsVerifiedOnce(t *testing.T) {
	file := func(s *disk.Store, d cas.Digest) error {
		_, release, err := s.File(t.Context(), d, false)
		if err == nil {
			release()
		}
		return err
	}
	for name, verify := range map[string]func(*disk.Store, cas.Digest) error{
		"by File": file,
		"by a whole read": func(s *disk.Store, d cas.Digest) error {
			_, err := cas.ReadAll(t.Context(), s, d, block)
			return err
		},
		"by a read from within": func(s *disk.Store, d cas.Digest) error {
			r, err := s.Open(t.Context(), d, 1)
			if err == nil {
				err = r.Close()
			}
			return err
		},
		"by Put": func(s *disk.Store, d cas.Digest) error { put(t, s, 1); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			earlier := open(t, dir, 1<<20)
			d := put(t, store(t, earlier, ""), 0)
			closeStore(t, earlier)
			c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s := store(t, c, "")
			if err := verify(s, d); err != nil {
				t.Fatal(err)
			}
			if name == "by Put" {
				_, d = castest.Blob(1, block)
			}
			damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { b[0] ^= 1; return b })
			if err := file(s, d); err != nil {
				t.Errorf("the file was read again: %v", err)
			}
		})
	}
}

func TestVerificationEndsWithItsContext(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 1<<20)
	d := put(t, store(t, c, ""), 0)
	closeStore(t, c)
	s := store(t, open(t, dir, 1<<20), "")
	ctx := &endsAfter{Context: t.Context(), calls: 1}
	if _, _, err := s.File(ctx, d, false); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	if got := present(t, s, 1); len(got) != 1 {
		t.Error("a blob that was not read to its end is taken for damaged")
	}
}

// endsAfter is a context that has ended after so many looks at it.
type endsAfter struct {
	context.Context
	calls int
}

func (c *endsAfter) Err() error {
	if c.calls--; c.calls < 0 {
		return context.Canceled
	}
	return nil
}

// An action may have the file of a blob mounted: another Put must leave that very file alone.
func TestPutDoesNotReplaceFileOfPresentBlob(t *testing.T) {
	s := store(t, open(t, t.TempDir(), 1<<20), "")
	b, d := castest.Blob(0, block)
	var before os.FileInfo
	var path string
	// While one Put is at its end, another one is faster, and its file is handed out.
	err := s.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b), checkReader(func() {
		put(t, s, 0)
		var release func()
		var err error
		if path, release, err = s.File(t.Context(), d, false); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(release)
		if before, err = os.Stat(path); err != nil {
			t.Fatal(err)
		}
	})))
	if err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the file handed out was replaced: %v, %v", after, err)
	}
}

func TestBlobTruncatedWhileItIsRead(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 1<<20), "")
	d := put(t, s, 0)
	for _, off := range []int64{0, 1} {
		put(t, s, 0)
		r, err := s.Open(t.Context(), d, off)
		if err != nil {
			t.Fatal(err)
		}
		damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { return b[:10] })
		if got, err := io.ReadAll(r); !errors.Is(err, cas.ErrCorrupt) {
			t.Errorf("from %d: read %d bytes, %v, want ErrCorrupt", off, len(got), err)
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestBlobTruncatedWhileClosedIsDroppedAtOpen(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 1<<20)
	s := store(t, c, "")
	d := put(t, s, 0)
	put(t, s, 1)
	closeStore(t, c)
	damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { return nil })
	c = open(t, dir, 1<<20)
	if got := present(t, store(t, c, ""), 2); !slices.Equal(got, []byte{1}) {
		t.Errorf("got %v, want 1", got)
	}
}

func TestVanishedBlobIsNotFound(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 1<<20), "")
	for i, use := range []func(cas.Digest) error{
		func(d cas.Digest) error { _, err := s.Open(t.Context(), d, 0); return err },
		func(d cas.Digest) error { _, _, err := s.File(t.Context(), d, false); return err },
		func(d cas.Digest) error { _, _, err := s.File(t.Context(), d, true); return err },
	} {
		d := put(t, s, byte(i))
		if err := os.Remove(pathOf(dir, "blobs", d)); err != nil {
			t.Fatal(err)
		}
		if err := use(d); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("use %d: got %v, want ErrNotFound", i, err)
		}
	}
	if got := present(t, s, 3); len(got) != 0 {
		t.Errorf("the vanished blobs %v are still present", got)
	}
}

// A blob that is found damaged while it is handed out is absent at once, its file stays until release,
// and a Put in between makes both whole again.
func TestDamagedBlobThatIsPinned(t *testing.T) {
	for _, repaired := range []bool{false, true} {
		t.Run(fmt.Sprintf("repaired=%v", repaired), func(t *testing.T) {
			dir := t.TempDir()
			s := store(t, open(t, dir, 2*block), "")
			d := put(t, s, 0)
			path, release, err := s.File(t.Context(), d, false)
			if err != nil {
				t.Fatal(err)
			}
			damage(t, path, func(b []byte) []byte { b[0] ^= 1; return b })
			if _, err := cas.ReadAll(t.Context(), s, d, block); !errors.Is(err, cas.ErrCorrupt) {
				t.Errorf("got %v, want ErrCorrupt", err)
			}
			if got := present(t, s, 1); len(got) != 0 {
				t.Error("the damaged blob is still present")
			}
			if _, err := os.Lstat(path); err != nil {
				t.Errorf("the file did not stay until release: %v", err)
			}
			if repaired {
				put(t, s, 0)
				for i := byte(1); i < 5; i++ {
					put(t, s, i)
				}
			}
			if got := len(present(t, s, 1)); (got == 1) != repaired {
				t.Errorf("repaired is %v, and %d blobs are present", repaired, got)
			}
			release()
			if _, err := os.Lstat(path); (err == nil) != repaired {
				t.Errorf("after release, repaired %v: %v", repaired, err)
			}
		})
	}
}

func TestDamagedResultIsMissAndRemoved(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, dir, 1<<20), "")
	_, action := castest.Blob(0, 10)
	r := &repb.ActionResult{ExitCode: 3, StdoutRaw: []byte("out")}
	path := pathOf(dir, "results", action)
	record := func() []byte {
		t.Helper()
		if err := s.Record(t.Context(), action, r); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	size := len(record())
	wantMiss := func(what string, change func([]byte) []byte) {
		t.Helper()
		record()
		damage(t, path, change)
		if got, err := s.Lookup(t.Context(), action); !errors.Is(err, cas.ErrNotFound) {
			t.Errorf("%s: got %v, %v, want ErrNotFound", what, got, err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: got %v, want the file removed", what, err)
		}
	}
	for i := range size {
		wantMiss(fmt.Sprintf("byte %d flipped", i), func(b []byte) []byte { b[i] ^= 0x10; return b })
		wantMiss(fmt.Sprintf("cut to %d bytes", i), func(b []byte) []byte { return b[:i] })
	}
	wantMiss("one byte long", func(b []byte) []byte { return append(b, 0) })
	record()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Lookup(t.Context(), action); !errors.Is(err, cas.ErrNotFound) {
		t.Errorf("file removed: got %v, want ErrNotFound", err)
	}
}

func TestSecondOpenIsLocked(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 1<<20)
	put(t, store(t, c, ""), 0)
	_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
	if !errors.Is(err, disk.ErrLocked) {
		t.Fatalf("got %v, want ErrLocked", err)
	}
	for _, want := range []string{dir, "process " + strconv.Itoa(os.Getpid()) + ","} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	closeStore(t, c)
	if got := present(t, store(t, open(t, dir, 1<<20), ""), 1); len(got) != 1 {
		t.Errorf("after Close: got %v, want blob 0", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, dir string)
		max     int64
		says    []string
	}{
		{"foreign directory", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "letter.txt"), "dear") }, 1,
			[]string{"not a store", "letter.txt", "choose another"}},
		{"foreign directory named like ours", func(t *testing.T, dir string) {
			if err := os.Mkdir(filepath.Join(dir, "tmp"), 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, "tmp", "thesis"), "chapter one")
		}, 1, []string{"not a store", "tmp", "choose another"}},
		{"later version", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "version"), "cloister-store v2\n") }, 1,
			[]string{`"cloister-store v2"`, `"cloister-store v1"`, "choose another"}},
		{"no version", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "version"), "") }, 1,
			[]string{`""`, `"cloister-store v1"`}},
		{"no budget", func(*testing.T, string) {}, 0, []string{"budget of 0 bytes", "positive"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			c.prepare(t, dir)
			before := list(t, dir)
			_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: c.max})
			if err == nil {
				t.Fatal("Open succeeded")
			}
			for _, want := range c.says {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if after := list(t, dir); !slices.Equal(after, before) {
				t.Errorf("Open changed the directory from %q to %q", before, after)
			}
		})
	}
}

func TestOpenNamesDirectoryThatCannotBeMade(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	for _, dir := range []string{file, filepath.Join(file, "store")} {
		_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1})
		if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "choose another") {
			t.Errorf("Open(%s): got %v, want an error that names it and says what to do", dir, err)
		}
	}
	if _, err := disk.Open(disk.Config{MaxBytes: 1}); err == nil {
		t.Error("Open without a directory succeeded")
	}
}

func TestOpenTakesRootOfFileSystemAndUnfinishedStore(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "lock"), "99999999\n")
	write(t, filepath.Join(dir, "version.new"), "cloist")
	put(t, store(t, open(t, dir, 1<<20), ""), 0)
}

func TestOpenSweepsFilesOfTmpOnly(t *testing.T) {
	dir := t.TempDir()
	closeStore(t, open(t, dir, 1<<20))
	kept := filepath.Join(dir, "tmp", "kept")
	if err := os.Mkdir(kept, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(kept, "file"), "kept")
	write(t, filepath.Join(dir, "tmp", "unfinished"), "swept")
	c, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(t.Context()); err == nil || !strings.Contains(err.Error(), kept) {
		t.Errorf("Check: got %v, want it to name %s", err, kept)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if got, want := list(t, filepath.Join(dir, "tmp")), []string{".", "kept", "kept/file"}; !slices.Equal(got, want) {
		t.Errorf("tmp holds %q, want %q", got, want)
	}
}

func TestClosedStoreRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c := open(t, dir, 1<<20)
		s := store(t, c, "")
		d := put(t, s, 0)
		b, d1 := castest.Blob(1, block)
		closing := make(chan error, 1)
		// This Put is under way when the store is closed.
		during := s.Put(t.Context(), d1, io.MultiReader(bytes.NewReader(b), checkReader(func() {
			go func() { closing <- c.Close() }()
			synctest.Wait()
			select {
			case err := <-closing:
				t.Errorf("Close returned %v before the Put did", err)
			default:
			}
			if _, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20}); !errors.Is(err, disk.ErrLocked) {
				t.Errorf("another Open during the Put: got %v, want ErrLocked", err)
			}
		})))
		if err := <-closing; err != nil {
			t.Errorf("Close: %v", err)
		}
		_, openErr := s.Open(t.Context(), d, 0)
		_, missingErr := s.Missing(t.Context(), nil)
		_, _, fileErr := s.File(t.Context(), d, false)
		_, lookupErr := s.Lookup(t.Context(), d)
		for name, err := range map[string]error{
			"Put under way": during, "Put": s.Put(t.Context(), d1, bytes.NewReader(b)), "Open": openErr,
			"Missing": missingErr, "File": fileErr, "Lookup": lookupErr,
			"Record": s.Record(t.Context(), d, &repb.ActionResult{}), "Close": c.Close(),
		} {
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: got %v, want os.ErrClosed", name, err)
			}
		}
		if got := present(t, store(t, open(t, dir, 1<<20), ""), 2); !slices.Equal(got, []byte{0}) {
			t.Errorf("after reopening: got %v, want 0", got)
		}
	})
}

// What is found out or given back after Close must not change a directory that may be another's.
func TestClosedStoreRemovesNothing(t *testing.T) {
	dir := t.TempDir()
	c := open(t, dir, 1<<20)
	s := store(t, c, "")
	flip := func(b []byte) []byte { b[0] ^= 1; return b }
	read := put(t, s, 0)
	r, err := s.Open(t.Context(), read, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	damage(t, pathOf(dir, "blobs", read), flip)
	// This one is known to be damaged, and its file stays for as long as it is handed out.
	held, release, err := s.File(t.Context(), put(t, s, 1), false)
	if err != nil {
		t.Fatal(err)
	}
	damage(t, held, flip)
	_, d := castest.Blob(1, block)
	if _, err := cas.ReadAll(t.Context(), s, d, block); !errors.Is(err, cas.ErrCorrupt) {
		t.Errorf("before Close: got %v, want ErrCorrupt", err)
	}

	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); !errors.Is(err, cas.ErrCorrupt) {
		t.Errorf("after Close: got %v, want ErrCorrupt", err)
	}
	release()
	for _, path := range []string{pathOf(dir, "blobs", read), held} {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
}

func TestCheckFindsWhatIsWrong(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(t *testing.T, dir string, d cas.Digest)
		says string
	}{
		{"damaged blob", func(t *testing.T, dir string, d cas.Digest) {
			damage(t, pathOf(dir, "blobs", d), func(b []byte) []byte { b[0] ^= 1; return b })
		}, "corrupt"},
		{"vanished blob", func(t *testing.T, dir string, d cas.Digest) {
			if err := os.Remove(pathOf(dir, "blobs", d)); err != nil {
				t.Fatal(err)
			}
		}, "not on disk"},
		{"foreign file", func(t *testing.T, dir string, d cas.Digest) {
			write(t, filepath.Join(filepath.Dir(pathOf(dir, "blobs", d)), "letter.txt"), "")
		}, "letter.txt"},
		{"unindexed blob", func(t *testing.T, dir string, d cas.Digest) {
			write(t, pathOf(dir, "blobs", d)+"0", "")
		}, "not in the index"},
		{"unfinished file", func(t *testing.T, dir string, d cas.Digest) {
			write(t, filepath.Join(dir, "tmp", "x"), "")
		}, "unfinished"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			cache, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			defer cache.Close()
			d := put(t, store(t, cache, ""), 0)
			if err := cache.Check(t.Context()); err != nil {
				t.Errorf("before: %v", err)
			}
			c.do(t, dir, d)
			if err := cache.Check(t.Context()); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want it to say %q", err, c.says)
			}
		})
	}
}

// Everything at once in a store that is too small for it: each answer must be right or ErrNotFound or
// ErrFull, and the store consistent in the end.
func TestConcurrentUseUnderEviction(t *testing.T) {
	const workers, rounds, blobs = 8, 150, 40
	s := store(t, open(t, t.TempDir(), 16*block), "")
	tolerable := func(err error) bool {
		return err == nil || errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrFull)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range rounds {
				b, d := castest.Blob(byte((w*7+i)%blobs), 1+(w*7+i)%blobs*200)
				var err error
				switch i % 5 {
				case 0, 1:
					err = s.Put(t.Context(), d, bytes.NewReader(b))
				case 2:
					var got []byte
					if got, err = cas.ReadAll(t.Context(), s, d, d.Size()); err == nil && !bytes.Equal(got, b) {
						t.Errorf("%s: Open gave other bytes", d)
					}
				case 3:
					var path string
					var release func()
					if path, release, err = s.File(t.Context(), d, w%2 == 0); err == nil {
						if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
							t.Errorf("%s: File gave %d other bytes, %v", d, len(got), err)
						}
						release()
					}
				case 4:
					if err = s.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(d.Size())}); err == nil {
						var r *repb.ActionResult
						if r, err = s.Lookup(t.Context(), d); err == nil && r.ExitCode != int32(d.Size()) {
							t.Errorf("%s: Lookup gave another result", d)
						}
					}
				}
				if !tolerable(err) {
					t.Errorf("%s: %v", d, err)
				}
			}
		})
	}
	wg.Wait()
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// list returns the slash-separated paths of everything in dir.
func list(t *testing.T, dir string) []string {
	t.Helper()
	var paths []string
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return paths
}

func BenchmarkPut(b *testing.B) {
	s := store(b, open(b, b.TempDir(), 1<<30), "")
	data, _ := castest.Blob(0, 1<<10)
	b.SetBytes(int64(len(data)))
	var n uint64
	for b.Loop() {
		n++
		copy(data, strconv.FormatUint(n, 10)+" ")
		if err := s.Put(b.Context(), cas.SHA256.Sum(data), bytes.NewReader(data)); err != nil {
			b.Fatal(err)
		}
	}
}
