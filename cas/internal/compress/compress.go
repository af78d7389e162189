// SPDX-License-Identifier: Apache-2.0

// Package compress implements the compressors of the Remote Execution API (Compressor). It does not verify digests.
//
// Compressed data is untrusted. The caller limits how much is decompressed, by stating the size or by reading no more;
// the memory of a stream is its window: at most MaxWindow for Zstandard and 16 MiB for Brotli. Admit returns that
// amount in advance, so that a caller can limit the total. The package starts no goroutines and pools tables and
// windows, which take megabytes each.
//
// All compressors of the API are implemented, because clients differ in which ones they support. Encoders run at fast
// levels: compression saves network traffic only, since stores keep uncompressed bytes.
package compress

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// MinSize is the size of the smallest blob worth compressing, in bytes: for smaller blobs, the frame costs more than
// compression saves.
const MinSize = 512

// An encoder compresses the bytes written to it. Reset makes it reusable.
type encoder interface {
	io.WriteCloser
	Reset(io.Writer)
}

// A decoder reads decompressed bytes. Reset makes it reusable.
type decoder interface {
	io.Reader
	Reset(io.Reader) error
}

// A format is one compressor of the API.
type format struct {
	compressor repb.Compressor_Value
	encoders   sync.Pool // of encoder
	decoders   *decoders // for any stream
}

func newFormat(c repb.Compressor_Value, e func() encoder, d *decoders) *format {
	return &format{compressor: c, encoders: sync.Pool{New: func() any { return e() }}, decoders: d}
}

// formats are the supported formats, in order of preference.
var formats = []*format{
	newFormat(repb.Compressor_ZSTD, newZstdEncoder, windows[len(windows)-1]),
	newFormat(repb.Compressor_BROTLI, newBrotliEncoder, newDecoders(16<<20, newBrotliDecoder)),
	newFormat(repb.Compressor_DEFLATE, newDeflateEncoder, newDecoders(32<<10, newDeflateDecoder)),
}

// Compressors returns the supported compressors, except IDENTITY, in order of preference.
func Compressors() []repb.Compressor_Value {
	all := make([]repb.Compressor_Value, len(formats))
	for i, f := range formats {
		all[i] = f.compressor
	}
	return all
}

// Supported reports whether c is one of Compressors.
func Supported(c repb.Compressor_Value) bool { return slices.Contains(Compressors(), c) }

// Name returns the name of c in resource names, such as "zstd".
func Name(c repb.Compressor_Value) string { return strings.ToLower(c.String()) }

// Parse returns the compressor with this Name, or cas.ErrInvalid if it is not supported.
func Parse(name string) (repb.Compressor_Value, error) {
	for _, f := range formats {
		if name == Name(f.compressor) {
			return f.compressor, nil
		}
	}
	return 0, fmt.Errorf("%w compressor: %+.80q is not supported; use one of %s", cas.ErrInvalid, name, Names())
}

// Names lists the supported compressors for messages.
func Names() string {
	var names []string
	for _, f := range formats {
		names = append(names, Name(f.compressor))
	}
	return strings.Join(names, ", ")
}

// formatOf panics if c is not supported.
func formatOf(c repb.Compressor_Value) *format {
	for _, f := range formats {
		if f.compressor == c {
			return f
		}
	}
	panic(fmt.Sprintf("compress: compressor %v is not supported", c))
}

// WriterMemory is the approximate memory of a Writer in bytes.
const WriterMemory = 2 << 20

// A Writer compresses the data written to it. It is not safe for concurrent use.
type Writer struct {
	format  *format
	encoder encoder // nil after Release
}

// NewWriter returns a Writer that compresses to w with the supported compressor c. The caller calls Release.
func NewWriter(c repb.Compressor_Value, w io.Writer) *Writer {
	f := formatOf(c)
	e := f.encoders.Get().(encoder)
	e.Reset(w)
	return &Writer{f, e}
}

// Write implements io.Writer. The underlying writer may receive little before Close.
func (w *Writer) Write(p []byte) (int, error) { return w.encoder.Write(p) }

// Close completes the compressed stream. It does not close the underlying writer.
func (w *Writer) Close() error { return w.encoder.Close() }

// Release returns the resources of w, with or without Close. It is idempotent.
func (w *Writer) Release() {
	if w.encoder != nil {
		w.encoder.Reset(nil)
		w.format.encoders.Put(w.encoder)
		w.encoder = nil
	}
}

// A Reader decompresses. It is not safe for concurrent use.
type Reader struct {
	format   *format
	src      source
	decoders *decoders
	decoder  decoder // nil after Release
	err      error   // permanent
}

