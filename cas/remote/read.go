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

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/sandbox/printable"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Missing implements cas.Store.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	if err := cas.CheckDigests(ds...); err != nil {
		return nil, err
	}
	var unique, query []cas.Digest // each digest once; those to ask the server about
	absent := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if _, seen := absent[d]; seen || d.IsEmpty() {
			continue
		}
		absent[d] = impossible(d)
		unique = append(unique, d)
		if !absent[d] {
			query = append(query, d)
		}
	}
	if _, err := s.ready(ctx); err != nil {
		return nil, err
	}
	for _, part := range byFunction(query, maxMissing) {
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
				return nil, fmt.Errorf("find missing blobs at %s: malformed answer: %w", s.target, err)
			}
			absent[d] = true
		}
	}
	return slices.DeleteFunc(unique, func(d cas.Digest) bool { return !absent[d] }), ctx.Err()
}

// impossible reports whether d has size 0 but not the hash of the empty blob. bb_storage takes such a digest for the
// empty blob, and bazel-remote rejects the whole request.
func impossible(d cas.Digest) bool { return d.Size() == 0 && !d.IsEmpty() }

func protos(ds []cas.Digest) []*repb.Digest {
	ps := make([]*repb.Digest, len(ds))
	for i, d := range ds {
		ps[i] = d.Proto()
	}
	return ps
}

// Open implements cas.Store. It reads blobs of up to 1 MiB at once and streams larger ones, resuming broken streams.
//
// Large blobs use a single stream: four parallel ranges took as long, on loopback and with round trips of 20 and 50 ms,
// because they share the connection.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	if err := cas.CheckDigests(d); err != nil {
		return nil, err
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("read blob %s at %s: offset %d: %w", d, s.target, off, cas.ErrRange)
	case d.IsEmpty():
		return io.NopCloser(bytes.NewReader(nil)), nil
	case off == d.Size():
		// bazel-remote rejects reads at the end of a blob.
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
	if off == 0 && d.Size() <= t.maxSmall {
		data, err := s.readBatch(ctx, t, []cas.Digest{d})
		if err != nil {
			return nil, err
		}
		if data[0].err == nil {
			return io.NopCloser(bytes.NewReader(data[0].data)), nil
		}
		if !errors.Is(data[0].err, errNotBatched) {
			return nil, data[0].err
		}
	}
	r := &reader{s: s, d: d, next: off}
	r.ctx, r.cancel = context.WithCancel(ctx)
	// Some servers ignore the offset of compressed reads, and partial reads are not verified.
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

// errNotBatched means that the server left a blob out of a batch; it may be readable on its own.
var errNotBatched = errors.New("not read in a batch")

// A batchedBlob is one blob of a batch, or its error: cas.ErrNotFound, cas.ErrCorrupt or errNotBatched.
type batchedBlob struct {
	data []byte
	err  error
}

// readBatch reads distinct blobs that fit into one call.
func (s *Store) readBatch(ctx context.Context, t *capabilities, ds []cas.Digest) ([]batchedBlob, error) {
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
	index := make(map[cas.Digest]int, len(ds))
	all := make([]batchedBlob, len(ds))
	for i, d := range ds {
		index[d] = i
		all[i].err = errNotBatched
	}
	for _, r := range resp.Responses {
		d, err := cas.FromProto(fn, r.Digest)
		i, ok := index[d]
		if err != nil || !ok {
			return nil, fmt.Errorf("read %d blobs at %s: the answer contains blob %s, which was not requested",
				len(ds), s.target, printable.Head(r.Digest.String(), maxReason))
		}
		switch codes.Code(r.GetStatus().GetCode()) {
		case codes.OK:
			data, err := r.Data, error(nil)
			if r.Compressor == repb.Compressor_ZSTD {
				data, err = compress.Decode(r.Compressor, data, d.Size())
			}
			all[i] = batchedBlob{data: data}
			if err != nil || fn.Sum(data) != d {
				all[i] = batchedBlob{err: fmt.Errorf("read blob %s at %s: %w", d, s.target, cas.ErrCorrupt)}
			}
		case codes.NotFound:
			all[i].err = fmt.Errorf("read blob %s at %s: %w", d, s.target, cas.ErrNotFound)
		}
	}
	return all, nil
}

// A reader reads a blob by ByteStream. It checks the size but not the contents.
type reader struct {
	s      *Store
	d      cas.Digest
	ctx    context.Context
	cancel context.CancelFunc

	in      *messageReader
	decoder *compress.Reader // reads in if the stream is compressed
	broken  int              // consecutive streams that broke early
	start   int64            // offset of the current stream
	next    int64            // offset of the next byte
	err     error            // permanent
}

// open starts a stream at r.next and waits for its first message, which shows whether the blob exists.
func (r *reader) open(compressed bool) error {
	r.releaseDecoder()
	r.start = r.next
	name := r.d.Resource()
	if compressed {
		name = "compressed-blobs/zstd/" + strings.TrimPrefix(name, "blobs/")
	}
	stream, err := r.s.streams.Read(r.ctx, &bspb.ReadRequest{ResourceName: r.s.resource(name), ReadOffset: r.next})
	if err == nil {
		r.in = &messageReader{stream: stream}
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
			r.err = r.resume(err)
		}
		if n > 0 {
			return n, nil
		}
	}
	return 0, r.err
}

// resume handles the end of a stream with err: it returns nil if another stream continues, or how the read ended.
func (r *reader) resume(err error) error {
	if r.next-r.start >= maxData {
		r.broken = 0
	}
	switch {
	case err == io.EOF && r.next == r.d.Size():
		return io.EOF
	case r.in.err == nil || r.in.err == io.EOF:
		return fmt.Errorf("read blob %s at %s: wrong size: %w", r.d, r.s.target, cas.ErrCorrupt)
	case status.Code(r.in.err) == codes.Unavailable && r.broken < attempts:
		r.broken++
		return r.open(false)
	}
	return r.failed(r.in.err)
}

func (r *reader) failed(err error) error {
	return r.s.failed(r.ctx, fmt.Sprintf("read blob %s", r.d), err)
}

func (r *reader) releaseDecoder() {
	if r.decoder != nil {
		r.decoder.Release()
		r.decoder = nil
	}
}

// Close implements io.Closer.
func (r *reader) Close() error {
	r.cancel()
	r.err = cmp.Or(r.err, os.ErrClosed)
	r.releaseDecoder()
	return nil
}

// maxEmpty limits consecutive messages without data, which the watchdog does not catch.
const maxEmpty = 100

// A messageReader reads the data of a stream.
type messageReader struct {
	stream grpc.ServerStreamingClient[bspb.ReadResponse]
	data   []byte // received but unread
	err    error  // how the stream ended
}

// receive waits for the next message.
func (m *messageReader) receive() error {
	resp, err := m.stream.Recv()
	m.data, m.err = resp.GetData(), err
	return err
}

// Read implements io.Reader.
func (m *messageReader) Read(p []byte) (int, error) {
	for empty := 0; len(m.data) == 0; empty++ {
		if m.err == nil && empty == maxEmpty {
			m.err = status.Errorf(codes.Unavailable, "%d consecutive messages without data", maxEmpty)
		}
		if m.err != nil || m.receive() != nil {
			return 0, m.err
		}
	}
	n := copy(p, m.data)
	m.data = m.data[n:]
	return n, nil
}
