// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"context"
	"io"
	"time"

	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// CreateLogStream implements LogStreamService. The parent is the name of an instance.
func (r *Registry) CreateLogStream(_ context.Context, req *logpb.CreateLogStreamRequest) (*logpb.LogStream, error) {
	if _, err := r.cfg.Instances(req.Parent); err != nil {
		return nil, cas.Status(err)
	}
	s := &stream{
		id: unguessable(), instance: req.Parent, token: unguessable(), log: &worker.Log{},
		until: time.Now().Add(r.cfg.Idle),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.makeRoom(1, 0) {
		return nil, status.Errorf(codes.ResourceExhausted,
			"clients write to %d log streams already, which is the limit; finish one, or wait", len(r.clients))
	}
	r.streams[s.id] = s
	r.clients = append(r.clients, s)
	return &logpb.LogStream{Name: s.name(), WriteResourceName: join(s.name(), s.token)}, nil
}

// makeRoom drops streams of clients that are whole, oldest first, until there is room for more streams and
// bytes. It reports whether there is.
func (r *Registry) makeRoom(streams int, bytes int64) bool {
	for i := 0; len(r.clients)+streams > r.cfg.MaxStreams || r.bytes > r.cfg.MaxBytes-bytes; {
		switch {
		case i == len(r.clients):
			return false
		case r.clients[i].whole:
			r.dropClient(r.clients[i])
		default:
			i++
		}
	}
	return true
}

// Write implements ByteStream.Write for write_resource_names of streams; first is its first message, whose data it does
// not keep. What a message brings can be read at once. A call that ends without finish_write leaves the stream open: the
// next one goes on where it ended.
func (r *Registry) Write(first *bspb.WriteRequest, from bspb.ByteStream_WriteServer) error {
	name := first.ResourceName
	for m := first; ; {
		if m.ResourceName != "" && m.ResourceName != name {
			return status.Error(codes.InvalidArgument, "the name changed within the stream of a write")
		}
		committed, err := r.write(name, m)
		if err != nil {
			return err
		}
		if !m.FinishWrite {
			if m, err = from.Recv(); err == nil {
				continue
			} else if err != io.EOF {
				return err
			}
		}
		return from.SendAndClose(&bspb.WriteResponse{CommittedSize: committed})
	}
}

// write adds one message to a stream, and returns how much there is of it.
func (r *Registry) write(name string, m *bspb.WriteRequest) (committed int64, err error) {
	s, err := r.writable(name)
	if err != nil {
		return 0, err
	}
	// What follows is one step for other writers, while nobody waits for r.mu during a copy.
	s.writing.Lock()
	defer s.writing.Unlock()
	if committed, err = r.admit(s, m); err != nil {
		return 0, err
	}
	if _, err := s.log.Write(m.Data); err != nil && len(m.Data) > 0 {
		return 0, status.Errorf(codes.Unavailable, "log stream %+q was dropped, or the server is shutting down", s.name())
	}
	if m.FinishWrite {
		s.log.Close(nil)
	}
	return committed, nil
}

// admit checks a message and gives it room. It returns how much there will be of the stream.
func (r *Registry) admit(s *stream, m *bspb.WriteRequest) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, more := s.size, int64(len(m.Data))
	switch {
	case m.WriteOffset != n:
		return 0, status.Errorf(codes.InvalidArgument,
			"write_offset is %d where %d belongs: that much of log stream %+q is committed", m.WriteOffset, n, s.name())
	case s.whole && more == 0 && m.FinishWrite:
		return n, nil // who did not hear the answer says it again
	case s.whole:
		return 0, status.Errorf(codes.FailedPrecondition, "log stream %+q is finished at %d bytes: nothing can be added", s.name(), n)
	case more > r.cfg.MaxStreamBytes-n:
		return 0, status.Errorf(codes.ResourceExhausted,
			"log stream %+q has %d bytes; with %d more it exceeds the %d that one may have", s.name(), n, more, r.cfg.MaxStreamBytes)
	case !r.makeRoom(0, more):
		return 0, status.Errorf(codes.ResourceExhausted, "the log streams of clients take %d bytes of the %d that they may have; finish one, or wait",
			r.bytes, r.cfg.MaxBytes)
	}
	s.size += more
	r.bytes += more
	s.whole, s.until = m.FinishWrite, time.Now().Add(r.cfg.Idle)
	if s.whole {
		s.until = time.Now().Add(r.cfg.Keep)
	}
	return s.size, nil
}

// QueryWriteStatus implements ByteStream.QueryWriteStatus for write_resource_names of streams.
func (r *Registry) QueryWriteStatus(_ context.Context, req *bspb.QueryWriteStatusRequest) (*bspb.QueryWriteStatusResponse, error) {
	s, err := r.writable(req.ResourceName)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return &bspb.QueryWriteStatusResponse{CommittedSize: s.size, Complete: s.whole}, nil
}
