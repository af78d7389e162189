// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"errors"
	"fmt"
	"io"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/internal/compress"
	"golang.org/x/sync/semaphore"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// maxData is the most data of one ReadResponse. With its framing it fills 1 MiB, the largest buffer that Go clients
	// pool.
	maxData = 1<<20 - headSize
	// maxCompressedData is the most compressed data of one ReadResponse: less, so that the client can start early.
	maxCompressedData = 128<<10 - headSize
)

// byteStream is the ByteStream service.
type byteStream struct {
	bspb.UnimplementedByteStreamServer
	Config
	uploads  *uploads
	memory   *memoryPool
	deciding *semaphore.Weighted // memory of decidingStores
	forked   *semaphore.Weighted // of decidingStores
}

// Read sends a blob, or the part of it that the offset and limit select. The offset counts uncompressed bytes even if
// the blob is sent compressed; a compressed read has no limit.
func (s *byteStream) Read(req *bspb.ReadRequest, stream bspb.ByteStream_ReadServer) error {
	ctx := stream.Context()
	if err := checkHeader(ctx, req.ResourceName); err != nil {
		return err
	}
	if s.isLog(req.ResourceName) {
		return s.Logs.Read(req, stream)
	}
	in, res, d, err := s.resolve(req.ResourceName, parseRead)
	if err != nil {
		return err
	}
	if req.ReadLimit < 0 {
		return status.Errorf(codes.InvalidArgument, "read_limit %d is negative", req.ReadLimit)
	}
	if req.ReadLimit > 0 && res.compressed() {
		return status.Errorf(codes.InvalidArgument,
			"read_limit is %d, but compressed reads must not have one", req.ReadLimit)
	}
	single := d.Size()-req.ReadOffset <= maxData || req.ReadLimit > 0 && req.ReadLimit <= maxData
	if single && !res.compressed() {
		return s.read(in, res, d, req, stream, nil) // a single message, which does not wait for the client
	}
	return s.uploads.watch(stream, s.StreamIdle, func(w *watched) error {
		to := &grpc.GenericServerStream[bspb.ReadRequest, bspb.ReadResponse]{ServerStream: w}
		return s.read(in, res, d, req, to, w)
	})
}

// read sends the part of d that the request selects. The stream is that of w, unless it sends a single message.
func (s *byteStream) read(
	in *cas.Instance, res resource, d cas.Digest, req *bspb.ReadRequest, stream bspb.ByteStream_ReadServer, w *watched,
) error {
	ctx := stream.Context()
	if res.compressed() {
		release, err := s.memory.acquire(ctx, compress.WriterMemory, w)
		if err != nil {
			return casstatus.Error(err)
		}
		defer release()
	}
	r, err := in.Store.Open(ctx, d, req.ReadOffset)
	// Names omit SHA256 even for clients that state it elsewhere, so the function known for the instance may be another.
	for _, other := range s.candidates(in, res.function, d) {
		if !errors.Is(err, cas.ErrNotFound) {
			break
		}
		if found, otherErr := in.Store.Open(ctx, other, req.ReadOffset); !errors.Is(otherErr, cas.ErrNotFound) {
			r, err = found, otherErr
		}
	}
	if err != nil {
		return casstatus.Error(s.explain("read", d, err))
	}
	defer r.Close()
	rest, toEnd := d.Size()-req.ReadOffset, true
	if res.compressed() {
		return casstatus.Error(s.explain("read", d, sendCompressed(stream, res.compressor, r, rest)))
	}
	if req.ReadLimit > 0 && req.ReadLimit < rest {
		rest, toEnd = req.ReadLimit, false
	}
	for rest > 0 {
		p := newReadResponse(int(min(rest, maxData)))
		rest -= int64(len(p.Data))
		if err := fill(r, p.Data, toEnd && rest == 0); err != nil {
			return casstatus.Error(s.explain("read", d, err))
		}
		if err := stream.SendMsg(p); err != nil {
			return err
		}
	}
	return nil
}

