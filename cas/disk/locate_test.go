// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// locate locates the blobs of ds, and releases the result at the end of the test.
func locate(t testing.TB, s cas.Locator, ds ...cas.Digest) cas.Location {
	t.Helper()
	p := must.Get(s.Locate(t.Context(), ds))(t)
	t.Cleanup(p.Release)
	return p
}

// absent returns the indexes of the extents that are absent.
func absent(p cas.Location) (is []int) {
	for i, e := range p.Extents() {
		if e.File == cas.Absent {
			is = append(is, i)
		}
	}
	return is
}

// at returns size bytes of the extent of blob i.
func at(t testing.TB, p cas.Location, i, size int) []byte {
	t.Helper()
	b := make([]byte, size)
	e := p.Extents()[i]
	must.Get(p.Files()[e.File].ReadAt(b, e.Offset))(t)
	return b
}

// overwrite writes b into the file at path as another process does.
func overwrite(t testing.TB, path string, b []byte, off int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must.Succeed(t, err)
	_, err = f.WriteAt(b, int64(off))
	later := time.Now().Add(time.Minute)
	must.Succeed(t, errors.Join(err, f.Close(), os.Chtimes(path, later, later)))
}

func TestLocateFindsPackedBlobs(t *testing.T) {
	s := store(t, open(t, disk.Config{Pack: 8 << 10, Dir: t.TempDir()}), "")
	small, large := putSize(t, s, 1, 8<<10-1), putSize(t, s, 2, 8<<10)
	p := locate(t, s, small, large)
	if e := p.Extents(); e[0].File != 0 || e[1].File != cas.Unpacked || len(p.Files()) != 1 {
		t.Errorf("got extents %v in %d files", e, len(p.Files()))
	}
	other := store(t, open(t, disk.Config{Dir: t.TempDir()}), "nothing was put here")
	if p := locate(t, other, small, cas.SHA256.Sum(nil)); p.Extents()[0].File != cas.Absent ||
		p.Extents()[1].File != cas.Unpacked || !p.Valid() {
		t.Errorf("unused instance: got %v", p.Extents())
	}
}

// TestLocateVerifies: blobs of an earlier process are verified together with their padding. Damage affects no other
// blob.
func TestLocateVerifies(t *testing.T) {
	const n = 400
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 64 << 20, Pack: 1 << 20}
	var reported atomic.Int32
	config.Corrupt = func(string, cas.Digest, string) { reported.Add(1) }
	c, s := openStore(t, config)
	size := func(i int) int { return []int{100, 3000, 513, 200_000, 40_000, 1, 10_000}[i%7] + i }
	var ds []cas.Digest
	for i := range n {
		ds = append(ds, putSize(t, s, byte(i), size(i)))
		if i%5 == 0 {
			putSize(t, s, byte(i), 20_000+i) // not located
		}
	}
	must.Succeed(t, c.Close())
	var want []int
	for i := 3; i < n; i += 37 {
		b, _ := castest.Blob(byte(i), size(i))
		path, off := find(t, config.Dir, b)
		if i%2 == 0 && size(i)%512 != 0 {
			off += size(i) // in the padding
		} else {
			off += size(i) / 2
		}
		old := must.Get(os.ReadFile(path))(t)
		overwrite(t, path, []byte{old[off] ^ 1}, off)
		want = append(want, i)
	}
	_, s = openStore(t, config)
	p := locate(t, s, append(slices.Clone(ds), ds...)...)
	all := absent(p)
	if got := all[:len(all)/2]; !slices.Equal(got, want) || len(all) != 2*len(want) || !p.Valid() {
		t.Errorf("absent: got %v, want %v twice; valid %v", all, want, p.Valid())
	}
	for i := range n {
		if b, _ := castest.Blob(byte(i), size(i)); !slices.Contains(want, i) && !bytes.Equal(at(t, p, i, size(i)), b) {
			t.Errorf("blob %d has other content", i)
		}
	}
	expect.Equal(t, int(reported.Load()), len(want), "blobs for which Corrupt was called")
}

