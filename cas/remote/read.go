// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Missing implements cas.Store.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	var named, asked []cas.Digest // each once, and those of them that the server is asked for
	absent := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if _, again := absent[d]; again || d.IsEmpty() {
			continue
		}
		absent[d] = impossible(d)
		named = append(named, d)
		if !impossible(d) {
			asked = append(asked, d)
		}
	}
	if _, err := s.ready(ctx); err != nil {
		return nil, err
	}
	for _, part := range runs(asked, maxAsked) {
		if _, err := s.readyFor(ctx, part[0].Function()); err != nil {
			return nil, err
		}
		resp, err := s.blobs.FindMissingBlobs(ctx, &repb.FindMissingBlobsRequest{
			InstanceName: s.name, BlobDigests: protos(part), DigestFunction: part[0].Function().Proto(),
		})
		if err != nil {
			return nil, s.failed(ctx, "find missing blobs", err)
		}
		// The server may answer in any order.
		for _, p := range resp.MissingBlobDigests {
			d, err := cas.FromProto(part[0].Function(), p)
			if err != nil {
				return nil, fmt.Errorf("find missing blobs at %s: the answer is malformed: %w", s.target, err)
			}
			absent[d] = true
		}
	}
	return slices.DeleteFunc(named, func(d cas.Digest) bool { return !absent[d] }), ctx.Err()
}

// impossible reports whether d names no blob at all. bb_storage takes each blob without bytes for the empty one, and
// bazel-remote refuses a whole list for it.
func impossible(d cas.Digest) bool { return d.Size() == 0 && !d.IsEmpty() }

func protos(ds []cas.Digest) []*repb.Digest {
	ps := make([]*repb.Digest, len(ds))
	for i, d := range ds {
		ps[i] = d.Proto()
	}
	return ps
}

// Open implements cas.Store. A blob of up to 1 MiB is here when it returns, a larger one is streamed; a
// stream that breaks off goes on where it was.
//
// It is one stream also for a large blob: four ranges at once took as long, on loopback and with 20 and 50 ms to the
// server and back, since they share the connection.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("read blob %s at %s: offset %d: %w", d, s.target, off, cas.ErrRange)
	case d.IsEmpty():
		return io.NopCloser(bytes.NewReader(nil)), nil
	case off == d.Size():
		// bazel-remote refuses to read nothing from the end.
		missing, err := s.Missing(ctx, []cas.Digest{d})
		if err == nil && len(missing) > 0 {
			err = fmt.Errorf("read blob %s at %s: %w", d, s.target, cas.ErrNotFound)
		}
		if err != nil {
			return nil, err
		}
		return io.NopCloser(bytes.NewReader(nil)), nil
	}
	t, err := s.readyFor(ctx, d.Function())
	if err != nil {
		return nil, err
	}
	if off == 0 && d.Size() <= t.small {
		data, err := s.readBatch(ctx, t, []cas.Digest{d})
		if err != nil {
			return nil, err
		}
		if data[0].err == nil {
			return io.NopCloser(bytes.NewReader(data[0].data)), nil
		}
		if !errors.Is(data[0].err, errAlone) {
			return nil, data[0].err
		}
	}
	r := &reader{s: s, d: d, next: off}
	r.ctx, r.cancel = context.WithCancel(ctx)
	// Some servers ignore the offset into a compressed blob, and in a part that would not be noticed.
	if err := r.open(t.zstd && off == 0 && d.Size() >= compress.MinSize); err != nil {
		r.Close()
		return nil, err
	}
	if off > 0 {
		return r, nil
	}
	return &verified{cas.Verify(d, r), r}, nil
}

type verified struct {
	io.Reader
	io.Closer
}

// errAlone says that a blob was not read as one of a batch, and may be by itself.
var errAlone = errors.New("not read in a batch")

// batched is one blob of a batch, or why it was not read: the error is cas.ErrNotFound, cas.ErrCorrupt or
// errAlone.
type batched struct {
	data []byte
	err  error
}

