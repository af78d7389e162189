// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"sync"

	"github.com/klauspost/compress/zstd"
)

const (
	// worthwhile is the size, in bytes, from which a blob is compressed: of less, the frame costs what is saved.
	worthwhile = 512
	// maxWindow bounds the memory that a frame may ask for to be read. No encoder's usual level needs more.
	maxWindow = 32 << 20
	// window is what our own frames ask for.
	window = 1 << 20
)

// decoders and encoders, of which each has megabytes of tables. None starts a goroutine.
var (
	decoders = sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			panic(err) // only an option can be wrong
		}
		return d
	}}
	encoders = sync.Pool{New: func() any {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
			zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(window))
		if err != nil {
			panic(err)
		}
		return e
	}}
)

// inflate returns what was compressed to data, if that is at most size bytes: it takes memory for no more.
func inflate(data []byte, size int64) ([]byte, error) {
	d := decoders.Get().(*zstd.Decoder)
	defer decoders.Put(d)
	return d.DecodeAll(data, make([]byte, 0, size))
}

// deflate returns data compressed, or nil if that saves nothing.
func deflate(data []byte) []byte {
	if len(data) < worthwhile {
		return nil
	}
	e := encoders.Get().(*zstd.Encoder)
	defer encoders.Put(e)
	b := e.EncodeAll(data, make([]byte, 0, len(data)))
	if len(b) >= len(data) {
		return nil
	}
	return b
}
