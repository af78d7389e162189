// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
)

// Limits of what waits in a Batch.
const (
	batchBytes = 1 << 20
	batchBlobs = 1000
)

// A Batch puts many small blobs into one store, some of them at once, and knows all that it was given. It
// holds at most a mebibyte, and as much again for each goroutine that uses it. Its methods are safe for
// concurrent use; make it with NewBatch.
type Batch struct {
	store Store

	mu      sync.Mutex
	waiting []Blob          // guarded by mu
	bytes   int             // guarded by mu; of waiting
	blobs   []Digest        // guarded by mu
	known   map[Digest]bool // guarded by mu; what is in blobs
}

// NewBatch returns an empty Batch for s.
func NewBatch(s Store) *Batch { return &Batch{store: s, known: map[Digest]bool{}} }

// Add puts b, perhaps no sooner than Flush. Until then nobody may change the data. Errors are those of Put,
// also for what was added before.
func (b *Batch) Add(ctx context.Context, blob Blob) error {
	if len(blob.Data) == 0 || !b.note(blob.Digest) {
		return nil // the empty blob is always present
	}
	if len(blob.Data) >= batchBytes {
		return b.store.Put(ctx, blob.Digest, bytes.NewReader(blob.Data))
	}
	b.mu.Lock()
	b.waiting = append(b.waiting, blob)
	b.bytes += len(blob.Data)
	full := b.bytes >= batchBytes || len(b.waiting) == batchBlobs
	b.mu.Unlock()
	if full {
		return b.Flush(ctx)
	}
	return nil
}

// AddBytes adds data and returns its digest.
func (b *Batch) AddBytes(ctx context.Context, f Function, data []byte) (Digest, error) {
	d := f.Sum(data)
	return d, b.Add(ctx, Blob{d, data})
}

// AddSeeker puts what r holds from its start to its end at once, and returns its digest, as PutSeeker does.
func (b *Batch) AddSeeker(ctx context.Context, f Function, r io.ReadSeeker) (Digest, error) {
	d, err := PutSeeker(ctx, b.store, f, r)
	if err == nil {
		b.note(d)
	}
	return d, err
}

// note reports whether d is new.
func (b *Batch) note(d Digest) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known[d] {
		return false
	}
	b.known[d] = true
	b.blobs = append(b.blobs, d)
	return true
}

// Flush puts what was added and waits. When it returns nil, and so has every other call, all is stored.
func (b *Batch) Flush(ctx context.Context) error {
	b.mu.Lock()
	waiting := b.waiting
	b.waiting, b.bytes = nil, 0
	b.mu.Unlock()
	for i, err := range PutAll(ctx, b.store, waiting) {
		if err != nil {
			return fmt.Errorf("put blob %s: %w", waiting[i].Digest, err)
		}
	}
	return nil
}

// Blobs returns the digests of all that was added, each once, without that of the empty blob.
func (b *Batch) Blobs() []Digest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.blobs
}
