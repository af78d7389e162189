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
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/compress"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Put implements cas.Store. It restarts a broken stream if r is an io.Seeker. A blob above the server's limit fails
// with both cas.ErrUpstreamFull and errors.ErrUnsupported, and one that the server rejects as invalid with
// cas.ErrInvalid.
func (s *Store) Put(ctx context.Context, d cas.Digest, r io.Reader) error {
	if err := cas.CheckDigests(d); err != nil {
		return err
	}
	t, err := s.readyFor(ctx, d.Function())
	if err != nil {
		return err
	}
	if t.maxBlob > 0 && d.Size() > t.maxBlob {
		return fmt.Errorf("store blob %s at %s: the server accepts blobs of up to %d bytes: %w (%w)",
			d, s.target, t.maxBlob, cas.ErrUpstreamFull, errors.ErrUnsupported)
	}
	if d.Size() <= t.maxSmall {
		b := cas.Blob{Digest: d, Data: make([]byte, d.Size())}
		if _, err := newSource(d, r).next(b.Data); err != nil || d.IsEmpty() {
			return err
		}
		return s.update(ctx, t, []cas.Blob{b}, new(division))[0]
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

// PutAll implements cas.Batcher with many small blobs per call. It sends equal blobs once.
func (s *Store) PutAll(ctx context.Context, blobs []cas.Blob) []error {
	errs := make([]error, len(blobs))
	t, err := s.ready(ctx)
	if err != nil {
		return fill(errs, err)
	}
	indexes := make(map[cas.Digest][]int, len(blobs))
	var distinct []cas.Blob
	for i, b := range blobs {
		if errs[i] = b.Check(); errs[i] != nil {
			continue
		}
		if indexes[b.Digest] == nil && !b.Digest.IsEmpty() {
			distinct = append(distinct, b)
		}
		indexes[b.Digest] = append(indexes[b.Digest], i)
	}
	parallel(batches(t, distinct, func(b cas.Blob) cas.Digest { return b.Digest }), func(batch []cas.Blob) {
		var results []error
		if batch[0].Digest.Size() > t.maxSmall {
			results = []error{s.Put(ctx, batch[0].Digest, bytes.NewReader(batch[0].Data))}
		} else {
			results = s.update(ctx, t, batch, new(division))
		}
		for j, err := range results {
			for _, i := range indexes[batch[j].Digest] {
				errs[i] = err
			}
		}
	})
	return errs
}

// fill sets all errs to err.
func fill(errs []error, err error) []error {
	for i := range errs {
		errs[i] = err
	}
	return errs
}

// putFailed is like writeFailed, for a Put.
func (s *Store) putFailed(ctx context.Context, d cas.Digest, err error) error {
	return s.writeFailed(ctx, fmt.Sprintf("store blob %s", d), err)
}

// writeFailed is like failed, for a write: RESOURCE_EXHAUSTED becomes cas.ErrUpstreamFull, and INVALID_ARGUMENT also
// becomes cas.ErrInvalid. For a read, ErrInvalid would mean that the blob is malformed.
func (s *Store) writeFailed(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return s.failed(ctx, what, err)
	}
	switch status.Code(err) {
	case codes.ResourceExhausted:
		return fmt.Errorf("%s at %s: %w (%s)", what, s.target, cas.ErrUpstreamFull, Reason(status.Convert(err)))
	case codes.InvalidArgument:
		p := status.Convert(err).Proto()
		p.Message = Reason(status.Convert(err))
		return fmt.Errorf("%s at %s: %w: %w", what, s.target, cas.ErrInvalid, rejection{statusError{status.FromProto(p)}})
	}
	return s.failed(ctx, what, err)
}

// A rejection is the status error of a write that the server rejects as invalid.
type rejection struct{ statusError }

// Rejected lets package worker recognize the error, which does not make a client's request invalid.
func (rejection) Rejected() bool { return true }

// maxRejected is the number of rejected calls for one batch after which its parts are not split further while the server
// has accepted none. It is enough to find a single invalid blob among maxEntries. A server that rejects everything gets
// that many calls and one for each part that is left.
const maxRejected = 16

// A division counts the calls for a batch and its parts.
type division struct {
	rejected int
	accepted bool
}

// update stores distinct small blobs and returns an error for each. It makes one call, and splits the batch if the
// server rejects it.
func (s *Store) update(ctx context.Context, t *capabilities, blobs []cas.Blob, div *division) []error {
	req := &repb.BatchUpdateBlobsRequest{InstanceName: s.name, DigestFunction: blobs[0].Digest.Function().Proto()}
	index := make(map[string]int, len(blobs)) // by hash
	errs := make([]error, len(blobs))
	if _, err := s.readyFor(ctx, blobs[0].Digest.Function()); err != nil {
		return fill(errs, err)
	}
	for i, b := range blobs {
		r := &repb.BatchUpdateBlobsRequest_Request{Digest: b.Digest.Proto(), Data: b.Data}
		if t.zstdUpdate {
			if data := compress.Encode(repb.Compressor_ZSTD, b.Data); data != nil {
				r.Data, r.Compressor = data, repb.Compressor_ZSTD
			}
		}
		req.Requests = append(req.Requests, r)
		index[b.Digest.Hash()] = i
		errs[i] = fmt.Errorf("store blob %s at %s: missing from the answer", b.Digest, s.target)
	}
	resp, err := s.blobs.BatchUpdateBlobs(ctx, req)
	if status.Code(err) == codes.InvalidArgument && ctx.Err() == nil {
		div.rejected++
		if len(blobs) > 1 && (div.accepted || div.rejected < maxRejected) {
			// A single invalid blob may be the reason.
			half := len(blobs) / 2
			return slices.Concat(s.update(ctx, t, blobs[:half], div), s.update(ctx, t, blobs[half:], div))
		}
	}
	if err != nil {
		for i, b := range blobs {
			errs[i] = s.putFailed(ctx, b.Digest, err)
		}
		return errs
	}
	div.accepted = true
	for _, r := range resp.Responses {
		i, ok := index[r.Digest.GetHash()]
		if !ok {
			continue
		}
		if errs[i] = status.FromProto(r.Status).Err(); errs[i] != nil {
			errs[i] = s.putFailed(ctx, blobs[i].Digest, errs[i])
		}
	}
	return errs
}

// putStream stores a blob by ByteStream.
func (s *Store) putStream(ctx context.Context, t *capabilities, src *source) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // the server drops an incomplete upload
	stream, err := s.streams.Write(ctx)
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	name := src.d.Resource()
	if t.zstd {
		name = "compressed-blobs/zstd/" + strings.TrimPrefix(name, "blobs/")
	}
	out := &messageWriter{stream: stream, name: s.resource("uploads/" + newUUID() + "/" + name)}
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
	// The server may end the stream early, for example because it already has the blob.
	if err != nil && !out.ended {
		if out.failed {
			err = s.putFailed(ctx, src.d, err)
		}
		return err
	}
	resp, err := stream.CloseAndRecv()
	// For compressed uploads, servers also return the compressed size or -1.
	n := resp.GetCommittedSize()
	if err == nil && n != src.d.Size() && !(t.zstd && (n == out.off || n == -1)) {
		err = fmt.Errorf("the server committed %d bytes", n)
	}
	if err != nil {
		return s.putFailed(ctx, src.d, err)
	}
	return nil
}