// TestLocationOutlivesItsSegment: extents stay valid when the segment is removed or the store closed.
func TestLocationOutlivesItsSegment(t *testing.T) {
	for _, how := range []string{"evicted", "moved", "closed"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				config := disk.Config{Dir: t.TempDir(), Lease: none}
				c, s := openStore(t, config)
				put(t, s, 9)
				if how == "moved" {
					time.Sleep(10 * time.Hour)
				}
				b, d := castest.Blob(1, 5000)
				putSize(t, s, 1, 5000)
				first, p := locate(t, s, d), locate(t, s, d)
				path := segmentFiles(t, config.Dir, ".data")[0]
				switch how {
				case "evicted":
					time.Sleep(10 * time.Hour)
					fallthrough
				case "moved":
					must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: time.Hour}))(t)
					must.Be(t, !exists(path), "the segment still exists")
					if now := locate(t, s, d); how == "moved" &&
						(now.Extents()[0].File != 0 || !bytes.Equal(at(t, now, 0, 5000), b)) {
						t.Error("a moved blob has no extent")
					} else if how == "evicted" && now.Extents()[0].File != cas.Absent {
						t.Error("an evicted blob has an extent")
					}
					for i := range byte(20) { // would reuse free space
						put(t, s, 100+i)
					}
					expect.Equal(t, c.Stats().HeldBytes, 5120+block, "HeldBytes")
				case "closed":
					closeStore(t, c)
					expect.Error(t, expect.Err(s.Locate(t.Context(), []cas.Digest{d})), os.ErrClosed,
						"Locate in a closed store")
				}
				first.Release()
				expect.That(t, p.Valid() && bytes.Equal(at(t, p, 0, 5000), b), "the extents have changed")
				f := p.Files()[0]
				p.Release()
				if _, err := f.Stat(); !errors.Is(err, os.ErrClosed) || p.Valid() {
					t.Errorf("after Release: valid %v, reading the file: %v", p.Valid(), err)
				}
				expect.Equal(t, c.Stats().HeldBytes, 0, "HeldBytes after Release")
			})
		})
	}
}

// TestForeignWriteInvalidatesLocations: a write of another process to a segment invalidates all Locations, even if the
// store has written since. From then on every Locate verifies the data again.
func TestForeignWriteInvalidatesLocations(t *testing.T) {
	for _, put := range []bool{false, true} {
		config := disk.Config{Dir: t.TempDir()}
		_, s := openStore(t, config)
		var ds []cas.Digest
		var blobs [][]byte
		for i := range byte(3) {
			b, d := castest.Blob(i, 2000)
			ds, blobs = append(ds, d), append(blobs, b)
			putSize(t, s, i, 2000)
		}
		before := locate(t, s, ds...)
		path, off := find(t, config.Dir, blobs[0])
		overwrite(t, path, []byte{blobs[0][0] ^ 1}, off)
		if put {
			putSize(t, s, 9, 2000)
		}
		expect.That(t, !before.Valid(), "the Location is valid after a foreign write")
		p := locate(t, s, ds...)
		if got := absent(p); !slices.Equal(got, []int{0}) || !p.Valid() || !bytes.Equal(at(t, p, 1, 2000), blobs[1]) {
			t.Errorf("absent: got %v, valid %v", got, p.Valid())
		}
		expect.That(t, !before.Valid(), "the old Location is valid again")
		// A write that does not change size and time.
		fi := must.Get(os.Stat(path))(t)
		_, off = find(t, config.Dir, blobs[1])
		overwrite(t, path, []byte{blobs[1][0] ^ 1}, off)
		must.Succeed(t, os.Chtimes(path, fi.ModTime(), fi.ModTime()))
		expect.Slices(t, absent(locate(t, s, ds...)), []int{0, 1}, "absent after a hidden write")
	}
}

// TestLocateInTruncatedSegment: an image would show zeros in place of missing data.
func TestLocateInTruncatedSegment(t *testing.T) {
	config := disk.Config{Dir: t.TempDir()}
	s := store(t, open(t, config), "")
	ds := []cas.Digest{put(t, s, 1), putSize(t, s, 2, 700)}
	before := locate(t, s, ds...)
	must.Succeed(t, os.Truncate(segmentFiles(t, config.Dir, ".data")[0], block+700))
	expect.That(t, !before.Valid(), "the Location is valid after its file was truncated")
	expect.Slices(t, absent(locate(t, s, ds...)), []int{1}, "absent")
}

