// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"io"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxCalls is how many calls of each kind are under way at once; others wait.
	maxCalls = 64
	// silence is how long a call waits for the server to take or to bring something.
	silence = time.Minute
	// patience is how long a caller must have waited for his giving up to say something about the server: many wait
	// for less than silence.
	patience = 10 * time.Second
)

// turns bound the calls under way. Each kind has its own: an upload may read what a download of the same server
// brings, and would else wait for a turn that only its own end can give back.
type turns struct{ calls, downloads, uploads chan struct{} }

func newTurns() turns {
	return turns{make(chan struct{}, maxCalls), make(chan struct{}, maxCalls), make(chan struct{}, maxCalls)}
}

// take waits for a turn; its error is a status.
func take(ctx context.Context, turn chan struct{}) error {
	select {
	case turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

var errSilent = errors.New("silent")

// A watch ends a call whose server is silent.
type watch struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
}

func newWatch(ctx context.Context) *watch {
	w := &watch{}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	return w
}

// during calls f, which waits for the server. If it waits too long, the call is ended, and the error is that of
// a server that is not there. The caller's slowness between two calls of f is not the server's.
func (w *watch) during(f func() error) error {
	timer := time.AfterFunc(silence, func() { w.cancel(errSilent) })
	defer timer.Stop()
	err := f()
	switch {
	case err != nil && context.Cause(w.ctx) == errSilent:
		err = status.Errorf(codes.Unavailable, "no answer for %v", silence)
	case status.Code(err) == codes.DeadlineExceeded:
		// The server knows the caller's deadline, and may say that it has come before our own timer does. Then it is the
		// caller who gave up.
		if d, ok := w.ctx.Deadline(); ok && !time.Now().Before(d) {
			<-w.ctx.Done()
		}
	case err != io.EOF && errors.Is(err, io.EOF):
		// gRPC gave up repeating a call, which it does where the server is Unavailable, and no longer says why.
		err = status.Error(codes.Unavailable, err.Error())
	}
	return err
}

// unary is a grpc.UnaryClientInterceptor: it gives each call its turn and its deadline, and notes how it ended.
func (c *Client) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	w := newWatch(ctx)
	defer w.cancel(nil)
	call := func() error { return invoke(w.ctx, method, req, reply, cc, opts...) }
	// A probe waits for nobody, and who sent it notes how it ended.
	if method == repb.Capabilities_GetCapabilities_FullMethodName {
		return w.during(call)
	}
	if err := take(ctx, c.turns.calls); err != nil {
		return err
	}
	defer func() { <-c.turns.calls }()
	begun := time.Now()
	err := w.during(call)
	c.heard(ctx, begun, err)
	return err
}

// stream is a grpc.StreamClientInterceptor: unary for streams. Each keeps its turn until it has ended or its
// context has.
func (c *Client) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	turn := c.turns.uploads
	if desc.ServerStreams {
		turn = c.turns.downloads
	}
	if err := take(ctx, turn); err != nil {
		return nil, err
	}
	s := &call{watch: newWatch(ctx), caller: ctx, client: c, brings: desc.ServerStreams}
	context.AfterFunc(s.ctx, func() { <-turn })
	begun := time.Now()
	err := s.during(func() (err error) {
		s.ClientStream, err = streamer(s.ctx, desc, cc, method, opts...)
		return err
	})
	if err != nil {
		c.heard(ctx, begun, err)
		s.cancel(nil)
		return nil, err
	}
	return s, nil
}

// A call is a stream with its watch.
type call struct {
	grpc.ClientStream
	*watch
	caller context.Context
	client *Client
	brings bool      // more than one message
	broke  time.Time // when the send began that found the stream over; zero: none did
}

// SendMsg implements grpc.ClientStream. That a message could be sent says nothing about the server: it may lie in
// a buffer.
func (s *call) SendMsg(m any) error {
	begun := time.Now()
	err := s.during(func() error { return s.ClientStream.SendMsg(m) })
	if err == io.EOF {
		s.broke = begun // RecvMsg says why, at once, and not how long that took
	} else if err != nil {
		s.client.heard(s.caller, begun, err)
	}
	return err
}

// RecvMsg implements grpc.ClientStream.
func (s *call) RecvMsg(m any) error {
	begun := s.broke
	if begun.IsZero() {
		begun = time.Now()
	}
	err := s.during(func() error { return s.ClientStream.RecvMsg(m) })
	s.client.heard(s.caller, begun, err)
	if err != nil || !s.brings {
		s.cancel(nil)
	}
	return err
}
