// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
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

// fill puts blobs of one block, with seeds counting up from the given one, until the store is full, and returns their
// number.
func fill(t *testing.T, s *disk.Store, from, most int) int {
	t.Helper()
	for i := range most {
		err := putOther(t, s, from+i)
		if errors.Is(err, cas.ErrFull) {
			return i
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return most
}

func putOther(t *testing.T, s cas.Store, n int) error {
	b := fmt.Appendf(make([]byte, 0, block), "%d ", n)
	_, err := cas.PutBytes(t.Context(), s, cas.SHA256, b[:block])
	return err
}

type use struct {
	name string
	use  func(t *testing.T, s *disk.Store, d cas.Digest) error
}

// uses are the ways to use a blob, or the result of an action with its digest.
var uses = []use{
	{"Open", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		r, err := s.Open(t.Context(), d, 1)
		if err == nil {
			err = r.Close()
		}
		return err
	}},
	{"Missing", func(t *testing.T, s *disk.Store, d cas.Digest) error { // rule 24
		absent, err := s.Missing(t.Context(), []cas.Digest{d})
		if len(absent) > 0 {
			err = cas.ErrNotFound
		}
		return err
	}},
	{"Put", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		b, _ := castest.Blob(0, int(d.Size()))
		return s.Put(t.Context(), d, bytes.NewReader(b))
	}},
	{"PutAll", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		b, _ := castest.Blob(0, int(d.Size()))
		return errors.Join(s.PutAll(t.Context(), []cas.Blob{{Digest: d, Data: b}})...)
	}},
	{"File", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		_, release, err := s.File(t.Context(), d, false)
		if err == nil {
			release()
		}
		return err
	}},
	{"Place", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		p, err := s.Locate(t.Context(), []cas.Digest{d, d})
		if err == nil {
			p.Release()
		}
		return err
	}},
	{"Lookup", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		_, err := s.Lookup(t.Context(), d)
		return err
	}},
	{"Record", func(t *testing.T, s *disk.Store, d cas.Digest) error {
		return s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1})
	}},
}

// TestLeasedIsNotEvicted also reopens the store: leases survive the end of the process.
func TestLeasedIsNotEvicted(t *testing.T) {
	const lease = 2 * time.Hour
	for _, pack := range []int64{0, everyFile} {
		for _, u := range uses {
			for _, reopen := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s,pack=%d,reopen=%v", u.name, pack, reopen), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						config := disk.Config{Dir: t.TempDir(), MaxBytes: 32 * block, Lease: lease, Pack: pack}
						c, s := openStore(t, config)
						d := put(t, s, 0)
						must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
						for i := byte(1); i < 8; i++ {
							put(t, s, i)
						}
						time.Sleep(lease - time.Second)
						must.Succeed(t, u.use(t, s, d))
						if reopen {
							closeStore(t, c)
							_, s = openStore(t, config)
						}
						time.Sleep(lease)
						// The lease of everything else has expired.
						if n := fill(t, s, 0, 200); n < 10 || n == 200 {
							t.Errorf("put %d blobs into a store of 32", n)
						}
						if u.name == "Lookup" || u.name == "Record" {
							expect.Error(t, expect.Err(s.Lookup(t.Context(), d)), nil, "leased result")
							return
						}
						read(t, s, 0, block)
						if got := present(t, s, 8); len(got) != 1 {
							t.Errorf("present: got %v, want only 0", got)
						}
					})
				})
			}
		}
	}
}

// TestUseWithinGrainRenewsLease: a use soon after the last one is not written, but renews the lease.
func TestUseWithinGrainRenewsLease(t *testing.T) {
	for _, u := range uses {
		synctest.Test(t, func(t *testing.T) {
			const lease = 2 * time.Hour
			c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 32 * block, Lease: lease})
			d := put(t, s, 0)
			must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{}))
			time.Sleep(15 * time.Minute)
			must.Succeed(t, u.use(t, s, d))
			time.Sleep(lease)
			if r, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}); err != nil {
				t.Errorf("Collect: got %+v, %v", r, err)
			}
			if u.name == "Lookup" || u.name == "Record" {
				expect.Error(t, expect.Err(s.Lookup(t.Context(), d)), nil, "%s", u.name)
			} else if !has(t, s, d) {
				t.Errorf("%s: the blob was evicted", u.name)
			}
		})
	}
}

func TestLongestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := openStore(t, disk.Config{Dir: t.TempDir(), Lease: math.MaxInt64})
		put(t, s, 0)
		time.Sleep(24 * time.Hour)
		if r, err := c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1}); err != nil || r.Freed != 0 ||
			r.Leased == 0 {
			t.Errorf("Collect: got %+v, %v", r, err)
		}
		read(t, s, 0, block)
	})
}

// TestLeaseFromFutureExpires: a clock that was ahead does not extend leases.
func TestLeaseFromFutureExpires(t *testing.T) {
	const lease = time.Hour
	config := disk.Config{Dir: t.TempDir(), MaxBytes: 32 * block, Lease: lease}
	c := open(t, config)
	must.Be(t, fill(t, store(t, c, ""), 0, 100) != 100, "the store is not full")
	closeStore(t, c)
	synctest.Test(t, func(t *testing.T) { // starts years earlier
		s := store(t, open(t, config), "")
		time.Sleep(lease + lease/8 + 2*time.Second)
		expect.Error(t, putOther(t, s, 1000), nil)
	})
}

func TestExpiredIsEvicted(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		synctest.Test(t, func(t *testing.T) {
			const lease = time.Hour
			s := store(t, open(t, disk.Config{Dir: t.TempDir(), MaxBytes: 32 * block, Lease: lease, Pack: pack}), "")
			d := put(t, s, 0)
			must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{}))
			fill(t, s, 0, 200)
			expect.Error(t, putOther(t, s, 1000), cas.ErrFull)
			time.Sleep(lease + lease/8 + 2*time.Second) // lease and grain
			for i := range 25 {
				if err := putOther(t, s, 1000+i); err != nil {
					t.Fatalf("pack %d: Put after the lease: %v", pack, err)
				}
				time.Sleep(lease / 5)
			}
			expect.That(t, !has(t, s, d), "the blob was not evicted after its lease")
			if _, err := s.Lookup(t.Context(), d); pack == 0 && !errors.Is(err, cas.ErrNotFound) {
				t.Errorf("result after its lease: got %v, want ErrNotFound", err)
			}
		})
	}
}

// TestOldestIsEvictedFirst: ages have a precision of a quarter.
func TestOldestIsEvictedFirst(t *testing.T) {
	for _, lease := range []time.Duration{none, time.Minute} {
		for _, pack := range []int64{0, everyFile} {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				config := disk.Config{Dir: dir, MaxBytes: 64 * block, Lease: lease, Pack: pack}
				c, s := openStore(t, config)
				for i := range byte(40) {
					put(t, s, i)
					time.Sleep(10 * time.Minute)
				}
				closeStore(t, c)
				// Blobs 4 to 7 share a segment and are the last used.
				s = store(t, open(t, config), "")
				for i := byte(4); i < 8; i++ {
					read(t, s, i, block)
				}
				time.Sleep(10 * time.Minute)
				for i := range 30 {
					must.Succeed(t, putOther(t, s, i))
				}
				got := present(t, s, 40)
				must.Be(t, len(got) >= 8 && len(got) <= 36, "lease %v, pack %d: left %v", lease, pack, got)
				expect.That(t, bytes.HasPrefix(got, []byte{4, 5, 6, 7}),
					"lease %v, pack %d: left %v, want 4 to 7 among them", lease, pack, got)
				// Of the others, the last ones put.
				for _, seed := range got[4:] {
					expect.That(t, int(seed) >= 40-3*len(got)/2,
						"lease %v, pack %d: left %v, although %d is old", lease, pack, got, seed)
				}
			})
		}
	}
}