// readBatch reads blobs that differ and fit into one call.
func (s *Store) readBatch(ctx context.Context, t *terms, ds []cas.Digest) ([]batched, error) {
	fn := ds[0].Function()
	if _, err := s.readyFor(ctx, fn); err != nil {
		return nil, err
	}
	req := &repb.BatchReadBlobsRequest{InstanceName: s.name, Digests: protos(ds), DigestFunction: fn.Proto()}
	if t.zstd {
		req.AcceptableCompressors = []repb.Compressor_Value{repb.Compressor_ZSTD}
	}
	resp, err := s.blobs.BatchReadBlobs(ctx, req)
	if err != nil {
		return nil, s.failed(ctx, fmt.Sprintf("read blob %s and %d others", ds[0], len(ds)-1), err)
	}
	at := make(map[cas.Digest]int, len(ds))
	all := make([]batched, len(ds))
	for i, d := range ds {
		at[d] = i
		all[i].err = errAlone
	}
	for _, r := range resp.Responses {
		d, err := cas.FromProto(fn, r.Digest)
		i, asked := at[d]
		if err != nil || !asked {
			return nil, fmt.Errorf("read %d blobs at %s: the answer names the blob %s, which was not asked for", len(ds), s.target, printable(r.Digest.String()))
		}
		switch codes.Code(r.GetStatus().GetCode()) {
		case codes.OK:
			data, err := r.Data, error(nil)
			if r.Compressor == repb.Compressor_ZSTD {
				data, err = compress.Decode(r.Compressor, data, d.Size())
			}
			all[i] = batched{data: data}
			if err != nil || fn.Sum(data) != d {
				all[i] = batched{err: fmt.Errorf("read blob %s at %s: %w", d, s.target, cas.ErrCorrupt)}
			}
		case codes.NotFound:
			all[i].err = fmt.Errorf("read blob %s at %s: %w", d, s.target, cas.ErrNotFound)
		}
	}
	return all, nil
}

// A reader reads a blob by ByteStream. It sees to the number of bytes; what they are is not its business.
type reader struct {
	s      *Store
	d      cas.Digest
	ctx    context.Context
	cancel context.CancelFunc

	in      *messages
	decoder *compress.Reader // of in, if the stream is compressed
	broken  int              // how many streams in a row broke off early
	begun   int64            // offset at which this one began
	next    int64            // offset of what is to be read next
	err     error            // what ended it
}

