// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// splice puts blobs of the given sizes, and splices their concatenation.
func splice(t testing.TB, s *disk.Store, seed byte, sizes ...int) ([]byte, cas.Digest, []cas.Digest) {
	t.Helper()
	b, d, m := castest.PutChunks(t, s, seed, sizes...)
	must.Succeed(t, s.Splice(t.Context(), d, m))
	return b, d, m.Chunks
}

// wantBlob checks that d is b, read through its chunks.
func wantBlob(t testing.TB, s *disk.Store, d cas.Digest, b []byte) {
	t.Helper()
	got, err := cas.ReadAll(t.Context(), s, d, d.Size())
	expect.That(t, err == nil && bytes.Equal(got, b), "blob %s: got %d bytes, %v", d, len(got), err)
}

// TestChunksAreStoredOnce: blobs share common chunks.
func TestChunksAreStoredOnce(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 256 << 20})
	const chunk, chunks = 512 << 10, 40
	sizes := slices.Repeat([]int{chunk}, chunks)
	b, d, of := splice(t, s, 0, sizes...)
	one := c.Stats().Bytes
	must.Be(t, one >= chunk*chunks && one <= chunk*chunks+1<<20, "a blob of %d bytes takes %d", chunk*chunks, one)
	changed, piece := castest.Blob(100, chunk)
	must.Succeed(t, s.Put(t.Context(), piece, bytes.NewReader(changed)))
	other := slices.Concat(b[:7*chunk], changed, b[8*chunk:])
	otherOf := slices.Concat(of[:7], []cas.Digest{piece}, of[8:])
	must.Succeed(t, s.Splice(t.Context(), cas.SHA256.Sum(other), cas.ChunkList{Chunks: otherOf}))
	if both := c.Stats().Bytes; both > one+chunk+16<<10 {
		t.Errorf("two blobs that differ in one chunk take %d bytes, one of them %d", both, one)
	}
	wantBlob(t, s, d, b)
	wantBlob(t, s, cas.SHA256.Sum(other), other)
}

func TestChunkListSurvivesReopen(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20}
	c, s := openStore(t, config)
	b, d, of := splice(t, s, 0, 1000, 100_000)
	// The list is replaced, and the first one must not reappear.
	more := slices.Concat(of, of)
	twice := cas.SHA256.Sum(append(bytes.Clone(b), b...))
	for _, m := range []cas.ChunkList{{Function: 1, Chunks: more}, {Function: 2, Chunks: more}} {
		must.Succeed(t, s.Splice(t.Context(), twice, m))
	}
	before := c.Stats()
	closeStore(t, c)
	for range 2 {
		c, s = openStore(t, config)
		if got := c.Stats(); got.Blobs != before.Blobs || got.Results != 0 || got.Blobs != 4 {
			t.Errorf("got %d blobs and %d results, want 2 chunks and 2 lists", got.Blobs, got.Results)
		}
		wantBlob(t, s, d, b)
		if m, err := s.Split(t.Context(), twice); err != nil || m.Function != 2 || !slices.Equal(m.Chunks, more) {
			t.Errorf("Split: got %+v, %v", m, err)
		}
		expect.That(t, !has(t, store(t, c, "other"), d), "the blob is present in another instance")
		closeStore(t, c)
	}
}

// TestUseOfSplicedBlobRenewsLeasesOfChunks tries all uses.
func TestUseOfSplicedBlobRenewsLeasesOfChunks(t *testing.T) {
	maps := use{"Map", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		m, err := s.Split(t.Context(), d)
		if err != nil {
			return err
		}
		return s.Splice(t.Context(), d, m)
	}}
	for _, u := range append(slices.Clone(uses), maps) {
		if u.name == "Lookup" || u.name == "Record" {
			continue // uses of results
		}
		t.Run(u.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const lease, size = time.Hour, 150_000
				config := disk.Config{Dir: t.TempDir(), MaxBytes: 16 << 20, Lease: lease}
				c, s := openStore(t, config)
				b, d := castest.Blob(0, size)
				parts := [][]byte{b[:10_000], b[10_000:]}
				m := cas.ChunkList{Chunks: []cas.Digest{cas.SHA256.Sum(parts[0]), cas.SHA256.Sum(parts[1])}}
				for i, p := range parts {
					must.Succeed(t, s.Put(t.Context(), m.Chunks[i], bytes.NewReader(p)))
				}
				must.Succeed(t, s.Splice(t.Context(), d, m))
				for range 2 {
					time.Sleep(lease - time.Second)
					must.Succeed(t, u.use(t, s, d))
				}
				expect.That(t, !exists(filePath(config.Dir, d)), "the blob is stored as a whole")
				time.Sleep(lease)
				must.Get(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}))(t)
				wantBlob(t, s, d, b)
				time.Sleep(2 * lease)
				must.Get(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}))(t)
				if got := missing(t, s, d, m.Chunks[0], m.Chunks[1]); len(got) != 3 {
					t.Errorf("after the lease: missing only %v", got)
				}
			})
		})
	}
}

