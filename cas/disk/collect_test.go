// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
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
)

// step is the time between the puts of aged. The store syncs a file every 15 minutes, so longer steps take longer to
// test.
const step = 2 * time.Hour

// aged opens a store with blobs of one block and of ten, and results, each put a step after the last.
func aged(t *testing.T, steps int, config disk.Config) (*disk.Cache, *disk.Store) {
	t.Helper()
	config.Dir, config.MaxBytes = t.TempDir(), 16<<20
	c, s := openStore(t, config)
	for i := range byte(steps) {
		put(t, s, i)
		d := putSize(t, s, i, 20*block)
		must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: int32(i)}))
		time.Sleep(step)
	}
	return c, s
}

func TestCollectOlderThan(t *testing.T) {
	for _, pack := range []int64{0, everyFile, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			const steps, kept = 40, 10
			c, s := aged(t, steps, disk.Config{Pack: pack})
			before := c.Stats()
			o := disk.CollectOptions{OlderThan: kept*step + step/2, DryRun: true}
			dry, err := c.Collect(t.Context(), o)
			if err != nil || c.Stats() != before {
				t.Fatalf("the dry run changed %+v to %+v, %v", before, c.Stats(), err)
			}
			o.DryRun = false
			r := must.Get(c.Collect(t.Context(), o))(t)
			time.Sleep(time.Minute) // for a mark in each log
			// A second call finds nothing to remove.
			if r, err := c.Collect(t.Context(), o); err != nil || r.Freed != 0 || r.Moved != 0 || r.Segments != 0 {
				t.Errorf("pack %d: second Collect: got %+v, %v", pack, r, err)
			}
			expect.That(t, r.Blobs+r.Files == 3*(steps-kept) && c.Stats().EvictedBlobs == 3*(steps-kept),
				"pack %d: Collect: got %+v", pack, r)
			if got := present(t, s, steps); len(got) != kept || got[0] != steps-kept {
				t.Errorf("pack %d: left %v", pack, got)
			}
			for i := range byte(steps) {
				b, d := castest.Blob(i, 20*block)
				got, err := cas.ReadAll(t.Context(), s, d, d.Size())
				expect.That(t, (err == nil && bytes.Equal(got, b)) == (i >= steps-kept),
					"pack %d: large blob %d: %v", pack, i, err)
				if _, err := s.Lookup(t.Context(), d); (err == nil) != (i >= steps-kept) {
					t.Errorf("pack %d: result %d: %v", pack, i, err)
				}
			}
			after := c.Stats()
			expect.That(t, r.Freed == before.Bytes-after.Bytes+(after.Bytes-r.Bytes) && r.MaxBytes == before.MaxBytes,
				"pack %d: got %+v, and the size went from %d to %d bytes", pack, r, before.Bytes, after.Bytes)
			if dry.Freed < r.Freed*9/10 || dry.Freed > r.Freed*11/10 || dry.Files != r.Files ||
				dry.Segments > r.Segments+1 || dry.Bytes != before.Bytes-dry.Freed {
				t.Errorf("pack %d: the dry run reported %+v, Collect %+v", pack, dry, r)
			}
		})
	}
}

func TestCollectMaxBytes(t *testing.T) {
	for _, pack := range []int64{0, everyFile, 1 << 20} {
		synctest.Test(t, func(t *testing.T) {
			const steps = 40
			c, s := aged(t, steps, disk.Config{Pack: pack})
			before := c.Stats()
			o := disk.CollectOptions{MaxBytes: before.Bytes / 2, DryRun: true}
			dry, err := c.Collect(t.Context(), o)
			if err != nil || c.Stats() != before {
				t.Fatalf("the dry run changed %+v to %+v, %v", before, c.Stats(), err)
			}
			o.DryRun = false
			r, err := c.Collect(t.Context(), o)
			after := c.Stats()
			if err != nil || after.Bytes > o.MaxBytes || after.Bytes < o.MaxBytes*6/10 || r.Bytes != after.Bytes ||
				r.Freed != before.Bytes-after.Bytes {
				t.Errorf("pack %d: got %+v, %v, and the size went from %d to %d bytes", pack, r, err, before.Bytes, after.Bytes)
			}
			expect.That(t, dry.Freed >= before.Bytes-o.MaxBytes && dry.Freed <= r.Freed*3/2,
				"pack %d: the dry run reported %+v, Collect %+v", pack, dry, r)
			// The youngest stay.
			for i := byte(steps - 8); i < steps; i++ {
				read(t, s, i, block)
				read(t, s, i, 20*block)
			}
		})
	}
}