// TestSmallerBudget reopens a store with a smaller budget: it soon evicts what leases permit, but no blob that was used
// since it was opened.
func TestSmallerBudget(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		synctest.Test(t, func(t *testing.T) {
			const lease = time.Hour
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 64 * block, Lease: lease, Pack: pack}
			c, s := openStore(t, config)
			for i := range byte(40) {
				put(t, s, i)
				time.Sleep(lease)
			}
			closeStore(t, c)
			config.MaxBytes = 24 * block
			c, s = openStore(t, config)
			used := present(t, s, 3)
			time.Sleep(time.Minute + time.Second) // not at a multiple of the maintenance's interval, so that Check runs alone
			if got := c.Stats(); got.Bytes > 24*block || got.Blobs < 10 {
				t.Errorf("pack %d: Stats: got %+v", pack, got)
			}
			got := present(t, s, 40)
			if len(used) != 3 || !bytes.Equal(got[:3], used) || got[len(got)-10] < 15 || got[len(got)-1] != 39 {
				t.Errorf("pack %d: left %v", pack, got)
			}
			expect.Error(t, c.Check(t.Context()), nil)
			must.Succeed(t, c.Close())
			// Everything left is leased.
			config.MaxBytes = 10 * block
			c = must.Get(disk.Open(config))(t)
			s = store(t, c, "")
			if again := present(t, s, 40); !bytes.Equal(again, got) {
				t.Errorf("pack %d: left %v, want %v", pack, again, got)
			}
			expect.Error(t, putOther(t, s, 0), cas.ErrFull, "pack %d", pack)
			must.Succeed(t, c.Close())
		})
	}
}

func TestFullErrorGivesReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, open(t, disk.Config{Dir: dir, MaxBytes: 32 * block, Lease: 42 * time.Minute}), "")
		fill(t, s, 0, 100)
		r, err := s.Missing(t.Context(), nil)
		if err != nil || len(r) > 0 {
			t.Error(r, err)
		}
		_, d := castest.Blob(0, block)
		b, large := castest.Blob(0, 70_000)
		for name, err := range map[string]error{
			"Put":    putOther(t, s, 1000),
			"Record": s.Record(t.Context(), d, &repb.ActionResult{StdoutRaw: make([]byte, block)}),
			"large":  s.Put(t.Context(), large, bytes.NewReader(b)),
		} {
			if !errors.Is(err, cas.ErrFull) {
				t.Errorf("%s: got %v, want ErrFull", name, err)
				continue
			}
			for _, want := range []string{dir, "within the lease of", "42m0s", fmt.Sprint(32 * block)} {
				expect.That(t, strings.Contains(err.Error(), want),
					"%s: got %q, want it to contain %q", name, err, want)
			}
		}
	})
}

// TestFullStoreIsNotRewritten: nothing can be gained while everything is leased.
func TestFullStoreIsNotRewritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		s := store(t, open(t, disk.Config{Dir: dir, MaxBytes: 64 * block}), "")
		fill(t, s, 0, 100)
		before := list(t, dir)
		for i := range 10 {
			time.Sleep(2 * time.Second)
			if err := putOther(t, s, 1000+i); !errors.Is(err, cas.ErrFull) {
				t.Fatalf("got %v, want ErrFull", err)
			}
		}
		expect.Slices(t, list(t, dir), before, "directory after ten failed Puts")
	})
}

func logBytes(t *testing.T, dir string) (n int64) {
	t.Helper()
	for _, path := range segmentFiles(t, dir, ".log") {
		fi := must.Get(os.Stat(path))(t)
		n += fi.Size()
	}
	return n
}

// TestUseIsWrittenOncePerGrain: the grain is an eighth of the lease, and at most 15 minutes.
func TestUseIsWrittenOncePerGrain(t *testing.T) {
	for _, test := range []struct{ lease, grain time.Duration }{
		{80 * time.Minute, 10 * time.Minute}, {24 * time.Hour, 15 * time.Minute}, {none, 15 * time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			dir := t.TempDir()
			c, s := openStore(t, disk.Config{Dir: dir, Lease: test.lease, Sync: true})
			d := put(t, s, 0)
			must.Succeed(t, s.Record(t.Context(), d, &repb.ActionResult{ExitCode: 1}))
			use := func(times int) {
				for range times {
					for _, u := range uses {
						if u.name == "Record" {
							continue
						}
						if err := u.use(t, s, d); err != nil {
							t.Fatalf("%s: %v", u.name, err)
						}
					}
				}
			}
			c.Maintain() // so that nothing else is written
			before := logBytes(t, dir)
			time.Sleep(test.grain)
			use(3)
			expect.Equal(t, logBytes(t, dir)-before, 0, "lease %v: bytes written within the grain", test.lease)
			time.Sleep(time.Second)
			use(3)
			expect.Equal(t, logBytes(t, dir)-before, 2*16,
				"lease %v: bytes of two notes, written after the grain", test.lease)
		})
	}
}