// TestLocateInReplacedSegment replaces the file of a segment by another one. The blob can still be used as a copy.
func TestLocateInReplacedSegment(t *testing.T) {
	var log bytes.Buffer
	config := disk.Config{Dir: t.TempDir(), Log: slog.New(slog.NewTextHandler(&log, nil))}
	s := store(t, open(t, config), "")
	d := put(t, s, 1)
	path, other := segmentFiles(t, config.Dir, ".data")[0], filepath.Join(config.Dir, "other")
	fi := must.Get(os.Stat(path))(t)
	write(t, other, string(make([]byte, block)))
	must.Succeed(t, errors.Join(os.Chtimes(other, fi.ModTime(), fi.ModTime()), os.Rename(other, path)))
	for range 2 {
		at := locate(t, s, d, d)
		if got := at.Extents(); got[0].File != cas.Unpacked || got[1].File != cas.Unpacked || len(at.Files()) > 0 {
			t.Errorf("got %v, want no extents", got)
		}
	}
	copied, release := file(t, s, d, false)
	defer release()
	want, _ := castest.Blob(1, block)
	if got, err := os.ReadFile(copied); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy has %d bytes of other content, %v", len(got), err)
	}
	expect.Equal(t, strings.Count(log.String(), "replaced by another file"), 1, "warnings in %s", &log)
}

// TestDamageInvalidatesLocations of its segment, however it is found.
func TestDamageInvalidatesLocations(t *testing.T) {
	for name, discover := range map[string]func(*disk.Cache, *disk.Store, cas.Digest) error{
		"Open": func(_ *disk.Cache, s *disk.Store, d cas.Digest) error {
			_, err := s.Open(t.Context(), d, 0)
			return err
		},
		"Verify": func(c *disk.Cache, _ *disk.Store, _ cas.Digest) error {
			_, err := c.Verify(t.Context(), disk.VerifyOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir()}
			c, s := openStore(t, config)
			d, kept := put(t, s, 1), put(t, s, 2)
			p := locate(t, s, d, kept)
			path := segmentFiles(t, config.Dir, ".data")[0]
			fi := must.Get(os.Stat(path))(t)
			b, _ := castest.Blob(1, block)
			damageBlob(t, config.Dir, b)
			// Damage without a write, as by the disk.
			must.Succeed(t, os.Chtimes(path, fi.ModTime(), fi.ModTime()))
			must.Be(t, p.Valid(), "the Location is invalid before the damage was found")
			if err := discover(c, s, d); err != nil && !errors.Is(err, cas.ErrCorrupt) {
				t.Fatal(err)
			}
			expect.That(t, !p.Valid(), "the Location is still valid")
			if p := locate(t, s, d, kept); !slices.Equal(absent(p), []int{0}) || !p.Valid() {
				t.Errorf("absent: got %v, valid %v", absent(p), p.Valid())
			}
		})
	}
}

// TestConcurrentLocate: extents are right and stay valid during puts, evictions and moves.
func TestConcurrentLocate(t *testing.T) {
	c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 600 << 10, Lease: none})
	var group sync.WaitGroup
	for w := range 3 {
		group.Go(func() {
			for i := range 60 {
				var ds []cas.Digest
				var blobs [][]byte
				for j := range byte(10) {
					b, d := castest.Blob(byte(5*i)+j, 3000+w)
					expect.Error(t, expect.Err(cas.PutBytes(t.Context(), s, cas.SHA256, b)), nil)
					ds, blobs = append(ds, d), append(blobs, b)
				}
				p, err := s.Locate(t.Context(), ds)
				if err != nil {
					t.Error(err)
					return
				}
				if i%10 == 0 {
					expect.Error(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 100 << 10})), nil)
				}
				for j, e := range p.Extents() {
					expect.That(t, e.File < 0 || bytes.Equal(at(t, p, j, len(blobs[j])), blobs[j]),
						"blob %d has other content", j)
				}
				expect.That(t, p.Valid(), "the Location is invalid")
				p.Release()
			}
		})
	}
	group.Wait()
	expect.Equal(t, c.Stats().HeldBytes, 0, "HeldBytes")
}

