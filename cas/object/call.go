// SPDX-License-Identifier: Apache-2.0

package object

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// Time without progress by the server after which an attempt fails.
const (
	stallTime       = 10 * time.Second
	probeStallTime  = 8 * time.Second  // less than the time of a probe
	uploadStallTime = 30 * time.Second // the connection buffers data of an upload
	copyStallTime   = time.Minute      // the server may copy the object before it answers,
	copyRate        = 4 << 20          // bytes per second in addition to this time
)

// callTime is the total time without progress after which a call makes no further attempt.
const callTime = 20 * time.Second

// probe is the kind of calls that the health check makes.
const probe = "probe"

// probeAttempts is the maximum number of attempts of a probe without a response. A probe that gets an error as response
// is retried like other calls.
const probeAttempts = 2

// A Call describes a call of the bucket's API that has ended, with all its attempts.
type Call struct {
	// Kind is get, head, put, part, begin, complete, abort, copy or probe.
	Kind string
	// Outcome is ok, not_found, full, denied, unavailable, canceled or failed. If the bucket was known to be down, no
	// request was sent, and Outcome is denied or unavailable.
	Outcome string
	// Err is the error of the call, nil if Outcome is ok.
	Err error
	// Began is when the call began.
	Began time.Time
	// Time is the time until the response began, with all attempts and the pauses between them.
	Time time.Duration
	// Requests is the number of attempts.
	Requests int
	// Sent and Received are the bytes of the bodies.
	Sent, Received int64
}

// A call is a running Call. Its attempts are sequential.
type call struct {
	client *Client
	ctx    context.Context // of the caller
	own    context.Context // ends with ctx, when the call ends, and to prevent another attempt
	cancel context.CancelCauseFunc
	idle   time.Duration // without progress, in all ended attempts
	size   int64         // bytes that the server may copy
	lost   int           // number of attempts without a response
	Call
	sent, received atomic.Int64
}

// callKey is the context key of a call.
type callKey struct{}

// newCall returns a call, which end reports.
func (c *Client) newCall(ctx context.Context, kind string) *call {
	k := &call{client: c, ctx: ctx, Call: Call{Kind: kind, Began: time.Now()}}
	k.own, k.cancel = context.WithCancelCause(ctx)
	k.own = context.WithValue(k.own, callKey{}, k)
	return k
}

// do makes a call, unless the bucket is down.
func (c *Client) do(ctx context.Context, kind, what string, f func(ctx context.Context) error) error {
	return c.doCopy(ctx, kind, what, 0, f)
}

// doCopy is do for a call that makes the server copy size bytes.
func (c *Client) doCopy(ctx context.Context, kind, what string, size int64, f func(ctx context.Context) error) error {
	k := c.newCall(ctx, kind)
	k.size = size
	if err := c.health.Ready(ctx); err != nil {
		return k.end(fmt.Errorf("%s: %w", what, err))
	}
	return k.do(what, f)
}

// do makes the call and ends it. The operation what is part of errors.
func (k *call) do(what string, f func(ctx context.Context) error) error {
	return k.end(k.answered(what, f(k.own)))
}

// answered records the result of the first response, and returns its error as one of package cas.
func (k *call) answered(what string, err error) error {
	if err != nil {
		if cause := context.Cause(k.own); k.ctx.Err() == nil && cause != nil {
			err = cause
		}
		err = k.client.wrap(k.ctx, what, err)
	}
	k.Time = time.Since(k.Began)
	// If a caller gives up on a slow transfer, only the time since the last progress counts as waiting for the bucket.
	k.client.health.Observe(k.ctx, time.Now().Add(-k.idle), err)
	switch {
	case k.Kind == probe || down(err) == nil:
	case errors.Is(err, ErrNoBucket): // a probe would report nothing else
		k.client.health.Fail(ErrNoBucket)
	default:
		k.client.health.Start() // does it answer anything?
	}
	return err
}

// end ends the call, reports it and returns err.
func (k *call) end(err error) error {
	k.cancel(nil)
	if k.client.config.Observe == nil {
		return err
	}
	k.Err, k.Outcome, k.Sent, k.Received = err, outcome(err), k.sent.Load(), k.received.Load()
	k.client.config.Observe(k.ctx, k.Call)
	return err
}

// outcome returns the Outcome of a call that returned err.
func outcome(err error) string {
	for _, row := range []struct {
		err  error
		text string
	}{
		{nil, "ok"},
		{cas.ErrNotFound, "not_found"},
		{cas.ErrUpstreamFull, "full"},
		{cas.ErrDenied, "denied"},
		{cas.ErrUnavailable, "unavailable"},
		{context.Canceled, "canceled"},
		{context.DeadlineExceeded, "canceled"},
	} {
		if errors.Is(err, row.err) {
			return row.text
		}
	}
	return "failed"
}