func TestCollectKeepsLeasedAndPinned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := aged(t, 20, disk.Config{Lease: 5 * step})
		_, old := castest.Blob(0, 20*block)
		path, release := file(t, s, old, false)
		copied, releaseCopy := file(t, s, old, true)
		time.Sleep(6 * step) // the lease from File has expired, too
		b, d := castest.Blob(19, block)
		read(t, s, 19, block)
		r := must.Get(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}))(t)
		if st := c.Stats(); r.Leased != block || r.Pinned != 2*20*block || st.Blobs != 2 || r.Bytes > 45*block {
			t.Errorf("Collect: got %+v, Stats %+v", r, st)
		}
		if got, err := cas.ReadAll(t.Context(), s, d, block); err != nil || !bytes.Equal(got, b) {
			t.Error("the leased blob was removed")
		}
		large, _ := castest.Blob(0, 20*block)
		for _, path := range []string{path, copied} {
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, large) {
				t.Errorf("%s: got %d bytes, %v", path, len(got), err)
			}
		}
		release()
		releaseCopy()
		time.Sleep(7 * step)
		if r, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}); err != nil || r.Copies != 1 ||
			r.Files != 1 || c.Stats().Bytes != 0 {
			t.Errorf("after release: got %+v, %v, Stats %+v", r, err, c.Stats())
		}
	})
}

func TestCollectAges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 16 << 20})
		for i, wait := range []time.Duration{32 * day, 8 * day, 2 * day, 10 * time.Hour, 0} {
			for range 1 << i {
				putSize(t, s, byte(c.Stats().Blobs), 1000)
			}
			putSize(t, s, byte(i), 80_000)
			time.Sleep(wait)
		}
		_, d := castest.Blob(0, 80_000)
		_, release := file(t, s, d, false) // counts as leased, not as pinned
		defer release()
		r := must.Get(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 16 << 20, DryRun: true}))(t)
		var blobs, sum int64
		for _, row := range r.Ages {
			blobs += row.Blobs
			sum += row.Bytes
			if row.Leased && (row.Bytes != r.Leased || row.Blobs != 16+1+1) {
				t.Errorf("Leased: got %d, row %+v", r.Leased, row)
			}
		}
		if want := int64(31*1024 + 5*20*block); blobs != 36 || sum != want || len(r.Ages) != 5 {
			t.Errorf("got %d blobs of %d bytes, want 36 of %d: %+v", blobs, sum, want, r.Ages)
		}
		// 42 days, 10, 2, and half a day; leased blobs come first.
		for i, want := range []int64{18, 9, 5, 3, 1} {
			expect.That(t, r.Ages[i].Blobs == want, "%q: got %d blobs, want %d", r.Ages[i].Label, r.Ages[i].Blobs, want)
		}
	})
}

