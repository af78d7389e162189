// SPDX-License-Identifier: Apache-2.0

package buildevents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/quota"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	bespb "google.golang.org/genproto/googleapis/devtools/build/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

// maxBatch is the size in bytes at which a batch accepts no further event.
const maxBatch = 1 << 20

// Callers identifies callers and their rights. Package access implements it.
type Callers interface {
	// Caller returns the name of a call's caller.
	Caller(ctx context.Context) string
	// Reads reports whether the caller may read an instance.
	Reads(ctx context.Context, instance string) bool
}

// everyone implements Callers for a server that does not authenticate: every caller may read everything.
type everyone struct{}

// Caller implements Callers.
func (everyone) Caller(context.Context) string { return "" }

// Reads implements Callers.
func (everyone) Reads(context.Context, string) bool { return true }

// Register adds the services to r. Interceptors check the rights of calls that name an instance. If callers is nil, the
// server does not authenticate.
func (s *Store) Register(r grpc.ServiceRegistrar, callers Callers) {
	if callers == nil {
		callers = everyone{}
	}
	// The generated functions of PublishBuildEvent accept only a *grpc.Server.
	if g, ok := r.(*grpc.Server); ok {
		bespb.RegisterPublishBuildEventServer(g, &service{store: s, caller: callers.Caller})
	}
	cloisterpb.RegisterBuildsServer(r, &reader{store: s, reads: callers.Reads})
}

type service struct {
	store  *Store
	caller func(context.Context) string
}

// PublishLifecycleEvent accepts and drops Bazel's events about a build as a whole. The stream of the tool's events has
// the same information.
func (s *service) PublishLifecycleEvent(_ context.Context, req *bespb.PublishLifecycleEventRequest) (*emptypb.Empty, error) {
	if err := cas.CheckInstanceName(req.ProjectId); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &emptypb.Empty{}, nil
}

// PublishBuildToolEventStream stores a stream of events. It ends the call when the client neither sends events nor
// receives acknowledgements for the idle time. It need not wait for publish, whose pending operation fails when this
// call returns.
func (s *service) PublishBuildToolEventStream(stream bespb.PublishBuildEvent_PublishBuildToolEventStreamServer) error {
	progress, done, panicked := make(chan struct{}), make(chan error, 1), make(chan string, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				panicked <- fmt.Sprintf("%v\n%s", p, debug.Stack())
			}
		}()
		done <- s.publish(stream, progress)
	}()
	idle := time.NewTimer(s.store.cfg.Idle)
	defer idle.Stop()
	for {
		select {
		case <-progress:
			idle.Reset(s.store.cfg.Idle)
		case err := <-done:
			return err
		case p := <-panicked:
			panic(p) // in this goroutine, where an interceptor recovers
		case <-idle.C:
			return status.Errorf(codes.Unavailable, "the client was silent for %v; it may continue the stream", s.store.cfg.Idle)
		}
	}
}

// publish stores events in batches: while it syncs one, it receives the next. It acknowledges each event once it is
// durable, and sends to progress after each batch.
func (s *service) publish(
	stream bespb.PublishBuildEvent_PublishBuildToolEventStreamServer, progress chan<- struct{},
) error {
	ctx := stream.Context()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	id := first.GetOrderedBuildEvent().GetStreamId()
	if err := cas.CheckInstanceName(first.ProjectId); err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	h := Header{ID: id.GetInvocationId(), Instance: first.ProjectId, Caller: s.caller(ctx)}
	p, err := s.store.publish(h, quota.Caller(ctx), first.GetOrderedBuildEvent().GetSequenceNumber())
	if err != nil {
		return s.failed(err)
	}
	defer p.close()
	in := inbox{partial: make(chan []event, 1), full: make(chan []event)}
	go in.fill(stream, first)
	for {
		var batch []event
		select {
		case batch = <-in.partial:
		case batch = <-in.full:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		}
		end := batch[len(batch)-1].err
		if end != nil {
			batch = batch[:len(batch)-1]
		}
		n, err := p.append(batch)
		for _, e := range batch[:n] {
			ack := &bespb.PublishBuildToolEventStreamResponse{StreamId: id, SequenceNumber: e.number}
			if err := stream.Send(ack); err != nil {
				return err
			}
		}
		select {
		case progress <- struct{}{}:
		case <-ctx.Done(): // the receiver may have returned
		}
		switch {
		case err != nil:
			return s.failed(err)
		case end == io.EOF:
			return nil
		case end != nil:
			return end
		}
	}
}

// failed returns the gRPC status of an error of the store. Bazel does not retry a stream after INVALID_ARGUMENT and
// FAILED_PRECONDITION.
func (s *service) failed(err error) error {
	code := codes.Unavailable
	switch {
	case errors.Is(err, ErrInvalid):
		code = codes.InvalidArgument
	case errors.Is(err, ErrOwner):
		code = codes.PermissionDenied
	case errors.Is(err, ErrFinished):
		code = codes.FailedPrecondition
	case errors.Is(err, ErrBusy):
		return quota.Exhausted(err.Error())
	case errors.Is(err, ErrFull):
		code = codes.ResourceExhausted
	case errors.Is(err, ErrGap):
		code = codes.Aborted
	default: // the error names files of this host, which are not the clients' concern
		s.store.cfg.Log.Error("cannot store build events", "err", err)
		return status.Error(code, "build events cannot be stored; see the server's log")
	}
	return status.Error(code, err.Error())
}

// An inbox holds a batch of events that are not stored yet: at most maxBatch bytes and one more event.
type inbox struct {
	partial chan []event // buffered: fill takes the batch back to extend it, unless publish was faster
	full    chan []event
}

// fill receives events until the call ends. Its last event has the error of the call, io.EOF after an orderly end.
func (in *inbox) fill(
	stream bespb.PublishBuildEvent_PublishBuildToolEventStreamServer, first *bespb.PublishBuildToolEventStreamRequest,
) {
	size := 0
	for m, err := first, error(nil); ; m, err = stream.Recv() {
		e := event{err: err}
		if err == nil {
			e = received(first, m)
		}
		var batch []event
		select {
		case batch = <-in.partial:
		default:
			size = 0
		}
		batch, size = append(batch, e), size+len(e.data)
		if size < maxBatch {
			in.partial <- batch // never blocks: only this goroutine sends
		} else {
			select {
			case in.full <- batch:
			case <-stream.Context().Done():
				return
			}
		}
		if e.err != nil {
			return
		}
	}
}

// received converts a message of the stream that began with first to an event.
func received(first, m *bespb.PublishBuildToolEventStreamRequest) event {
	o := m.GetOrderedBuildEvent()
	if !proto.Equal(o.GetStreamId(), first.GetOrderedBuildEvent().GetStreamId()) || m.ProjectId != first.ProjectId {
		return event{err: status.Error(codes.InvalidArgument, "the messages of a call name different streams")}
	}
	if o.SequenceNumber < 1 {
		return event{err: status.Errorf(codes.InvalidArgument, "sequence number %d: numbers begin at 1", o.SequenceNumber)}
	}
	data, err := proto.Marshal(o.Event)
	if err != nil {
		return event{err: status.Error(codes.InvalidArgument, err.Error())}
	}
	e := event{number: o.SequenceNumber, data: data, final: o.GetEvent().GetComponentStreamFinished() != nil}
	if len(data) > maxEvent {
		e.data = nil
	}
	return e
}
