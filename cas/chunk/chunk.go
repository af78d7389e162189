// SPDX-License-Identifier: Apache-2.0

// Package chunk cuts a stream of bytes where its content says, so that streams that have much in common have most of
// their chunks in common: FastCDC of 2020 and RepMaxCDC, as the Remote Execution API names them
// (ChunkingFunction). It knows neither blobs nor digests, and stores nothing.
//
// Both roll a Gear hash over the bytes, h = h<<1 + gear[b], which therefore depends on the last 64 bytes alone.
// FastCDC cuts where certain bits of it are zero: more of them before the average size than after it, so that most
// chunks are near that. RepMaxCDC cuts where it is the greatest.
package chunk

import (
	"crypto/md5"
	"encoding/binary"
	"errors"
	"io"
)

// window is on how many bytes the Gear hash depends.
const window = 64

// gear has a random-looking number for each byte: the first eight bytes of the MD5 of 64 times that byte. The API's
// text says the MD5 of the byte itself; but its test vectors, and every implementation that it names, have these.
var gear = func() (table [256]uint64) {
	var b [64]byte
	for i := range table {
		for j := range b {
			b[j] = byte(i)
		}
		sum := md5.Sum(b[:])
		table[i] = binary.BigEndian.Uint64(sum[:])
	}
	return table
}()

// Params are the parameters of a chunking function: FastCDC or RepMaxCDC.
type Params interface {
	// Max is the size of the largest chunk, in bytes.
	Max() int
	// cutter returns the function at the beginning of a stream, or says which parameter it cannot have.
	cutter() (cutter, error)
}

// A cutter cuts one stream.
type cutter interface {
	// ahead is how many bytes cut must see, in so far as the stream has them.
	ahead() int
	// cut returns the size of the first chunk of what is left of the stream, which begins with b and ends there if
	// b has less than ahead bytes. B is not empty.
	cut(b []byte) int
}

// A Reader reads a stream by its chunks. It holds two times what its function must see in advance: with the parameters
// that the API recommends, five mebibytes.
type Reader struct {
	src    io.Reader
	cutter cutter
	buf    []byte
	from   int   // the first byte of buf that is in no chunk yet
	to     int   // the end of what was read
	err    error // of src; what was read before it still becomes chunks if it is io.EOF
}

// NewReader returns a Reader of src, or an error that says which of the parameters is not one the function may have.
func NewReader(src io.Reader, p Params) (*Reader, error) {
	c, err := p.cutter()
	if err != nil {
		return nil, err
	}
	return &Reader{src: src, cutter: c, buf: make([]byte, 2*c.ahead())}, nil
}

// Next returns the next chunk, which is the caller's until the next call, or io.EOF after the last one. The chunks
// depend on the bytes of the stream alone, not on how its reader hands them out. An error of that reader is returned
// at once, and again.
func (r *Reader) Next() ([]byte, error) {
	if err := r.fill(); err != nil {
		return nil, err
	}
	b := r.buf[r.from:r.to]
	if len(b) == 0 {
		return nil, io.EOF
	}
	n := r.cutter.cut(b[:min(len(b), r.cutter.ahead())])
	r.from += n
	return b[:n], nil
}

// fill reads until enough is in the buffer, or the stream has ended.
func (r *Reader) fill() error {
	ahead := r.cutter.ahead()
	if r.to-r.from < ahead && r.err == nil {
		r.to = copy(r.buf, r.buf[r.from:r.to])
		r.from = 0
		n, err := io.ReadAtLeast(r.src, r.buf[r.to:], ahead-r.to)
		r.to += n
		if errors.Is(err, io.ErrUnexpectedEOF) {
			err = io.EOF
		}
		r.err = err
	}
	if r.err == io.EOF {
		return nil
	}
	return r.err
}
