// SPDX-License-Identifier: Apache-2.0

// Package health is a circuit breaker for an upstream store. While the upstream does not answer, or refuses our
// credentials, calls fail at once, and one goroutine probes it, so that recovery does not depend on calls.
package health

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

const (
	maxFailures = 5                // consecutive failed calls, each with all attempts, after which the upstream is down
	probeTime   = 10 * time.Second // timeout of a background probe; behind much traffic it takes a while
	probePause  = 2 * time.Second  // average time between background probes; the jitter is a fifth
	// minWait is the minimum time that a caller must have waited for a cancelled call to count as a failure of the
	// upstream. The deadlines of many callers are shorter than the timeout of a call.
	minWait = 10 * time.Second
)

// ErrNoBucket is the reason why an absent bucket is down. Check.Err wraps it.
var ErrNoBucket = errors.New("the bucket does not exist; create it, or correct its name or the endpoint")

// Config configures a Check.
type Config struct {
	// Name is the upstream in errors.
	Name string
	// Probe makes one call that a healthy upstream answers. A cas.ErrDenied means that it refuses our credentials.
	Probe func(ctx context.Context) error
	// Down returns why an error of Probe means that the upstream is down, or nil if it does not. If Down is nil, every
	// error does.
	Down func(err error) error
	// Failure returns why the upstream did not answer a call that returned err, or nil if it did answer.
	Failure func(err error) error
}

// Redact removes from the URL of an upstream, which may be malformed, the parts that may be secret: the user, the query
// and the fragment.
func Redact(text string) string {
	if at := strings.LastIndexByte(text, '@'); at >= 0 {
		scheme, _, found := strings.Cut(text[:at], "://")
		if !found {
			scheme = ""
		}
		text = scheme + "://..." + text[at:]
	}
	if i := strings.IndexAny(text, "?#"); i >= 0 {
		text = text[:i+1] + "..."
	}
	return text
}

// A Check tracks whether an upstream answers. It is safe for concurrent use. Create it with New; the caller closes it.
type Check struct {
	config     Config
	ctx        context.Context // ends with the Check
	cancel     context.CancelFunc
	background sync.WaitGroup
	probed     chan struct{} // closed after the first probe

	mu       sync.Mutex
	up       bool          // guarded by mu; also false before the first probe
	probing  bool          // guarded by mu; a background goroutine probes
	settled  chan struct{} // guarded by mu; closed after the first probe of the latest goroutine
	err      error         // guarded by mu; the last failure, if the upstream is down
	since    time.Time     // guarded by mu; when the failures began
	failures int           // guarded by mu; consecutive failed calls
	success  time.Time     // guarded by mu; end of the last successful call
	// recovered is closed when the upstream is up again, nil unless it is down.
	recovered chan struct{} // guarded by mu
}

// New returns a Check of an upstream that was not probed yet. Call Start or Probe next.
func New(c Config) *Check {
	h := &Check{config: c, probed: make(chan struct{})}
	h.ctx, h.cancel = context.WithCancel(context.Background())
	return h
}

// Start probes the upstream in the background until it answers, unless such probes are already running.
func (h *Check) Start() { h.start(0) }

// start is Start after a pause.
func (h *Check) start(pause time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.startLocked(pause)
}

// startLocked is start. The caller holds h.mu.
func (h *Check) startLocked(pause time.Duration) {
	if h.probing || h.ctx.Err() != nil {
		return
	}
	h.probing, h.settled = true, make(chan struct{})
	h.background.Go(func() {
		for h.sleep(pause) {
			ctx, cancel := context.WithTimeout(h.ctx, probeTime)
			err := h.probe(ctx, true)
			cancel()
			if err == nil {
				return
			}
			pause = probePause
		}
	})
}

// sleep waits for about d, and returns false if the Check is closed.
func (h *Check) sleep(d time.Duration) bool {
	select {
	case <-time.After(time.Duration((0.8 + 0.4*rand.Float64()) * float64(d))):
		return h.ctx.Err() == nil
	case <-h.ctx.Done():
		return false
	}
}

// Probe probes the upstream once, records the result, and returns the error of Config.Probe. If the upstream turns out
// to be down, background probes begin. As in Observe, a probe has no effect if its caller cancels it or its deadline
// ends it within ten seconds.
func (h *Check) Probe(ctx context.Context) error { return h.probe(ctx, false) }

