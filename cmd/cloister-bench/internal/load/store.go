// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk"
)

// StoreConfig configures RunStore.
type StoreConfig struct {
	Dir   string // of the store; new, or that of an earlier run
	Salt  string // of the contents
	Blobs int    // at least 1
	Size  int64  // bytes of a blob, at least 8
	Reads int    // random reads
	Sync  bool   // sync each batch to disk before the next one
}

// A StoreReport is the result of RunStore. Times are in seconds, rates in blobs per second.
type StoreReport struct {
	Blobs    int     `json:"blobs"`
	Size     int64   `json:"blob_bytes"`
	Filled   bool    `json:"filled"` // by this run
	Put      float64 `json:"put_rate"`
	Close    float64 `json:"close_seconds"`
	Open     float64 `json:"open_seconds"`
	OpenCPU  float64 `json:"open_cpu_seconds"` // of all threads; 0 if unknown
	Heap     float64 `json:"heap_bytes_per_blob"`
	Resident float64 `json:"resident_bytes_per_blob"` // 0 if unknown
	Missing  float64 `json:"missing_rate"`            // lookups of blobs that are present
	Read     float64 `json:"read_rate"`
}

// putsBatch is the number of blobs per PutAll, as many as fill a batch of 1 KiB blobs.
const putsBatch = 4000

// RunStore fills a store with small blobs, unless it already contains as many, closes it, opens it again, and reads
// some blobs. The store remains.
func RunStore(ctx context.Context, c StoreConfig) (*StoreReport, error) {
	r := &StoreReport{Blobs: c.Blobs, Size: c.Size}
	store, in, err := c.open()
	if err != nil {
		return nil, err
	}
	if store.Stats().Blobs < c.Blobs {
		r.Filled = true
		r.Put, err = c.fill(ctx, in)
	}
	start := time.Now()
	if err := errors.Join(err, store.Close()); err != nil {
		return nil, err
	}
	r.Close = time.Since(start).Seconds()

	heap, resident := memory()
	before := ownUsage()
	start = time.Now()
	if store, in, err = c.open(); err != nil {
		return nil, err
	}
	defer store.Close()
	r.Open = time.Since(start).Seconds()
	r.OpenCPU = (ownUsage().cpu - before.cpu).Seconds()
	heapAfter, residentAfter := memory()
	r.Heap = float64(heapAfter-heap) / float64(c.Blobs)
	r.Resident = float64(residentAfter-resident) / float64(c.Blobs)
	if r.Missing, err = c.lookUp(ctx, in); err != nil {
		return nil, err
	}
	r.Read, err = c.read(ctx, in)
	return r, err
}

// open opens the store with space for all blobs twice.
func (c *StoreConfig) open() (*disk.Cache, *cas.Instance, error) {
	store, err := disk.Open(disk.Config{Dir: c.Dir, MaxBytes: 1<<30 + 2*int64(c.Blobs)*(c.Size+1024), Sync: c.Sync})
	if err != nil {
		return nil, nil, err
	}
	in, err := store.Instance("bench")
	if err != nil {
		return nil, nil, errors.Join(err, store.Close())
	}
	return store, in, nil
}

// blob generates blob i.
func (c *StoreConfig) blob(i int) cas.Blob {
	data := make([]byte, c.Size)
	copy(data[8:], c.Salt)
	binary.LittleEndian.PutUint64(data, uint64(i))
	return cas.Blob{Digest: cas.SHA256.Sum(data), Data: data}
}

// timed calls f and adds its duration to spent.
func timed(spent *time.Duration, f func()) {
	start := time.Now()
	f()
	*spent += time.Since(start)
}

// batches calls f with all blobs in batches of n, and returns the rate. Generating the blobs does not count.
func (c *StoreConfig) batches(n int, f func([]cas.Blob) error) (rate float64, err error) {
	var spent time.Duration
	batch := make([]cas.Blob, 0, n)
	for i := 0; i < c.Blobs; {
		for batch = batch[:0]; i < c.Blobs && len(batch) < n; i++ {
			batch = append(batch, c.blob(i))
		}
		if timed(&spent, func() { err = f(batch) }); err != nil {
			return 0, err
		}
	}
	return float64(c.Blobs) / spent.Seconds(), nil
}

// fill puts all blobs.
func (c *StoreConfig) fill(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	return c.batches(putsBatch, func(batch []cas.Blob) error {
		return errors.Join(cas.PutAll(ctx, in.Store, batch)...)
	})
}

// lookUp looks up all blobs, which must be present.
func (c *StoreConfig) lookUp(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	ds := make([]cas.Digest, 0, lookupsBatch)
	return c.batches(lookupsBatch, func(batch []cas.Blob) error {
		ds = ds[:0]
		for _, b := range batch {
			ds = append(ds, b.Digest)
		}
		missing, err := in.Store.Missing(ctx, ds)
		if err == nil && len(missing) > 0 {
			err = fmt.Errorf("%d of %d blobs are missing, for example %s", len(missing), len(ds), missing[0])
		}
		return err
	})
}

// read reads random blobs.
func (c *StoreConfig) read(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	if c.Reads == 0 {
		return 0, nil
	}
	var spent time.Duration
	random := rand.New(rand.NewPCG(1, 2))
	for range c.Reads {
		want := c.blob(random.IntN(c.Blobs))
		var got []byte
		if timed(&spent, func() { got, err = cas.ReadAll(ctx, in.Store, want.Digest, c.Size) }); err != nil {
			return 0, err
		}
		if !bytes.Equal(got, want.Data) {
			return 0, fmt.Errorf("blob %s: read other bytes than were put", want.Digest)
		}
	}
	return float64(c.Reads) / spent.Seconds(), nil
}

// ownUsage returns the usage of this process, or nothing if it is unknown.
func ownUsage() usage {
	u, err := usageOf(os.Getpid())
	if err != nil {
		return usage{}
	}
	return u
}

// memory returns the bytes in use on the heap, and the resident bytes that belong to no file.
func memory() (heap, resident int64) {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), ownUsage().anonymous
}
