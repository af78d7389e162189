// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"cmp"
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
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/ramdir"
)

func TestMain(m *testing.M) { os.Exit(ramdir.Main(m)) }

const (
	block = 4096
	large = 70_000 // the size of blobs that are files
	// The smallest store has segments of 16 KiB, and keeps as much free for moves.
	segmentSize = 16 << 10
	everyFile   = -1 // Config.Pack: each blob is a file
	none        = -1 // Config.Lease
)

// open opens a store that is checked and closed at the end of the test, unless closeStore was called.
func open(t testing.TB, config disk.Config) *disk.Cache {
	t.Helper()
	config.MaxBytes = cmp.Or(config.MaxBytes, 1<<20)
	c := must.Get(disk.Open(config))(t)
	t.Cleanup(func() {
		err := errors.Join(c.Check(context.Background()), c.Close())
		if err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return c
}

func closeStore(t testing.TB, c *disk.Cache) {
	t.Helper()
	must.Succeed(t, errors.Join(c.Check(t.Context()), c.Close()))
}

func store(t testing.TB, c *disk.Cache, instance string) *disk.Store {
	t.Helper()
	in := must.Get(c.Instance(instance))(t)
	return in.Store.(*disk.Store)
}

// openStore opens a store and returns its instance "" as well.
func openStore(t testing.TB, config disk.Config) (*disk.Cache, *disk.Store) {
	t.Helper()
	c := open(t, config)
	return c, store(t, c, "")
}

// putSize stores a blob of size bytes that depends on seed.
func putSize(t testing.TB, s cas.Store, seed byte, size int) cas.Digest {
	t.Helper()
	b, d := castest.Blob(seed, size)
	must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	return d
}

// put stores a blob of one block.
func put(t testing.TB, s cas.Store, seed byte) cas.Digest {
	t.Helper()
	return putSize(t, s, seed, block)
}

func missing(t testing.TB, s cas.Store, ds ...cas.Digest) []cas.Digest {
	t.Helper()
	return must.Get(s.Missing(t.Context(), ds))(t)
}

func has(t testing.TB, s cas.Store, d cas.Digest) bool { t.Helper(); return len(missing(t, s, d)) == 0 }

// present returns the seeds below n whose blobs of one block are in s. It renews their leases.
func present(t testing.TB, s cas.Store, n byte) []byte {
	t.Helper()
	var seeds []byte
	for i := range n {
		if _, d := castest.Blob(i, block); has(t, s, d) {
			seeds = append(seeds, i)
		}
	}
	return seeds
}

// read reads and verifies the blob of seed and size.
func read(t testing.TB, s cas.Store, seed byte, size int) {
	t.Helper()
	b, d := castest.Blob(seed, size)
	if got, err := cas.ReadAll(t.Context(), s, d, d.Size()); err != nil || !bytes.Equal(got, b) {
		t.Errorf("blob %d of %d bytes: read %d bytes, %v", seed, size, len(got), err)
	}
}

func file(t testing.TB, s *disk.Store, d cas.Digest, executable bool) (path string, release func()) {
	t.Helper()
	path, release, err := s.File(t.Context(), d, executable)
	must.Succeed(t, err)
	return path, release
}

// filePath returns the path of a blob of the instance "".
func filePath(dir string, d cas.Digest) string {
	return filepath.Join(dir, "files", "@", "sha256", d.Hash()[:2], fmt.Sprintf("%s-%d", d.Hash(), d.Size()))
}

// damageFile replaces the content of a file.
func damageFile(t testing.TB, path string, change func([]byte) []byte) {
	t.Helper()
	fi := must.Get(os.Stat(path))(t)
	b := must.Get(os.ReadFile(path))(t)
	must.Succeed(t, errors.Join(os.Chmod(path, 0o600), os.WriteFile(path, change(b), 0o600), os.Chmod(path, fi.Mode())))
}

// find returns the segment that holds b, and the offset.
func find(t testing.TB, dir string, b []byte) (path string, at int) {
	t.Helper()
	for _, path := range segmentFiles(t, dir, ".data") {
		data := must.Get(os.ReadFile(path))(t)
		if at := bytes.Index(data, b); at >= 0 {
			return path, at
		}
	}
	t.Fatalf("no segment holds these %d bytes", len(b))
	return "", 0
}

func segmentFiles(t testing.TB, dir, suffix string) []string {
	t.Helper()
	return must.Get(filepath.Glob(filepath.Join(dir, "segments", "*"+suffix)))(t)
}

// damageBlob flips a bit of a blob of the instance "".
func damageBlob(t testing.TB, dir string, b []byte) {
	t.Helper()
	d := cas.SHA256.Sum(b)
	if path := filePath(dir, d); exists(path) {
		damageFile(t, path, func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		return
	}
	path, at := find(t, dir, b)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must.Succeed(t, err)
	_, err = f.WriteAt([]byte{b[len(b)/2] ^ 1}, int64(at+len(b)/2))
	must.Succeed(t, errors.Join(err, f.Close()))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// occupied returns the size and number of files that count against the budget.
func occupied(t testing.TB, dir string) (bytes, files int64) {
	t.Helper()
	for _, sub := range []string{"tmp", "files", "copies", "quarantine", "segments"} {
		err := filepath.WalkDir(filepath.Join(dir, sub), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			fi, err := e.Info()
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			files++
			if sub == "segments" {
				bytes += fi.Size()
			} else {
				bytes += max(1, (fi.Size()+block-1)/block) * block
			}
			return err
		})
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	return bytes, files
}

func write(t testing.TB, path, content string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
}

// list returns the slash-separated paths of everything in dir.
func list(t testing.TB, dir string) []string {
	t.Helper()
	var paths []string
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	})
	must.Succeed(t, err)
	return paths
}

type checkReader func()

func (r checkReader) Read([]byte) (int, error) {
	r()
	return 0, io.EOF
}

// kinds are store configurations.
var kinds = []struct {
	name   string
	config disk.Config
}{
	{"default", disk.Config{}},
	{"files", disk.Config{Pack: everyFile}},
	{"sync", disk.Config{Sync: true}},
	{"sync files", disk.Config{Sync: true, Pack: everyFile}},
	{"all packed", disk.Config{Pack: 1 << 30}},
	{"no lease", disk.Config{Lease: none}},
}

func TestContract(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			newStore := func(t *testing.T, instance string) *disk.Store {
				k.config.Dir, k.config.MaxBytes = t.TempDir(), 40<<20 // leaves 32 MiB for puts
				return store(t, open(t, k.config), instance)
			}
			castest.TestStore(t, func(t *testing.T) cas.Store { return newStore(t, "") })
			castest.TestActionCache(t, func(t *testing.T) cas.ActionCache { return newStore(t, "a/b") })
		})
	}
	t.Run("tiny segments", func(t *testing.T) {
		castest.TestActionCache(t, func(t *testing.T) cas.ActionCache {
			return store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 512 << 10, Lease: none}), "")
		})
	})
}