// NewReader returns a Reader of r for the supported compressor c. The caller calls Release and limits how much it
// reads: a few bytes may decompress to a huge number of bytes.
func NewReader(c repb.Compressor_Value, r io.Reader) *Reader {
	f := formatOf(c)
	return newReader(f, f.decoders, r)
}

// Admit returns the memory in bytes that reading a stream takes, and a variant of NewReader for it. The head is the
// beginning of the stream, at least 18 bytes unless the stream is shorter; with less, the memory is the maximum. A
// later frame that needs more memory is cas.ErrInvalid.
func Admit(c repb.Compressor_Value, head []byte) (memory int64, newReaderOf func(io.Reader) *Reader) {
	f := formatOf(c)
	d := f.decoders
	if c == repb.Compressor_ZSTD {
		d = zstdDecoders(head)
	}
	return d.window, func(r io.Reader) *Reader { return newReader(f, d, r) }
}

func newReader(f *format, d *decoders, r io.Reader) *Reader {
	cr := &Reader{format: f, src: source{r: r}, decoders: d, decoder: d.pool.Get().(decoder)}
	cr.err = cr.decoder.Reset(&cr.src)
	return cr
}

// Read implements io.Reader. It returns io.EOF if both the compressed stream and the underlying reader end. Malformed,
// truncated and trailing data is cas.ErrInvalid; errors of the underlying reader are returned unchanged.
func (r *Reader) Read(p []byte) (int, error) {
	if r.err != nil || len(p) == 0 {
		return 0, r.err
	}
	n, err := r.decoder.Read(p)
	if err != nil {
		r.err = r.readError(err)
	}
	return n, r.err
}

// readError converts an error of the decoder.
func (r *Reader) readError(err error) error {
	if err == io.EOF && r.src.err == nil {
		if n, _ := io.ReadFull(&r.src, make([]byte, 1)); n > 0 {
			err = errTrailing
		}
	}
	if r.src.err != nil && r.src.err != io.EOF {
		return r.src.err
	}
	if err == io.EOF {
		return io.EOF
	}
	return malformed(r.format.compressor, err)
}

var errTrailing = errors.New("trailing data")

// Release returns the resources of r, which is then unusable. It is idempotent.
func (r *Reader) Release() {
	if r.decoder != nil {
		r.err = errReleased
		_ = r.decoder.Reset(nil) // drop the reference to the source; errors do not matter any more
		r.decoders.pool.Put(r.decoder)
		r.decoder = nil
	}
}

var errReleased = errors.New("compress: read after Release")

// A source records its error, to distinguish it from those of the decoder.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	n, err := s.r.Read(p)
	s.err = err
	return n, err
}

// DecodeMemory returns the memory in bytes that Decode takes besides the data: Zstandard uses them as its window.
func DecodeMemory(c repb.Compressor_Value) int64 {
	if c == repb.Compressor_ZSTD {
		return 0
	}
	return formatOf(c).decoders.window
}

// Decode decompresses data to size bytes. It allocates no more, except for the window of formats other than Zstandard.
// Malformed data and other sizes are cas.ErrInvalid.
func Decode(c repb.Compressor_Value, data []byte, size int64) ([]byte, error) {
	if c == repb.Compressor_ZSTD {
		return decodeZstd(data, size)
	}
	r := NewReader(c, bytes.NewReader(data))
	defer r.Release()
	b := make([]byte, size)
	n, err := io.ReadFull(r, b)
	if err == nil {
		// Check that nothing follows.
		if _, err = io.ReadFull(r, make([]byte, 1)); err == io.EOF {
			return b, nil
		} else if err == nil {
			return nil, tooLong(size)
		}
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return nil, tooShort(int64(n), size)
	}
	return nil, err
}

func tooLong(size int64) error {
	return fmt.Errorf("%w data: decompresses to more than the stated %d bytes", cas.ErrInvalid, size)
}

func tooShort(n, size int64) error {
	return fmt.Errorf("%w data: decompresses to %d bytes, not the stated %d", cas.ErrInvalid, n, size)
}

func malformed(c repb.Compressor_Value, err error) error {
	return fmt.Errorf("%w data: malformed %s: %s", cas.ErrInvalid, Name(c), err)
}

// Encode compresses data. It returns nil if that does not make it smaller.
func Encode(c repb.Compressor_Value, data []byte) []byte {
	if len(data) < MinSize {
		return nil
	}
	var b bytes.Buffer
	b.Grow(len(data))
	w := NewWriter(c, &b)
	defer w.Release()
	if _, err := w.Write(data); err != nil {
		return nil
	}
	if err := w.Close(); err != nil || b.Len() >= len(data) {
		return nil
	}
	return b.Bytes()
}
