// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/worker"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// chunkBytes bounds the data of a message, and so the memory held for a slow reader.
const chunkBytes = 64 << 10

// A reader is one call of Read.
type reader struct {
	to   bspb.ByteStream_ReadServer
	buf  []byte
	off  int64 // of the next byte
	left int64 // bytes still requested
}

// Read implements ByteStream.Read for names of streams. It sends what is written, then what is added until the log is
// complete. An offset beyond the present end waits; one beyond the final end fails with OUT_OF_RANGE. If the run ends
// without a result, Read fails with ABORTED.
func (r *Registry) Read(req *bspb.ReadRequest, to bspb.ByteStream_ReadServer) error {
	s, err := r.readable(req.ResourceName)
	if err != nil {
		return err
	}
	switch {
	case req.ReadLimit < 0:
		return status.Errorf(codes.InvalidArgument, "read_limit %d is negative", req.ReadLimit)
	case req.ReadOffset < 0:
		return status.Errorf(codes.OutOfRange, "read_offset %d is negative", req.ReadOffset)
	}
	call := &reader{to: to, buf: make([]byte, chunkBytes), off: req.ReadOffset, left: req.ReadLimit}
	if call.left == 0 {
		call.left = math.MaxInt64
	}
	for err == nil && call.left > 0 {
		var log *worker.Log
		var blob cas.Digest
		log, blob, err = r.source(s)
		switch {
		case err != nil:
		case log == nil:
			err = r.stored(call, s, blob)
		default:
			err = call.follow(log)
		}
		if errors.Is(err, errEnded) {
			err = nil // continue with the new source
		}
	}
	if err == nil || err == io.EOF {
		return nil
	}
	return explain(s, err)
}

// source returns the present source of s: a log or a blob.
func (r *Registry) source(s *stream) (*worker.Log, cas.Digest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.streams[s.id] != s:
		return nil, cas.Digest{}, status.Errorf(codes.NotFound, "log stream %+q ended too long ago", s.name())
	case s.log == nil && s.blob.IsZero():
		return nil, cas.Digest{}, status.Errorf(codes.Aborted,
			"log stream %+q: the run ended without a result, and its output is not kept", s.name())
	}
	return s.log, s.blob, nil
}

// follow waits for a chunk of a log and sends it.
func (c *reader) follow(log *worker.Log) error {
	n, err := log.ReadAt(c.to.Context(), c.buf[:min(c.left, chunkBytes)], c.off)
	if err != nil {
		return err
	}
	return c.send(n)
}

// stored sends the requested part of a blob, and returns io.EOF.
func (r *Registry) stored(c *reader, s *stream, blob cas.Digest) error {
	in, err := r.cfg.Instances(s.instance)
	if err != nil {
		return err
	}
	from, err := in.Store.Open(c.to.Context(), blob, c.off)
	if err != nil {
		return err
	}
	defer from.Close()
	for c.left > 0 {
		n, err := io.ReadFull(from, c.buf[:min(c.left, chunkBytes)])
		if err == io.ErrUnexpectedEOF {
			err = nil // the next read returns io.EOF
		}
		if err != nil {
			return err
		}
		if err := c.send(n); err != nil {
			return err
		}
	}
	return io.EOF
}

// send sends the first n bytes of c.buf.
func (c *reader) send(n int) error {
	if err := c.to.Send(&bspb.ReadResponse{Data: c.buf[:n]}); err != nil {
		return err
	}
	c.off += int64(n)
	c.left -= int64(n)
	return nil
}

// explain returns an error of reading s as a status.
func explain(s *stream, err error) error {
	switch {
	case errors.Is(err, errClosing):
		return status.Errorf(codes.Unavailable, "log stream %+q: %v", s.name(), err)
	case errors.Is(err, errIdle):
		return status.Errorf(codes.Aborted, "log stream %+q ended unfinished: %v", s.name(), err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	if _, ok := status.FromError(err); ok {
		return err
	}
	return casstatus.Error(fmt.Errorf("log stream %+q: %w", s.name(), err))
}
