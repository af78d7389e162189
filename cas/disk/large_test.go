// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var largeBlobs = flag.Int("large", 0, "number of blobs in the larger of two stores that TestLargeStore measures; 0 uses small ones")

// TestLargeStore fills, opens, searches, verifies and halves a store of many small blobs. With -large it prints how
// long that takes. A row with a quarter of the blobs shows whether anything grows faster than they do.
func TestLargeStore(t *testing.T) {
	sizes := []int{20_000}
	if *largeBlobs > 0 {
		sizes = []int{*largeBlobs / 4, *largeBlobs}
	}
	for _, n := range sizes {
		t.Run(fmt.Sprint(n), func(t *testing.T) { newLargeStore(t, n).measure(t) })
	}
}

// A largeStore is a store of blobs of largeSize bytes.
type largeStore struct {
	config disk.Config
	blobs  int
	cache  *disk.Cache
	took   time.Duration // of a step, if it did other things as well
	memory int64         // of the index
	logs   int64         // size of its files
}

const (
	largeSize  = 64
	largeBatch = 4000
)

// newLargeStore returns an empty store for n blobs, rounded up to whole batches.
func newLargeStore(t *testing.T, n int) *largeStore {
	n = (n + largeBatch - 1) / largeBatch * largeBatch
	// Without leases anything can be evicted. The budget is about three times what the blobs take.
	m := &largeStore{config: disk.Config{Dir: t.TempDir(), MaxBytes: int64(n) * 2000, Lease: -1}, blobs: n}
	m.cache = must.Get(disk.Open(m.config))(t)
	t.Cleanup(func() {
		if m.cache != nil {
			must.Succeed(t, m.cache.Close())
		}
	})
	return m
}

// measure calls all steps, each of which returns a number of blobs, and prints a row.
func (m *largeStore) measure(t *testing.T) {
	row := fmt.Sprintf("| %d |", m.blobs)
	for _, step := range []func(*testing.T) int{m.fill, m.open, m.missing, m.verify, m.evict} {
		m.took = 0
		began := time.Now()
		blobs := step(t)
		if m.took == 0 {
			m.took = time.Since(began)
		}
		row += fmt.Sprintf(" %.0f/s |", float64(blobs)/m.took.Seconds())
	}
	t.Logf("large: %s %d B | %d B |", row, m.memory/int64(m.blobs), m.logs/int64(m.blobs))
}

// fill puts all blobs.
func (m *largeStore) fill(t *testing.T) int {
	s := store(t, m.cache, "")
	for round := range m.blobs / largeBatch {
		blobs := smallBlobs(round, largeBatch, largeSize)
		began := time.Now()
		must.Succeed(t, errors.Join(s.PutAll(t.Context(), blobs)...))
		m.took += time.Since(began)
	}
	m.cache.Maintain()
	return m.blobs
}

// open closes the store and opens it again.
func (m *largeStore) open(t *testing.T) int {
	must.Succeed(t, m.cache.Close())
	err := filepath.WalkDir(m.config.Dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasSuffix(path, ".data") {
			return err
		}
		info, err := e.Info()
		if err == nil {
			m.logs += info.Size()
		}
		return err
	})
	must.Succeed(t, err)
	m.cache = nil
	before := heap()
	began := time.Now()
	m.cache = must.Get(disk.Open(m.config))(t)
	m.took = time.Since(began)
	m.memory = heap() - before
	expect.Equal(t, m.cache.Stats().Blobs, m.blobs, "blobs after Open")
	return m.blobs
}

// heap returns the size of what is in use.
func heap() int64 {
	debug.FreeOSMemory()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}

// missing looks up random batches, of which every second one is absent.
func (m *largeStore) missing(t *testing.T) int {
	s := store(t, m.cache, "")
	batches := min(100, 2*m.blobs/largeBatch)
	for i := range batches {
		round := rand.IntN(m.blobs / largeBatch)
		want := 0
		if i%2 == 1 {
			round += m.blobs
			want = largeBatch
		}
		var ds []cas.Digest
		for _, b := range smallBlobs(round, largeBatch, largeSize) {
			ds = append(ds, b.Digest)
		}
		rand.Shuffle(len(ds), func(i, k int) { ds[i], ds[k] = ds[k], ds[i] })
		began := time.Now()
		absent, err := s.Missing(t.Context(), ds)
		m.took += time.Since(began)
		must.Succeed(t, err)
		expect.Equal(t, len(absent), want, "absent blobs of batch %d", i)
	}
	return batches * largeBatch
}

// verify reads all blobs.
func (m *largeStore) verify(t *testing.T) int {
	r := must.Get(m.cache.Verify(t.Context(), disk.VerifyOptions{Restart: true}))(t)
	expect.That(t, r.Blobs == int64(m.blobs) && len(r.Damaged) == 0,
		"Verify read %d blobs and found %d damaged, want %d and none", r.Blobs, len(r.Damaged), m.blobs)
	return m.blobs
}

// evict removes half of the store.
func (m *largeStore) evict(t *testing.T) int {
	before := m.cache.Stats()
	r := must.Get(m.cache.Collect(t.Context(), disk.CollectOptions{MaxBytes: before.Bytes / 2}))(t)
	after := m.cache.Stats()
	expect.That(t, after.Bytes <= before.Bytes/2 && after.Blobs == before.Blobs-r.Blobs && after.Blobs >= before.Blobs/4,
		"Collect left %d of %d bytes and %d of %d blobs, want half of each", after.Bytes, before.Bytes, after.Blobs, before.Blobs)
	return r.Blobs
}