// TestDuplicateDigestsAreNotedOnce: repeating a digest in a request does not grow a log.
func TestDuplicateDigestsAreNotedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, s := openStore(t, disk.Config{Dir: dir})
		a, b := put(t, s, 0), put(t, s, 1)
		c.Maintain() // so that nothing else is written
		before := logBytes(t, dir)
		time.Sleep(time.Hour)
		var ds []cas.Digest
		for range 1000 {
			ds = append(ds, a, a, b)
		}
		missing(t, s, ds...)
		expect.Equal(t, logBytes(t, dir)-before, 2*16, "bytes of two notes")
	})
}

// TestUseDuringEvacuationIsKept also reopens the store.
func TestUseDuringEvacuationIsKept(t *testing.T) {
	const lease = time.Hour
	for round := range 5 {
		synctest.Test(t, func(t *testing.T) {
			config := disk.Config{Dir: t.TempDir(), MaxBytes: 512 << 10, Lease: lease}
			c, s := openStore(t, config)
			var ds []cas.Digest
			for i := range 200 { // one half expires
				b := fmt.Appendf(nil, "%d %d", round, i)
				d := must.Get(cas.PutBytes(t.Context(), s, cas.SHA256, bytes.Repeat(b, 100)))(t)
				ds = append(ds, d)
			}
			time.Sleep(lease)
			for i, d := range ds {
				must.Be(t, i%2 != 0 || has(t, s, d), "absent")
			}
			time.Sleep(lease) // the other half has expired
			var wg sync.WaitGroup
			var used []cas.Digest
			wg.Go(func() {
				for i, d := range ds {
					absent, err := s.Missing(t.Context(), []cas.Digest{d})
					expect.Error(t, err, nil)
					if len(absent) == 0 {
						used = append(used, ds[i])
					}
				}
			})
			r, err := c.Collect(t.Context(), disk.CollectOptions{OlderThan: lease})
			expect.Error(t, err, nil)
			wg.Wait()
			expect.That(t, len(used) >= len(ds)/2 && r.Segments != 0,
				"used %d blobs, evacuated %d segments", len(used), r.Segments)
			closeStore(t, c)
			time.Sleep(lease)
			c = open(t, config)
			expect.Error(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1})), nil)
			expect.Slices(t, missing(t, store(t, c, ""), used...), nil, "evicted blobs that were used within the lease")
		})
	}
}

// TestMissingRenewsLeaseUnderEviction: what Missing reports as present stays for the lease.
func TestMissingRenewsLeaseUnderEviction(t *testing.T) {
	for _, pack := range []int64{0, everyFile} {
		t.Run(fmt.Sprintf("pack=%d", pack), func(t *testing.T) {
			const lease, workers, blobs = time.Minute, 6, 30
			synctest.Test(t, func(t *testing.T) {
				c, s := openStore(t, disk.Config{Dir: t.TempDir(), MaxBytes: 40 * block, Lease: lease, Pack: pack})
				evicted := int64(0)
				for round := range 12 {
					time.Sleep(lease + lease/8 + 2*time.Second) // everything may be evicted
					for i := range byte(blobs / 2) {
						_ = tryPut(t, s, i+byte(round%2)*blobs/2)
					}
					time.Sleep(lease + lease/8 + 2*time.Second)
					var wg sync.WaitGroup
					for w := range workers {
						wg.Go(func() {
							for i := range byte(blobs) {
								if w%2 == 0 {
									_ = putOther(t, s, round*1000+w*100+int(i))
									continue
								}
								b, d := castest.Blob((i*7+byte(w))%blobs, block)
								if !has(t, s, d) {
									continue
								}
								r, err := s.Open(t.Context(), d, 0)
								if err != nil {
									t.Errorf("a blob that Missing reported as present: %v", err)
									continue
								}
								got, err := io.ReadAll(r)
								if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, b) {
									t.Errorf("a blob that Missing reported as present: got %d bytes, %v", len(got), err)
								}
							}
						})
					}
					wg.Wait()
					evicted = c.Stats().EvictedBlobs
				}
				expect.That(t, evicted >= blobs, "evicted only %d blobs", evicted)
			})
		})
	}
}