func TestReopenKeepsEverything(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "store")
	instances := []string{"", "main", "Main", "a/b", "ünï", strings.Repeat("long/", 50) + "x"}
	c := open(t, disk.Config{Dir: dir})
	for i, name := range instances {
		s := store(t, c, name)
		d := put(t, s, byte(i))
		putSize(t, s, byte(i), 70_000)
		_, release := file(t, s, d, true)
		release()
		must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(i)}))
	}
	before := c.Stats()
	if before.Blobs != 12 || before.Results != 6 || before.Segments == 0 || before.MaxBytes != 1<<20 ||
		before.Lease != disk.DefaultLease {
		t.Errorf("got %+v", before)
	}
	closeStore(t, c)

	c = open(t, disk.Config{Dir: dir})
	after := c.Stats()
	// Open removes the copies made by File.
	before.Bytes -= 6 * block
	before.Files -= 6
	expect.Equal(t, after, before, "after reopening")
	for i, name := range instances {
		s := store(t, c, name)
		expect.Slices(t, present(t, s, byte(len(instances))), []byte{byte(i)}, "instance %q: blobs", name)
		read(t, s, byte(i), block)
		read(t, s, byte(i), 70_000)
		_, d := castest.Blob(byte(i), block)
		if r, err := s.Lookup(t.Context(), d); err != nil || r.ExitCode != int32(i) {
			t.Errorf("instance %q: Lookup: got %v, %v, want exit code %d", name, r, err, i)
		}
	}
}

