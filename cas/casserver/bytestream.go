// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	"golang.org/x/sync/semaphore"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// pieceBytes is the most data of one ReadResponse, which with its framing fills 1 MiB: that is the largest size
	// of which clients in Go keep buffers.
	pieceBytes = 1<<20 - pieceHead
	// packedBytes is the same of compressed data: less, since it comes slowly, and the client is to begin.
	packedBytes = 128<<10 - pieceHead
)

// byteStream is the ByteStream service.
type byteStream struct {
	bspb.UnimplementedByteStreamServer
	Config
	uploads *uploads
	packing *semaphore.Weighted // of packingBytes
}

// packingBytes is the memory that all compressed streams may take together; others wait, as for a slow network.
const packingBytes = 1 << 30

// Read sends a blob, or the part of it that the offset and limit select. The offset counts bytes of the blob also
// where it is sent compressed, and then there is no limit.
func (s *byteStream) Read(req *bspb.ReadRequest, stream bspb.ByteStream_ReadServer) error {
	ctx := stream.Context()
	if err := checkHeader(ctx, req.ResourceName); err != nil {
		return err
	}
	if s.ofLog(req.ResourceName) {
		return s.Logs.Read(req, stream)
	}
	in, res, d, err := s.resolve(ctx, req.ResourceName, parseRead)
	if err != nil {
		return err
	}
	if req.ReadLimit < 0 {
		return status.Errorf(codes.InvalidArgument, "read_limit is %d, below 0", req.ReadLimit)
	}
	if req.ReadLimit > 0 && res.compressed() {
		return status.Errorf(codes.InvalidArgument, "read_limit is %d, and a compressed blob is read without one", req.ReadLimit)
	}
	if res.compressed() {
		if err := s.packing.Acquire(ctx, compress.WriterMemory); err != nil {
			return cas.Status(err)
		}
		defer s.packing.Release(compress.WriterMemory)
	}
	r, err := in.Store.Open(ctx, d, req.ReadOffset)
	if err != nil {
		return cas.Status(explain("read", d, err))
	}
	defer r.Close()
	rest, toEnd := d.Size()-req.ReadOffset, true
	if res.compressed() {
		return cas.Status(explain("read", d, pack(stream, res.compressor, r, rest)))
	}
	if req.ReadLimit > 0 && req.ReadLimit < rest {
		rest, toEnd = req.ReadLimit, false
	}
	for rest > 0 {
		p := newPiece(int(min(rest, pieceBytes)))
		rest -= int64(len(p.Data))
		if err := fill(r, p.Data, toEnd && rest == 0); err != nil {
			return cas.Status(explain("read", d, err))
		}
		if err := stream.SendMsg(p); err != nil {
			return err
		}
	}
	return nil
}

// fill reads piece whole from r, and is ErrCorrupt if r ends before, or does not end after the last
// piece. Only the end of the blob shows corruption, so that the last piece is not sent before it.
func fill(r io.Reader, piece []byte, last bool) error {
	_, err := io.ReadFull(r, piece)
	if err == nil && last {
		if _, err = io.ReadFull(r, make([]byte, 1)); err == io.EOF {
			return nil
		} else if err == nil {
			return cas.ErrCorrupt
		}
	}
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return cas.ErrCorrupt
	}
	return err
}

// pack sends the rest bytes of r compressed. The stream of the compressor ends only if r did where it should.
func pack(stream bspb.ByteStream_ReadServer, c repb.Compressor_Value, r io.Reader, rest int64) error {
	out := &outgoing{stream: stream}
	defer out.release()
	w := compress.NewWriter(c, out)
	defer w.Release()
	buf := buffers.Get(128 << 10)
	defer buffers.Put(buf)
	for rest > 0 {
		// What compresses well is not sent for long, and then only this shows that nobody wants it any more.
		if err := stream.Context().Err(); err != nil {
			return err
		}
		b := (*buf)[:min(rest, int64(len(*buf)))]
		rest -= int64(len(b))
		if err := fill(r, b, rest == 0); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return out.flush()
}

// An outgoing sends what is written to it in pieces.
type outgoing struct {
	stream bspb.ByteStream_ReadServer
	piece  *piece // that is being filled; nil if none is
	n      int    // bytes of it that are filled
}

// Write implements io.Writer.
func (o *outgoing) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if o.piece == nil {
			o.piece, o.n = newPiece(packedBytes), 0
		}
		n := copy(o.piece.Data[o.n:], rest)
		o.n += n
		rest = rest[n:]
		if o.n == packedBytes {
			p := o.piece
			o.piece = nil
			if err := o.stream.SendMsg(p); err != nil {
				return 0, err
			}
		}
	}
	return len(b), nil
}

// flush sends what no piece was full of.
func (o *outgoing) flush() error {
	if o.piece == nil {
		return nil
	}
	p := newPiece(o.n)
	copy(p.Data, o.piece.Data)
	return o.stream.SendMsg(p)
}

// release gives back what was not sent.
func (o *outgoing) release() {
	if o.piece != nil {
		buffers.Put(o.piece.encoded)
		o.piece = nil
	}
}

// QueryWriteStatus says that the upload of a blob that is present is complete, and how much is kept of one that
// broke off. Of a compressed one nothing is ever kept: it begins at 0. Any other is NOT_FOUND (rule 46).
func (s *byteStream) QueryWriteStatus(ctx context.Context, req *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error) {
	if err := checkHeader(ctx, req.ResourceName); err != nil {
		return nil, err
	}
	if s.ofLog(req.ResourceName) {
		return s.Logs.QueryWriteStatus(ctx, req)
	}
	in, r, d, err := s.resolve(ctx, req.ResourceName, parseWrite)
	if err != nil {
		return nil, err
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{d})
	if err != nil {
		return nil, cas.Status(explain("query", d, err))
	}
	if len(missing) == 0 {
		return &bspb.QueryWriteStatusResponse{CommittedSize: d.Size(), Complete: true}, nil
	}
	if r.compressed() {
		return &bspb.QueryWriteStatusResponse{}, nil
	}
	if n, ok := s.uploads.committed(uploadKey{r.instance, r.upload, d}); ok {
		return &bspb.QueryWriteStatusResponse{CommittedSize: n}, nil
	}
	return nil, status.Errorf(codes.NotFound, "upload of %s is not complete, and nothing of it is kept; begin at offset 0", d)
}

// checkHeader returns INVALID_ARGUMENT if the header with the resource name, by which something on the way may have
// chosen where the call goes, is not that of the message (rule 54).
func checkHeader(ctx context.Context, name string) error {
	const header = "build.bazel.remote.execution.v2.resource-name"
	for _, v := range metadata.ValueFromIncomingContext(ctx, header) {
		if v != name {
			return status.Errorf(codes.InvalidArgument, "header %s is %+.256q, and the name in the message %+.256q", header, v, name)
		}
	}
	return nil
}

// resolve returns the instance and the digest that a resource name stands for, or a status.
func (s *byteStream) resolve(ctx context.Context, name string, parse func(string) (resource, error)) (*cas.Instance, resource, cas.Digest, error) {
	fail := func(err error) (*cas.Instance, resource, cas.Digest, error) {
		return nil, resource{}, cas.Digest{}, cas.Status(err)
	}
	r, err := parse(name)
	if err != nil {
		return fail(err)
	}
	in, err := s.Instances(r.instance)
	if err != nil {
		return fail(err)
	}
	d, err := r.digest(in)
	if err != nil {
		return fail(fmt.Errorf("resource name %+.256q: %w", name, err))
	}
	return in, r, d, nil
}
