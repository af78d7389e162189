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
	// MaxWindow bounds the memory, in bytes, that a Zstandard frame may ask for to be read. No encoder's usual level
	// needs more than 8 MiB, and the --ultra ones up to 20 no more than this.
	MaxWindow = 32 << 20
	// window is what our own frames ask for.
	window = 1 << 20
)

func newZstdEncoder() encoder {
	// An empty blob is an empty frame, since not every decoder takes no bytes at all for one.
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
		zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(window), zstd.WithZeroFrames(true))
	if err != nil {
		panic(err) // only an option can be wrong
	}
	return e
}

// windows are what decoders of Zstandard are made for. Level 3 needs 2 MiB, and levels up to 19, as RFC 8878 asks of
// decoders, 8 MiB. A pool is of each, so that a stream which needs little does not hold much.
var windows = [...]*decoders{newZstdDecoders(2 << 20), newZstdDecoders(8 << 20), newZstdDecoders(MaxWindow)}

// decoders are those for a window.
type decoders struct {
	window int64
	pool   sync.Pool // of decoder
}

func newZstdDecoders(window int64) *decoders {
	return &decoders{window, sync.Pool{New: func() any {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(uint64(window)))
		if err != nil {
			panic(err)
		}
		return d
	}}}
}

// zstdDecoders returns those for a stream that begins with head. Where it begins with a frame that needs no window beyond
// itself, those after it may.
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
	return last // which says that it is too much
}

// wholeZstd reads what is in memory as a whole, where the output is the window.
var wholeZstd = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(MaxWindow), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic(err)
	}
	return d
})

// decodeZstd is Decode for Zstandard.
func decodeZstd(data []byte, size int64) ([]byte, error) {
	b, err := wholeZstd().DecodeAll(data, make([]byte, 0, size))
	switch {
	case errors.Is(err, zstd.ErrDecoderSizeExceeded) || int64(len(b)) > size:
		return nil, tooLong(size)
	case err != nil:
		return nil, notWhole(repb.Compressor_ZSTD, err)
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

// An inflater reads raw deflate (RFC 1951). It sees to it that the stream is all there is in its buffer.
type inflater struct {
	in *bufio.Reader // of which the reader takes no byte too many
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