// fill fills b from r. If b is the last part of the blob, it also reads the end of r, since only that reveals
// corruption. It returns cas.ErrCorrupt if r is too short or too long.
func fill(r io.Reader, b []byte, last bool) error {
	_, err := io.ReadFull(r, b)
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

// sendCompressed sends the n bytes of r compressed. It completes the compressed stream only if r has exactly n bytes.
func sendCompressed(stream bspb.ByteStream_ReadServer, c repb.Compressor_Value, r io.Reader, n int64) error {
	out := &responseWriter{stream: stream}
	defer out.release()
	w := compress.NewWriter(c, out)
	defer w.Release()
	buf := buffers.Get(128 << 10)
	defer buffers.Put(buf)
	for n > 0 {
		// Highly compressible data is rarely sent, so check for cancellation here.
		if err := stream.Context().Err(); err != nil {
			return err
		}
		b := (*buf)[:min(n, int64(len(*buf)))]
		n -= int64(len(b))
		if err := fill(r, b, n == 0); err != nil {
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

// A responseWriter sends the bytes written to it as ReadResponses.
type responseWriter struct {
	stream  bspb.ByteStream_ReadServer
	pending *readResponse // being filled, or nil
	n       int           // bytes of pending that are filled
}

// Write implements io.Writer.
func (o *responseWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if o.pending == nil {
			o.pending, o.n = newReadResponse(maxCompressedData), 0
		}
		n := copy(o.pending.Data[o.n:], rest)
		o.n += n
		rest = rest[n:]
		if o.n == maxCompressedData {
			p := o.pending
			o.pending = nil
			if err := o.stream.SendMsg(p); err != nil {
				return 0, err
			}
		}
	}
	return len(b), nil
}

// flush sends the pending bytes.
func (o *responseWriter) flush() error {
	if o.pending == nil {
		return nil
	}
	p := newReadResponse(o.n)
	copy(p.Data, o.pending.Data)
	return o.stream.SendMsg(p)
}

// release returns the pending buffer to its pool.
func (o *responseWriter) release() {
	if o.pending != nil {
		buffers.Put(o.pending.encoded)
		o.pending = nil
	}
}

// QueryWriteStatus reports that the upload of a present blob is complete, or how much of an interrupted upload is kept:
// always 0 for compressed uploads. Unknown uploads are NOT_FOUND (rule 46). As with an upload, presence in an upstream
// does not count, so the call does not wait for one.
func (s *byteStream) QueryWriteStatus(
	ctx context.Context, req *bspb.QueryWriteStatusRequest,
) (*bspb.QueryWriteStatusResponse, error) {
	if err := checkHeader(ctx, req.ResourceName); err != nil {
		return nil, err
	}
	if s.isLog(req.ResourceName) {
		return s.Logs.QueryWriteStatus(ctx, req)
	}
	in, r, d, err := s.resolve(req.ResourceName, parseWrite)
	if err != nil {
		return nil, err
	}
	missing, err := cas.MissingForPut(ctx, in.Store, []cas.Digest{d})
	if err != nil {
		return nil, casstatus.Error(s.explain("query", d, err))
	}
	if len(missing) == 0 {
		return &bspb.QueryWriteStatusResponse{CommittedSize: d.Size(), Complete: true}, nil
	}
	if r.compressed() {
		return &bspb.QueryWriteStatusResponse{}, nil
	}
	if n, ok := s.uploads.committedSize(uploadKey{r.instance, r.upload, d}); ok {
		return &bspb.QueryWriteStatusResponse{CommittedSize: n}, nil
	}
	return nil, status.Errorf(codes.NotFound, "upload of %s is unknown; start at offset 0", d)
}

// checkHeader returns INVALID_ARGUMENT if the resource name in the header, which proxies may use for routing, differs
// from the one in the message (rule 54).
func checkHeader(ctx context.Context, name string) error {
	const header = "build.bazel.remote.execution.v2.resource-name"
	for _, v := range metadata.ValueFromIncomingContext(ctx, header) {
		if v != name {
			return status.Errorf(codes.InvalidArgument,
				"header %s is %+.256q, but the request names %+.256q", header, v, name)
		}
	}
	return nil
}

// resolve parses a resource name and returns its instance and digest. Its error is a status.
func (s *byteStream) resolve(
	name string, parse func(string) (resource, error),
) (in *cas.Instance, r resource, d cas.Digest, err error) {
	if r, err = parse(name); err == nil {
		in, err = s.Instances(r.instance)
	}
	if err == nil {
		if d, err = r.digest(in); err != nil {
			err = fmt.Errorf("resource name %+.256q: %w", name, err)
		}
	}
	return in, r, d, casstatus.Error(err)
}
