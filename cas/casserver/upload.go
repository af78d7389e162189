// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"errors"
	"fmt"
	"io"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/compress"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Write stores a blob, and answers when the client has said by finish_write that this was all, without
// a look at what it may still send. If the blob is present, now or by the time that other clients have
// uploaded it, the call ends early and well (rule 41).
func (s *byteStream) Write(stream bspb.ByteStream_WriteServer) error {
	u := &upload{stream: stream, begins: true}
	if err := stream.RecvMsg(&u.message); err == io.EOF {
		return status.Error(codes.InvalidArgument, "write without a message")
	} else if err != nil {
		return err
	}
	if err := checkHeader(stream.Context(), u.message.ResourceName); err != nil {
		u.message.release()
		return err
	}
	if s.ofLog(u.message.ResourceName) {
		return s.writeLog(&u.message, stream)
	}
	committed, err := s.write(u)
	if !u.lent {
		u.message.release()
	}
	if err != nil {
		return cas.Status(err)
	}
	return stream.SendAndClose(&bspb.WriteResponse{CommittedSize: committed})
}

// write stores the blob of an upload whose first message is there, and returns the committed_size of the answer: the
// bytes received, or, where the call ends early, the size of the blob, and -1 if it was to come compressed.
func (s *byteStream) write(u *upload) (int64, error) {
	ctx := u.stream.Context()
	in, r, d, err := s.resolve(ctx, u.message.ResourceName, parseWrite)
	if err != nil {
		return 0, err
	}
	if err := s.checkSize(d); err != nil {
		return 0, err
	}
	u.name, u.digest, u.compressed = u.message.ResourceName, d, r.compressed()
	early := d.Size()
	if u.compressed {
		early = -1
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{d})
	if err != nil {
		return 0, explain("upload", d, err)
	}
	switch {
	case len(missing) == 0:
		return early, nil
	case u.compressed:
		memory, reader := compress.Admit(r.compressor, u.message.Data)
		if err := s.packing.Acquire(ctx, memory); err != nil {
			return 0, err
		}
		defer s.packing.Release(memory)
		src := &unpacked{r: reader(u), d: d}
		defer src.r.Release()
		if err = in.Store.Put(ctx, d, src); src.err != nil && src.err != io.EOF {
			err = src.err // the store saw no other, but may have wrapped it in words of its own
		}
		if u.err == io.EOF {
			early = u.offset
		}
	case u.message.FinishWrite && u.message.WriteOffset == 0:
		// All of it is here. Most uploads are such, and need none of what it takes to go on with one.
		if err = in.Store.Put(ctx, d, u); u.err != nil && u.err != io.EOF {
			err = u.err
		}
	default:
		err = s.uploads.write(ctx, in.Store, uploadKey{r.instance, r.upload, d}, u)
	}
	if errors.Is(err, cas.ErrFull) {
		s.uploads.dropWaiting() // room for the next try
	}
	if err != nil {
		return 0, explain("upload", d, err)
	}
	return early, nil
}

// An upload reads the data of a Write stream, and io.EOF only where the client has said by finish_write
// that this was all. It is what makes a broken-off upload fail in the store.
type upload struct {
	stream     bspb.ByteStream_WriteServer
	message    incoming // the last one received
	begins     bool     // it is the first, and nobody has looked at its data yet
	lent       bool     // all else is a session's, which may outlive the call
	name       string
	digest     cas.Digest
	compressed bool

	data   []byte // received and not yet read
	skip   int64  // bytes that are to come once more, and are not read
	offset int64  // where the next message belongs: in the blob, or what has come of it compressed
	err    error  // what ended the stream, io.EOF if it ended well
	broken bool   // it ended without a fault in what it brought
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.data) == 0 {
		if u.err != nil {
			return 0, u.err
		}
		u.data, u.err = u.receive()
		known := min(u.skip, int64(len(u.data)))
		u.data, u.skip = u.data[known:], u.skip-known
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
		if err := u.stream.RecvMsg(m); err != nil {
			u.broken = true
			return nil, u.brokenOff(err)
		}
	}
	u.begins = false
	switch {
	case m.ResourceName != "" && m.ResourceName != u.name:
		return nil, fmt.Errorf("%w write: name changed to %+.256q within the stream", cas.ErrInvalid, m.ResourceName)
	case m.WriteOffset != u.offset:
		return nil, fmt.Errorf("%w write: write_offset is %d where %d belongs, and nothing is kept; begin at offset 0",
			cas.ErrInvalid, m.WriteOffset, u.offset)
	case !u.compressed && int64(len(m.Data)) > u.digest.Size()-u.offset:
		return nil, cas.Mismatch(u.digest, cas.Digest{})
	}
	u.offset += int64(len(m.Data))
	if m.FinishWrite {
		return m.Data, io.EOF
	}
	return m.Data, nil
}

// brokenOff returns the error of an upload whose stream ended with err before finish_write.
func (u *upload) brokenOff(err error) error {
	switch {
	case err != io.EOF:
		return err
	case u.compressed:
		return fmt.Errorf("%w write: stream ended after %d compressed bytes without finish_write, and nothing is kept; begin at offset 0",
			cas.ErrInvalid, u.offset)
	case u.offset == 0:
		return fmt.Errorf("%w write: stream ended without data and without finish_write; begin at offset 0", cas.ErrInvalid)
	}
	return fmt.Errorf("%w write: stream ended after %d of %d bytes without finish_write; go on at offset %d, or begin at offset 0",
		cas.ErrInvalid, u.offset, u.digest.Size(), u.offset)
}

// An unpacked reads what a compressed upload stands for, and no more than a byte beyond the size of its blob.
type unpacked struct {
	r   *compress.Reader
	d   cas.Digest
	n   int64 // bytes read
	err error // what ended it
}

// Read implements io.Reader.
func (u *unpacked) Read(p []byte) (int, error) {
	if u.err != nil {
		return 0, u.err
	}
	n, err := u.r.Read(p[:min(int64(len(p)), u.d.Size()-u.n+1)])
	u.n += int64(n)
	u.err = err
	if u.n > u.d.Size() {
		u.err = cas.Mismatch(u.d, cas.Digest{})
	}
	return n, u.err
}