func tryPut(t *testing.T, s *disk.Store, seed byte) error {
	b, d := castest.Blob(seed, block)
	return s.Put(t.Context(), d, bytes.NewReader(b))
}

// TestCompactionShortensLog keeps entries, stamps and drops.
func TestCompactionShortensLog(t *testing.T) {
	for _, sync := range []bool{false, true} {
		shorten(t, sync)
	}
}

func shorten(t *testing.T, sync bool) {
	synctest.Test(t, func(t *testing.T) {
		const lease = time.Hour
		dir := t.TempDir()
		config := disk.Config{Dir: dir, Lease: lease, Sync: sync}
		c, s := openStore(t, config)
		var ds []cas.Digest
		for i := range byte(10) {
			ds = append(ds, putSize(t, s, i, 1000))
		}
		large := putSize(t, s, 10, 70_000)
		ds = append(ds, large)
		for n := range int32(5) {
			must.Succeed(t, s.Record(t.Context(), ds[0], &repb.ActionResult{ExitCode: n}))
		}
		b, _ := castest.Blob(5, 1000)
		damageBlob(t, dir, b)
		expect.Error(t, expect.Err(s.Open(t.Context(), ds[5], 0)), cas.ErrCorrupt)
		ds = append(ds[:5], ds[6:]...)
		before, after := int64(0), int64(0)
		for range 40 {
			time.Sleep(lease / 4)
			if lost := missing(t, s, ds...); len(lost) > 0 {
				t.Fatal(lost)
			}
			must.Get(s.Lookup(t.Context(), ds[0]))(t)
			before = logBytes(t, dir)
			time.Sleep(time.Minute) // two maintenance intervals
			if after = logBytes(t, dir); after < before {
				break // all stamps are in puts
			}
		}
		expect.That(t, after < before && after <= 12*64+32,
			"sync %v: the log has %d bytes, before %d", sync, after, before)
		check := func() {
			t.Helper()
			for i := range byte(10) {
				if i != 5 {
					read(t, s, i, 1000)
				}
			}
			read(t, s, 10, 70_000)
			if r, err := s.Lookup(t.Context(), ds[0]); err != nil || r.ExitCode != 4 {
				t.Errorf("Lookup: got %v, %v", r, err)
			}
		}
		putSize(t, s, 20, 100) // in the next segment, or at the end
		time.Sleep(lease - 2*time.Minute)
		for range 2 {
			closeStore(t, c)
			c, s = openStore(t, config)
			expect.Error(t, expect.Err(c.Collect(t.Context(), disk.CollectOptions{MaxBytes: 1})), nil)
			expect.That(t, !has(t, s, digestOfBlob(5, 1000)), "a damaged blob is present again")
		}
		check()
	})
}

func digestOfBlob(seed byte, size int) cas.Digest { _, d := castest.Blob(seed, size); return d }

// TestFullErrorsNameTheLimit: each limit has its own remedy.
func TestFullErrorsNameTheLimit(t *testing.T) {
	for _, test := range []struct {
		config disk.Config
		want   cas.Limit
		text   string
	}{
		{disk.Config{MaxBytes: 1 << 20}, cas.LimitBytes, "bytes are in use"},
		{disk.Config{MaxBytes: 64 << 20, MaxFiles: 20, Pack: everyFile}, cas.LimitFiles, "of its 20 files"},
	} {
		test.config.Dir = t.TempDir()
		s := store(t, open(t, test.config), "")
		var err error
		for i := 0; err == nil && i < 1000; i++ {
			err = putOther(t, s, i)
		}
		wantLimit(t, err, test.want)
		expect.That(t, strings.Contains(err.Error(), test.text), "got %v, want %q", err, test.text)
	}
	_, err := cas.PutBytes(t.Context(), store(t, open(t, disk.Config{Dir: t.TempDir()}), ""), cas.SHA256, make([]byte, 2<<20))
	wantLimit(t, err, cas.LimitBytes)
}

func wantLimit(t *testing.T, err error, want cas.Limit) {
	t.Helper()
	full, ok := errors.AsType[*cas.FullError](err)
	expect.That(t, ok && full.Limit == want && errors.Is(err, cas.ErrFull), "got %v, want limit %d", err, want)
}
