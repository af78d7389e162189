// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// MaxChunks is the maximum length of a chunk list: 512 GB in chunks of 512 KiB, the size the API recommends.
const MaxChunks = 1_000_000

// A ChunkList lists the chunks of a blob.
type ChunkList struct {
	// Function is the algorithm that cut the blob, or UNKNOWN.
	Function repb.ChunkingFunction_Value
	// Chunks, concatenated, form the blob. None is empty, and all have the blob's digest function.
	Chunks []Digest
}

// A Splicer is a Store that can keep a blob as a list of chunks, so that blobs with common chunks share their storage.
type Splicer interface {
	// Splice stores d as the chunks m, and replaces an earlier list. From then on d is present while all its chunks
	// are, and behaves like any other blob. The caller has verified that the chunks match d: a store never returns
	// other content as d, but may report d as present. Splice returns ErrNotFound, naming the chunk, if one is absent,
	// and ErrInvalid if m.Check(d) fails.
	Splice(ctx context.Context, d Digest, m ChunkList) error
	// Split returns the chunk list of d, or ErrNotFound. It may differ from the spliced list if some of those chunks
	// were chunk lists themselves. The chunks need not be present.
	Split(ctx context.Context, d Digest) (ChunkList, error)
}

// Check returns ErrInvalid if m cannot be the chunk list of d, whatever the content of the chunks.
func (m ChunkList) Check(d Digest) error {
	if len(m.Chunks) > MaxChunks {
		return invalidf("blob %s has %d chunks, the maximum is %d: use larger chunks", d, len(m.Chunks), MaxChunks)
	}
	rest := d.size
	for i, c := range m.Chunks {
		switch {
		case c.fn != d.fn:
			return invalidf("chunk %d of blob %s has a different digest function: %s", i, d, c)
		case c.size == 0:
			return invalidf("chunk %d of blob %s is empty", i, d)
		case c.size > rest:
			return invalidf("the first %d chunks of blob %s exceed its size", i+1, d)
		}
		rest -= c.size
	}
	if rest > 0 {
		return invalidf("the chunks of blob %s have %d bytes, the blob has %d", d, d.size-rest, d.size)
	}
	return nil
}

// Flat returns m with every chunk that is itself a chunk list replaced by its chunks, so that clients cannot nest
// lists. Flat calls chunks for each chunk; it returns nil for an ordinary blob, or a flat list. An error of chunks
// ends Flat. If anything is replaced, the resulting Function is UNKNOWN.
func (m ChunkList) Flat(chunks func(Digest) ([]Digest, error)) (ChunkList, error) {
	flat := ChunkList{Function: m.Function, Chunks: make([]Digest, 0, len(m.Chunks))}
	for _, c := range m.Chunks {
		inner, err := chunks(c)
		if err != nil {
			return ChunkList{}, err
		}
		if inner == nil {
			inner = []Digest{c}
		} else {
			flat.Function = repb.ChunkingFunction_UNKNOWN
		}
		if flat.Chunks = append(flat.Chunks, inner...); len(flat.Chunks) > MaxChunks {
			return ChunkList{}, invalidf("more than %d chunks in a blob, because chunk %s is a list of %d: use larger chunks",
				MaxChunks, c, len(inner))
		}
	}
	return flat, nil
}

// openFunc is the signature of Store.Open.
type openFunc = func(ctx context.Context, d Digest, off int64) (io.ReadCloser, error)

// Join returns a reader of the concatenated chunks, from byte off. It calls open with ctx for each chunk in turn, so
// ctx must outlive the reader. Reading fails with ErrNotFound, naming the chunk, if one is absent. The caller closes
// the reader.
func Join(ctx context.Context, open openFunc, chunks []Digest, off int64) io.ReadCloser {
	for len(chunks) > 0 && off >= chunks[0].size {
		off -= chunks[0].size
		chunks = chunks[1:]
	}
	return &joined{ctx: ctx, open: open, chunks: chunks, off: off}
}

type joined struct {
	ctx    context.Context
	open   openFunc
	chunks []Digest      // not yet read to the end
	off    int64         // where to start in the first of them
	r      io.ReadCloser // the first of them, or nil
	err    error
}

func (j *joined) Read(p []byte) (int, error) {
	for j.err == nil {
		if len(j.chunks) == 0 {
			return 0, io.EOF
		}
		if j.r == nil {
			if j.r, j.err = j.open(j.ctx, j.chunks[0], j.off); j.err != nil {
				j.err = fmt.Errorf("chunk %s: %w", j.chunks[0], j.err)
				break
			}
			j.off = 0
		}
		n, err := j.r.Read(p)
		if err == io.EOF {
			j.err = errors.Join(j.r.Close())
			j.r, j.chunks = nil, j.chunks[1:]
		} else if err != nil {
			j.err = fmt.Errorf("chunk %s: %w", j.chunks[0], err)
		}
		if n > 0 || len(p) == 0 {
			return n, nil
		}
	}
	return 0, j.err
}

func (j *joined) Close() error {
	j.chunks = nil
	if j.r == nil {
		return nil
	}
	return j.r.Close()
}