// TestSplicedBlobDependsOnItsChunks: it is absent without a chunk, and present again with it.
func TestSplicedBlobDependsOnItsChunks(t *testing.T) {
	for name, size := range map[string]int{"packed": 5000, "file": 100_000} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20, Lease: time.Hour})
				b, d, of := splice(t, s, 0, 5000, size)
				time.Sleep(4 * time.Hour)
				// The list and one chunk are used; the other chunk is not.
				if _, err := s.Split(t.Context(), d); err != nil || !has(t, s, of[0]) {
					t.Fatal(err)
				}
				must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: 2 * time.Hour}))(t)
				if got := missing(t, s, of[1], d, of[0], d); !slices.Equal(got, []cas.Digest{of[1], d}) {
					t.Fatalf("Missing: got %v", got)
				}
				expect.Error(t, expect.Err(s.Open(t.Context(), d, 0)), cas.ErrNotFound, "Open")
				if _, _, err := s.File(t.Context(), d, true); !errors.Is(err, cas.ErrNotFound) {
					t.Errorf("File: got %v", err)
				}
				p, err := s.Locate(t.Context(), []cas.Digest{d, of[1]})
				expect.That(t, err == nil && p.Extents()[0].File == cas.Absent, "Locate: got %v", err)
				p.Release()
				must.Succeed(t, s.Put(t.Context(), of[1], bytes.NewReader(b[5000:])))
				wantBlob(t, s, d, b)
				expect.Slices(t, missing(t, s, d), nil, "Missing")
			})
		})
	}
}

// TestPutReplacesIncompleteChunkList: a blob that lost a chunk can be put as a whole.
func TestPutReplacesIncompleteChunkList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20, Lease: none})
		b, d, of := splice(t, s, 0, 100_000, 200_000)
		time.Sleep(2 * time.Hour)
		must.Get(s.Split(t.Context(), d))(t)
		must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Hour}))(t)
		must.Succeed(t, s.Put(t.Context(), d, bytes.NewReader(b)))
		wantBlob(t, s, d, b)
		expect.Slices(t, missing(t, s, append(of, d)...), of, "Missing")
		at, release := file(t, s, d, false)
		defer release()
		if got, err := os.ReadFile(at); err != nil || !bytes.Equal(got, b) {
			t.Errorf("File: got %d bytes, %v", len(got), err)
		}
	})
}

// TestChunkListIsMoved: evacuation moves chunk lists.
func TestChunkListIsMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		config := disk.Config{Dir: t.TempDir(), MaxBytes: 16 << 20, Lease: time.Hour}
		c, s := openStore(t, config)
		for i := range byte(100) {
			put(t, s, i)
		}
		b, d, _ := splice(t, s, 200, 3000, 4000)
		time.Sleep(3 * time.Hour)
		wantBlob(t, s, d, b)
		r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: 2 * time.Hour})
		expect.That(t, err == nil && r.Blobs >= 100 && r.Moved != 0, "Collect: got %+v, %v", r, err)
		wantBlob(t, s, d, b)
		closeStore(t, c)
		wantBlob(t, store(t, open(t, config), ""), d, b)
	})
}

// listOf returns the stored form of a list of two chunks, to find and damage it.
func listOf(t *testing.T, chunks []cas.Digest) []byte {
	return must.Get(hex.DecodeString(chunks[0].Hash()))(t)
}

