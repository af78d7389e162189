// SPDX-License-Identifier: Apache-2.0

package chunk

import (
	"crypto/md5"
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"

	"github.com/buildbarn/go-cdc"
)

// Bounds of the average chunk size of FastCDC in bytes (FastCdc2020Params).
const (
	MinAverage = 1 << 10
	maxAverage = 8 << 20
)

// normalization is the number of bits added to the mask before the average size and removed from the mask after it.
// The API fixes it (FastCdc2020Params).
const normalization = 2

// FastCDC is the function of Wen Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based
// Storage Systems", IEEE TPDS 31(9), 2020, with normalization 2. Chunks are from a quarter of the average to four times
// the average; only the last chunk may be smaller.
type FastCDC struct {
	Average int    // bytes: a power of two from MinAverage to maxAverage
	Seed    uint32 // XORed into the Gear table; 0 is the table of the paper
}

// Max implements Params.
func (p FastCDC) Max() int { return 4 * p.Average }

func (p FastCDC) chunker() (chunker, error) {
	if p.Average < MinAverage || p.Average > maxAverage || p.Average&(p.Average-1) != 0 {
		return nil, fmt.Errorf("FastCDC: average chunk size %d is not a power of two from %d to %d bytes",
			p.Average, MinAverage, maxAverage)
	}
	return newFastCDC(p.Average/4, p.Average, 4*p.Average, p.Seed), nil
}

// gear maps each byte to a pseudorandom number: the first eight bytes of the MD5 of 64 repetitions of the byte. The
// text of the API specifies the MD5 of the byte itself, but its test vectors and all implementations it names use this.
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

// fastCDC finds cut points: hard is the mask up to the average size, easy the mask after it.
type fastCDC struct {
	least, average, most int // bytes
	hard, easy           uint64
	gear                 [256]uint64
}

// newFastCDC returns a fastCDC. The average must be a power of two; the other sizes are arbitrary.
func newFastCDC(least, average, most int, seed uint32) *fastCDC {
	n := bits.TrailingZeros(uint(average))
	c := &fastCDC{
		least: least, average: average, most: most,
		hard: masks[n+normalization], easy: masks[n-normalization], gear: gear,
	}
	for i := range c.gear {
		c.gear[i] ^= uint64(seed)
	}
	return c
}

func (c *fastCDC) GetMaximumPeekSizeBytes() int { return c.most }

func (c *fastCDC) NewChunkReader(src cdc.Peeker) cdc.ChunkReader {
	return &fastReader{fastCDC: c, src: src}
}

// fastReader implements cdc.ChunkReader.
type fastReader struct {
	*fastCDC
	src  cdc.Peeker
	last int // size of the last chunk returned, still in src
}

func (r *fastReader) ReadNextChunk() ([]byte, error) {
	if _, err := r.src.Discard(r.last); err != nil {
		return nil, err
	}
	r.last = 0
	b, err := r.src.Peek(r.most)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if len(b) == 0 {
		return nil, io.EOF
	}
	r.last, _ = r.cut(b)
	return b[:r.last], nil
}

// cut returns the size of the first chunk of b and the hash at its end. The byte whose hash allows the cut begins the
// next chunk. Like the paper, and hence the test vectors, it processes pairs of bytes that start at even offsets: an
// odd last byte is ignored.
func (c *fastCDC) cut(b []byte) (n int, hash uint64) {
	if len(b) <= c.least {
		return len(b), 0
	}
	b = b[:min(len(b), c.most)]
	end := len(b) &^ 1
	middle := min(c.average&^1, end)
	i := c.least &^ 1
	for ; i < middle; i++ {
		if hash = hash<<1 + c.gear[b[i]]; hash&c.hard == 0 {
			return i, hash
		}
	}
	for ; i < end; i++ {
		if hash = hash<<1 + c.gear[b[i]]; hash&c.easy == 0 {
			return i, hash
		}
	}
	return len(b), hash
}

// masks[n] has n bits set, spread over the hash. They are the constants of the reference implementation of the paper,
// which the API requires; no formula yields them.
var masks = [...]uint64{
	8:  0x0000001800035300,
	9:  0x0000019000353000,
	10: 0x0000590003530000,
	11: 0x0000d90003530000,
	12: 0x0000d90103530000,
	13: 0x0000d90303530000,
	14: 0x0000d90313530000,
	15: 0x0000d90f03530000,
	16: 0x0000d90303537000,
	17: 0x0000d90703537000,
	18: 0x0000d90707537000,
	19: 0x0000d91707537000,
	20: 0x0000d91747537000,
	21: 0x0000d91767537000,
	22: 0x0000d93767537000,
	23: 0x0000d93777537000,
	24: 0x0000d93777577000,
	25: 0x0000db3777577000,
}