// Rule 22.
func TestInstancesAreIsolated(t *testing.T) {
	c := open(t, disk.Config{Dir: t.TempDir()})
	a := store(t, c, "a")
	d, large := put(t, a, 0), putSize(t, a, 0, 70_000)
	must.Succeed(t, a.Record(t.Context(), d, &repb.ActionResult{}))
	for _, name := range []string{"", "A", "b", "a/b", "a%2fb", "@a"} {
		s := store(t, c, name)
		put(t, s, 1) // assigns a number
		for _, d := range []cas.Digest{d, large} {
			expect.That(t, !has(t, s, d), "instance %q has a blob of instance a", name)
			expect.Error(t, expect.Err(s.Open(t.Context(), d, 0)), cas.ErrNotFound, "Open in instance %q", name)
			if _, _, err := s.File(t.Context(), d, false); !errors.Is(err, cas.ErrNotFound) {
				t.Errorf("File in instance %q: got %v, want ErrNotFound", name, err)
			}
		}
		expect.Error(t, expect.Err(s.Lookup(t.Context(), d)), cas.ErrNotFound, "Lookup in instance %q", name)
	}
}

// Rule 21.
func TestInstanceRefusesReservedNames(t *testing.T) {
	c := open(t, disk.Config{Dir: t.TempDir()})
	for _, name := range []string{"blobs", "a/uploads/b", "/", "a//b", "\xff"} {
		expect.Error(t, expect.Err(c.Instance(name)), cas.ErrInvalid, "Instance(%q)", name)
	}
}

func TestResultIsNotABlob(t *testing.T) {
	s := store(t, open(t, disk.Config{Dir: t.TempDir()}), "")
	_, d := castest.Blob(0, 100)
	must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{}))
	expect.That(t, !has(t, s, d), "a result made the blob of its action present")
}

// TestPutNeverExceedsBudget inspects the directory when a Put has written its temporary file but not committed.
func TestPutNeverExceedsBudget(t *testing.T) {
	const budget = 40 * block
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			dir := t.TempDir()
			k.config.Dir, k.config.MaxBytes, k.config.Lease = dir, budget, none
			c, s := openStore(t, k.config)
			check := func() {
				if n, _ := occupied(t, dir); n > budget {
					t.Errorf("files occupy %d bytes of a budget of %d", n, budget)
				}
				if st := c.Stats(); st.Bytes > budget {
					t.Errorf("Stats: got %d bytes, budget %d", st.Bytes, budget)
				}
			}
			for i := range 60 {
				b, d := castest.Blob(byte(i), 1+i*977%(7*block))
				r := io.MultiReader(bytes.NewReader(b), checkReader(check))
				must.Succeed(t, s.Put(t.Context(), d, r))
				check()
				if i%3 == 0 {
					_, release, err := s.File(t.Context(), d, true)
					check()
					if err == nil {
						release()
					} else if !errors.Is(err, cas.ErrNotFound) { // evicted to make room for its own copy
						t.Fatal(err)
					}
				}
				must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{StdoutRaw: b[:len(b)/2]}))
				check()
			}
			if st := c.Stats(); st.Blobs == 0 || st.Results == 0 || st.Bytes < budget/3 || st.EvictedBlobs == 0 ||
				st.EvictedBytes == 0 {
				t.Errorf("the store holds too little: %+v", st)
			}
		})
	}
}

