// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"context"
	"io"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
)

// Memory is an unlimited memory.Store whose blobs tests can corrupt. It is safe for concurrent use. Create one with
// NewMemory.
type Memory struct {
	*memory.Store

	mu      sync.Mutex
	corrupt map[cas.Digest]bool // guarded by mu
}

// NewMemory returns an empty Memory.
func NewMemory() *Memory { return &Memory{Store: memory.New(0), corrupt: map[cas.Digest]bool{}} }

// Instances returns instances with a Memory each, which is both Store and Actions.
func Instances() cas.Instances {
	var mu sync.Mutex
	memories := map[string]*Memory{}
	return func(name string) (*cas.Instance, error) {
		if err := cas.CheckInstanceName(name); err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		m := memories[name]
		if m == nil {
			m = NewMemory()
			memories[name] = m
		}
		return &cas.Instance{Name: name, Store: m, Actions: m}, nil
	}
}

// Open implements cas.Store.
func (m *Memory) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	m.mu.Lock()
	damaged, healthy := m.corrupt[d], len(m.corrupt) == 0
	m.mu.Unlock()
	r, err := m.Store.Open(ctx, d, off)
	if err != nil || healthy {
		return r, err
	}
	list, err := m.Split(ctx, d)
	switch {
	case damaged:
		whole, err := cas.ReadAll(ctx, m.Store, d, d.Size())
		if err != nil {
			return nil, err
		}
		whole[len(whole)/2] ^= 1
		r = io.NopCloser(bytes.NewReader(whole[off:]))
	case err == nil && !m.has(d):
		r = cas.Join(ctx, m.Open, list.Chunks, off)
	default:
		return r, nil
	}
	if off > 0 {
		return r, nil
	}
	return struct {
		io.Reader
		io.Closer
	}{cas.Verify(d, r), r}, nil
}

// has reports whether d is present as a blob of its own.
func (m *Memory) has(d cas.Digest) bool { return slices.Contains(m.Digests(), d) }

// Put implements cas.Store.
func (m *Memory) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	err := m.Store.Put(ctx, d, r)
	if err == nil {
		m.mu.Lock()
		delete(m.corrupt, d)
		m.mu.Unlock()
	}
	return err
}

// PutAll implements cas.Batcher.
func (m *Memory) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		errs[i] = m.Put(ctx, b.Digest, bytes.NewReader(b.Data))
	}
	return errs
}

// Delete deletes the blob d and keeps its chunk list if the chunks are present.
func (m *Memory) Delete(d cas.Digest) {
	list, err := m.Split(context.Background(), d)
	m.Store.Delete(d)
	if err == nil {
		_ = m.Splice(context.Background(), d, list)
	}
}

// Len returns the number of blobs, not counting the empty blob and spliced blobs.
func (m *Memory) Len() int { return len(m.Digests()) }

// Corrupt flips a bit of the blob d, and reports whether it exists and is not empty. Open readers are not affected. A
// Put of the blob repairs it.
func (m *Memory) Corrupt(d cas.Digest) bool {
	if !m.has(d) {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.corrupt[d] = !m.corrupt[d]
	return true
}
