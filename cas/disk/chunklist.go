// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A spliced blob is stored as chunks, which are ordinary blobs, and a list of them. It is present while the list and
// all chunks are. Using it renews all their leases; eviction treats them independently. A list that has lost a chunk
// stays until it has not been used for long: the blob reappears if the chunk is put again.

// Splice implements cas.Splicer.
func (s *Store) Splice(ctx context.Context, d cas.Digest, m cas.ChunkList) error {
	if err := cas.CheckDigests(d); err != nil {
		return err
	}
	end, err := s.cache.beginPut(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := m.Check(d); err != nil || d.IsEmpty() {
		return err
	}
	s.absent(m.Chunks) // renews all leases at once
	flat, err := m.Flat(func(c cas.Digest) ([]cas.Digest, error) {
		if _, ok := s.use(blob, c); ok {
			return nil, nil
		}
		if chunks, _, ok := s.spliced(c); ok {
			return chunks, nil
		}
		return nil, fmt.Errorf("chunk %s of blob %s: %w", c, d, cas.ErrNotFound)
	})
	if err != nil {
		return err
	}
	k, err := s.key(chunkList, d)
	if err != nil {
		return err
	}
	it := s.cache.newItem(k, encodeChunkList(flat))
	it.Next = true
	return s.cache.append([]segment.Item{it})
}

// Split implements cas.Splicer. It drops a damaged list and returns cas.ErrNotFound.
func (s *Store) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return cas.ChunkList{}, err
	}
	defer end()
	_, m, err := s.chunks(d)
	return m, err
}

// chunks returns the chunk list of d and its entry, and renews its lease.
func (s *Store) chunks(d cas.Digest) (index.Entry, cas.ChunkList, error) {
	e, ok := s.use(chunkList, d)
	if !ok {
		return e, cas.ChunkList{}, notSpliced{d}
	}
	b, err := s.cache.read(e)
	if isDropped(err) {
		return e, cas.ChunkList{}, notSpliced{d}
	} else if err != nil {
		return e, cas.ChunkList{}, fmt.Errorf("chunks of blob %s: %w", d, err)
	}
	m, ok := decodeChunkList(d.Function(), b)
	if !ok {
		_ = s.cache.damaged(e, b)
		return e, cas.ChunkList{}, notSpliced{d}
	}
	return e, m, nil
}

// notSpliced is cas.ErrNotFound for a chunk list. It formats its text lazily: most callers discard it.
type notSpliced struct{ d cas.Digest }

func (e notSpliced) Error() string { return fmt.Sprintf("chunks of blob %s: %v", e.d, cas.ErrNotFound) }
func (e notSpliced) Unwrap() error { return cas.ErrNotFound }

// spliced returns the chunks of d and the entry of their list if all are present, and renews their leases. An
// unreadable list counts as absent, so that d can be put.
func (s *Store) spliced(d cas.Digest) (chunks []cas.Digest, e index.Entry, ok bool) {
	e, m, err := s.chunks(d)
	if err != nil || len(s.absent(m.Chunks)) > 0 {
		return nil, e, false
	}
	return m.Chunks, e, true
}

// present reports whether d is present, as a blob or as chunks, and renews its lease.
func (s *Store) present(d cas.Digest) bool {
	_, ok := s.use(blob, d)
	if !ok {
		_, _, ok = s.spliced(d)
	}
	return ok
}

// openSpliced opens a blob that is stored as chunks.
func (s *Store) openSpliced(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	chunks, e, ok := s.spliced(d)
	switch {
	case !ok:
		return nil, notFound(d)
	case off < 0 || off > d.Size():
		return nil, rangeError(d, off)
	}
	r := cas.Join(ctx, s.openChunk, chunks, off)
	if off > 0 {
		return r, nil // each chunk is verified
	}
	return &splicedReader{r, cas.Verify(d, r), s.cache, e}, nil
}

// openChunk is Open for a chunk, which has its own entry.
func (s *Store) openChunk(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	e, ok := s.use(blob, d)
	if !ok {
		return nil, notFound(d)
	}
	return s.openEntry(ctx, e, d, off)
}

// A splicedReader reads the chunks of a blob, and drops their list if they do not match the blob.
type splicedReader struct {
	io.Closer
	r     io.Reader
	cache *Cache
	entry index.Entry
}

func (r *splicedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err == cas.ErrCorrupt { //nolint:errorlint // unwrapped; a damaged chunk returns a wrapped error and was dropped
		if end, closed := r.cache.begin(); closed == nil {
			_ = r.cache.damaged(r.entry, nil)
			end()
		}
	}
	return n, err
}

// splicedFile is File for a blob that is stored as chunks: it makes a copy.
func (s *Store) splicedFile(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	k, ok := s.find(blob, d)
	if !ok || !s.present(d) {
		return "", nil, notFound(d)
	}
	return s.copy(ctx, copyKey{k, executable}, d, func(f *draft) error {
		r, err := s.openSpliced(ctx, d, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return s.cache.fill(ctx, f, d, r)
	})
}

// encodeChunkList returns the stored form of m: a checksum, the chunking function, and hash and size of each chunk.
func encodeChunkList(m cas.ChunkList) []byte {
	b := make([]byte, sha256.Size, sha256.Size+binary.MaxVarintLen32+len(m.Chunks)*(64+4))
	b = binary.AppendUvarint(b, uint64(m.Function))
	for _, c := range m.Chunks {
		b, _ = hex.AppendDecode(b, []byte(c.Hash())) // always valid hexadecimal
		b = binary.AppendUvarint(b, uint64(c.Size()))
	}
	return seal(b)
}

// decodeChunkList is the inverse of encodeChunkList for digests of function f.
func decodeChunkList(f cas.Function, b []byte) (m cas.ChunkList, ok bool) {
	if !soundRecord(b) {
		return m, false
	}
	b = b[sha256.Size:]
	function, n := binary.Uvarint(b)
	if n <= 0 {
		return m, false
	}
	m.Function = repb.ChunkingFunction_Value(function)
	m.Chunks = make([]cas.Digest, 0, len(b)/(f.Size()+1))
	for b = b[n:]; len(b) > 0; b = b[n:] {
		if len(b) <= f.Size() {
			return m, false
		}
		hash := hex.EncodeToString(b[:f.Size()])
		b = b[f.Size():]
		var size uint64
		if size, n = binary.Uvarint(b); n <= 0 {
			return m, false
		}
		c, err := cas.NewDigest(f, hash, int64(size))
		if err != nil {
			return m, false
		}
		m.Chunks = append(m.Chunks, c)
	}
	return m, true
}