func TestPutAboveBudgetIsFull(t *testing.T) {
	s := store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 12 * block, Lease: none}), "")
	for i := range byte(4) {
		put(t, s, i)
	}
	for _, size := range []int{9 * block, 70_000, 1 << 20} {
		b, d := castest.Blob(9, size)
		expect.Error(t, s.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrFull, "Put of %d bytes", size)
	}
	if got := present(t, s, 4); len(got) != 4 {
		t.Errorf("a blob larger than the budget evicted all but %v", got)
	}
}

// TestPutReservesAsBytesArrive: a large claimed size evicts nothing by itself.
func TestPutReservesAsBytesArrive(t *testing.T) {
	const blobs, size, budget = 8, 2 << 20, 17 << 20 // 544 KiB are kept free
	c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: budget, Lease: none})
	var all []cas.Digest
	for i := range byte(blobs) {
		all = append(all, putSize(t, s, i, size))
	}
	lost := func() int { return len(missing(t, s, all...)) }
	b, d := castest.Blob(99, budget-1<<20)
	for _, sent := range []int{1, 3 << 20} {
		before := c.Stats().Bytes - int64(blobs-lost())*size
		r := io.MultiReader(bytes.NewReader(b[:sent]), checkReader(func() {
			if n := c.Stats().Bytes; n > budget {
				t.Errorf("Stats: got %d bytes, budget %d", n, budget)
			}
		}))
		expect.Error(t, s.Put(t.Context(), d, r), cas.ErrMismatch)
		// Twice the bytes received, and a twentieth of the budget.
		if n, most := lost(), (2*sent+budget/20+size-1)/size+1; n > most {
			t.Errorf("%d bytes evicted %d blobs, want at most %d", sent, n, most)
		}
		expect.Equal(t, c.Stats().Bytes, before+int64(blobs-lost())*size, "after a broken Put")
	}
	must.Be(t, lost() != blobs, "nothing left to evict for the complete Put")
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil || lost() != blobs {
		t.Errorf("complete Put: %v, evicted %d blobs", err, lost())
	}
}

// TestPutIsFullMidway: a Put that runs out of space leaves nothing behind.
func TestPutIsFullMidway(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, MaxBytes: 8 << 20})
	putSize(t, s, 0, 1<<20)
	before := c.Stats()
	b, d := castest.Blob(1, 7<<20)
	expect.Error(t, s.Put(t.Context(), d, bytes.NewReader(b)), cas.ErrFull)
	expect.Equal(t, c.Stats(), before, "after the Put")
	if got := list(t, filepath.Join(dir, "tmp")); len(got) != 1 {
		t.Errorf("tmp holds %q", got)
	}
}

func TestRejectedPutReleasesItsReservation(t *testing.T) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			k.config.Dir = t.TempDir()
			c, s := openStore(t, k.config)
			for _, size := range []int{4 * block, 500_000} {
				_, d := castest.Blob(0, size)
				for range 5 {
					expect.Error(t, s.Put(t.Context(), d, strings.NewReader("wrong")), cas.ErrMismatch)
				}
			}
			if got := c.Stats(); got.Bytes != 0 || got.Files != 0 {
				t.Errorf("after rejected Puts: got %+v", got)
			}
		})
	}
}

