// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/disk/internal/index"
	"github.com/cloister-build/cloister/cas/disk/internal/segment"
)

// A blob may be kept as its chunks: blobs of their own, and a mapping that lists them. It is present as long as the
// mapping and each chunk is, and whoever uses it uses all of these: so they are leased as long as it. What evicts knows
// nothing of that. A mapping that has lost a chunk stays, small as it is, until it has not been used for long: if
// the chunk is put again, the blob is there again.

// Splice implements cas.Splicer.
func (s *Store) Splice(ctx context.Context, d cas.Digest, m cas.ChunkList) error {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return err
	}
	defer end()
	if err := m.Check(d); err != nil || d.IsEmpty() {
		return err
	}
	s.absent(m.Chunks) // leases all of them at once
	flat, err := m.Flat(func(c cas.Digest) ([]cas.Digest, error) {
		if _, ok := s.use(blob, c); ok {
			return nil, nil
		}
		if chunks, _, ok := s.mapped(c); ok {
			return chunks, nil
		}
		return nil, fmt.Errorf("chunk %s of blob %s: %w", c, d, cas.ErrNotFound)
	})
	if err != nil {
		return err
	}
	k, err := s.key(mapping, d)
	if err != nil {
		return err
	}
	it := item(k, encodeMapping(flat))
	it.Next = true
	return s.cache.append([]segment.Item{it})
}

// Split implements cas.Splicer. One that is damaged is cas.ErrNotFound from then on.
func (s *Store) Split(ctx context.Context, d cas.Digest) (cas.ChunkList, error) {
	end, err := s.cache.beginWith(ctx)
	if err != nil {
		return cas.ChunkList{}, err
	}
	defer end()
	_, m, err := s.mapping(d)
	return m, err
}

// mapping returns the mapping of d, which from now on is leased anew, and its entry.
func (s *Store) mapping(d cas.Digest) (index.Entry, cas.ChunkList, error) {
	e, ok := s.use(mapping, d)
	if !ok {
		return e, cas.ChunkList{}, unmapped{d}
	}
	b, err := s.cache.read(e)
	if errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrCorrupt) {
		return e, cas.ChunkList{}, unmapped{d}
	} else if err != nil {
		return e, cas.ChunkList{}, fmt.Errorf("chunks of blob %s: %w", d, err)
	}
	m, ok := decodeMapping(d.Function(), b)
	if !ok {
		_ = s.cache.damaged(e, b)
		return e, cas.ChunkList{}, unmapped{d}
	}
	return e, m, nil
}

// unmapped is the cas.ErrNotFound for a blob without a mapping: for most of those that are asked for it is made in vain.
type unmapped struct{ d cas.Digest }

func (e unmapped) Error() string { return fmt.Sprintf("chunks of blob %s: %v", e.d, cas.ErrNotFound) }
func (e unmapped) Unwrap() error { return cas.ErrNotFound }

// mapped returns the chunks of d if it is kept as chunks and each of them is present; all are leased from now on. E is
// the entry of their mapping. One that cannot be read is none: d can be put.
func (s *Store) mapped(d cas.Digest) (chunks []cas.Digest, e index.Entry, ok bool) {
	e, m, err := s.mapping(d)
	if err != nil || len(s.absent(m.Chunks)) > 0 {
		return nil, e, false
	}
	return m.Chunks, e, true
}

// present reports whether d is present, by itself or as chunks, and leases it anew.
func (s *Store) present(d cas.Digest) bool {
	_, ok := s.use(blob, d)
	if !ok {
		_, _, ok = s.mapped(d)
	}
	return ok
}

// openMapped opens a blob that is kept as chunks.
func (s *Store) openMapped(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	chunks, e, ok := s.mapped(d)
	switch {
	case !ok:
		return nil, notFound(d)
	case off < 0 || off > d.Size():
		return nil, rangeError(d, off)
	}
	r := cas.Join(ctx, s.openWhole, chunks, off)
	if off > 0 {
		return r, nil // each chunk is compared with its digest
	}
	return &mappedReader{r, cas.Verify(d, r), s.cache, e}, nil
}

// openWhole is Open for a chunk: it is not kept as chunks.
func (s *Store) openWhole(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
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

// A mappedReader reads the chunks of a blob, and loses their mapping if they are not the blob.
type mappedReader struct {
	io.Closer
	r     io.Reader
	cache *Cache
	entry index.Entry
}

func (r *mappedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err == cas.ErrCorrupt { // itself: of a chunk it is wrapped, and the chunk is lost already
		if end, closed := r.cache.begin(); closed == nil {
			_ = r.cache.damaged(r.entry, nil)
			end()
		}
	}
	return n, err
}

// mappedFile is File for a blob that is kept as chunks: a copy, since there is no file.
func (s *Store) mappedFile(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	k, ok := s.find(blob, d)
	if !ok || !s.present(d) {
		return "", nil, notFound(d)
	}
	return s.copy(ctx, copyKey{k, executable}, d, func(f *draft) error {
		r, err := s.openMapped(ctx, d, 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return s.cache.fill(ctx, f, d, r)
	})
}

// encodeMapping returns what is stored of m: its checksum, the function that cut it, and of each chunk hash and size.
func encodeMapping(m cas.ChunkList) []byte {
	b := make([]byte, sha256.Size, sha256.Size+binary.MaxVarintLen32+len(m.Chunks)*(64+4))
	b = binary.AppendUvarint(b, uint64(m.Function))
	for _, c := range m.Chunks {
		b, _ = hex.AppendDecode(b, []byte(c.Hash())) // a Digest has been checked to be hexadecimal
		b = binary.AppendUvarint(b, uint64(c.Size()))
	}
	return seal(b)
}

// decodeMapping is the inverse of encodeMapping, for a blob of f; ok is false if b is anything else.
func decodeMapping(f cas.Function, b []byte) (m cas.ChunkList, ok bool) {
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
