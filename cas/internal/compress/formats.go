// SPDX-License-Identifier: Apache-2.0

package compress

import (
	"bufio"
	"errors"
	"io"
	"sync"

	"github.com/andybalholm/brotli"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"
)

const (
	// MaxWindow limits the window of Zstandard frames in bytes. The standard levels need at most 8 MiB, and the ultra
	// level 20 needs this.
	MaxWindow = 32 << 20
	// window is the window size of our frames. Larger ones need a fifth more processor time for at most 0.3 % fewer bytes.
	window = 512 << 10
)

func newZstdEncoder() encoder {
	// Encode the empty blob as a frame, since some decoders reject empty input.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(window), zstd.WithZeroFrames(true))
	if err != nil {
		panic(err) // an invalid option
	}
	return e
}

// windows has one pool of Zstandard decoders per window size, so that streams with small windows take little memory.
// Level 3 needs 2 MiB; levels up to 19 need 8 MiB, the size that RFC 8878 recommends to support.
var windows = [...]*decoders{newZstdDecoders(2 << 20), newZstdDecoders(8 << 20), newZstdDecoders(MaxWindow)}

// decoders pools the decoders for one window size.
type decoders struct {
	window int64
	pool   sync.Pool // of decoder
}

func newDecoders(window int64, newDecoder func() decoder) *decoders {
	return &decoders{window, sync.Pool{New: func() any { return newDecoder() }}}
}

func newZstdDecoders(window int64) *decoders {
	return newDecoders(window, func() decoder { return newZstdDecoder(1, window) })
}

func newZstdDecoder(concurrency int, window int64, options ...zstd.DOption) *zstd.Decoder {
	options = append(options, zstd.WithDecoderConcurrency(concurrency), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(uint64(window)))
	d, err := zstd.NewReader(nil, options...)
	if err != nil {
		panic(err)
	}
	return d
}

// zstdDecoders returns the decoders for a stream that begins with head. After a first frame without a window, other
// frames may need one.
func zstdDecoders(head []byte) *decoders {
	var h zstd.Header
	last := windows[len(windows)-1]
	if err := h.Decode(head); err != nil || h.Skippable {
		return last
	}
	need, least := int64(h.WindowSize), 0
	if h.SingleSegment {
		need, least = int64(min(h.FrameContentSize, MaxWindow)), 1
	}
	for _, d := range windows[least:] {
		if need <= d.window {
			return d
		}
	}
	return last // which reports the error
}

// memoryDecoder decodes Zstandard in memory, where the output serves as the window.
var memoryDecoder = sync.OnceValue(func() *zstd.Decoder {
	return newZstdDecoder(0, MaxWindow, zstd.WithDecodeAllCapLimit(true))
})

// decodeZstd is Decode for Zstandard.
func decodeZstd(data []byte, size int64) ([]byte, error) {
	b, err := memoryDecoder().DecodeAll(data, make([]byte, 0, size))
	switch {
	case errors.Is(err, zstd.ErrDecoderSizeExceeded) || int64(len(b)) > size:
		return nil, tooLong(size)
	case err != nil:
		return nil, malformed(repb.Compressor_ZSTD, err)
	case int64(len(b)) < size:
		return nil, tooShort(int64(len(b)), size)
	}
	return b, nil
}

func newBrotliEncoder() encoder {
	return brotli.NewWriterOptions(nil, brotli.WriterOptions{Quality: 3, LGWin: 18})
}

func newBrotliDecoder() decoder { return new(brotli.Reader) }

func newDeflateEncoder() encoder {
	e, err := flate.NewWriter(nil, flate.BestSpeed)
	if err != nil {
		panic(err)
	}
	return e
}

// An inflater reads raw deflate (RFC 1951) and rejects trailing data in its buffer.
type inflater struct {
	in *bufio.Reader // an io.ByteReader, so that r does not read ahead
	r  io.ReadCloser
}

func newDeflateDecoder() decoder {
	in := bufio.NewReaderSize(nil, 32<<10)
	return &inflater{in, flate.NewReader(in)}
}

// Reset implements decoder.
func (f *inflater) Reset(r io.Reader) error {
	f.in.Reset(r)
	return f.r.(flate.Resetter).Reset(f.in, nil)
}

// Read implements io.Reader.
func (f *inflater) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if err == io.EOF && f.in.Buffered() > 0 {
		err = errTrailing
	}
	return n, err
}