func TestCollectRejectsInvalidOptions(t *testing.T) {
	c := open(t, disk.Config{Dir: t.TempDir()})
	for _, o := range []disk.CollectOptions{{}, {MaxBytes: -1}, {OlderThan: -1}, {DryRun: true}} {
		expect.Error(t, expect.Err(c.Collect(t.Context(), o)), cas.ErrInvalid, "%+v", o)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expect.Error(t, expect.Err(c.Collect(ctx, disk.CollectOptions{MaxBytes: 1})), context.Canceled)
}

// TestCollectStopsWithItsContext: a cancelled Collect leaves a consistent store.
func TestCollectStopsWithItsContext(t *testing.T) {
	for calls := 1; calls < 60; calls += 6 {
		synctest.Test(t, func(t *testing.T) {
			c, s := aged(t, 20, disk.Config{Pack: 1 << 20})
			_, err := c.Collect(&endsAfter{Context: t.Context(), calls: calls}, disk.CollectOptions{OlderThan: 10*step + step/2})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			for i := byte(10); i < 20; i++ {
				read(t, s, i, block)
				read(t, s, i, 20*block)
			}
		})
	}
}

// TestReadersSurviveCollect reads while blobs are moved and removed.
func TestReadersSurviveCollect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := aged(t, 20, disk.Config{Lease: none})
		b, d := castest.Blob(0, 20*block)
		small, sd := castest.Blob(0, block)
		var readers []io.ReadCloser
		for _, d := range []cas.Digest{d, sd} {
			r := must.Get(s.Open(t.Context(), d, 0))(t)
			defer r.Close()
			readers = append(readers, r)
		}
		time.Sleep(40 * step)
		if _, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}); err != nil || c.Stats().Blobs > 0 {
			t.Fatal(err, c.Stats())
		}
		for i, want := range [][]byte{b, small} {
			if got, err := io.ReadAll(readers[i]); err != nil || !bytes.Equal(got, want) {
				t.Errorf("got %d bytes, %v", len(got), err)
			}
		}
	})
}

// TestDamagedBlobIsNotMoved: evacuation drops a damaged blob.
func TestDamagedBlobIsNotMoved(t *testing.T) {
	for _, cut := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			const lease = time.Hour
			dir := t.TempDir()
			var reported []cas.Digest
			c, s := openStore(t, disk.Config{Dir: dir, Lease: lease, Corrupt: func(_ string, d cas.Digest, _ string) { reported = append(reported, d) }})
			for i := byte(1); i < 4; i++ {
				put(t, s, i)
			}
			time.Sleep(2 * lease)
			put(t, s, 4)
			d := put(t, s, 0) // the last, in the segment of the expired ones
			b, _ := castest.Blob(0, block)
			path, at := find(t, dir, b)
			if cut {
				must.Succeed(t, os.Truncate(path, int64(at)+1))
			} else {
				damageBlob(t, dir, b)
			}
			if r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease}); err != nil || r.Segments == 0 {
				t.Errorf("Collect: got %+v, %v", r, err)
			}
			expect.That(t, !exists(path), "the segment was not evacuated")
			read(t, s, 4, block)
			expect.That(t, !has(t, s, d), "the damaged blob was moved")
			expect.That(t, slices.Equal(reported, []cas.Digest{d}) && c.Stats().Corrupt == 1,
				"Corrupt was called with %v, counted %d", reported, c.Stats().Corrupt)
			if got := list(t, filepath.Join(dir, "quarantine")); len(got) != 2 && !cut {
				t.Errorf("quarantine: got %q", got)
			}
		})
	}
}

// TestLaterResultWins also reopens the store, and evacuates the segments of both results.
func TestLaterResultWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Hour
		config := disk.Config{Dir: t.TempDir(), Lease: lease}
		c := open(t, config)
		_, action := castest.Blob(0, 10)
		n := 0
		for round := range 4 {
			s := store(t, c, "")
			for range 4 - round { // fewer each time: orders that started again would be too low
				n++
				must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: int32(n)}))
				for i := range byte(5) { // fill the segment
					put(t, s, byte(n)*5+i)
				}
			}
			if round%2 == 1 {
				time.Sleep(2 * lease)
				if r, err := s.Lookup(t.Context(), action); err != nil || r.ExitCode != int32(n) {
					t.Errorf("round %d: Lookup: got %v, %v", round, r, err)
				}
				if r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease}); err != nil ||
					r.Segments == 0 {
					t.Errorf("round %d: Collect: got %+v, %v", round, r, err)
				}
			}
			closeStore(t, c)
			c = open(t, config)
			if r, err := store(t, c, "").Lookup(t.Context(), action); err != nil || r.ExitCode != int32(n) {
				t.Errorf("round %d, after reopening: got %v, %v, want %d", round, r, err, n)
			}
			expect.Equal(t, c.Stats().Results, 1, "results")
		}
	})
}

