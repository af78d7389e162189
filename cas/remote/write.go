// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Put implements cas.Store. A stream that broke off begins again if r is an io.Seeker.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	t, err := s.readyFor(ctx, d.Function())
	if err != nil {
		return err
	}
	if t.largest > 0 && d.Size() > t.largest {
		return fmt.Errorf("store blob %s at %s: the server takes blobs of up to %d bytes: %w", d, s.target, t.largest, cas.ErrFull)
	}
	if d.Size() <= t.small {
		b := cas.Blob{Digest: d, Data: make([]byte, d.Size())}
		if _, err := newSource(d, r).next(b.Data); err != nil || d.IsEmpty() {
			return err
		}
		return s.update(ctx, t, []cas.Blob{b})[0]
	}
	start := int64(-1)
	seeker, ok := r.(io.Seeker)
	if ok {
		if off, err := seeker.Seek(0, io.SeekCurrent); err == nil {
			start = off
		}
	}
	for n := 1; ; n++ {
		err := s.putStream(ctx, t, newSource(d, r))
		if start < 0 || n == attempts || !errors.Is(err, cas.ErrUnavailable) || s.Err() != nil {
			return err
		}
		if _, err := seeker.Seek(start, io.SeekStart); err != nil {
			return err
		}
	}
}

// PutAll implements cas.Batcher, by calls that hold many small blobs each. Equal blobs are sent once.
func (s *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	t, err := s.ready(ctx)
	if err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	at := make(map[cas.Digest][]int, len(blobs))
	var distinct []cas.Blob
	for i, b := range blobs {
		if got := b.Digest.Function().Sum(b.Data); got != b.Digest {
			errs[i] = cas.Mismatch(b.Digest, got)
			continue
		}
		if at[b.Digest] == nil && !b.Digest.IsEmpty() {
			distinct = append(distinct, b)
		}
		at[b.Digest] = append(at[b.Digest], i)
	}
	named := func(b cas.Blob) cas.Digest { return b.Digest }
	each(parts(t, distinct, named), func(part []cas.Blob) {
		if part[0].Digest.Size() > t.small {
			err := s.Put(ctx, part[0].Digest, bytes.NewReader(part[0].Data))
			for _, i := range at[part[0].Digest] {
				errs[i] = err
			}
			return
		}
		for j, err := range s.update(ctx, t, part) {
			for _, i := range at[part[j].Digest] {
				errs[i] = err
			}
		}
	})
	return errs
}

// putFailed is failed for a Put.
func (s *Store) putFailed(ctx context.Context, d cas.Digest, err error) error {
	what := fmt.Sprintf("store blob %s", d)
	if ctx.Err() == nil && status.Code(err) == codes.ResourceExhausted {
		return fmt.Errorf("%s at %s: %w (%s)", what, s.target, cas.ErrFull, Reason(status.Convert(err)))
	}
	return s.failed(ctx, what, err)
}