// TestInstanceIsNumberedAtFirstPut: there are only 65,536 numbers.
func TestInstanceIsNumberedAtFirstPut(t *testing.T) {
	dir := t.TempDir()
	c := open(t, disk.Config{Dir: dir})
	s := store(t, c, "visitor")
	for _, size := range []int{0, 1000, 70_000} {
		b, d := castest.Blob(0, size)
		wrong := bytes.Repeat([]byte{1}, size)
		if err := s.Put(t.Context(), d, bytes.NewReader(wrong)); size > 0 && !errors.Is(err, cas.ErrMismatch) {
			t.Errorf("Put: got %v, want ErrMismatch", err)
		}
		ctx := &endsAfter{Context: t.Context(), calls: 1}
		if err := s.Put(ctx, d, bytes.NewReader(b)); size > 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("Put: got %v, want context.Canceled", err)
		}
		if err := s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: wrong}})[0]; size > 0 &&
			!errors.Is(err, cas.ErrMismatch) {
			t.Errorf("PutAll: got %v, want ErrMismatch", err)
		}
		has(t, s, d)
		if r, err := s.Open(t.Context(), d, 0); err == nil {
			r.Close()
		}
		for _, executable := range []bool{false, true} {
			if _, release, err := s.File(t.Context(), d, executable); err == nil {
				release()
			}
		}
		expect.Error(t, expect.Err(s.Lookup(t.Context(), d)), cas.ErrNotFound, "Lookup")
	}
	names := filepath.Join(dir, "instances")
	expect.That(t, !exists(names), "%s exists", names)
	if put(t, s, 0); !exists(names) {
		t.Errorf("%s does not exist after a Put", names)
	}
}

// TestFileIsNotEvictedBeforeRelease covers files, copies and executable copies.
func TestFileIsNotEvictedBeforeRelease(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		for _, executable := range []bool{false, true} {
			t.Run(fmt.Sprintf("pack=%d,executable=%v", pack, executable), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 24 * block, Lease: none, Pack: pack}), "")
					b, _ := castest.Blob(0, block)
					path, release := file(t, s, put(t, s, 0), executable)
					churn := func(from byte) {
						for i := from; i < from+100; i++ {
							time.Sleep(time.Hour)
							put(t, s, i)
						}
					}
					churn(1)
					if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
						t.Errorf("file: got %d bytes, %v", len(got), err)
					}
					release()
					release() // must not release another caller's pin
					churn(101)
					expect.That(t, !exists(path), "the file was not evicted after its release")
				})
			})
		}
	}
}

func TestPinsAreCounted(t *testing.T) {
	_, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 24 * block, Lease: none, Pack: everyFile})
	d := put(t, s, 0)
	path, release := file(t, s, d, false)
	_, other := file(t, s, d, false)
	release()
	release()
	for i := range byte(60) {
		put(t, s, i)
	}
	expect.That(t, exists(path), "releasing one File evicted the file of another")
	other()
}

// TestEvictionSkipsWhatCannotBeRemoved replaces a file by a directory. On Windows an open file cannot be removed.
func TestEvictionSkipsWhatCannotBeRemoved(t *testing.T) {
	dir := t.TempDir()
	s := store(t, open(t, disk.Config{Dir: dir, MaxBytes: 12 * block, Lease: none, Pack: everyFile}), "")
	path := filePath(dir, put(t, s, 0))
	aside := filepath.Join(t.TempDir(), "aside")
	must.Succeed(t, errors.Join(os.Rename(path, aside), os.Mkdir(path, 0o700)))
	write(t, filepath.Join(path, "file"), "")
	for i := byte(1); i < 30; i++ {
		put(t, s, i)
	}
	expect.That(t, len(present(t, s, 1)) == 1, "a file that could not be removed is absent")
	b, d := castest.Blob(40, 6*block+1)
	err := s.Put(t.Context(), d, bytes.NewReader(b))
	expect.That(t, errors.Is(err, cas.ErrFull) && strings.Contains(err.Error(), path),
		"got %v, want ErrFull naming %s", err, path)
	must.Succeed(t, errors.Join(os.Remove(filepath.Join(path, "file")), os.Remove(path), os.Rename(aside, path)))
	expect.Error(t, s.Put(t.Context(), d, bytes.NewReader(b)), nil, "Put after the file can be removed")
}