// open begins a stream at r.next, and waits for its first message: only that says whether the blob is there.
func (r *reader) open(compressed bool) error {
	r.recycle()
	r.begun = r.next
	name := r.d.Resource()
	if compressed {
		name = "compressed-blobs/zstd/" + strings.TrimPrefix(name, "blobs/")
	}
	stream, err := r.s.streams.Read(r.ctx, &bspb.ReadRequest{ResourceName: r.s.resource(name), ReadOffset: r.next})
	if err == nil {
		r.in = &messages{stream: stream}
		err = r.in.receive()
	}
	if err != nil && err != io.EOF {
		return r.failed(err)
	}
	if compressed {
		r.decoder = compress.NewReader(repb.Compressor_ZSTD, r.in)
	}
	return nil
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for r.err == nil {
		var n int
		var err error
		if r.decoder != nil {
			n, err = r.decoder.Read(p)
		} else {
			n, err = r.in.Read(p)
		}
		if int64(n) > r.d.Size()-r.next {
			n, err = 0, io.EOF
			r.next = -1
		}
		r.next += int64(n)
		if err != nil {
			r.err = r.ended(err)
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// ended returns what the end of a stream is for the reader: nil if another stream goes on.
func (r *reader) ended(err error) error {
	if r.next-r.begun >= pieceBytes {
		r.broken = 0
	}
	switch {
	case err == io.EOF && r.next == r.d.Size():
		return io.EOF
	case r.in.err == nil || r.in.err == io.EOF:
		return fmt.Errorf("read blob %s at %s: it has not that many bytes: %w", r.d, r.s.target, cas.ErrCorrupt)
	case status.Code(r.in.err) == codes.Unavailable && r.broken < attempts:
		r.broken++
		return r.open(false)
	}
	return r.failed(r.in.err)
}

func (r *reader) failed(err error) error {
	return r.s.failed(r.ctx, fmt.Sprintf("read blob %s", r.d), err)
}

// recycle gives back the decoder.
func (r *reader) recycle() {
	if r.decoder != nil {
		r.decoder.Release()
		r.decoder = nil
	}
}

// Close implements io.Closer.
func (r *reader) Close() error {
	r.cancel()
	r.err = cmp.Or(r.err, os.ErrClosed)
	r.recycle()
	return nil
}

// maxEmpty is how many messages without data a stream may bring in a row: none of them is silence.
const maxEmpty = 100

// messages reads the data of a stream.
type messages struct {
	stream grpc.ServerStreamingClient[bspb.ReadResponse]
	data   []byte // received and not yet read
	err    error  // what ended the stream
}

// receive waits for the next message.
func (m *messages) receive() error {
	resp, err := m.stream.Recv()
	m.data, m.err = resp.GetData(), err
	return err
}

// Read implements io.Reader.
func (m *messages) Read(p []byte) (int, error) {
	for empty := 0; len(m.data) == 0; empty++ {
		if m.err == nil && empty == maxEmpty {
			m.err = status.Errorf(codes.Unavailable, "%d messages in a row brought nothing", maxEmpty)
		}
		if m.err != nil || m.receive() != nil {
			return 0, m.err
		}
	}
	n := copy(p, m.data)
	m.data = m.data[n:]
	return n, nil
}

// inFlight is how many calls of one Fetch or PutAll are under way at once: with their blobs they take up to 24 MiB.
const inFlight = 8

// Fetch copies those of the blobs ds that another store lacks into it, small ones many in one call. It
// returns those that are absent here, too, in order and each once. After an error it may have copied some.
func (s *Store) Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error) {
	lacking, err := to.Missing(ctx, ds)
	if err != nil {
		return nil, err
	}
	if absent, err = s.Missing(ctx, lacking); err != nil {
		return nil, err
	}
	lost := make(map[cas.Digest]bool, len(absent))
	for _, d := range absent {
		lost[d] = true
	}
	lacking = slices.DeleteFunc(lacking, func(d cas.Digest) bool { return lost[d] })

	t, err := s.ready(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	each(parts(t, lacking, func(d cas.Digest) cas.Digest { return d }), func(part []cas.Digest) {
		if ctx.Err() != nil {
			return
		}
		if err := s.fetch(ctx, t, to, part); err != nil {
			cancel(err)
		}
	})
	return absent, context.Cause(ctx)
}

// each calls f with each of parts, inFlight of them at once, and returns when all have.
func each[T any](parts []T, f func(T)) {
	var group sync.WaitGroup
	turn := make(chan struct{}, inFlight)
	for _, part := range parts {
		turn <- struct{}{}
		group.Go(func() {
			defer func() { <-turn }()
			f(part)
		})
	}
	group.Wait()
}

// runs returns ds in parts of at most size digests, each of one digest function.
func runs(ds []cas.Digest, size int) [][]cas.Digest {
	var parts [][]cas.Digest
	for i, d := range ds {
		last := len(parts) - 1
		if i == 0 || len(parts[last]) == size || parts[last][0].Function() != d.Function() {
			parts, last = append(parts, ds[i:i]), last+1
		}
		parts[last] = ds[i-len(parts[last]) : i+1]
	}
	return parts
}

// parts returns all in parts that fit into one call each, by the sizes of the blobs that they name: those of a part are
// of one digest function, and a large one is a part of its own.
func parts[T any](t *terms, all []T, digest func(T) cas.Digest) [][]T {
	var parts [][]T
	var part []T
	var bytes int64
	for _, b := range all {
		n := digest(b).Size()
		if n > t.small {
			parts = append(parts, []T{b})
			continue
		}
		if len(part) > 0 && (bytes+n > t.batch || len(part) == maxEntries || digest(part[0]).Function() != digest(b).Function()) {
			parts = append(parts, part)
			part, bytes = nil, 0
		}
		part = append(part, b)
		bytes += n
	}
	if len(part) > 0 {
		parts = append(parts, part)
	}
	return parts
}

// fetch copies one part.
func (s *Store) fetch(ctx context.Context, t *terms, to cas.Store, part []cas.Digest) error {
	if len(part) == 1 {
		r, err := s.Open(ctx, part[0], 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return to.Put(ctx, part[0], r)
	}
	all, err := s.readBatch(ctx, t, part)
	if err != nil {
		return err
	}
	var blobs []cas.Blob
	for i, b := range all {
		switch {
		case b.err == nil:
			blobs = append(blobs, cas.Blob{Digest: part[i], Data: b.data})
		case errors.Is(b.err, errAlone):
			err = s.fetch(ctx, t, to, part[i:i+1])
		default:
			err = b.err
		}
		if err != nil {
			return err
		}
	}
	for _, err := range cas.PutAll(ctx, to, blobs) {
		if err != nil {
			return err
		}
	}
	return nil
}