// update stores small blobs that differ by one call, and returns an error for each.
func (s *Store) update(ctx context.Context, t *terms, blobs []cas.Blob) []error {
	req := &repb.BatchUpdateBlobsRequest{InstanceName: s.name, DigestFunction: blobs[0].Digest.Function().Proto()}
	at := make(map[string]int, len(blobs)) // by hash: it is that of the contents
	errs := make([]error, len(blobs))
	if _, err := s.readyFor(ctx, blobs[0].Digest.Function()); err != nil {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	for i, b := range blobs {
		r := &repb.BatchUpdateBlobsRequest_Request{Digest: b.Digest.Proto(), Data: b.Data}
		if t.zstdPut {
			if data := compress.Encode(repb.Compressor_ZSTD, b.Data); data != nil {
				r.Data, r.Compressor = data, repb.Compressor_ZSTD
			}
		}
		req.Requests = append(req.Requests, r)
		at[b.Digest.Hash()] = i
		errs[i] = fmt.Errorf("store blob %s at %s: the answer leaves it out", b.Digest, s.target)
	}
	resp, err := s.blobs.BatchUpdateBlobs(ctx, req)
	if err != nil {
		for i, b := range blobs {
			errs[i] = s.putFailed(ctx, b.Digest, err)
		}
		return errs
	}
	for _, r := range resp.Responses {
		i, asked := at[r.Digest.GetHash()]
		if !asked {
			continue
		}
		if errs[i] = status.FromProto(r.Status).Err(); errs[i] != nil {
			errs[i] = s.putFailed(ctx, blobs[i].Digest, errs[i])
		}
	}
	return errs
}

// putStream stores a blob by ByteStream.
func (s *Store) putStream(ctx context.Context, t *terms, src *source) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what is not whole is dropped by the server
	stream, err := s.streams.Write(ctx)
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	name := src.d.Resource()
	if t.zstd {
		name = "compressed-blobs/zstd/" + strings.TrimPrefix(name, "blobs/")
	}
	out := &pieces{stream: stream, name: s.resource("uploads/" + newUUID() + "/" + name)}
	w, flush := io.Writer(out), func() error { return nil }
	if t.zstd {
		e := compress.NewWriter(repb.Compressor_ZSTD, out)
		defer e.Release()
		w, flush = e, e.Close
	}
	if err = src.copyTo(w); err == nil {
		if err = flush(); err == nil {
			err = out.send(true)
		}
	}
	// A server that has the blob by now answers early, and the stream ends for us.
	if err != nil && !out.over {
		if out.failed {
			err = s.putFailed(ctx, src.d, err)
		}
		return err
	}
	resp, err := stream.CloseAndRecv()
	// Of a compressed blob a server may also count what it received, or nothing.
	n := resp.GetCommittedSize()
	if err == nil && n != src.d.Size() && !(t.zstd && (n == out.off || n == -1)) {
		err = fmt.Errorf("the server committed %d bytes", n)
	}
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	return nil
}

// pieces sends what is written as the messages of an upload. It holds the last of it back for send(true).
type pieces struct {
	stream grpc.ClientStreamingClient[bspb.WriteRequest, bspb.WriteResponse]
	name   string
	off    int64  // bytes sent
	buf    []byte // not yet sent
	over   bool   // the server wants no more, and says why when asked
	failed bool
}

// Write implements io.Writer.
func (p *pieces) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if len(p.buf) == pieceBytes {
			if err := p.send(false); err != nil {
				return 0, err
			}
		}
		if p.buf == nil {
			p.buf = make([]byte, 0, pieceBytes) // gRPC may look at the last one still
		}
		n := min(len(rest), pieceBytes-len(p.buf))
		p.buf = append(p.buf, rest[:n]...)
		rest = rest[n:]
	}
	return len(b), nil
}

// send sends what is held back.
func (p *pieces) send(last bool) error {
	err := p.stream.Send(&bspb.WriteRequest{ResourceName: p.name, WriteOffset: p.off, Data: p.buf, FinishWrite: last})
	p.off += int64(len(p.buf))
	p.buf = nil
	p.over = errors.Is(err, io.EOF)
	p.failed = err != nil
	return err
}

// A source reads a blob in pieces, and does not give the last one out before it has seen that the whole
// is what the digest names.
type source struct {
	d cas.Digest
	r io.Reader
	h hash.Hash
	n int64 // bytes read
}

func newSource(d cas.Digest, r io.Reader) *source {
	return &source{d: d, r: r, h: d.Function().New(d.Size())}
}

// next fills piece, as far as the blob goes, and returns how far that is. Bytes that are not the blob's are
// cas.ErrMismatch.
func (s *source) next(piece []byte) (int, error) {
	piece = piece[:min(int64(len(piece)), s.d.Size()-s.n)]
	n, err := io.ReadFull(s.r, piece)
	s.h.Write(piece[:n])
	s.n += int64(n)
	if err == nil && s.n == s.d.Size() {
		if _, err = io.ReadFull(s.r, make([]byte, 1)); err == nil {
			return n, cas.Mismatch(s.d, cas.Digest{})
		}
	}
	switch {
	case err == nil:
		return n, nil
	case err != io.EOF && err != io.ErrUnexpectedEOF:
		return n, err
	}
	if got := s.d.Function().Digest(s.h, s.n); got != s.d {
		return n, cas.Mismatch(s.d, got)
	}
	return n, nil
}

// copyTo writes all of it to w.
func (s *source) copyTo(w io.Writer) error {
	piece := make([]byte, pieceBytes)
	for s.n < s.d.Size() {
		n, err := s.next(piece)
		if err == nil {
			_, err = w.Write(piece[:n])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// newUUID returns a random UUID, which names an upload that nobody else makes.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