func TestPutIsFullWhenEverythingIsPinned(t *testing.T) {
	_, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 12 * block, Lease: none, Pack: everyFile})
	var release []func()
	for i := range byte(100) {
		b, d := castest.Blob(i, block)
		err := s.Put(t.Context(), d, bytes.NewReader(b))
		if errors.Is(err, cas.ErrFull) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		_, r := file(t, s, d, false)
		release = append(release, r)
	}
	n := byte(len(release))
	must.Be(t, n >= 5 && n <= 12, "pinned %d blobs of one block in a store of 12", n)
	if got := present(t, s, n+1); len(got) != int(n) {
		t.Errorf("pinned blobs: got %v, want all below %d", got, n)
	}
	release[1]()
	put(t, s, n)
	if got := present(t, s, n+1); len(got) != int(n) || slices.Contains(got, 1) {
		t.Errorf("after releasing 1: got %v", got)
	}
	for _, r := range release {
		r()
	}
}

// Rule 53.
func TestOpenReaderSurvivesEviction(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		s := store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 24 * block, Lease: none, Pack: pack}), "")
		b, _ := castest.Blob(0, block)
		d := put(t, s, 0)
		r := must.Get(s.Open(t.Context(), d, 0))(t)
		defer r.Close()
		evictAll(t, s, d)
		if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, b) {
			t.Errorf("pack %d: got %d bytes, %v", pack, len(got), err)
		}
	}
}

// evictAll puts other blobs until d is evicted.
func evictAll(t testing.TB, s *disk.Store, d cas.Digest) {
	t.Helper()
	for i := range 1000 {
		b := bytes.Repeat([]byte(strconv.Itoa(i)+" "), 700)
		must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, b))(t)
		if !has(t, s, d) {
			return
		}
	}
	t.Fatal("the blob was not evicted")
}

func TestSecondOpenIsLocked(t *testing.T) {
	dir := t.TempDir()
	c := open(t, disk.Config{Dir: dir})
	put(t, store(t, c, ""), 0)
	_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20})
	must.Be(t, errors.Is(err, disk.ErrLocked), "got %v, want ErrLocked", err)
	for _, want := range []string{dir, "(pid " + strconv.Itoa(os.Getpid()) + ")"} {
		expect.That(t, strings.Contains(err.Error(), want), "got %q, want it to contain %q", err, want)
	}
	closeStore(t, c)
	if got := present(t, store(t, open(t, disk.Config{Dir: dir}), ""), 1); len(got) != 1 {
		t.Errorf("after Close: got %v, want blob 0", got)
	}
}

func TestOpenRefuses(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, dir string)
		config  disk.Config
		want    []string
	}{
		{
			"foreign directory", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "letter.txt"), "dear") },
			disk.Config{MaxBytes: 1},
			[]string{"not a store", "letter.txt", "choose an empty directory"},
		},
		{"foreign directory named like ours", func(t *testing.T, dir string) {
			must.Succeed(t, os.Mkdir(filepath.Join(dir, "tmp"), 0o700))
			write(t, filepath.Join(dir, "tmp", "thesis"), "chapter one")
		}, disk.Config{MaxBytes: 1}, []string{"not a store", "tmp", "choose an empty directory"}},
		{
			"earlier version", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "version"), "cloister-store v1\n") },
			disk.Config{MaxBytes: 1},
			[]string{`"cloister-store v1"`, `"cloister-store v2"`, "choose another"},
		},
		{
			"no version", func(t *testing.T, dir string) { write(t, filepath.Join(dir, "version"), "") },
			disk.Config{MaxBytes: 1},
			[]string{`""`, `"cloister-store v2"`},
		},
		{"no budget", func(*testing.T, string) {}, disk.Config{}, []string{"budget of 0 bytes", "positive"}},
		{"negative files", func(*testing.T, string) {}, disk.Config{MaxBytes: 1, MaxFiles: -1}, []string{"budget of -1 files", "positive"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.config.Dir = t.TempDir()
			c.prepare(t, c.config.Dir)
			before := list(t, c.config.Dir)
			_, err := disk.Open(c.config)
			must.Be(t, err != nil, "Open succeeded")
			for _, want := range c.want {
				expect.That(t, strings.Contains(err.Error(), want), "got %q, want it to contain %q", err, want)
			}
			expect.Slices(t, list(t, c.config.Dir), before, "directory after Open")
		})
	}
}

func TestOpenErrorNamesDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	for _, dir := range []string{file, filepath.Join(file, "store")} {
		_, err := disk.Open(disk.Config{Dir: dir, MaxBytes: 1})
		if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "choose another") {
			t.Errorf("Open(%s): got %v, want an error with the directory and advice", dir, err)
		}
	}
	expect.That(t, expect.Err(disk.Open(disk.Config{MaxBytes: 1})) != nil, "Open without a directory succeeded")
}

func TestOpenAcceptsRootOfFileSystemAndUnfinishedStore(t *testing.T) {
	dir := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(dir, "lost+found"), 0o700))
	write(t, filepath.Join(dir, "lock"), "99999999\n")
	write(t, filepath.Join(dir, "version.new"), "cloist")
	// mkdir may have made the directory writable for the group.
	must.Succeed(t, os.Chmod(dir, 0o755))
	put(t, store(t, open(t, disk.Config{Dir: dir}), ""), 0)
}

func TestOpenRemovesOnlyFilesInTmp(t *testing.T) {
	dir := t.TempDir()
	closeStore(t, open(t, disk.Config{Dir: dir}))
	kept := filepath.Join(dir, "tmp", "kept")
	must.Succeed(t, os.Mkdir(kept, 0o700))
	write(t, filepath.Join(kept, "file"), "kept")
	write(t, filepath.Join(dir, "tmp", "unfinished"), "swept")
	c := must.Get(disk.Open(disk.Config{Dir: dir, MaxBytes: 1 << 20}))(t)
	expect.Message(t, c.Check(t.Context()), kept, "Check")
	must.Succeed(t, c.Close())
	expect.Slices(t, list(t, filepath.Join(dir, "tmp")), []string{".", "kept", "kept/file"}, "tmp")
}

func TestOpenRemovesCopies(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir})
	path, _ := file(t, s, put(t, s, 0), true)
	closeStore(t, c)
	c = open(t, disk.Config{Dir: dir})
	expect.That(t, !exists(path), "the copy still exists")
	s = store(t, c, "")
	_, release := file(t, s, put(t, s, 0), true)
	release()
}

func TestClosedStoreRefuses(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		synctest.Test(t, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Pack: pack}
			c, s := openStore(t, config)
			d := put(t, s, 0)
			b, d1 := castest.Blob(1, block)
			closing := make(chan error, 1)
			// This Put is in progress when the store is closed.
			during := s.Put(t.Context(), d1, io.MultiReader(bytes.NewReader(b), checkReader(func() {
				go func() { closing <- c.Close() }()
				synctest.Wait()
				select {
				case err := <-closing:
					t.Errorf("Close returned %v before the Put", err)
				default:
				}
				expect.Error(t, expect.Err(disk.Open(config)), disk.ErrLocked, "another Open during the Put")
			})))
			expect.Error(t, <-closing, nil, "Close")
			_, openErr := s.Open(t.Context(), d, 0)
			_, missingErr := s.Missing(t.Context(), nil)
			_, _, fileErr := s.File(t.Context(), d, false)
			_, lookupErr := s.Lookup(t.Context(), d)
			_, mappingErr := s.Split(t.Context(), d)
			_, collectErr := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1})
			_, verifyErr := c.Verify(t.Context(), disk.VerifyOptions{})
			for name, err := range map[string]error{
				"Put under way": during, "Put": s.Put(t.Context(), d1, bytes.NewReader(b)), "Open": openErr,
				"PutAll":  s.PutAll(t.Context(), []cas.Blob{{Digest: d1, Data: b}})[0],
				"Missing": missingErr, "File": fileErr, "Lookup": lookupErr, "Mapping": mappingErr, "Collect": collectErr, "Verify": verifyErr,
				"Map":    s.Splice(t.Context(), d1, cas.ChunkList{}),
				"Record": s.Record(t.Context(), d, &repb.ActionResult{}), "Close": c.Close(), "Check": c.Check(t.Context()),
			} {
				expect.Error(t, err, os.ErrClosed, "%s", name)
			}
			expect.Slices(t, present(t, store(t, open(t, config), ""), 2), []byte{0}, "after reopening")
		})
	}
}