// TestHeldSegmentsCountAgainstTheBudget checks that removed segments and the store together stay within the budget
// while a holder can release Locations, and that Put does not fail if it cannot: neither if all blobs have one age, nor
// if the oldest ones that an eviction selects stay held as a whole.
func TestHeldSegmentsCountAgainstTheBudget(t *testing.T) {
	for _, releases := range []bool{true, false} {
		for _, pause := range []time.Duration{0, 100 * time.Millisecond} {
			synctest.Test(t, func(t *testing.T) { holdSegments(t, releases, pause) })
		}
	}
}

// holdSegments puts and locates blobs, with a pause between them.
func holdSegments(t *testing.T, releases bool, pause time.Duration) {
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Lease: -1}
	c, s := openStore(t, config)
	var held []cas.Location
	c.SetHolder(func() bool {
		i := slices.IndexFunc(held, cas.Location.Removed)
		if i < 0 || !releases {
			return false
		}
		held[i].Release()
		held = slices.Delete(held, i, i+1)
		return true
	})
	var most int64
	for _, b := range smallBlobs(0, 1000, 4000) {
		must.Succeed(t, s.Put(t.Context(), b.Digest, bytes.NewReader(b.Data)))
		held = append(held, locate(t, s, b.Digest))
		onDisk, _ := occupied(t, config.Dir)
		most = max(most, onDisk+c.Stats().HeldBytes)
		time.Sleep(pause)
	}
	if releases && most > config.MaxBytes || c.Stats().HeldBytes == 0 {
		t.Errorf("releases %v, pause %v: the disk had up to %d bytes, %d of them held, want at most %d and some held",
			releases, pause, most, c.Stats().HeldBytes, config.MaxBytes)
	}
	for _, l := range held {
		l.Release()
	}
	closeStore(t, c)
}

// TestHeldSegmentsAreReleasedBeforePutFails fills the store with leased blobs.
func TestHeldSegmentsAreReleasedBeforePutFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 1 << 20, Lease: time.Hour})
		var held []cas.Location
		c.SetHolder(func() bool {
			if len(held) == 0 {
				return false
			}
			held[0].Release()
			held = held[1:]
			return true
		})
		blobs := smallBlobs(0, 400, 4000)
		for _, b := range blobs[:50] {
			must.Succeed(t, s.Put(t.Context(), b.Digest, bytes.NewReader(b.Data)))
			held = append(held, locate(t, s, b.Digest))
		}
		time.Sleep(2 * time.Hour)
		var err error
		for _, b := range blobs[50:] {
			if err = s.Put(t.Context(), b.Digest, bytes.NewReader(b.Data)); err != nil {
				break
			}
		}
		if !errors.Is(err, cas.ErrFull) || c.Stats().HeldBytes != 0 {
			t.Errorf("got %v with %d bytes held, want %v with none", err, c.Stats().HeldBytes, cas.ErrFull)
		}
		for _, l := range held {
			l.Release()
		}
		closeStore(t, c)
	})
}

// BenchmarkLocate locates 2,000 small blobs, verified or not, and checks whether the result is valid.
func BenchmarkLocate(b *testing.B) {
	config := disk.Config{Dir: b.TempDir(), MaxBytes: 64 << 30}
	blobs := smallBlobs(0, 2000, 4096)
	c := open(b, config)
	s := store(b, c, "")
	must.Succeed(b, errors.Join(s.PutAll(b.Context(), blobs)...))
	ds := make([]cas.Digest, len(blobs))
	for i := range ds {
		ds[i] = blobs[i].Digest
	}
	b.Run("known", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			p := must.Get(s.Locate(b.Context(), ds))(b)
			p.Release()
		}
	})
	b.Run("missing", func(b *testing.B) {
		for b.Loop() {
			missing(b, s, ds...)
		}
	})
	b.Run("valid", func(b *testing.B) {
		p := locate(b, s, ds...)
		for b.Loop() {
			p.Valid()
		}
	})
	must.Succeed(b, c.Close())
	b.Run("first", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			c := open(b, config)
			s := store(b, c, "")
			b.StartTimer()
			locate(b, s, ds...).Release()
			b.StopTimer()
			must.Succeed(b, c.Close())
			b.StartTimer()
		}
	})
}
