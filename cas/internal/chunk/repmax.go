// SPDX-License-Identifier: Apache-2.0

package chunk

import (
	"fmt"

	"github.com/buildbarn/go-cdc"
)

const (
	// maxHorizon is the largest lookahead of RepMaxCDC in bytes; a Reader buffers that much.
	maxHorizon = 64 << 20
	// window is the number of bytes that determine a Gear hash, which has 64 bits and shifts by one per byte.
	window = 64
)

// RepMaxCDC cuts where the Gear hash is greatest within the horizon, repeatedly, until chunks are from Min to 2*Min-1
// bytes. Only a stream of less than Min bytes has a smaller chunk.
type RepMaxCDC struct {
	Min     int // bytes: 64 to maxAverage
	Horizon int // bytes: 0 to maxHorizon; the API recommends 8 times Min
}

// Max implements Params.
func (p RepMaxCDC) Max() int { return 2*p.Min - 1 }

func (p RepMaxCDC) chunker() (chunker, error) {
	if p.Min < window || p.Min > maxAverage {
		return nil, fmt.Errorf("RepMaxCDC: minimum chunk size %d is outside %d to %d bytes", p.Min, window, maxAverage)
	}
	if p.Horizon < 0 || p.Horizon > maxHorizon {
		return nil, fmt.Errorf("RepMaxCDC: horizon %d is outside 0 to %d bytes", p.Horizon, maxHorizon)
	}
	return cdc.NewRepMaxContentDefinedChunker(&cdc.FastContentDefinedChunkerGearTable, p.Min, p.Horizon), nil
}
