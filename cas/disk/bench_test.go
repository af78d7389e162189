// SPDX-License-Identifier: Apache-2.0

package disk_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/tests/must"
)

// smallBlobs returns n blobs of size bytes that depend on round.
func smallBlobs(round, n, size int) []cas.Blob {
	blobs := make([]cas.Blob, n)
	for i := range blobs {
		b := make([]byte, size)
		binary.LittleEndian.PutUint64(b, uint64(round))
		binary.LittleEndian.PutUint64(b[8:], uint64(i))
		blobs[i] = cas.Blob{Digest: cas.SHA256.Sum(b), Data: b}
	}
	return blobs
}

// BenchmarkSmallBlobs puts small blobs one by one and in batches, reads them and calls Missing: as files, packed, and
// packed with Sync.
func BenchmarkSmallBlobs(b *testing.B) {
	const size, batch = 1024, 1000
	for _, c := range []struct {
		name   string
		config disk.Config
	}{
		{"files", disk.Config{Pack: -1}},
		{"packed", disk.Config{}},
		{"packed,sync", disk.Config{Sync: true}},
	} {
		c.config.MaxBytes = 64 << 30
		for _, n := range []int{batch, 1} {
			b.Run(fmt.Sprintf("put/%s/by=%d", c.name, n), func(b *testing.B) {
				c.config.Dir = b.TempDir()
				s := store(b, open(b, c.config), "")
				round := 0
				for b.Loop() {
					b.StopTimer()
					blobs := smallBlobs(round, n, size)
					round++
					b.StartTimer()
					for _, err := range s.PutAll(context.Background(), blobs) {
						must.Succeed(b, err)
					}
				}
				b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "blobs/s")
			})
		}
		b.Run("read/"+c.name, func(b *testing.B) {
			c.config.Dir = b.TempDir()
			s := store(b, open(b, c.config), "")
			blobs := smallBlobs(0, batch, size)
			s.PutAll(b.Context(), blobs)
			i := 0
			for b.Loop() {
				if _, err := cas.ReadAll(b.Context(), s, blobs[i%batch].Digest, size); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
		b.Run("missing/"+c.name, func(b *testing.B) {
			c.config.Dir = b.TempDir()
			s := store(b, open(b, c.config), "")
			blobs := smallBlobs(0, batch, size)
			s.PutAll(b.Context(), blobs)
			ds := make([]cas.Digest, batch)
			for i := range ds {
				ds[i] = blobs[i].Digest
			}
			for b.Loop() {
				if _, err := s.Missing(b.Context(), ds); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(batch*float64(b.N)/b.Elapsed().Seconds(), "digests/s")
		})
	}
}

// BenchmarkOpen opens a store of small blobs, and reports the memory that its index takes.
func BenchmarkOpen(b *testing.B) {
	const blobs, batch = 1_000_000, 4000
	c := disk.Config{Dir: b.TempDir(), MaxBytes: 64 << 30}
	cache, err := disk.Open(c)
	must.Succeed(b, err)
	in := store(b, cache, "")
	for round := range blobs / batch {
		must.Succeed(b, errors.Join(in.PutAll(b.Context(), smallBlobs(round, batch, 256))...))
	}
	must.Succeed(b, cache.Close())
	var before, after runtime.MemStats
	for b.Loop() {
		b.StopTimer()
		debug.FreeOSMemory()
		runtime.ReadMemStats(&before)
		b.StartTimer()
		if cache, err = disk.Open(c); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		debug.FreeOSMemory()
		runtime.ReadMemStats(&after)
		must.Succeed(b, cache.Close())
		b.StartTimer()
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/blobs, "B/blob")
}
