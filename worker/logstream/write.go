// SPDX-License-Identifier: Apache-2.0

package logstream

import (
	"context"
	"fmt"
	"io"
	"time"

	logpb "github.com/bazelbuild/remote-apis/build/bazel/remote/logstream/v1"
	"github.com/cloister-build/cloister/cas/casstatus"
	"github.com/cloister-build/cloister/cas/quota"
	"github.com/cloister-build/cloister/worker"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// CreateLogStream implements LogStreamService. The parent is an instance name.
func (r *Registry) CreateLogStream(ctx context.Context, req *logpb.CreateLogStreamRequest) (*logpb.LogStream, error) {
	if _, err := r.cfg.Instances(req.Parent); err != nil {
		return nil, casstatus.Error(err)
	}
	release, err := quota.Hold(ctx, quota.LogStreams)
	if err != nil {
		return nil, err
	}
	s := &stream{
		id: randomID(), instance: req.Parent, token: randomID(), log: &worker.Log{},
		release: release, caller: quota.Caller(ctx), expires: time.Now().Add(r.cfg.Idle),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.makeRoom(s.caller, 1, 0); err != nil {
		release()
		return nil, err
	}
	if r.callers[s.caller] == nil {
		r.callers[s.caller] = &usage{}
	}
	r.callers[s.caller].streams++
	r.streams[s.id] = s
	r.clients = append(r.clients, s)
	return &logpb.LogStream{Name: s.name(), WriteResourceName: join(s.name(), s.token)}, nil
}

// makeRoom drops finished streams of clients until there is room for more streams and bytes of a caller, or returns an
// error. It drops those of the caller that has the most, oldest first. A caller that exceeds its own limit loses only
// its own streams.
func (r *Registry) makeRoom(caller string, streams int, bytes int64) error {
	for {
		var own usage
		if u := r.callers[caller]; u != nil {
			own = *u
		}
		ownFull := own.bytes > r.cfg.MaxBytes/2-bytes
		tooMany := len(r.clients)+streams > r.cfg.MaxStreams
		if !ownFull && !tooMany && r.bytes <= r.cfg.MaxBytes-bytes {
			return nil
		}
		var drop *stream
		most := int64(-1)
		for _, s := range r.clients {
			if !s.finished || ownFull && s.caller != caller {
				continue
			}
			u := *r.callers[s.caller]
			if s.caller == caller {
				u.streams, u.bytes = u.streams+streams, u.bytes+bytes
			}
			n := u.bytes
			if tooMany {
				n = int64(u.streams)
			}
			if n > most {
				drop, most = s, n
			}
		}
		switch {
		case drop != nil:
			r.dropClient(drop)
		case ownFull:
			return quota.Exhausted(fmt.Sprintf("log streams of this client take %d of its %d bytes; finish one or retry later",
				own.bytes, r.cfg.MaxBytes/2))
		case tooMany:
			return quota.Exhausted(fmt.Sprintf("too many log streams: clients write to %d; finish one or retry later",
				len(r.clients)))
		default:
			return quota.Exhausted(fmt.Sprintf("log streams of clients take %d of %d bytes; finish one or retry later",
				r.bytes, r.cfg.MaxBytes))
		}
	}
}

// Write implements ByteStream.Write for write_resource_names of streams; first is the first message, whose data it does
// not retain. Each message can be read at once. A call without finish_write leaves the stream open for the next call.
func (r *Registry) Write(first *bspb.WriteRequest, from bspb.ByteStream_WriteServer) error {
	name := first.ResourceName
	for m := first; ; {
		if m.ResourceName != "" && m.ResourceName != name {
			return status.Error(codes.InvalidArgument, "resource_name changed within a write")
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

// write adds a message to a stream, and returns the size of the stream.
func (r *Registry) write(name string, m *bspb.WriteRequest) (committed int64, err error) {
	s, err := r.writable(name)
	if err != nil {
		return 0, err
	}
	// This is atomic for other writers, but does not hold r.mu during the copy.
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
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

// admit checks a message and reserves room for it. It returns the size of the stream including the message.
func (r *Registry) admit(s *stream, m *bspb.WriteRequest) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n, more := s.size, int64(len(m.Data))
	switch {
	case r.streams[s.id] != s: // dropped since it was found, and no longer counted
		return 0, status.Errorf(codes.NotFound, "log stream %+q ended too long ago", s.name())
	case m.WriteOffset != n:
		return 0, status.Errorf(codes.InvalidArgument,
			"write_offset is %d, but %d bytes of log stream %+q are committed", m.WriteOffset, n, s.name())
	case s.finished && more == 0 && m.FinishWrite:
		return n, nil // a retry after a lost answer
	case s.finished:
		return 0, status.Errorf(codes.FailedPrecondition, "log stream %+q is finished at %d bytes", s.name(), n)
	case more > r.cfg.MaxStreamBytes-n:
		return 0, status.Errorf(codes.ResourceExhausted,
			"log stream %+q has %d bytes; %d more exceed the limit of %d", s.name(), n, more, r.cfg.MaxStreamBytes)
	}
	if err := r.makeRoom(s.caller, 0, more); err != nil {
		return 0, err
	}
	s.size += more
	r.bytes += more
	r.callers[s.caller].bytes += more
	s.finished, s.expires = m.FinishWrite, time.Now().Add(r.cfg.Idle)
	if s.finished {
		s.release()
		s.expires = time.Now().Add(r.cfg.Keep)
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
	return &bspb.QueryWriteStatusResponse{CommittedSize: s.size, Complete: s.finished}, nil
}
