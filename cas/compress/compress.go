// SPDX-License-Identifier: Apache-2.0

// Package compress compresses blobs for the wire and back, in the formats that the Remote Execution API names
// (Compressor). It does not compare what comes out with a digest: that is for who asks.
//
// Whoever sends may lie about everything. What is read is bounded by the caller, who stops, or states the size; the
// memory of a stream is that of its window, at most MaxWindow for Zstandard and 16 MiB for Brotli, whatever the data
// says of itself. Admit says how much beforehand, for a caller who bounds what all streams take. Nothing starts a
// goroutine. Tables and windows, megabytes each, are used again by other streams.
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

// Worthwhile is the size, in bytes, from which a blob is compressed: of less, the frame costs what is saved.
const Worthwhile = 512

// An encoder compresses what is written to it; after Reset it is as good as new.
type encoder interface {
	io.WriteCloser
	Reset(io.Writer)
}

// A decoder reads to io.EOF what was compressed; after Reset it is as good as new.
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

// formats are those served, the best first.
var formats = []*format{
	newFormat(repb.Compressor_ZSTD, newZstdEncoder, windows[len(windows)-1]),
	newFormat(repb.Compressor_BROTLI, newBrotliEncoder, &decoders{16 << 20, sync.Pool{New: func() any { return newBrotliDecoder() }}}),
	newFormat(repb.Compressor_DEFLATE, newDeflateEncoder, &decoders{32 << 10, sync.Pool{New: func() any { return newDeflateDecoder() }}}),
}

// Compressors lists the compressors served, the best first. IDENTITY is none of them.
func Compressors() []repb.Compressor_Value {
	all := make([]repb.Compressor_Value, len(formats))
	for i, f := range formats {
		all[i] = f.compressor
	}
	return all
}

// Served reports whether c is one of Compressors.
func Served(c repb.Compressor_Value) bool { return slices.Contains(Compressors(), c) }

// Name returns the name of c in a resource name: "zstd".
func Name(c repb.Compressor_Value) string { return strings.ToLower(c.String()) }

// Parse returns the compressor that Name has that name, or cas.ErrInvalid if none is served by it.
func Parse(name string) (repb.Compressor_Value, error) {
	for _, f := range formats {
		if name == Name(f.compressor) {
			return f.compressor, nil
		}
	}
	return 0, fmt.Errorf("%w compressor: %+.80q is not served; served: %s", cas.ErrInvalid, name, Names())
}

// Names lists the compressors served, for a message to a client.
func Names() string {
	var names []string
	for _, f := range formats {
		names = append(names, Name(f.compressor))
	}
	return strings.Join(names, ", ")
}

// formatOf panics for a compressor that is not served.
func formatOf(c repb.Compressor_Value) *format {
	for _, f := range formats {
		if f.compressor == c {
			return f
		}
	}
	panic(fmt.Sprintf("compress: compressor %v is not served", c))
}

// WriterMemory is about what a Writer takes of memory, in bytes.
const WriterMemory = 2 << 20

// A Writer compresses what is written to it. It is not safe for concurrent use.
type Writer struct {
	format  *format
	encoder encoder // nil once it is given back
}

// NewWriter returns a Writer to w of a compressor that is served. The caller calls Release.
func NewWriter(c repb.Compressor_Value, w io.Writer) *Writer {
	f := formatOf(c)
	e := f.encoders.Get().(encoder)
	e.Reset(w)
	return &Writer{f, e}
}

// Write implements io.Writer. Little of p may reach the underlying writer before Close.
func (w *Writer) Write(p []byte) (int, error) { return w.encoder.Write(p) }

// Close writes the end of the stream, without which it is not whole; it does not close the underlying writer.
func (w *Writer) Close() error { return w.encoder.Close() }

// Release ends the use of w, with or without Close, and may be called again.
func (w *Writer) Release() {
	if w.encoder != nil {
		w.encoder.Reset(nil)
		w.format.encoders.Put(w.encoder)
		w.encoder = nil
	}
}

// A Reader reads what was compressed. It is not safe for concurrent use.
type Reader struct {
	format   *format
	src      source
	decoders *decoders
	decoder  decoder // nil once it is given back
	err      error   // what reading ended with
}

// NewReader returns a Reader of a compressor that is served. The caller calls Release, and bounds what it reads:
// few bytes may stand for very many.
func NewReader(c repb.Compressor_Value, r io.Reader) *Reader {
	f := formatOf(c)
	return newReader(f, f.decoders, r)
}

// Admit returns how much memory, in bytes, a stream takes to be read that begins with head, 18 bytes of it or
// all, and what makes a Reader of it that takes no more: a later frame that asks for more is cas.ErrInvalid. If head is
// less, it is the most that any stream takes. The Reader is as of NewReader.
func Admit(c repb.Compressor_Value, head []byte) (memory int64, reader func(io.Reader) *Reader) {
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

// Read implements io.Reader. It returns io.EOF where the compressed stream and the underlying reader end both. What
// is malformed, ends within a stream or goes on after it is cas.ErrInvalid; an error of the underlying reader is
// returned as it is.
func (r *Reader) Read(p []byte) (int, error) {
	if r.err != nil || len(p) == 0 {
		return 0, r.err
	}
	n, err := r.decoder.Read(p)
	if err != nil {
		r.err = r.ended(err)
	}
	return n, r.err
}

// ended returns what err of the decoder is for the caller.
func (r *Reader) ended(err error) error {
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
	return notWhole(r.format.compressor, err)
}

var errTrailing = errors.New("bytes follow its end")

// Release ends the use of r, at whatever point, and may be called again. Then r reads nothing.
func (r *Reader) Release() {
	if r.decoder != nil {
		r.err = errReleased
		// It must not keep the source; there is no error that anybody could still care for.
		_ = r.decoder.Reset(nil)
		r.decoders.pool.Put(r.decoder)
		r.decoder = nil
	}
}

var errReleased = errors.New("compress: read of a released Reader")

// A source remembers what ended it, so that its errors are told from those of the data.
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

// Decode returns what data decompresses to, which is size bytes; it takes memory for no more, of Zstandard also for no
// window. Whatever else data is, is cas.ErrInvalid.
func Decode(c repb.Compressor_Value, data []byte, size int64) ([]byte, error) {
	if c == repb.Compressor_ZSTD {
		return decodeZstd(data, size)
	}
	r := NewReader(c, bytes.NewReader(data))
	defer r.Release()
	b := make([]byte, size)
	n, err := io.ReadFull(r, b)
	if err == nil {
		// Only the end shows that nothing follows.
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
	return fmt.Errorf("%w data: it is more than the %d bytes stated, uncompressed", cas.ErrInvalid, size)
}

func tooShort(n, size int64) error {
	return fmt.Errorf("%w data: it is %d bytes, uncompressed, and not %d as stated", cas.ErrInvalid, n, size)
}

func notWhole(c repb.Compressor_Value, err error) error {
	return fmt.Errorf("%w data: it is not whole %s: %s", cas.ErrInvalid, Name(c), err)
}

// Encode returns data compressed, or nil if that saves nothing.
func Encode(c repb.Compressor_Value, data []byte) []byte {
	if len(data) < Worthwhile {
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
