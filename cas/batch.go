// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
)

// A Batch is flushed at these limits.
const (
	batchBytes = 1 << 20
	batchBlobs = 1000
)

// A Batch collects small blobs and puts them into a store in groups. It holds at most 1 MiB, and 1 MiB more for each
// goroutine that uses it. Its methods are safe for concurrent use. Create one with NewBatch.
type Batch struct {
	store Store

	mu      sync.Mutex
	waiting []Blob          // guarded by mu
	bytes   int             // guarded by mu; of waiting
	blobs   []Digest        // guarded by mu
	known   map[Digest]bool // guarded by mu; set of blobs
}

// NewBatch returns an empty Batch for s. If s is nil, all additions fail.
func NewBatch(s Store) *Batch { return &Batch{store: s, known: map[Digest]bool{}} }

// check returns an error for a Batch that NewBatch did not make, or without a store.
func (b *Batch) check() error {
	if b.known == nil || b.store == nil {
		return errors.New("cas: Batch without a store")
	}
	return nil
}

// Add puts blob now or at the latest in Flush; until then the caller must not modify the data. It may return errors of
// blobs added earlier.
func (b *Batch) Add(ctx context.Context, blob Blob) error {
	if err := cmp.Or(b.check(), CheckDigests(blob.Digest)); err != nil {
		return err
	}
	if len(blob.Data) == 0 || !b.remember(blob.Digest) {
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

// AddSeeker puts the content of r from start to end without delay, and returns its digest.
func (b *Batch) AddSeeker(ctx context.Context, f Function, r io.ReadSeeker) (Digest, error) {
	if err := b.check(); err != nil {
		return Digest{}, err
	}
	d, err := PutSeeker(ctx, b.store, f, r)
	if err == nil {
		b.remember(d)
	}
	return d, err
}

// remember reports whether d is new.
func (b *Batch) remember(d Digest) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known[d] {
		return false
	}
	b.known[d] = true
	b.blobs = append(b.blobs, d)
	return true
}

// Flush puts the waiting blobs. When it and all concurrent calls have returned nil, every added blob is stored.
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

// Blobs returns the digests of all added blobs, each once, except the empty blob's.
func (b *Batch) Blobs() []Digest {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.blobs
}
