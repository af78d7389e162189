// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Missing implements cas.Store.
func (s *Store) Missing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	var asked []cas.Digest
	seen := make(map[cas.Digest]bool, len(ds))
	for _, d := range ds {
		if !seen[d] && !d.IsEmpty() {
			asked = append(asked, d)
		}
		seen[d] = true
	}
	var missing []cas.Digest
	for part := range slices.Chunk(asked, maxAsked) {
		resp, err := s.blobs.FindMissingBlobs(ctx, &repb.FindMissingBlobsRequest{
			InstanceName: s.name, BlobDigests: protos(part), DigestFunction: part[0].Function().Proto(),
		})
		if err != nil {
			return nil, s.failed(ctx, "find missing blobs", err)
		}
		// The server may answer in any order.
		absent := make(map[cas.Digest]bool, len(resp.MissingBlobDigests))
		for _, p := range resp.MissingBlobDigests {
			d, err := cas.FromProto(part[0].Function(), p)
			if err != nil {
				return nil, fmt.Errorf("find missing blobs at %s: the answer is malformed: %w", s.target, err)
			}
			absent[d] = true
		}
		for _, d := range part {
			if absent[d] {
				missing = append(missing, d)
			}
		}
	}
	return missing, ctx.Err()
}

func protos(ds []cas.Digest) []*repb.Digest {
	ps := make([]*repb.Digest, len(ds))
	for i, d := range ds {
		ps[i] = d.Proto()
	}
	return ps
}

// Open implements cas.Store. A blob of up to 1 MiB is here when it returns, a larger one is streamed; a
// stream that breaks off goes on where it was.
func (s *Store) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case off < 0 || off > d.Size():
		return nil, fmt.Errorf("read blob %s at %s: offset %d: %w", d, s.target, off, cas.ErrRange)
	case d.IsEmpty():
		return io.NopCloser(bytes.NewReader(nil)), nil
	case off == 0 && d.Size() <= s.small:
		data, err := s.readBatch(ctx, []cas.Digest{d})
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
	// Only the first message says whether the blob is there.
	if r.err = r.receive(); r.err != nil && r.err != io.EOF {
		r.cancel()
		return nil, r.err
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
func (s *Store) readBatch(ctx context.Context, ds []cas.Digest) ([]batched, error) {
	fn := ds[0].Function()
	resp, err := s.blobs.BatchReadBlobs(ctx, &repb.BatchReadBlobsRequest{
		InstanceName: s.name, Digests: protos(ds), DigestFunction: fn.Proto(),
	})
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
			all[i] = batched{data: r.Data}
			if fn.Sum(r.Data) != d {
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

	stream grpc.ServerStreamingClient[bspb.ReadResponse] // nil before the first message and after a break
	alive  bool                                          // stream has brought a message
	broken int                                           // how often a stream broke off
	data   []byte                                        // received and not yet read
	next   int64                                         // offset of what is to be received next
	err    error                                         // what ended the stream
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	for len(r.data) == 0 {
		if r.err == nil {
			r.err = r.receive()
		}
		if r.err != nil {
			return 0, r.err
		}
	}
	n := copy(p, r.data)
	r.data = r.data[n:]
	return n, nil
}

// receive waits for the next message.
func (r *reader) receive() error {
	for {
		m, err := r.message()
		switch {
		case err == nil && int64(len(m.Data)) <= r.d.Size()-r.next:
			r.data, r.alive = m.Data, true
			r.next += int64(len(m.Data))
			return nil
		case err == nil || err == io.EOF && r.next != r.d.Size():
			return fmt.Errorf("read blob %s at %s: it has not that many bytes: %w", r.d, r.s.target, cas.ErrCorrupt)
		case err == io.EOF:
			return err
		case status.Code(err) == codes.Unavailable && r.alive && r.broken < attempts:
			r.broken++
			r.stream, r.alive = nil, false
		default:
			return r.s.failed(r.ctx, fmt.Sprintf("read blob %s", r.d), err)
		}
	}
}

func (r *reader) message() (*bspb.ReadResponse, error) {
	if r.stream == nil {
		var err error
		r.stream, err = r.s.streams.Read(r.ctx, &bspb.ReadRequest{ResourceName: r.s.resource(r.d.Resource()), ReadOffset: r.next})
		if err != nil {
			return nil, err
		}
	}
	return r.stream.Recv()
}

// Close implements io.Closer.
func (r *reader) Close() error {
	r.cancel()
	return nil
}

// fetches is how many calls of one Fetch are under way at once: with their blobs they take up to 24 MiB.
const fetches = 8

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

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var group sync.WaitGroup
	turn := make(chan struct{}, fetches)
	for _, part := range s.parts(lacking) {
		turn <- struct{}{}
		group.Go(func() {
			defer func() { <-turn }()
			if ctx.Err() != nil {
				return
			}
			if err := s.fetch(ctx, to, part); err != nil {
				cancel(err)
			}
		})
	}
	group.Wait()
	return absent, context.Cause(ctx)
}

// parts returns ds in parts that fit into one call each; a large blob is a part of its own.
func (s *Store) parts(ds []cas.Digest) [][]cas.Digest {
	var parts [][]cas.Digest
	var part []cas.Digest
	var bytes int64
	for _, d := range ds {
		if d.Size() > s.small {
			parts = append(parts, []cas.Digest{d})
			continue
		}
		if bytes+d.Size() > s.batch || len(part) == maxEntries {
			parts = append(parts, part)
			part, bytes = nil, 0
		}
		part = append(part, d)
		bytes += d.Size()
	}
	if len(part) > 0 {
		parts = append(parts, part)
	}
	return parts
}

// fetch copies one part.
func (s *Store) fetch(ctx context.Context, to cas.Store, part []cas.Digest) error {
	if len(part) == 1 {
		r, err := s.Open(ctx, part[0], 0)
		if err != nil {
			return err
		}
		defer r.Close()
		return to.Put(ctx, part[0], r)
	}
	all, err := s.readBatch(ctx, part)
	if err != nil {
		return err
	}
	for i, b := range all {
		switch {
		case b.err == nil:
			err = to.Put(ctx, part[i], bytes.NewReader(b.data))
		case errors.Is(b.err, errAlone):
			err = s.fetch(ctx, to, part[i:i+1])
		default:
			err = b.err
		}
		if err != nil {
			return err
		}
	}
	return nil
}
