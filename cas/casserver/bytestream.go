// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cas"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// pieceBytes is the most data of one ReadResponse, which with its framing fills 1 MiB: that is the largest size
// of which clients in Go keep buffers.
const pieceBytes = 1<<20 - pieceHead

// byteStream is the ByteStream service.
type byteStream struct {
	bspb.UnimplementedByteStreamServer
	Config
}

// Read sends a blob, or the part of it that the offset and limit select.
func (s *byteStream) Read(req *bspb.ReadRequest, stream bspb.ByteStream_ReadServer) error {
	if s.ofLog(req.ResourceName) {
		return s.Logs.Read(req, stream)
	}
	ctx := stream.Context()
	in, d, err := s.resolve(ctx, req.ResourceName, parseRead)
	if err != nil {
		return err
	}
	if req.ReadLimit < 0 {
		return status.Errorf(codes.InvalidArgument, "read_limit is %d, below 0", req.ReadLimit)
	}
	r, err := in.Store.Open(ctx, d, req.ReadOffset)
	if err != nil {
		return cas.Status(explain("read", d, err))
	}
	defer r.Close()
	rest, toEnd := d.Size()-req.ReadOffset, true
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

// Write stores a blob, and answers when the client has said by finish_write that this was all, without
// a look at what it may still send. If the blob is present, now or by the time that other clients have
// uploaded it, the call ends early and well (rule 41).
func (s *byteStream) Write(stream bspb.ByteStream_WriteServer) error {
	ctx := stream.Context()
	u := &upload{stream: stream, begins: true}
	defer u.message.release()
	err := stream.RecvMsg(&u.message)
	if err == io.EOF {
		return status.Error(codes.InvalidArgument, "write without a message")
	} else if err != nil {
		return err
	}
	if s.ofLog(u.message.ResourceName) {
		return s.writeLog(&u.message, stream)
	}
	in, d, err := s.resolve(ctx, u.message.ResourceName, parseWrite)
	if err != nil {
		return err
	}
	if err := s.checkSize(d); err != nil {
		return cas.Status(err)
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{d})
	if err != nil {
		return cas.Status(explain("upload", d, err))
	}
	if len(missing) > 0 {
		u.name, u.digest = u.message.ResourceName, d
		err := in.Store.Put(ctx, d, u)
		if u.err != nil && u.err != io.EOF {
			err = u.err // the store saw no other, but may have wrapped it in words of its own
		}
		if err != nil {
			return cas.Status(explain("upload", d, err))
		}
	}
	return stream.SendAndClose(&bspb.WriteResponse{CommittedSize: d.Size()})
}

// QueryWriteStatus says that the upload of a blob that is present is complete. Any other is
// NOT_FOUND, since nothing is kept of it (rule 46).
func (s *byteStream) QueryWriteStatus(ctx context.Context, req *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error) {
	if s.ofLog(req.ResourceName) {
		return s.Logs.QueryWriteStatus(ctx, req)
	}
	in, d, err := s.resolve(ctx, req.ResourceName, parseWrite)
	if err != nil {
		return nil, err
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{d})
	if err != nil {
		return nil, cas.Status(explain("query", d, err))
	}
	if len(missing) > 0 {
		return nil, status.Errorf(codes.NotFound,
			"upload of %s is not complete, and nothing of it is kept; begin at offset 0", d)
	}
	return &bspb.QueryWriteStatusResponse{CommittedSize: d.Size(), Complete: true}, nil
}

// resolve returns the instance and the digest that a resource name stands for, or a status.
func (s *byteStream) resolve(ctx context.Context, name string, parse func(string) (resource, error)) (*cas.Instance, cas.Digest, error) {
	r, err := parse(name)
	if err != nil {
		return nil, cas.Digest{}, cas.Status(err)
	}
	const header = "build.bazel.remote.execution.v2.resource-name"
	for _, v := range metadata.ValueFromIncomingContext(ctx, header) {
		if v != name {
			return nil, cas.Digest{}, status.Errorf(codes.InvalidArgument,
				"header %s is %+.256q, and the name in the message %+.256q", header, v, name)
		}
	}
	in, err := s.Instances(r.instance)
	if err != nil {
		return nil, cas.Digest{}, cas.Status(err)
	}
	d, err := r.digest(in)
	if err != nil {
		err = fmt.Errorf("resource name %+.256q: %w", name, err)
	}
	return in, d, cas.Status(err)
}

// An upload reads the data of a Write stream, and io.EOF only where the client has said by finish_write
// that this was all. It is what makes a broken-off upload fail in the store.
type upload struct {
	stream  bspb.ByteStream_WriteServer
	message incoming // the last one received
	begins  bool     // it is the first, and nobody has looked at its data yet
	name    string
	digest  cas.Digest

	data     []byte // received and not yet read
	received int64  // bytes
	err      error  // what ended the stream, io.EOF if it ended well
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.data) == 0 {
		if u.err != nil {
			return 0, u.err
		}
		u.data, u.err = u.receive()
	}
	n := copy(p, u.data)
	u.data = u.data[n:]
	return n, nil
}

// receive returns the data of the next message, and io.EOF beside it if it is the last one.
func (u *upload) receive() ([]byte, error) {
	m := &u.message
	if !u.begins {
		m.release() // a client that takes its time holds no buffer
		if err := u.stream.RecvMsg(m); err == io.EOF {
			return nil, fmt.Errorf(
				"%w write: stream ended after %d of %d bytes without finish_write, and nothing is kept; begin at offset 0",
				cas.ErrInvalid, u.received, u.digest.Size())
		} else if err != nil {
			return nil, err
		}
	}
	u.begins = false
	switch {
	case m.ResourceName != "" && m.ResourceName != u.name:
		return nil, fmt.Errorf("%w write: name changed to %+.256q within the stream", cas.ErrInvalid, m.ResourceName)
	case m.WriteOffset != u.received:
		return nil, fmt.Errorf("%w write: write_offset is %d where %d belongs; uploads are not resumed, begin at offset 0",
			cas.ErrInvalid, m.WriteOffset, u.received)
	case int64(len(m.Data)) > u.digest.Size()-u.received:
		return nil, cas.Mismatch(u.digest, cas.Digest{})
	}
	u.received += int64(len(m.Data))
	if m.FinishWrite {
		return m.Data, io.EOF
	}
	return m.Data, nil
}
