// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Put implements cas.Store. A stream that broke off begins again if r is an io.Seeker.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if d.Size() <= s.small {
		return s.putWhole(ctx, newSource(d, r))
	}
	start := int64(-1)
	seeker, ok := r.(io.Seeker)
	if ok {
		if off, err := seeker.Seek(0, io.SeekCurrent); err == nil {
			start = off
		}
	}
	for n := 1; ; n++ {
		err := s.putStream(ctx, newSource(d, r))
		if start < 0 || n == attempts || status.Code(err) != codes.Unavailable {
			return err
		}
		if _, err := seeker.Seek(start, io.SeekStart); err != nil {
			return err
		}
	}
}

// putFailed is failed for a Put.
func (s *Store) putFailed(ctx context.Context, d cas.Digest, err error) error {
	what := fmt.Sprintf("store blob %s", d)
	if ctx.Err() == nil && status.Code(err) == codes.ResourceExhausted {
		return fmt.Errorf("%s at %s: %w (%s)", what, s.target, cas.ErrFull, printable(status.Convert(err).Message()))
	}
	return s.failed(ctx, what, err)
}

// putWhole stores a small blob.
func (s *Store) putWhole(ctx context.Context, src *source) error {
	data, err := src.next(src.d.Size())
	if err != nil || src.d.IsEmpty() {
		return err
	}
	resp, err := s.blobs.BatchUpdateBlobs(ctx, &repb.BatchUpdateBlobsRequest{
		InstanceName: s.name, DigestFunction: src.d.Function().Proto(),
		Requests: []*repb.BatchUpdateBlobsRequest_Request{{Digest: src.d.Proto(), Data: data}},
	})
	if err == nil && len(resp.Responses) != 1 {
		err = fmt.Errorf("the answer is about %d blobs", len(resp.Responses))
	}
	if err == nil {
		err = status.FromProto(resp.Responses[0].Status).Err()
	}
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	return nil
}

// putStream stores a blob by ByteStream.
func (s *Store) putStream(ctx context.Context, src *source) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // what is not whole is dropped by the server
	stream, err := s.streams.Write(ctx)
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	name := s.resource("uploads/" + newUUID() + "/" + src.d.Resource())
	for off, last := int64(0), false; !last; {
		data, err := src.next(pieceBytes)
		if err != nil {
			return err
		}
		m := &bspb.WriteRequest{ResourceName: name, WriteOffset: off, Data: data}
		off += int64(len(data))
		last = off == src.d.Size()
		m.FinishWrite = last
		// A server that has the blob by now answers early, and the stream ends for us.
		if err := stream.Send(m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return s.putFailed(ctx, src.d, err)
		}
	}
	resp, err := stream.CloseAndRecv()
	if err == nil && resp.CommittedSize != src.d.Size() {
		err = fmt.Errorf("the server committed %d bytes", resp.CommittedSize)
	}
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	return nil
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
	return &source{d: d, r: r, h: d.Function().New()}
}

// next returns the next piece, of at most limit bytes, in memory of its own. Bytes that are not the
// blob's are cas.ErrMismatch.
func (s *source) next(limit int64) ([]byte, error) {
	piece := make([]byte, min(limit, s.d.Size()-s.n))
	n, err := io.ReadFull(s.r, piece)
	s.h.Write(piece[:n])
	s.n += int64(n)
	if err == nil && s.n == s.d.Size() {
		if _, err = io.ReadFull(s.r, make([]byte, 1)); err == nil {
			return nil, cas.Mismatch(s.d, cas.Digest{})
		}
	}
	switch {
	case err == nil:
		return piece, nil
	case err != io.EOF && err != io.ErrUnexpectedEOF:
		return nil, err
	}
	if got := s.d.Function().Digest(s.h, s.n); got != s.d {
		return nil, cas.Mismatch(s.d, got)
	}
	return piece, nil
}

// newUUID returns a random UUID, which names an upload that nobody else makes.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
