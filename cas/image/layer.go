// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
)

const (
	smallFile = 512 << 10 // bytes of a file that is batched with others
	heldFile  = 4 << 20   // bytes of a file that is hashed in memory
	maxNames  = 256 << 20 // bytes of all paths and targets of one image
	// maxWindow bounds the memory of a zstd decoder: the window of level 22, which tools for images do not exceed.
	maxWindow = 128 << 20
)

// A layer is one layer of a source.
type layer struct {
	name string // for messages
	// open returns the layer as the source has it.
	open func(context.Context) (io.ReadCloser, error)
	// digest and size are those of what open returns. The zero digest is not checked.
	digest v1.Hash
	size   int64
	// diffID is the digest of the decompressed layer.
	diffID v1.Hash
}

// used counts what the layers of one image, which are read concurrently, have used of the limits.
type used struct {
	limits   Limits
	raw      atomic.Int64 // compressed bytes
	bytes    atomic.Int64 // decompressed bytes
	content  atomic.Int64 // bytes of files; a sparse one takes no space in a layer
	entries  atomic.Int64
	names    atomic.Int64 // bytes of paths and targets
	dropped  atomic.Int64
	progress func(done int64)
}

// A share is what one attempt to read a layer adds to a total.
type share struct {
	total *atomic.Int64
	own   int64
}

func (s *share) add(n int64) int64 {
	s.own += n
	return s.total.Add(n)
}

// A layerReader reads one layer into the store.
type layerReader struct {
	config                           *Config
	limits                           Limits
	content, entries, names, dropped share
	batch                            *cas.Batch
	held                             []byte // for files up to heldFile
	ops                              []op
}

// errBroken marks an error of reading from the source, which another attempt may not have.
var errBroken = errors.New("reading was interrupted")

// attempts is the number of times that a layer is read if the connection breaks.
const attempts = 3

// read stores the files of l and returns its entries. Nothing is left of a layer that fails but blobs in the store.
func (c *Config) readLayer(ctx context.Context, l *layer, u *used) ([]op, error) {
	for attempt := 1; ; attempt++ {
		before := u.raw.Load()
		ops, err := c.tryLayer(ctx, l, u)
		if err == nil || attempt == attempts || !errors.Is(err, errBroken) || ctx.Err() != nil {
			if err != nil {
				err = fmt.Errorf("layer %s: %w", l.name, err)
			}
			return ops, err
		}
		c.Log.Warn("reading a layer of an image again", "layer", l.name, "read", u.raw.Load()-before, "err", err)
	}
}

func (c *Config) tryLayer(ctx context.Context, l *layer, u *used) (ops []op, err error) {
	c.asking(1)
	body, err := l.open(ctx)
	c.asking(-1)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	raw := &meter{
		r: body, sum: sha256.New(), n: share{total: &u.raw}, limit: u.limits.Bytes, seen: u.progress, asking: c.asking,
	}
	out := &meter{sum: sha256.New(), n: share{total: &u.bytes}, limit: u.limits.Bytes}
	r := &layerReader{
		config: c, limits: u.limits, batch: cas.NewBatch(c.Store),
		content: share{total: &u.content}, entries: share{total: &u.entries},
		names: share{total: &u.names}, dropped: share{total: &u.dropped},
	}
	defer func() {
		if err == nil {
			return
		}
		for _, s := range []*share{&raw.n, &out.n, &r.content, &r.entries, &r.names, &r.dropped} {
			s.total.Add(-s.own) // another attempt reads it again
		}
	}()
	if err := r.read(ctx, raw, out); err != nil {
		return nil, l.explain(err, raw)
	}
	if err := raw.check(l.digest, ""); err != nil {
		return nil, err
	}
	if err := out.check(l.diffID, " decompressed"); err != nil {
		return nil, err
	}
	return r.ops, r.batch.Flush(ctx)
}

// read reads a layer to its end, from raw through out.
func (r *layerReader) read(ctx context.Context, raw, out *meter) error {
	plain, err := decompress(raw)
	if err != nil {
		return malformed(err, "the compressed data")
	}
	defer plain.Close()
	out.r = plain
	if err := r.archive(ctx, tar.NewReader(out)); err != nil {
		return err
	}
	// The digests cover what follows the archive, too.
	if _, err := io.Copy(io.Discard, out); err != nil {
		return malformed(err, "the compressed data")
	}
	_, err = io.Copy(io.Discard, raw)
	return err
}

// explain returns err, or the error of the source if that is why decompression or the archive failed.
func (l *layer) explain(err error, raw *meter) error {
	switch {
	case raw.err == nil:
		return err
	case raw.n.own >= l.size && l.size > 0 && raw.check(l.digest, "") != nil: // the source checks, too
		return raw.check(l.digest, "")
	}
	return fmt.Errorf("%w: %w", errBroken, raw.err)
}

// A meter hashes and counts what is read through it.
type meter struct {
	r     io.Reader
	sum   hash.Hash
	n     share // over all layers
	limit int64
	seen  func(int64) // may be nil, like asking
	err   error       // of r
	// asking is Config.asking if r reads from the registry.
	asking func(int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.read(p)
	m.sum.Write(p[:n])
	total := m.n.add(int64(n))
	if m.seen != nil {
		m.seen(total)
	}
	if total > m.limit {
		return n, tooLarge("the layers have more than %d bytes", m.limit)
	}
	if err != nil && err != io.EOF {
		m.err = err
	}
	return n, err
}

func (m *meter) read(p []byte) (int, error) {
	if m.asking != nil {
		m.asking(1)
		defer m.asking(-1)
	}
	return m.r.Read(p)
}

// check compares the digest of what was read, unless want is zero.
func (m *meter) check(want v1.Hash, what string) error {
	if got := m.digest(); want != (v1.Hash{}) && got != want {
		return &classified{ErrDigest, fmt.Sprintf("the%s content has the digest %s, not %s as stated", what, got, want)}
	}
	return nil
}

func (m *meter) digest() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(m.sum.Sum(nil))}
}

