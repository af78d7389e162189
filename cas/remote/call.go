// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/internal/health"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// maxCalls limits the concurrent calls of each kind; others wait.
	maxCalls = 64
	// callTimeout is how long a call waits for progress by the server.
	callTimeout = time.Minute
	// doubtTime is the time without progress after which a waiting call probes the server, and the interval of further
	// probes. The call ends if the server does not answer the probe either.
	doubtTime = 5 * time.Second
	// connectTime is the timeout of an attempt to connect.
	connectTime = 10 * time.Second
)

// limits are semaphores for the concurrent calls. Downloads and uploads are separate because an upload may read from a
// download of the same server: with a common limit they could deadlock.
type limits struct{ calls, downloads, uploads chan struct{} }

func newLimits() limits {
	return limits{make(chan struct{}, maxCalls), make(chan struct{}, maxCalls), make(chan struct{}, maxCalls)}
}

// acquire waits for the semaphore. It fails with a status if ctx ends, and with that of the health check if the server
// is down by then.
func (c *Client) acquire(ctx context.Context, semaphore chan struct{}) error {
	select {
	case semaphore <- struct{}{}:
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
	err := c.health.Err()
	if err != nil {
		<-semaphore
	}
	return err
}

// errStalled is the reason why a call without progress failed.
type errStalled struct{ d time.Duration }

func (e errStalled) Error() string { return fmt.Sprintf("no answer for %v", e.d.Round(time.Second)) }

// A watchdog ends a call without progress.
type watchdog struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	health *health.Check // nil for a probe
}

func newWatchdog(ctx context.Context, check *health.Check) *watchdog {
	w := &watchdog{health: check}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	return w
}

// watch ends the call if, before ctx ends, the server turns out to be down or callTimeout has passed since start.
func (w *watchdog) watch(ctx context.Context, start time.Time) {
	for ctx.Err() == nil {
		down := w.health != nil && w.health.Doubt(ctx) != nil
		waited := time.Since(start)
		if ctx.Err() == nil && (down || waited >= callTimeout) {
			w.cancel(errStalled{waited})
			return
		}
		select {
		case <-time.After(min(doubtTime, callTimeout-waited)):
		case <-ctx.Done():
		}
	}
}

// guard calls f, which waits for the server, and ends the call with UNAVAILABLE if f exceeds callTimeout, or if the
// server answers neither f nor a probe. The time between two calls of guard is the caller's and has no limit.
func (w *watchdog) guard(f func() error) error {
	ctx, done := context.WithCancel(w.ctx)
	defer done()
	start := time.Now()
	timer := time.AfterFunc(doubtTime, func() { w.watch(ctx, start) })
	defer timer.Stop()
	err := f()
	stalled, isStalled := errors.AsType[errStalled](context.Cause(w.ctx))
	switch {
	case err != nil && isStalled:
		err = status.Error(codes.Unavailable, stalled.Error())
	case status.Code(err) == codes.DeadlineExceeded:
		// The server knows the caller's deadline and may report it before our timer fires. Wait for the context, so
		// that Observe sees that the caller gave up.
		if d, ok := w.ctx.Deadline(); ok && !time.Now().Before(d) {
			<-w.ctx.Done()
		}
	case err != io.EOF && errors.Is(err, io.EOF):
		// gRPC gave up repeating a call to an unavailable server and lost the status.
		err = status.Error(codes.Unavailable, err.Error())
	}
	return err
}

// unary is a grpc.UnaryClientInterceptor that limits calls in number and time and observes their results.
func (c *Client) unary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	guarded := func(check *health.Check) error {
		w := newWatchdog(ctx, check)
		defer w.cancel(nil)
		return w.guard(func() error { return invoke(w.ctx, method, req, reply, cc, opts...) })
	}
	// A probe needs no semaphore, and its caller records the result.
	if method == repb.Capabilities_GetCapabilities_FullMethodName {
		return guarded(nil)
	}
	if err := c.acquire(ctx, c.limits.calls); err != nil {
		return err
	}
	defer func() { <-c.limits.calls }()
	start := time.Now()
	err := guarded(c.health)
	c.health.Observe(ctx, start, err)
	return err
}

// stream is unary for streams. A stream holds its semaphore until it or its context ends.
func (c *Client) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	semaphore := c.limits.uploads
	if desc.ServerStreams {
		semaphore = c.limits.downloads
	}
	if err := c.acquire(ctx, semaphore); err != nil {
		return nil, err
	}
	s := &guardedStream{watchdog: newWatchdog(ctx, c.health), caller: ctx, client: c, serverStreams: desc.ServerStreams}
	context.AfterFunc(s.ctx, func() { <-semaphore })
	start := time.Now()
	err := s.guard(func() (err error) {
		s.ClientStream, err = open(s.ctx, desc, cc, method, opts...)
		return err
	})
	if err != nil {
		c.health.Observe(ctx, start, err)
		s.cancel(nil)
		return nil, err
	}
	return s, nil
}

// A guardedStream is a stream with a watchdog.
type guardedStream struct {
	grpc.ClientStream
	*watchdog
	caller        context.Context
	client        *Client
	serverStreams bool
	broken        time.Time // start of the SendMsg that found the stream broken, or zero
}

// SendMsg implements grpc.ClientStream. Success is not observed: the message may only have reached a buffer.
func (s *guardedStream) SendMsg(m any) error {
	start := time.Now()
	err := s.guard(func() error { return s.ClientStream.SendMsg(m) })
	if err == io.EOF {
		s.broken = start // RecvMsg returns the reason, but not how long it took
	} else if err != nil {
		s.client.health.Observe(s.caller, start, err)
	}
	return err
}

// RecvMsg implements grpc.ClientStream.
func (s *guardedStream) RecvMsg(m any) error {
	start := s.broken
	if start.IsZero() {
		start = time.Now()
	}
	err := s.guard(func() error { return s.ClientStream.RecvMsg(m) })
	s.client.health.Observe(s.caller, start, err)
	if err != nil || !s.serverStreams {
		s.cancel(nil)
	}
	return err
}
