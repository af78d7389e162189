// SPDX-License-Identifier: Apache-2.0

package cas

import (
	"context"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// MaxChunks is how many chunks a mapping may have: of the 512 KiB that the API recommends, half a terabyte.
const MaxChunks = 1_000_000

// A ChunkList says of which chunks a blob consists.
type ChunkList struct {
	// Function is what cut the blob. UNKNOWN says nothing.
	Function repb.ChunkingFunction_Value
	// Chunks are, one after the other, the blob. None is empty, and all are of the blob's digest function.
	Chunks []Digest
}

// A Splicer is an optional ability of a Store: to keep a blob as the list of its chunks, so that what blobs have in
// common is stored once.
type Splicer interface {
	// Splice keeps m for d: from then on d is present as long as each of its chunks is, and all methods of the store
	// treat it as any other blob. An earlier mapping is replaced. The caller has compared what the chunks are
	// with d: a store gives out no other bytes as d, but may call them present. A chunk that is absent is
	// ErrNotFound, and the error names it; a mapping that Check refuses is ErrInvalid.
	Splice(ctx context.Context, d Digest, m ChunkList) error
	// Mapping returns what Map has kept for d, or ErrNotFound. It need not have the same chunks, where some of those
	// were themselves kept as chunks. It says nothing of whether the chunks are present: Missing does.
	Split(ctx context.Context, d Digest) (ChunkList, error)
}

// Check returns ErrInvalid if m cannot be a mapping of d, whatever the chunks hold.
func (m ChunkList) Check(d Digest) error {
	if len(m.Chunks) > MaxChunks {
		return invalidf("blob %s has %d chunks; at most %d are kept of a blob: cut it into larger ones", d, len(m.Chunks), MaxChunks)
	}
	rest := d.size
	for i, c := range m.Chunks {
		switch {
		case c.fn != d.fn:
			return invalidf("chunk %d of blob %s is named by another digest function, as %s", i, d, c)
		case c.size == 0:
			return invalidf("chunk %d of blob %s is empty", i, d)
		case c.size > rest:
			return invalidf("the first %d chunks of blob %s are larger than it", i+1, d)
		}
		rest -= c.size
	}
	if rest > 0 {
		return invalidf("the chunks of blob %s have %d of its %d bytes", d, d.size-rest, d.size)
	}
	return nil
}

// Flat returns m with chunks that are blobs of the store as they are. Chunks returns nothing for one that is, and for one
// that is kept as chunks itself those, which are flat; an error of it ends Flat. Chunks of chunks would let a client
// build towers of them. What cut the blob is unknown then.
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
			return ChunkList{}, invalidf("a blob has more than %d chunks, since chunk %s has %d itself: cut it into larger ones", MaxChunks, c, len(inner))
		}
	}
	return flat, nil
}

// Join returns a reader of chunks, one after the other, from byte off of all of them on. Open is a Store's, called
// with ctx for each chunk when its turn comes, so that ctx must not end before. A chunk that is absent then ends the
// reader with an error that names it and is ErrNotFound. The caller closes the reader.
func Join(ctx context.Context, open func(context.Context, Digest, int64) (io.ReadCloser, error), chunks []Digest, off int64) io.ReadCloser {
	for len(chunks) > 0 && off >= chunks[0].size {
		off -= chunks[0].size
		chunks = chunks[1:]
	}
	return &joined{ctx: ctx, open: open, chunks: chunks, off: off}
}

type joined struct {
	ctx    context.Context
	open   func(context.Context, Digest, int64) (io.ReadCloser, error)
	chunks []Digest      // that were not read to their ends
	off    int64         // where to begin with the first of them
	r      io.ReadCloser // of it, or nil
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