// TestClosedStoreRemovesNothing: after Close the directory may belong to another process.
func TestClosedStoreRemovesNothing(t *testing.T) {
	dir := t.TempDir()
	c, s := openStore(t, disk.Config{Dir: dir, Pack: everyFile})
	d := put(t, s, 0)
	r := must.Get(s.Open(t.Context(), d, 0))(t)
	defer r.Close()
	held, release := file(t, s, put(t, s, 1), true)
	b, _ := castest.Blob(0, block)
	damageBlob(t, dir, b)
	must.Succeed(t, c.Close())
	expect.Error(t, expect.Err(io.ReadAll(r)), cas.ErrCorrupt, "after Close")
	release()
	for _, path := range []string{filePath(dir, d), held} {
		expect.That(t, exists(path), "%s is gone", path)
	}
}

// TestConcurrentUseUnderEviction runs all methods on a small store. Each must succeed or return ErrNotFound or ErrFull.
func TestConcurrentUseUnderEviction(t *testing.T) {
	for _, k := range []disk.Config{{}, {Pack: 4096}, {Pack: everyFile}, {Sync: true}} {
		t.Run(fmt.Sprintf("pack=%d,sync=%v", k.Pack, k.Sync), func(t *testing.T) {
			k.Dir, k.MaxBytes, k.Lease = t.TempDir(), 32*block, none
			concurrentUse(t, k)
		})
	}
}

func concurrentUse(t *testing.T, config disk.Config) {
	const workers, rounds, blobs = 8, 150, 40
	c, s := openStore(t, config)
	tolerable := func(err error) bool {
		return err == nil || errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrFull)
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range rounds {
				b, d := castest.Blob(byte((w*7+i)%blobs), 1+(w*7+i)%blobs*200)
				var err error
				switch i % 6 {
				case 0, 1:
					err = s.Put(t.Context(), d, bytes.NewReader(b))
				case 2:
					var got []byte
					if got, err = cas.ReadAll(t.Context(), s, d, d.Size()); err == nil && !bytes.Equal(got, b) {
						t.Errorf("%s: Open returned other content", d)
					}
				case 3:
					var path string
					var release func()
					if path, release, err = s.File(t.Context(), d, w%2 == 0); err == nil {
						if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, b) {
							t.Errorf("%s: File: got %d other bytes, %v", d, len(got), err)
						}
						release()
					}
				case 4:
					if err = s.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(d.Size())}); err == nil {
						var r *repb.ActionResult
						if r, err = s.Lookup(t.Context(), d); err == nil && r.ExitCode != int32(d.Size()) {
							t.Errorf("%s: Lookup returned another result", d)
						}
					}
				case 5:
					err = errors.Join(s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...)
				}
				expect.That(t, tolerable(err), "%s: %v", d, err)
				// Data that is being committed counts twice.
				if st := c.Stats(); st.Bytes > st.MaxBytes+workers*blobs*200*2 {
					t.Errorf("Stats: got %d bytes, budget %d", st.Bytes, st.MaxBytes)
				}
			}
		})
	}
	wg.Wait()
}

// TestPutKeepsFileOfPresentBlob: the file may be mounted.
func TestPutKeepsFileOfPresentBlob(t *testing.T) {
	s := store(t, open(t, disk.Config{Dir: t.TempDir(), Pack: everyFile}), "")
	b, d := castest.Blob(0, block)
	var before os.FileInfo
	var path string
	// A second Put finishes first, and its file is handed out.
	err := s.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b), checkReader(func() {
		put(t, s, 0)
		var release func()
		path, release = file(t, s, d, false)
		t.Cleanup(release)
		var err error
		if before, err = os.Stat(path); err != nil {
			t.Fatal(err)
		}
	})))
	must.Succeed(t, err)
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the file was replaced: %v, %v", after, err)
	}
}