// A messageWriter sends the bytes written to it as the messages of an upload. It holds back the last one for
// send(true).
type messageWriter struct {
	stream grpc.ClientStreamingClient[bspb.WriteRequest, bspb.WriteResponse]
	name   string
	off    int64  // bytes sent
	buf    []byte // not yet sent
	ended  bool   // the server ended the stream; receiving returns the reason
	failed bool
}

// Write implements io.Writer.
func (p *messageWriter) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if len(p.buf) == maxData {
			if err := p.send(false); err != nil {
				return 0, err
			}
		}
		if p.buf == nil {
			p.buf = make([]byte, 0, maxData) // gRPC may still use the previous one
		}
		n := min(len(rest), maxData-len(p.buf))
		p.buf = append(p.buf, rest[:n]...)
		rest = rest[n:]
	}
	return len(b), nil
}

// send sends the held back bytes.
func (p *messageWriter) send(last bool) error {
	err := p.stream.Send(&bspb.WriteRequest{ResourceName: p.name, WriteOffset: p.off, Data: p.buf, FinishWrite: last})
	p.off += int64(len(p.buf))
	p.buf = nil
	p.ended = errors.Is(err, io.EOF)
	p.failed = err != nil
	return err
}

// A source reads a blob in parts and verifies the whole before it returns the last part.
type source struct {
	d cas.Digest
	r io.Reader
	h hash.Hash
	n int64 // bytes read
}

func newSource(d cas.Digest, r io.Reader) *source {
	return &source{d: d, r: r, h: d.Function().New(d.Size())}
}

// next reads the next part into b and returns its size. It returns cas.ErrMismatch if the data does not match the
// digest.
func (s *source) next(b []byte) (int, error) {
	b = b[:min(int64(len(b)), s.d.Size()-s.n)]
	n, err := io.ReadFull(s.r, b)
	s.h.Write(b[:n])
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

// copyTo copies the blob to w.
func (s *source) copyTo(w io.Writer) error {
	buf := make([]byte, maxData)
	for s.n < s.d.Size() {
		n, err := s.next(buf)
		if err == nil {
			_, err = w.Write(buf[:n])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// newUUID returns a random UUID for an upload.
func newUUID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