// TestReplacedResultStaysReplaced: a replaced result does not reappear when its successor is evicted or lost, even if
// the process ended before it recorded the replacement.
func TestReplacedResultStaysReplaced(t *testing.T) {
	for _, lost := range []bool{false, true} {
		for _, noted := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				// One result is no reason to evacuate a large segment.
				config := disk.Config{Dir: t.TempDir(), MaxBytes: 4 << 20}
				c, s := openStore(t, config)
				_, action := castest.Blob(0, 10)
				record := func(n int32) {
					t.Helper()
					must.Succeed(t, s.Record(t.Context(), action, &repb.ActionResult{ExitCode: n}))
				}
				var used []cas.Digest
				record(1)
				for i := byte(0); len(segmentFiles(t, config.Dir, ".log")) < 2; i++ {
					used = append(used, put(t, s, i))
				}
				record(2)
				if lost || !noted {
					closeStore(t, c)
				}
				if !noted {
					path := filepath.Join(config.Dir, firstLog)
					fi, err := os.Stat(path)
					if err != nil || fi.Size()%64 != 16 {
						t.Fatalf("%v: without the note at its end the log has %d bytes", err, fi.Size())
					}
					must.Succeed(t, os.Truncate(path, fi.Size()-16))
				}
				if lost {
					must.Succeed(t, os.Truncate(segmentFiles(t, config.Dir, ".data")[1], 0))
				}
				if lost || !noted { // otherwise in one process
					c, s = openStore(t, config)
				}
				if !lost {
					time.Sleep(48 * time.Hour)
					missing(t, s, used...) // keeps the first segment
					must.Get(c.Collect(t.Context(), disk.CollectOptions{OlderThan: 24 * time.Hour}))(t)
				}
				for round := range 2 {
					expect.Error(t, expect.Err(store(t, c, "").Lookup(t.Context(), action)), cas.ErrNotFound,
						"lost %v, noted %v, round %d", lost, noted, round)
					closeStore(t, c)
					c = open(t, config)
				}
			})
		}
	}
}

// TestLittleEvacuationForLittleGain: one Put does not cause evacuating everything if little has expired.
func TestLittleEvacuationForLittleGain(t *testing.T) {
	for name, lapses := range map[string]func(i int) bool{
		"a little everywhere":    func(i int) bool { return i%20 == 0 },
		"half of the first ones": func(i int) bool { return i%20 == 0 || i < 300 && i%2 == 0 },
	} {
		synctest.Test(t, func(t *testing.T) {
			const lease = time.Hour
			dir := t.TempDir()
			s := store(t, open(t, disk.Config{Dir: dir, MaxBytes: 4 << 20, Lease: lease}), "")
			var all []cas.Digest
			for i := 0; ; i++ {
				d, err := cas.PutBytes(t.Context(), s, cas.SHA256, fmt.Appendf(nil, "%01000d", i))
				if errors.Is(err, cas.ErrFull) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				all = append(all, d)
			}
			time.Sleep(2 * lease)
			for i, d := range all {
				must.Be(t, lapses(i) || has(t, s, d), "absent")
			}
			before := segmentFiles(t, dir, ".data")
			put(t, s, 0)
			after := segmentFiles(t, dir, ".data")
			gone := 0
			for _, path := range before {
				if !slices.Contains(after, path) {
					gone++
				}
			}
			expect.That(t, gone != 0 && gone <= 8 && len(before) >= 30,
				"%s: evacuated %d of %d segments", name, gone, len(before))
		})
	}
}

