// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"github.com/cloister-build/cloister/cas/quota"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Write stores a blob. It answers at finish_write without looking at later messages, or early if the blob is already
// present or another client completes it first (rule 41).
func (s *byteStream) Write(stream bspb.ByteStream_WriteServer) error {
	u := &upload{stream: stream, first: true}
	if err := stream.RecvMsg(&u.message); err == io.EOF {
		return status.Error(codes.InvalidArgument, "write without a message")
	} else if err != nil {
		return err
	}
	if err := checkHeader(stream.Context(), u.message.ResourceName); err != nil {
		u.message.release()
		return err
	}
	if s.isLog(u.message.ResourceName) {
		return s.writeLog(&u.message, stream)
	}
	if u.message.FinishWrite {
		return s.finish(u) // a single message: there is nothing to wait for
	}
	return s.uploads.watch(stream, s.StreamIdle, func(w *watched) error {
		u.stream = &grpc.GenericServerStream[bspb.WriteRequest, bspb.WriteResponse]{ServerStream: w}
		u.watched = w
		return s.finish(u)
	})
}

// finish stores the blob of an upload whose first message has arrived, and sends the response.
func (s *byteStream) finish(u *upload) error {
	committed, err := s.write(u)
	if !u.lent {
		u.message.release()
	}
	if err != nil {
		return casstatus.Error(err)
	}
	return u.stream.SendAndClose(&bspb.WriteResponse{CommittedSize: committed})
}

// write stores the blob of an upload whose first message has arrived. It returns the committed_size of the answer: the
// number of bytes received or, if the call ends early, the size of the blob, or -1 for a compressed upload.
func (s *byteStream) write(u *upload) (int64, error) {
	ctx := u.stream.Context()
	in, r, d, err := s.resolve(u.message.ResourceName, parseWrite)
	if err != nil {
		return 0, err
	}
	if err := s.checkSize(d); err != nil {
		return 0, err
	}
	u.name, u.digest, u.compressed = u.message.ResourceName, d, r.compressed()
	committed := d.Size()
	if u.compressed {
		committed = -1
	}
	missing, err := cas.MissingForPut(ctx, in.Store, []cas.Digest{d})
	if err != nil {
		return 0, s.explain("upload", d, err)
	}
	store := in.Store
	if others := s.candidates(in, r.function, d); len(others) > 0 {
		deciding := decidingStore{Store: store, memory: s.deciding, others: others, report: func(f cas.Function) error {
			if slices.Contains(in.Unstated, f) {
				return nil
			}
			return s.Unstated(ctx, in.Name, f)
		}}
		if s.undecided(in, r.function, d) { // afterwards, every large blob of a second function would be written twice
			deciding.forked = s.forked
		}
		store = deciding
	}
	switch {
	case len(missing) == 0:
		return committed, nil
	case u.compressed:
		if err = s.putCompressed(store, r, u); u.err == io.EOF {
			committed = u.offset
		}
	case u.message.FinishWrite && u.message.WriteOffset == 0:
		// Most uploads have a single message, which needs no session.
		err = s.putMessage(ctx, in, r, u)
	default:
		err = s.uploads.write(ctx, store, uploadKey{r.instance, r.upload, d}, u)
	}
	if errors.Is(err, cas.ErrFull) {
		s.uploads.dropWaiting(quota.Caller(ctx)) // make room for a retry
	}
	if err != nil {
		return 0, s.explain("upload", d, err)
	}
	return committed, nil
}

// putMessage stores the blob of an upload with a single message.
func (s *byteStream) putMessage(ctx context.Context, in *cas.Instance, r resource, u *upload) error {
	err := in.Store.Put(ctx, u.digest, u)
	switch unstated := r.function == repb.DigestFunction_UNKNOWN && s.Unstated != nil; {
	case u.err != nil && u.err != io.EOF:
		return u.err
	case unstated && errors.Is(err, cas.ErrMismatch):
		return s.putAs(ctx, in, cas.Blob{Digest: u.digest, Data: u.message.Data}, err)
	case err == nil && s.undecided(in, r.function, u.digest):
		return s.Unstated(ctx, in.Name, u.digest.Function())
	}
	return err
}

// putCompressed decompresses u into the store.
func (s *byteStream) putCompressed(store cas.Store, r resource, u *upload) error {
	ctx := u.stream.Context()
	memory, newReader := compress.Admit(r.compressor, u.message.Data)
	release, err := s.memory.acquire(ctx, memory, u.watched)
	if err != nil {
		return err
	}
	defer release()
	src := &decompressed{r: newReader(u), d: u.digest}
	defer src.r.Release()
	err = store.Put(ctx, u.digest, src)
	if src.err != nil && src.err != io.EOF {
		return src.err // the original error, which the store may have wrapped
	}
	return err
}

// An upload reads the data of a Write stream. It returns io.EOF only after finish_write, so that an interrupted upload
// fails in the store.
type upload struct {
	stream     bspb.ByteStream_WriteServer
	watched    *watched     // that stream; nil if the first message is the last
	message    writeRequest // the last one received
	first      bool         // message is the first one and its data is unread
	lent       bool         // the other fields belong to a session, which may outlive the call
	name       string
	digest     cas.Digest
	compressed bool

	data   []byte // received but unread
	skip   int64  // bytes that the client repeats and Read discards
	offset int64  // expected write_offset of the next message; in compressed bytes if compressed
	err    error  // how the stream ended: io.EOF after finish_write
	broken bool   // the stream ended early, without a fault in its messages
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

// receive returns the data of the next message, and io.EOF with the data of the last one.
func (u *upload) receive() ([]byte, error) {
	m := &u.message
	if !u.first {
		m.release() // a slow client must not hold a buffer
		if err := u.stream.RecvMsg(m); err != nil {
			u.broken = true
			return nil, u.interrupted(err)
		}
	}
	u.first = false
	switch {
	case m.ResourceName != "" && m.ResourceName != u.name:
		return nil, fmt.Errorf("%w write: resource_name changed to %+.256q within the stream",
			cas.ErrInvalid, m.ResourceName)
	case m.WriteOffset != u.offset:
		return nil, fmt.Errorf("%w write: write_offset is %d, want %d; the upload was discarded, start at offset 0",
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

// interrupted returns the error of a stream that ended with err before finish_write.
func (u *upload) interrupted(err error) error {
	switch {
	case err != io.EOF:
		return err
	case u.compressed:
		return fmt.Errorf("%w write: stream ended after %d compressed bytes without finish_write; start at offset 0",
			cas.ErrInvalid, u.offset)
	case u.offset == 0:
		return fmt.Errorf("%w write: stream ended without data and without finish_write; start at offset 0",
			cas.ErrInvalid)
	}
	return fmt.Errorf("%w write: stream ended after %d of %d bytes without finish_write; "+
		"resume at offset %d or start at offset 0", cas.ErrInvalid, u.offset, u.digest.Size(), u.offset)
}

// decompressed reads the blob of a compressed upload, and at most one byte more than its size.
type decompressed struct {
	r   *compress.Reader
	d   cas.Digest
	n   int64 // bytes read
	err error // permanent
}

// Read implements io.Reader.
func (u *decompressed) Read(p []byte) (int, error) {
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
