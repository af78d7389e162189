// SPDX-License-Identifier: Apache-2.0

// Package memory holds a store and action cache in memory, for programs that need neither a disk nor another server:
// small services, tools and tests.
package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"google.golang.org/protobuf/proto"
)

// entryBytes is the estimated memory of a blob, a chunk or a result besides its content, in bytes.
const entryBytes = 256

// A Store is a cas.Store, cas.Batcher, cas.Splicer and cas.ActionCache in memory. It evicts nothing: when it is full,
// writes return cas.ErrFull until Delete frees space. It is safe for concurrent use. Use New; the zero
// Store is not usable.
type Store struct {
	max int64

	mu      sync.Mutex
	bytes   int64                             // guarded by mu
	blobs   map[cas.Digest][]byte             // guarded by mu; slices are immutable
	results map[cas.Digest]*repb.ActionResult // guarded by mu; messages are immutable
	lists   map[cas.Digest]cas.ChunkList      // guarded by mu; flat and immutable
}

// New returns an empty Store of at most maxBytes: the contents and about 256 bytes for each entry. Zero means no limit.
func New(maxBytes int64) *Store {
	if maxBytes <= 0 {
		maxBytes = math.MaxInt64
	}
	return &Store{
		max: maxBytes, blobs: map[cas.Digest][]byte{}, results: map[cas.Digest]*repb.ActionResult{},
		lists: map[cas.Digest]cas.ChunkList{},
	}
}

// begin returns the error of a call that cannot start: ctx has ended, or a digest is the zero Digest.
func begin(ctx context.Context, ds ...cas.Digest) error {
	return cmp.Or(ctx.Err(), cas.CheckDigests(ds...))
}

// Open implements cas.Store.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := begin(ctx, d); err != nil {
		return nil, err
	}
	s.mu.Lock()
	b, ok := s.blobs[d]
	list, spliced := s.lists[d], s.present(d)
	s.mu.Unlock()
	switch {
	case !ok && !spliced && !d.IsEmpty():
		return nil, fmt.Errorf("blob %s: %w", d, cas.ErrNotFound)
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("blob %s: offset %d: %w", d, off, cas.ErrRange)
	case !ok && spliced:
		r := cas.Join(ctx, s.Open, list.Chunks, off)
		if off > 0 {
			return r, nil
		}
		return struct {
			io.Reader
			io.Closer
		}{cas.Verify(d, r), r}, nil
	}
	return io.NopCloser(bytes.NewReader(b[off:])), nil
}

// Put implements cas.Store.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := begin(ctx, d); err != nil {
		return err
	}
	var b bytes.Buffer
	// One extra byte reveals that the content is too long.
	limit := min(d.Size(), s.max)
	n, err := io.Copy(&b, io.LimitReader(contextReader{ctx, r}, limit+1))
	switch {
	case err != nil:
		return err
	case n > d.Size():
		return cas.Mismatch(d, cas.Digest{})
	case n > s.max:
		return s.full(d)
	}
	if got := d.Function().Sum(b.Bytes()); got != d {
		return cas.Mismatch(d, got)
	}
	if err := ctx.Err(); err != nil || d.IsEmpty() {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.reserve(d, n+entryBytes, s.costOf(d)); err != nil {
		return err
	}
	s.blobs[d] = b.Bytes()
	return nil
}

// costOf returns the counted bytes of the blob d, 0 if it is absent. The caller holds mu.
func (s *Store) costOf(d cas.Digest) int64 {
	if _, ok := s.blobs[d]; !ok {
		return 0
	}
	return d.Size() + entryBytes
}

// costOfList is costOf for the chunk list of d. The caller holds mu.
func (s *Store) costOfList(d cas.Digest) int64 { return int64(len(s.lists[d].Chunks)) * entryBytes }

// reserve counts bytes that replace others; beyond the limit it returns cas.ErrFull instead. The caller holds mu.
func (s *Store) reserve(d cas.Digest, bytes, replaced int64) error {
	if bytes > replaced && bytes-replaced > s.max-s.bytes {
		return s.full(d)
	}
	s.bytes += bytes - replaced
	return nil
}

