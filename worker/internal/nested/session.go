// SPDX-License-Identifier: Apache-2.0

package nested

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A session serves one action.
type session struct {
	actionapi.Action
	listener *listener
	serving  sync.WaitGroup // the server's loop over the listener
	calls    sync.WaitGroup // calls in progress; none is added once closed is set
	fetched  *record
	permits  chan struct{} // has a value for each call whose messages are received

	mu     sync.Mutex
	conns  map[*conn]bool // guarded by mu
	closed bool           // guarded by mu
	count  int            // guarded by mu; calls so far
}

// Close implements actionapi.Session.
func (s *session) Close() actionapi.Use {
	s.mu.Lock()
	s.closed = true
	open := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	s.listener.Close()
	for _, c := range open {
		c.Close() // which ends its calls
	}
	s.serving.Wait()
	s.calls.Wait()
	return actionapi.Use{Calls: s.count, Fetched: s.fetched.all()}
}

// add keeps a connection for Close, unless the session is closed or there are too many.
func (s *session) add(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.conns) >= maxConnections {
		return false
	}
	s.conns[c] = true
	return true
}

func (s *session) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// enter counts a call until leave is called. It refuses a call that ended before it was admitted.
func (s *session) enter(ctx context.Context) (leave func(), err error) {
	if !ctx.Value(admittedKey{}).(*admitted).ok {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, status.Error(codes.Unavailable, "the action has ended")
	}
	s.count++
	s.calls.Add(1)
	return s.calls.Done, nil
}

// confine refuses messages for another instance, and resources other than blobs.
func (s *session) confine(m any) error {
	var instance string
	switch m := m.(type) {
	case interface{ GetInstanceName() string }:
		instance = m.GetInstanceName()
	case interface{ GetResourceName() string }:
		segments := strings.Split(m.GetResourceName(), "/")
		i := slices.IndexFunc(segments, func(s string) bool { return slices.Contains(cas.Reserved(), s) })
		if i < 0 && m.GetResourceName() == "" { // the name in the stream's first message applies
			return nil
		}
		if i < 0 || segments[i] == "logstreams" {
			return status.Errorf(codes.PermissionDenied, "resource %+.256q is not a blob: an action can read and write only blobs",
				m.GetResourceName())
		}
		instance = strings.Join(segments[:i], "/")
	default:
		return status.Error(codes.PermissionDenied, "an action cannot call this method")
	}
	if instance != s.Instance {
		return status.Errorf(codes.PermissionDenied, "an action can only use its own instance %+q, not %+.256q", s.Instance, instance)
	}
	return nil
}

func unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	s := sessionOf(ctx)
	leave, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := s.confine(req); err != nil {
		return nil, err
	}
	answer, err := next(ctx, req)
	if err == nil {
		err = s.fetched.answer(req, answer)
	}
	return answer, err
}

func (e *Endpoint) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	s := sessionOf(stream.Context())
	leave, err := s.enter(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	if info.FullMethod == repb.Execution_WaitExecution_FullMethodName {
		// Operations of an action end with their Execute call, and an action that waited for another operation might wait for
		// its own slot.
		return status.Error(codes.NotFound, "operations of actions end with the call of Execute; execute the action again")
	}
	c := &call{ServerStream: stream, session: s}
	defer func() {
		if c.operation != "" {
			e.cancel(c.operation)
		}
	}()
	err = next(srv, c)
	if c.refusal != nil {
		return c.refusal // takes precedence over the service's error
	}
	return err
}

// A call is a stream of an action.
type call struct {
	grpc.ServerStream
	session   *session
	request   any    // the first message
	operation string // to cancel at the end, or ""
	refusal   error
}

// RecvMsg implements grpc.ServerStream. One goroutine at a time calls it.
func (c *call) RecvMsg(m any) error {
	if err := c.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if c.refusal = c.session.confine(m); c.refusal != nil {
		return c.refusal
	}
	if c.request == nil {
		c.request = m
	}
	return nil
}

// SendMsg implements grpc.ServerStream. One goroutine at a time calls it.
func (c *call) SendMsg(m any) error {
	if o, ok := m.(*longrunningpb.Operation); ok && o.Name != "" {
		if c.operation = o.Name; o.Done {
			c.operation = ""
		}
	}
	if err := c.session.fetched.answer(c.request, m); err != nil {
		c.refusal = err
		return err
	}
	return c.ServerStream.SendMsg(m)
}