// decompress detects the compression of a layer: gzip, zstd or none. Media types are not trusted.
func decompress(r io.Reader) (io.ReadCloser, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	magic, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		return gzip.NewReader(b)
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		d, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return io.NopCloser(b), nil
}

// archive reads the entries.
func (r *layerReader) archive(ctx context.Context, archive *tar.Reader) error {
	for {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		h, err := archive.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return malformed(err, "the archive")
		}
		if err := r.entry(ctx, h, archive); err != nil {
			return fmt.Errorf("entry %+.256q: %w", h.Name, err)
		}
	}
}

// malformed returns err, as an ErrLayer if it is about the format of an archive or of a compressed stream.
func malformed(err error, what string) error {
	if errors.Is(err, ErrTooLarge) || errors.Is(err, errBroken) {
		return err
	}
	return &classified{ErrLayer, fmt.Sprintf("%s is damaged: %v", what, err)}
}

const (
	whiteout = ".wh."     // begins the name of a file whose rest is removed
	reserved = ".wh..wh." // begins names with other meanings
	opaque   = ".wh..wh..opq"
)

// entry reads one entry of the archive.
func (r *layerReader) entry(ctx context.Context, h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	o := op{}
	var err error
	if o.path, err = cleanPath(h.Name); err != nil {
		return err
	}
	if n := r.entries.add(1); n > int64(r.limits.Entries) {
		return tooLarge("the layers have more than %d entries", r.limits.Entries)
	}
	dir, base := split(o.path)
	switch {
	case base == opaque:
		o.kind, o.path = opOpaque, dir
		return r.add(o)
	case strings.HasPrefix(base, reserved) || strings.Contains("/"+dir, "/"+reserved):
		return nil // AUFS's own
	case strings.Contains("/"+dir, "/"+whiteout):
		return refuse("a directory in its path has a name that marks a removal")
	case strings.HasPrefix(base, whiteout):
		name := strings.TrimPrefix(base, whiteout)
		if name == "" || name == "." || name == ".." {
			return refuse("it removes %+q, which is not a file name", name)
		}
		o.kind, o.path = opRemove, strings.TrimPrefix(dir+"/"+name, "/")
		return r.add(o)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		o.kind = opDirectory
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse:
		o.kind, o.exec = opFile, h.Mode&0o111 != 0
		if o.digest, err = r.file(ctx, h.Size, content); err != nil {
			return err
		}
	case tar.TypeSymlink:
		o.kind, o.target = opSymlink, h.Linkname
		if t := o.target; t == "" || len(t) > maxTarget || strings.Contains(t, "\x00") || !utf8.ValidString(t) {
			return refuse("a symlink to %+.64q: its target must be 1 to %d bytes of UTF-8 without NUL", t, maxTarget)
		}
	case tar.TypeLink:
		o.kind = opHardLink
		if o.target, err = cleanPath(h.Linkname); err != nil {
			return refuse("a hard link to %+.256q: %v", h.Linkname, err)
		}
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		r.dropped.add(1)
		o.kind = opRemove // it hides what earlier layers have there
	default:
		return refuse("it has the unknown type %q", h.Typeflag)
	}
	return r.add(o)
}

// add adds an operation.
func (r *layerReader) add(o op) error {
	if r.names.add(int64(len(o.path)+len(o.target))) > maxNames {
		return tooLarge("the paths and targets of all entries have more than %d bytes", maxNames)
	}
	r.ops = append(r.ops, o)
	return nil
}

// file stores the content of a file. A store needs the digest before the content, so a large file is written to a
// temporary one that has no name any more.
func (r *layerReader) file(ctx context.Context, size int64, content io.Reader) (d cas.Digest, err error) {
	f, limit := r.config.Function, r.limits.Bytes
	switch {
	case size > limit || r.content.add(size) > limit:
		return d, tooLarge("the files have more than %d bytes", limit)
	case size <= smallFile:
		data := make([]byte, size)
		if _, err := io.ReadFull(content, data); err != nil {
			return d, malformed(err, "the content")
		}
		return r.batch.AddBytes(ctx, f, data)
	case size <= heldFile:
		if r.held == nil {
			r.held = make([]byte, heldFile)
		}
		if _, err := io.ReadFull(content, r.held[:size]); err != nil {
			return d, malformed(err, "the content")
		}
		return r.batch.AddSeeker(ctx, f, bytes.NewReader(r.held[:size]))
	}
	tmp, err := os.CreateTemp(r.config.Dir, "layer-")
	if err != nil {
		return d, err
	}
	removed := os.Remove(tmp.Name()) // on some systems, only closed files can be removed
	defer func() {
		err = errors.Join(err, tmp.Close())
		if removed != nil {
			err = errors.Join(err, os.Remove(tmp.Name()))
		}
	}()
	from := &recorder{r: content}
	n, err := io.Copy(tmp, from)
	if from.err == nil && err == nil && n != size {
		from.err = io.ErrUnexpectedEOF
	}
	if from.err != nil {
		return d, malformed(from.err, "the content")
	}
	if err != nil {
		return d, err
	}
	return r.batch.AddSeeker(ctx, f, tmp)
}

// A recorder tells errors of reading from those of writing.
type recorder struct {
	r   io.Reader
	err error
}

func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}