func (s *Store) full(d cas.Digest) error {
	return &cas.FullError{
		Limit: cas.LimitBytes, Err: fmt.Errorf("%s: %w: it holds at most %d bytes", d, cas.ErrFull, s.max),
	}
}

// PutAll implements cas.Batcher.
func (s *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	for i, b := range blobs {
		errs[i] = s.Put(ctx, b.Digest, bytes.NewReader(b.Data))
	}
	return errs
}

// Missing implements cas.Store.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := begin(ctx, ds...); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var missing []cas.Digest
	seen := map[cas.Digest]bool{}
	for _, d := range ds {
		if !s.present(d) && !d.IsEmpty() && !seen[d] {
			missing = append(missing, d)
		}
		seen[d] = true
	}
	return missing, nil
}

// present reports whether d is present, as a blob or as chunks. The caller holds mu.
func (s *Store) present(d cas.Digest) bool {
	if _, ok := s.blobs[d]; ok {
		return true
	}
	list, ok := s.lists[d]
	for _, c := range list.Chunks {
		if _, held := s.blobs[c]; !held {
			return false
		}
	}
	return ok
}

// Splice implements cas.Splicer.
func (s *Store) Splice(ctx context.Context, d cas.Digest, list cas.ChunkList) error {
	if err := cmp.Or(begin(ctx, d), list.Check(d)); err != nil || d.IsEmpty() {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	flat, err := list.Flat(func(c cas.Digest) ([]cas.Digest, error) {
		if !s.present(c) {
			return nil, fmt.Errorf("chunk %s: %w", c, cas.ErrNotFound)
		}
		if _, ok := s.blobs[c]; ok {
			return nil, nil
		}
		return s.lists[c].Chunks, nil
	})
	if err == nil {
		err = s.reserve(d, int64(len(flat.Chunks))*entryBytes, s.costOfList(d))
	}
	if err == nil {
		s.lists[d] = flat
	}
	return err
}

// Split implements cas.Splicer.
func (s *Store) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	if err := begin(ctx, d); err != nil {
		return cas.ChunkList{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	list, ok := s.lists[d]
	if !ok {
		return list, fmt.Errorf("chunks of blob %s: %w", d, cas.ErrNotFound)
	}
	list.Chunks = slices.Clone(list.Chunks)
	return list, nil
}

// Lookup implements cas.ActionCache.
func (s *Store) Lookup(ctx context.Context, action cas.Digest) (*repb.ActionResult, error) {
	if err := begin(ctx, action); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.results[action]
	if !ok {
		return nil, fmt.Errorf("result of action %s: %w", action, cas.ErrNotFound)
	}
	return proto.CloneOf(r), nil
}

// Record implements cas.ActionCache.
func (s *Store) Record(ctx context.Context, action cas.Digest, r *repb.ActionResult) error {
	if err := cmp.Or(ctx.Err(), cas.CheckRecord(action, r)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var replaced int64
	if old, ok := s.results[action]; ok {
		replaced = int64(proto.Size(old)) + entryBytes
	}
	if err := s.reserve(action, int64(proto.Size(r))+entryBytes, replaced); err != nil {
		return err
	}
	s.results[action] = proto.CloneOf(r)
	return nil
}

// Digests returns the digests of the blobs, sorted by hash, without the empty blob and spliced blobs.
func (s *Store) Digests() []cas.Digest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Keys(s.blobs), func(a, b cas.Digest) int {
		return cmp.Or(cmp.Compare(a.Hash(), b.Hash()), cmp.Compare(a.Size(), b.Size()))
	})
}

// Delete deletes the blob d and its chunk list. Blobs spliced from d become absent.
func (s *Store) Delete(d cas.Digest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes -= s.costOf(d) + s.costOfList(d)
	delete(s.blobs, d)
	delete(s.lists, d)
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
