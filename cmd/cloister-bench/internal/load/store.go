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

// StoreConfig says what RunStore does.
type StoreConfig struct {
	Dir   string // of the store, which holds nothing else
	Salt  string // of the contents
	Blobs int    // at least 1
	Size  int64  // bytes of a blob, at least 8
	Reads int    // blobs that are read, at random
	Sync  bool   // what is put is on the disk before the next is
}

// A StoreReport is what RunStore has measured. Times are in seconds, and rates in blobs a second.
type StoreReport struct {
	Blobs    int     `json:"blobs"`
	Size     int64   `json:"blob_bytes"`
	Filled   bool    `json:"filled"` // whether there was anything to put
	Put      float64 `json:"put_rate"`
	Close    float64 `json:"close_seconds"`
	Open     float64 `json:"open_seconds"`
	OpenCPU  float64 `json:"open_cpu_seconds"` // of all threads; 0 where the operating system does not say
	Heap     float64 `json:"heap_bytes_per_blob"`
	Resident float64 `json:"resident_bytes_per_blob"` // 0 where the operating system does not say
	Missing  float64 `json:"missing_rate"`            // digests asked for, all of which are present
	Read     float64 `json:"read_rate"`
}

// puts is how many blobs are put at once: as many as fill a batch of 1 KiB each.
const puts = 4000

// RunStore fills a store with small blobs, unless it has as many already, closes it, opens it again, and reads
// some. The store stays.
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
	store, in = nil, nil

	heap, resident := memory()
	before := ownUsage()
	start = time.Now()
	if store, in, err = c.open(); err != nil {
		return nil, err
	}
	defer store.Close()
	r.Open = time.Since(start).Seconds()
	r.OpenCPU = (ownUsage().cpu - before.cpu).Seconds()
	heapNow, residentNow := memory()
	r.Heap = float64(heapNow-heap) / float64(c.Blobs)
	r.Resident = float64(residentNow-resident) / float64(c.Blobs)
	if r.Missing, err = c.ask(ctx, in); err != nil {
		return nil, err
	}
	r.Read, err = c.read(ctx, in)
	return r, err
}

// open opens the store, with room for all blobs and as much again.
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

// blob returns the blob i.
func (c *StoreConfig) blob(i int) cas.Blob {
	data := make([]byte, c.Size)
	copy(data[8:], c.Salt)
	binary.LittleEndian.PutUint64(data, uint64(i))
	return cas.Blob{Digest: cas.SHA256.Sum(data), Data: data}
}

// fill puts all blobs and returns how many it put a second. What a batch is made of is not counted.
func (c *StoreConfig) fill(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	var spent time.Duration
	batch := make([]cas.Blob, 0, puts)
	for i := 0; i < c.Blobs; {
		for batch = batch[:0]; i < c.Blobs && len(batch) < puts; i++ {
			batch = append(batch, c.blob(i))
		}
		start := time.Now()
		errs := cas.PutAll(ctx, in.Store, batch)
		spent += time.Since(start)
		if err := errors.Join(errs...); err != nil {
			return 0, err
		}
	}
	return float64(c.Blobs) / spent.Seconds(), nil
}

// ask asks for all blobs, all of which must be present, and returns for how many a second.
func (c *StoreConfig) ask(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	var spent time.Duration
	for i := 0; i < c.Blobs; {
		var ds []cas.Digest
		for ; i < c.Blobs && len(ds) < asked; i++ {
			ds = append(ds, c.blob(i).Digest)
		}
		start := time.Now()
		missing, err := in.Store.Missing(ctx, ds)
		spent += time.Since(start)
		if err != nil {
			return 0, err
		}
		if len(missing) > 0 {
			return 0, fmt.Errorf("%d of %d blobs are absent, for example %s", len(missing), len(ds), missing[0])
		}
	}
	return float64(c.Blobs) / spent.Seconds(), nil
}

// read reads blobs at random, and returns how many a second.
func (c *StoreConfig) read(ctx context.Context, in *cas.Instance) (rate float64, err error) {
	if c.Reads == 0 {
		return 0, nil
	}
	var spent time.Duration
	random := rand.New(rand.NewPCG(1, 2))
	for range c.Reads {
		want := c.blob(random.IntN(c.Blobs))
		start := time.Now()
		got, err := cas.ReadAll(ctx, in.Store, want.Digest, c.Size)
		spent += time.Since(start)
		if err != nil {
			return 0, err
		}
		if !bytes.Equal(got, want.Data) {
			return 0, fmt.Errorf("blob %s is not what was put", want.Digest)
		}
	}
	return float64(c.Reads) / spent.Seconds(), nil
}

// ownUsage returns what this process has used, or nothing where the operating system does not say.
func ownUsage() usage {
	u, err := usageOf(os.Getpid())
	if err != nil {
		return usage{}
	}
	return u
}

// memory returns how many bytes of memory are in use, and how many are resident that belong to no file.
func memory() (heap, resident int64) {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc), ownUsage().anonymous
}