// probe is Probe. Its error is nil in the background unless the upstream is down.
func (h *Check) probe(ctx context.Context, background bool) error {
	start := time.Now()
	err := h.config.Probe(ctx)
	ended := ctx.Err()
	why := err
	if err != nil && ended == nil && h.config.Down != nil {
		why = h.config.Down(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	tooShort := !background && ended != nil && time.Since(start) < minWait
	if err != nil && (tooShort || errors.Is(ended, context.Canceled)) {
		return err
	}
	was := h.up
	// A call that succeeded meanwhile proves that the upstream is only slow.
	down := why != nil && !(h.up && h.success.After(start))
	if down {
		h.setDown(why)
	} else {
		h.setUp()
	}
	if background {
		h.probing = down
		closeOnce(h.settled)
	} else if down && was {
		h.startLocked(probePause)
	}
	closeOnce(h.probed)
	if background && !down {
		return nil
	}
	return err
}

// closeOnce closes c unless it is closed. The caller holds the mutex of the Check.
func closeOnce(c chan struct{}) {
	select {
	case <-c:
	default:
		close(c)
	}
}

// setDown records that the upstream is down because of err. The caller holds h.mu.
func (h *Check) setDown(err error) {
	if h.err == nil {
		h.since, h.recovered = time.Now(), make(chan struct{})
	}
	h.up, h.err = false, err
}

// setUp records that the upstream has answered a probe. An upstream that answers only probes still counts as down after
// consecutive failures. The caller holds h.mu.
func (h *Check) setUp() {
	if !h.up {
		h.failures = 0
	}
	if h.err != nil {
		close(h.recovered)
	}
	h.up, h.err = true, nil
}

// Fail marks the upstream as down because a call failed with err, and probes it until it is up.
func (h *Check) Fail(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ctx.Err() == nil {
		h.setDown(err)
		h.startLocked(probePause)
	}
}

// Doubt probes the upstream for a call that has waited too long, unless the upstream is known to be down. It returns
// Err or the error of ctx. Concurrent calls share a probe.
func (h *Check) Doubt(ctx context.Context) error {
	h.mu.Lock()
	down := h.err != nil
	if !down {
		h.startLocked(0)
	}
	settled := h.settled
	h.mu.Unlock()
	if !down {
		select {
		case <-settled:
		case <-ctx.Done():
			return ctx.Err()
		case <-h.ctx.Done():
		}
	}
	return h.Err()
}

// Await waits until the upstream is up, at most for limit, and then returns Err.
func (h *Check) Await(ctx context.Context, limit time.Duration) error {
	h.mu.Lock()
	down, recovered := h.err != nil, h.recovered
	h.mu.Unlock()
	if down {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		select {
		case <-recovered:
		case <-timer.C:
		case <-ctx.Done():
			return ctx.Err()
		case <-h.ctx.Done():
		}
	}
	return h.Err()
}

// Close stops probing and waits for it. Calls that wait for the first probe fail.
func (h *Check) Close() {
	h.mu.Lock()
	h.cancel()
	h.mu.Unlock()
	h.background.Wait()
}

// Err returns nil if the upstream was up at the last call or probe. Otherwise it returns the error with which every
// call fails, including the time and the reason: cas.ErrDenied if the upstream refuses our credentials, else
// cas.ErrUnavailable, and also ErrNoBucket if that is the reason.
func (h *Check) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.err == nil {
		return nil
	}
	since := h.since.UTC().Format(time.RFC3339)
	if errors.Is(h.err, cas.ErrDenied) {
		return fmt.Errorf("%w (since %s)", h.err, since)
	}
	if errors.Is(h.err, ErrNoBucket) {
		return fmt.Errorf("%s: %w since %s: %w", h.config.Name, cas.ErrUnavailable, since, ErrNoBucket)
	}
	return fmt.Errorf("%s: %w since %s: %v", h.config.Name, cas.ErrUnavailable, since, h.err)
}

// Probed returns a channel that is closed after the first probe, whether it succeeded or not.
func (h *Check) Probed() <-chan struct{} { return h.probed }

// Ready waits for the first probe, and then returns Err.
func (h *Check) Ready(ctx context.Context) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	select {
	case <-h.probed:
		return h.Err()
	default:
	}
	select {
	case <-h.probed:
		return h.Err()
	case <-ctx.Done():
		return ctx.Err()
	case <-h.ctx.Done():
		return fmt.Errorf("%s: %w: the connection is closed", h.config.Name, cas.ErrUnavailable)
	}
}

// Observe records the result of a call that has waited for the upstream since start. After a failure it starts a probe.
// A call whose caller gave up within ten seconds says nothing about the upstream.
func (h *Check) Observe(ctx context.Context, start time.Time, err error) {
	gaveUp := err != nil && ctx.Err() != nil
	if gaveUp && time.Since(start) < minWait {
		return
	}
	var failure error
	if err != nil {
		failure = h.config.Failure(err)
	}
	if failure == nil && gaveUp {
		failure = ctx.Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		h.success = time.Now()
	}
	if failure == nil {
		h.failures = 0
		return
	}
	if h.failures++; !h.up || h.ctx.Err() != nil {
		return
	}
	var pause time.Duration
	if h.failures >= maxFailures {
		h.setDown(fmt.Errorf("%d consecutive calls failed: %w", h.failures, failure))
		pause = probePause
	}
	h.startLocked(pause)
}
