// SPDX-License-Identifier: Apache-2.0

// Package chunk splits byte streams into content-defined chunks: a small change to a stream changes few of its chunks.
// It implements the two functions of the Remote Execution API (ChunkingFunction): FastCDC of 2020 and RepMaxCDC. It
// knows nothing about blobs or digests and stores nothing.
//
// RepMaxCDC is github.com/buildbarn/go-cdc. FastCDC is our own, because that module supports neither seeds nor averages
// above 64 KiB and cuts one byte after the test vectors of the API.
//
// Where the text of the API and its test vectors disagree about FastCDC, the vectors decide.
package chunk

import (
	"bufio"
	"io"

	"github.com/buildbarn/go-cdc"
)

// Params are the parameters of a chunking function: FastCDC or RepMaxCDC.
type Params interface {
	// Max returns the size of the largest chunk in bytes.
	Max() int
	// chunker returns the chunking function, or an error that names the invalid parameter.
	chunker() (chunker, error)
}

// A chunker is the part of cdc.ContentDefinedChunker that a Reader needs.
type chunker interface {
	GetMaximumPeekSizeBytes() int
	NewChunkReader(cdc.Peeker) cdc.ChunkReader
}

// A Reader splits a stream into chunks. Its buffer is twice the lookahead of its chunking function: 5 MiB with the
// parameters that the API recommends.
type Reader struct {
	chunks cdc.ChunkReader
	err    error
}

// NewReader returns a Reader of src. It fails if a parameter is out of range.
func NewReader(src io.Reader, p Params) (*Reader, error) {
	c, err := p.chunker()
	if err != nil {
		return nil, err
	}
	return &Reader{chunks: c.NewChunkReader(bufio.NewReaderSize(src, 2*c.GetMaximumPeekSizeBytes()))}, nil
}

// Next returns the next chunk, which is valid until the next call, or io.EOF after the last one. The chunks depend only
// on the contents of the stream, not on the sizes of the reads. Errors, including those of src, are permanent.
func (r *Reader) Next() ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	b, err := r.chunks.ReadNextChunk()
	r.err = err
	return b, err
}