// TestBudgetsHoldUnderLoad runs random load with Collect and Verify on a store with few bytes or files.
func TestBudgetsHoldUnderLoad(t *testing.T) {
	for _, config := range []disk.Config{
		{MaxBytes: 1 << 20, Lease: none},
		{MaxBytes: 1 << 20, Lease: none, Pack: everyFile},
		{MaxBytes: 64 << 20, MaxFiles: 60, Lease: none, Pack: 2000},
		{MaxBytes: 1 << 20, MaxFiles: 50, Pack: 5000, Lease: none, Sync: true},
	} {
		t.Run(fmt.Sprintf("bytes=%d,files=%d,pack=%d", config.MaxBytes, config.MaxFiles, config.Pack), func(t *testing.T) {
			const workers, rounds = 6, 150
			config.Dir = t.TempDir()
			c, s := openStore(t, config)
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					random := rand.New(rand.NewPCG(1, uint64(w)))
					for i := range rounds {
						size := 1 + random.IntN(1<<(6+random.IntN(10)))
						b, d := castest.Blob(byte(random.IntN(256)), size)
						var err error
						switch random.IntN(10) {
						case 0:
							var got []byte
							if got, err = cas.ReadAll(t.Context(), s, d, d.Size()); err == nil && !bytes.Equal(got, b) {
								t.Errorf("%s: other content", d)
							}
						case 1:
							var release func()
							if _, release, err = s.File(t.Context(), d, i%2 == 0); err == nil {
								release()
							}
						case 2:
							err = s.Record(t.Context(), d, &repb.ActionResult{StdoutRaw: b})
						case 3:
							if w == 0 {
								_, err = c.Collect(t.Context(), disk.CollectOptions{MaxBytes: config.MaxBytes / 2})
							} else if w == 1 {
								_, err = c.Verify(t.Context(), disk.VerifyOptions{})
							} else if w == 2 {
								c.Maintain()
							}
						default:
							err = s.Put(t.Context(), d, bytes.NewReader(b))
						}
						if err != nil && !errors.Is(err, cas.ErrNotFound) && !errors.Is(err, cas.ErrFull) &&
							!strings.Contains(err.Error(), "is kept") {
							t.Error(err)
						}
						st := c.Stats()
						// Data that is being committed counts twice.
						expect.That(t, st.Bytes <= st.MaxBytes+workers*2<<16,
							"got %d bytes, budget %d", st.Bytes, st.MaxBytes)
						// A file that changes while it is counted may count twice.
						if _, files := occupied(t, config.Dir); config.MaxFiles > 0 && files > config.MaxFiles+workers {
							t.Errorf("got %d files, budget %d", files, config.MaxFiles)
						}
					}
				})
			}
			wg.Wait()
			st := c.Stats()
			expect.That(t, st.Corrupt <= 0 && st.EvictedBlobs != 0, "Stats: got %+v", st)
			r, err := c.Verify(t.Context(), disk.VerifyOptions{Restart: true})
			expect.That(t, err == nil && len(r.Damaged) == 0 && r.Blobs >= int64(st.Blobs+st.Results),
				"Verify: got %+v, %v", r, err)
		})
	}
}

// TestConcurrentPutsReserveFiles: they do not all take the last file.
func TestConcurrentPutsReserveFiles(t *testing.T) {
	const most = 20
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, s := openStore(t, disk.Config{Dir: dir, MaxFiles: most, Pack: everyFile, Lease: none})
		gate := make(chan struct{})
		var wg sync.WaitGroup
		for i := range byte(60) {
			wg.Go(func() {
				b, d := castest.Blob(i, block)
				err := s.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b), checkReader(func() { <-gate })))
				if err != nil && !errors.Is(err, cas.ErrFull) {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if _, files := occupied(t, dir); files > most || c.Stats().Files > most {
			t.Errorf("found %d files, counted %d, budget %d", files, c.Stats().Files, most)
		}
		close(gate)
		wg.Wait()
		if _, files := occupied(t, dir); files > most || files < 5 {
			t.Errorf("at the end: got %d files, budget %d", files, most)
		}
		for i := range byte(60) {
			must.Succeed(t, tryPut(t, s, i))
		}
	})
}