// limit returns the time without progress after which an attempt fails.
func (k *call) limit(r *http.Request) time.Duration {
	switch {
	case k.Kind == probe:
		return probeStallTime
	case k.Kind == "copy" || k.Kind == "complete":
		return copyStallTime + time.Duration(k.size/copyRate)*time.Second
	case r.ContentLength > 0:
		return uploadStallTime
	}
	return stallTime
}

// admit decides whether to make another attempt. If not, it ends the retries of the client.
func (k *call) admit() error {
	var err error
	if k.Requests > 0 && k.Kind != probe {
		err = k.client.health.Err()
	}
	if err == nil && (k.idle >= callTime || k.Kind == probe && k.idle >= probeStallTime) {
		err = errStalled{k.idle}
	}
	if err != nil {
		k.cancel(err)
		return err
	}
	k.Requests++
	return nil
}

// unanswered records that the last attempt got no response because of err. It starts the health check, which need not
// wait for the other attempts of the call, and which makes at most probeAttempts attempts itself.
func (k *call) unanswered(err error) {
	k.lost++
	switch {
	case k.own.Err() != nil:
	case k.Kind != probe:
		k.client.health.Start()
	case k.lost >= probeAttempts:
		k.cancel(err)
	}
}

// errStalled is the reason why an attempt or call without progress failed.
type errStalled struct{ d time.Duration }

func (e errStalled) Error() string {
	return fmt.Sprintf("no answer for %v", e.d.Round(time.Second))
}

// A limiter ends attempts without progress, and calls with too many of them. All its requests belong to calls.
type limiter struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (l limiter) RoundTrip(r *http.Request) (*http.Response, error) {
	k := r.Context().Value(callKey{}).(*call)
	if err := k.admit(); err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, err
	}
	a := newAttempt(k, r)
	resp, err := l.next.RoundTrip(r.WithContext(a.ctx))
	k.idle += a.pause()
	if err != nil {
		defer a.cancel(nil)
		err = a.reason(err)
		k.unanswered(err)
		return nil, err
	}
	resp.Body = &response{resp.Body, a}
	return resp, nil
}

// An attempt is a request of a call with a timer that ends it without progress.
type attempt struct {
	call   *call
	ctx    context.Context
	cancel context.CancelCauseFunc
	limit  time.Duration

	mu    sync.Mutex
	timer *time.Timer // guarded by mu; nil while nobody waits for the server
	last  time.Time   // guarded by mu; of the last progress
}

// attemptKey is the context key of an attempt.
type attemptKey struct{}

// newAttempt returns an attempt whose timer runs.
func newAttempt(k *call, r *http.Request) *attempt {
	a := &attempt{call: k, limit: k.limit(r)}
	ctx, cancel := context.WithCancelCause(r.Context())
	a.ctx, a.cancel = context.WithValue(ctx, attemptKey{}, a), cancel
	a.resume()
	return a
}

// resume starts the timer.
func (a *attempt) resume() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last = time.Now()
	a.timer = time.AfterFunc(a.limit, func() { a.cancel(errStalled{a.limit}) })
}

// progress restarts the timer if it runs.
func (a *attempt) progress() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.timer != nil {
		a.last = time.Now()
		a.timer.Reset(a.limit)
	}
}

// pause stops the timer and returns the time since the last progress.
func (a *attempt) pause() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timer.Stop()
	a.timer = nil
	return time.Since(a.last)
}

// reason returns errStalled if the timer has ended the attempt, otherwise err.
func (a *attempt) reason(err error) error {
	if stalled, ok := errors.AsType[errStalled](context.Cause(a.ctx)); ok {
		return stalled
	}
	return err
}

// A response is the body of a response. The timer runs only while somebody reads it.
type response struct {
	io.ReadCloser
	attempt *attempt
}

func (b *response) Read(p []byte) (int, error) {
	b.attempt.resume()
	n, err := b.ReadCloser.Read(p)
	b.attempt.pause()
	b.attempt.call.received.Add(int64(n))
	if err != nil && err != io.EOF {
		err = b.attempt.reason(err)
	}
	return n, err
}

func (b *response) Close() error {
	defer b.attempt.cancel(nil)
	return b.ReadCloser.Close()
}

// A sentBody is the body of a request; reading it is progress.
type sentBody struct {
	io.Reader
	attempt *attempt
}

func (b *sentBody) Read(p []byte) (int, error) {
	b.attempt.progress()
	n, err := b.Reader.Read(p)
	b.attempt.call.sent.Add(int64(n))
	return n, err
}

func (*sentBody) Close() error { return nil }