func TestDamagedChunkListIsFound(t *testing.T) {
	for _, how := range []string{"Open", "Missing", "Mapping", "Verify", "Put"} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			var reported []cas.Digest
			c := open(t, disk.Config{Dir: dir, MaxBytes: 16 << 20, Corrupt: func(_ string, d cas.Digest, where string) {
				if strings.HasPrefix(where, "segments/") {
					reported = append(reported, d)
				}
			}})
			s := store(t, c, "")
			b, d, of := splice(t, s, 0, 3000, 4000)
			path, at := find(t, dir, listOf(t, of))
			damageFile(t, path, func(b []byte) []byte { b[at+3] ^= 4; return b })
			var err error
			switch how {
			case "Open":
				_, err = s.Open(t.Context(), d, 0)
			case "Missing":
				if missing(t, s, d) != nil {
					err = cas.ErrNotFound
				}
			case "Mapping":
				_, err = s.Split(t.Context(), d)
			case "Verify":
				var r disk.VerifyReport
				if r, err = c.Verify(t.Context(), disk.VerifyOptions{}); err == nil && len(r.Damaged) == 1 &&
					r.Damaged[0].Digest == d {
					err = cas.ErrNotFound
				}
			case "Put":
				if err = s.Put(t.Context(), d, bytes.NewReader(b)); err == nil {
					wantBlob(t, s, d, b)
					err = cas.ErrNotFound
				}
			}
			expect.Error(t, err, cas.ErrNotFound)
			expect.That(t, slices.Equal(reported, []cas.Digest{d}), "Corrupt: got %v, want %s", reported, d)
			must.Succeed(t, s.Splice(t.Context(), d, cas.ChunkList{Chunks: of}))
			wantBlob(t, s, d, b)
		})
	}
}

func TestDamagedChunkMakesBlobAbsent(t *testing.T) {
	for _, off := range []int64{0, 1, 3500} {
		for _, size := range []int{4000, 100_000} {
			t.Run(fmt.Sprint(off, ",", size), func(t *testing.T) {
				dir := t.TempDir()
				c, s := openStore(t, disk.Config{Dir: dir, MaxBytes: 16 << 20})
				b, d, of := splice(t, s, 0, 3000, size)
				damageBlob(t, dir, b[3000:])
				closeStoreDamaged(t, c)
				_, s = openStore(t, disk.Config{Dir: dir, MaxBytes: 16 << 20})
				r, err := s.Open(t.Context(), d, off)
				if err == nil {
					var got []byte
					got, err = io.ReadAll(r)
					if r.Close(); err == nil || !bytes.HasPrefix(b[off:], got[:min(len(got), 3000)]) {
						t.Errorf("got %d bytes", len(got))
					}
				}
				expect.That(t, errors.Is(err, cas.ErrCorrupt) || errors.Is(err, cas.ErrNotFound),
					"got %v, want ErrCorrupt", err)
				expect.Slices(t, missing(t, s, d, of[0], of[1]), []cas.Digest{d, of[1]}, "Missing")
				must.Succeed(t, s.Put(t.Context(), of[1], bytes.NewReader(b[3000:])))
				wantBlob(t, s, d, b)
			})
		}
	}
}

// closeStoreDamaged closes a store without Check.
func closeStoreDamaged(t *testing.T, c *disk.Cache) {
	t.Helper()
	must.Succeed(t, c.Close())
}

// TestLongChunkList: a list may exceed the size of a segment.
func TestLongChunkList(t *testing.T) {
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 8 << 20}
	c, s := openStore(t, config)
	b, piece := castest.Blob(1, 10)
	must.Succeed(t, s.Put(t.Context(), piece, bytes.NewReader(b)))
	const n = 20_000
	whole := bytes.Repeat(b, n)
	d := cas.SHA256.Sum(whole)
	must.Succeed(t, s.Splice(t.Context(), d, cas.ChunkList{Chunks: slices.Repeat([]cas.Digest{piece}, n)}))
	closeStore(t, c)
	s = store(t, open(t, config), "")
	wantBlob(t, s, d, whole)
	// A list larger than the budget is rejected.
	const more = 300_000
	d = cas.SHA256.Sum(bytes.Repeat(b, more))
	expect.Error(t, s.Splice(t.Context(), d, cas.ChunkList{Chunks: slices.Repeat([]cas.Digest{piece}, more)}),
		cas.ErrFull)
	expect.That(t, !has(t, s, d), "the blob is present")
}
