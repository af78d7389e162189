// SPDX-License-Identifier: Apache-2.0

package castest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
)

// Memory is an unlimited cas.Store, cas.Batcher, cas.Splicer and cas.ActionCache in memory. It keeps the whole
// contract, and lets tests delete and corrupt blobs. It is safe for concurrent use. Create one with NewMemory.
type Memory struct {
	mu      sync.Mutex
	blobs   map[cas.Digest][]byte             // guarded by mu; slices are immutable
	results map[cas.Digest]*repb.ActionResult // guarded by mu; messages are immutable
	lists   map[cas.Digest]cas.ChunkList      // guarded by mu; flat and immutable
}

// NewMemory returns an empty Memory.
func NewMemory() *Memory {
	return &Memory{
		blobs: map[cas.Digest][]byte{}, results: map[cas.Digest]*repb.ActionResult{},
		lists: map[cas.Digest]cas.ChunkList{},
	}
}

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
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	b, ok := m.blobs[d]
	list, spliced := m.lists[d], m.present(d)
	m.mu.Unlock()
	switch {
	case !ok && !spliced && !d.IsEmpty():
		return nil, fmt.Errorf("blob %s: %w", d, cas.ErrNotFound)
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
	case !ok && spliced:
		r := cas.Join(ctx, m.Open, list.Chunks, off)
		if off > 0 {
			return r, nil
		}
		return struct {
			io.Reader
			io.Closer
		}{cas.Verify(d, r), r}, nil
	case off > 0:
		return io.NopCloser(bytes.NewReader(b[off:])), nil
	}
	return io.NopCloser(cas.Verify(d, bytes.NewReader(b))), nil
}

// Put implements cas.Store.
func (m *Memory) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	var b bytes.Buffer
	// One extra byte reveals that the content is too long.
	n, err := io.Copy(&b, io.LimitReader(contextReader{ctx, r}, d.Size()+1))
	if err != nil {
		return err
	}
	if n > d.Size() {
		return cas.Mismatch(d, cas.Digest{})
	}
	if got := d.Function().Sum(b.Bytes()); got != d {
		return cas.Mismatch(d, got)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !d.IsEmpty() {
		m.blobs[d] = b.Bytes()
	}
	return nil
}

// PutAll implements cas.Batcher.
func (m *Memory) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		errs[i] = m.Put(ctx, b.Digest, bytes.NewReader(b.Data))
	}
	return errs
}

// Missing implements cas.Store.
func (m *Memory) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var missing []cas.Digest
	seen := map[cas.Digest]bool{}
	for _, d := range ds {
		if !m.present(d) && !d.IsEmpty() && !seen[d] {
			missing = append(missing, d)
		}
		seen[d] = true
	}
	return missing, nil
}

// present reports whether d is present, as a blob or as chunks. The caller holds mu.
func (m *Memory) present(d cas.Digest) bool {
	if _, ok := m.blobs[d]; ok {
		return true
	}
	list, ok := m.lists[d]
	for _, c := range list.Chunks {
		if _, held := m.blobs[c]; !held {
			return false
		}
	}
	return ok
}

// Splice implements cas.Splicer.
func (m *Memory) Splice(ctx context.Context, d cas.Digest, list cas.ChunkList) error {
	if err := cmp.Or(ctx.Err(), list.Check(d)); err != nil || d.IsEmpty() {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	flat, err := list.Flat(func(c cas.Digest) ([]cas.Digest, error) {
		if !m.present(c) {
			return nil, fmt.Errorf("chunk %s: %w", c, cas.ErrNotFound)
		}
		if _, ok := m.blobs[c]; ok {
			return nil, nil
		}
		return m.lists[c].Chunks, nil
	})
	if err == nil {
		m.lists[d] = flat
	}
	return err
}

// Split implements cas.Splicer.
func (m *Memory) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	if err := ctx.Err(); err != nil {
		return cas.ChunkList{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	list, ok := m.lists[d]
	if !ok {
		return list, fmt.Errorf("chunks of blob %s: %w", d, cas.ErrNotFound)
	}
	list.Chunks = slices.Clone(list.Chunks)
	return list, nil
}

// Lookup implements cas.ActionCache.
func (m *Memory) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r, ok := m.results[action]
	if !ok {
		return nil, fmt.Errorf("result of action %s: %w", action, cas.ErrNotFound)
	}
	return proto.CloneOf(r), nil
}

// Record implements cas.ActionCache.
func (m *Memory) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.results[action] = proto.CloneOf(r)
	return nil
}

// Len returns the number of blobs, not counting the empty blob and spliced blobs.
func (m *Memory) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.blobs)
}

// Digests returns the digests of the blobs counted by Len, sorted by hash.
func (m *Memory) Digests() []cas.Digest {
	m.mu.Lock()
	defer m.mu.Unlock()
	ds := make([]cas.Digest, 0, len(m.blobs))
	for d := range m.blobs {
		ds = append(ds, d)
	}
	slices.SortFunc(ds, func(a, b cas.Digest) int {
		return cmp.Or(cmp.Compare(a.Hash(), b.Hash()), cmp.Compare(a.Size(), b.Size()))
	})
	return ds
}

// Delete deletes the blob d. Chunk lists and action results stay.
func (m *Memory) Delete(d cas.Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.blobs, d)
}

// DeleteChunkList deletes the chunk list of d.
func (m *Memory) DeleteChunkList(d cas.Digest) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.lists, d)
}

// Corrupt flips a bit of the blob d, and reports whether it exists and is not empty. Open readers are not affected. A
// Put of the blob repairs it.
func (m *Memory) Corrupt(d cas.Digest) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := bytes.Clone(m.blobs[d])
	if len(b) == 0 {
		return false
	}
	b[len(b)/2] ^= 1
	m.blobs[d] = b
	return true
}

// contextReader reads from r until ctx ends.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
