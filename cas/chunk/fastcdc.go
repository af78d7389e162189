// SPDX-License-Identifier: Apache-2.0

package chunk

import (
	"fmt"
	"math/bits"
)

// Bounds of the average size of FastCDC, in bytes (FastCdc2020Params).
const (
	MinAverage = 1 << 10
	MaxAverage = 8 << 20
)

// normalization is by how many bits the masks before and after the average size differ from its logarithm. The API
// fixes it (FastCdc2020Params).
const normalization = 2

// FastCDC is the function of Wen Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based
// Storage Systems", IEEE TPDS 31(9), 2020, with normalization 2. Chunks are a quarter of the average to four times it,
// but for the last one, which may be smaller.
type FastCDC struct {
	Average int    // bytes: a power of two from MinAverage to MaxAverage
	Seed    uint32 // changes the table of the hash; 0 is that of the paper
}

// Max implements Params.
func (p FastCDC) Max() int { return 4 * p.Average }

func (p FastCDC) cutter() (cutter, error) {
	if p.Average < MinAverage || p.Average > MaxAverage || p.Average&(p.Average-1) != 0 {
		return nil, fmt.Errorf("FastCDC with chunks of %d bytes on average: it must be a power of two from %d to %d",
			p.Average, MinAverage, MaxAverage)
	}
	return newFastCDC(p.Average/4, p.Average, 4*p.Average, p.Seed), nil
}

// A fastCDC implements cutter.
type fastCDC struct {
	least, average, most int // bytes
	hard, easy           uint64
	gear                 [256]uint64
}

// newFastCDC returns a cutter for an average size that is a power of two, and any other sizes.
func newFastCDC(least, average, most int, seed uint32) *fastCDC {
	n := bits.TrailingZeros(uint(average))
	c := &fastCDC{least: least, average: average, most: most, hard: masks[n+normalization], easy: masks[n-normalization], gear: gear}
	for i := range c.gear {
		c.gear[i] ^= uint64(seed)
	}
	return c
}

func (c *fastCDC) ahead() int { return c.most }

func (c *fastCDC) cut(b []byte) int {
	n, _ := c.cutHash(b)
	return n
}

// cutHash returns the size of the first chunk of b, and the hash where it was cut. The byte whose hash permits the cut
// is the first of the next chunk. The paper goes by two bytes at a time, from the even numbers below the sizes to those
// below the end, and so do the test vectors: an odd last byte is not looked at.
func (c *fastCDC) cutHash(b []byte) (n int, hash uint64) {
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

// masks have as many bits as their index, spread so that the hash's longer memory counts. They are those of the
// reference implementation of the paper's authors, which the API asks for: no formula gives them.
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
