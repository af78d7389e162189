// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/internal/health"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

var (
	errSilent  = errors.New("no answer")
	errRefused = errors.New("refused")
)

// An upstream counts probes and answers them with err.
type upstream struct {
	check  *health.Check
	probes atomic.Int64
	during func() // called by a probe, if not nil

	mu  sync.Mutex
	err error // guarded by mu
}

// answer sets the result of further probes.
func (u *upstream) answer(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = err
}

// inBubble calls test with a Check that was not probed yet.
func inBubble(t *testing.T, test func(t *testing.T, u *upstream)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		u := &upstream{}
		silent := func(err error) error {
			if errors.Is(err, errSilent) {
				return err
			}
			return nil
		}
		u.check = health.New(health.Config{
			Name: "bucket",
			Probe: func(context.Context) error {
				if u.probes.Add(1); u.during != nil {
					u.during()
				}
				u.mu.Lock()
				defer u.mu.Unlock()
				return u.err
			},
			Down: silent, Failure: silent,
		})
		defer u.check.Close()
		test(t, u)
	})
}

func (u *upstream) wantDown(t *testing.T, reason string) {
	t.Helper()
	for _, err := range []error{u.check.Err(), u.check.Ready(t.Context())} {
		if !errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), reason) || !strings.Contains(err.Error(), "bucket: ") {
			t.Errorf("got %v, want ErrUnavailable of the bucket with %q", err, reason)
		}
	}
}

func TestFailuresInARowOpenTheBreaker(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		must.Succeed(t, u.check.Probe(t.Context()))
		observe := func(errs ...error) {
			for _, err := range errs {
				expect.Error(t, u.check.Err(), nil, "too early")
				u.check.Observe(t.Context(), time.Now(), err)
			}
		}
		observe(errSilent, errSilent, errSilent, errSilent, nil)
		observe(errSilent, errSilent, errSilent, errSilent, errRefused)
		for range 5 {
			observe(errSilent)
			synctest.Wait() // a probe succeeds
		}
		u.wantDown(t, "5 consecutive calls failed: no answer")
		u.answer(errSilent)
		u.probes.Store(0)
		time.Sleep(time.Minute)
		u.wantDown(t, "no answer")
		if n := u.probes.Load(); n < 20 || n > 40 {
			t.Errorf("got %d probes in a minute, want about 30", n)
		}
		u.answer(nil)
		time.Sleep(3 * time.Second)
		expect.Error(t, u.check.Ready(t.Context()), nil, "after recovery")
		probes := u.probes.Load()
		time.Sleep(time.Minute)
		expect.Equal(t, u.probes.Load()-probes, 0, "probes of an upstream that is up")
	})
}

// TestFailedCallIsFollowedByAProbe checks that one failed call suffices to find out that the upstream is down.
func TestFailedCallIsFollowedByAProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.check.Probe(t.Context())
		u.answer(errSilent)
		u.check.Observe(t.Context(), time.Now(), errRefused)
		synctest.Wait()
		expect.Equal(t, u.probes.Load(), 1, "probes after a call that was answered (only the first)")
		u.check.Observe(t.Context(), time.Now(), errSilent)
		synctest.Wait()
		u.wantDown(t, "no answer")
	})
}

// TestAwait checks that it returns as soon as the upstream is up, and after the limit otherwise.
func TestAwait(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.check.Probe(t.Context())
		await := func(limit, want time.Duration, wantErr error) {
			t.Helper()
			start := time.Now()
			if err := u.check.Await(t.Context(), limit); !errors.Is(err, wantErr) || time.Since(start) > want {
				t.Errorf("got %v after %v, want %v within %v", err, time.Since(start), wantErr, want)
			}
		}
		await(time.Minute, 0, nil)
		u.answer(errSilent)
		u.check.Probe(t.Context())
		await(5*time.Second, 5*time.Second, cas.ErrUnavailable)
		u.answer(nil)
		await(time.Minute, 3*time.Second, nil)
		u.answer(errSilent)
		u.check.Probe(t.Context())
		time.AfterFunc(time.Second, u.check.Close)
		await(time.Minute, time.Second, cas.ErrUnavailable)
	})
}

func TestProbeOpensTheBreaker(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.answer(errRefused) // it answers
		if err := u.check.Probe(t.Context()); !errors.Is(err, errRefused) || u.check.Err() != nil {
			t.Errorf("refused: got %v and %v, want errRefused and up", err, u.check.Err())
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		u.answer(errSilent)
		if err := u.check.Probe(ctx); !errors.Is(err, errSilent) || u.check.Err() != nil {
			t.Errorf("cancelled: got %v and %v, want errSilent and up", err, u.check.Err())
		}
		expect.Error(t, u.check.Probe(t.Context()), errSilent)
		u.wantDown(t, "no answer")
		u.answer(errRefused)
		time.Sleep(3 * time.Second)
		expect.Error(t, u.check.Err(), nil, "it answers")
	})
}

// TestDeadlineWithinAProbe checks that a caller with a short deadline does not open the breaker for others, and that a
// probe that has waited ten seconds for an answer does.
func TestDeadlineWithinAProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		must.Succeed(t, u.check.Probe(t.Context()))
		u.answer(context.DeadlineExceeded)
		probe := func(limit time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			u.during = func() { <-ctx.Done() }
			expect.Error(t, u.check.Probe(ctx), context.DeadlineExceeded)
		}
		probe(9 * time.Second)
		expect.Error(t, u.check.Err(), nil, "after nine seconds")
		u.during = nil
		synctest.Wait()
		expect.Equal(t, u.probes.Load(), 2, "probes")
		probe(10 * time.Second)
		u.wantDown(t, "deadline exceeded")
	})
}

// TestSuccessOutweighsAProbe checks that a failed probe is ignored if a call succeeded while it ran.
func TestSuccessOutweighsAProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.check.Probe(t.Context())
		u.answer(errSilent)
		u.during = func() {
			time.Sleep(time.Second)
			u.check.Observe(t.Context(), time.Now(), nil)
		}
		if err := u.check.Probe(t.Context()); !errors.Is(err, errSilent) || u.check.Err() != nil {
			t.Errorf("got %v and %v, want errSilent and up", err, u.check.Err())
		}
	})
}

// TestDoubtsShareAProbe checks that waiting calls learn from one probe whether the upstream is down.
func TestDoubtsShareAProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.during = func() { time.Sleep(time.Second) }
		must.Succeed(t, u.check.Probe(t.Context()))
		doubt := func(took time.Duration, want error) {
			t.Helper()
			start := time.Now()
			var group sync.WaitGroup
			for range 10 {
				group.Go(func() { expect.Error(t, u.check.Doubt(t.Context()), want) })
			}
			group.Wait()
			expect.Equal(t, time.Since(start), took)
		}
		doubt(time.Second, nil)
		u.answer(errSilent)
		doubt(time.Second, cas.ErrUnavailable)
		expect.Equal(t, u.probes.Load(), 3, "probes")
		doubt(0, cas.ErrUnavailable)
		u.answer(nil)
		time.Sleep(5 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		expect.Error(t, u.check.Doubt(ctx), context.DeadlineExceeded)
	})
}

// TestRefusedProbeIsDenied checks that calls fail at once with cas.ErrDenied while the upstream refuses the probe.
func TestRefusedProbeIsDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := &upstream{err: fmt.Errorf("%w: correct --token", cas.ErrDenied)}
		u.check = health.New(health.Config{Name: "server", Probe: func(context.Context) error {
			u.mu.Lock()
			defer u.mu.Unlock()
			return u.err
		}})
		defer u.check.Close()
		u.check.Start()
		for range 2 {
			err := u.check.Ready(t.Context())
			if !errors.Is(err, cas.ErrDenied) || errors.Is(err, cas.ErrUnavailable) || !strings.Contains(err.Error(), "correct --token (since 20") {
				t.Errorf("got %v, want ErrDenied with the advice and the time", err)
			}
		}
		u.answer(nil)
		time.Sleep(3 * time.Second)
		expect.Error(t, u.check.Ready(t.Context()), nil, "after it was corrected")
	})
}

func TestStartProbesAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		u.check.Probe(t.Context())
		u.answer(errSilent)
		for range 10 {
			u.check.Start()
		}
		synctest.Wait()
		u.wantDown(t, "no answer")
		expect.Equal(t, u.probes.Load(), 2, "probes")
	})
}

// TestReadyWaitsForTheFirstProbe checks that Close and the caller's context end the wait.
func TestReadyWaitsForTheFirstProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, u *upstream) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		expect.Error(t, u.check.Ready(ctx), context.DeadlineExceeded)
		done := make(chan error, 1)
		go func() { done <- u.check.Ready(t.Context()) }()
		synctest.Wait()
		u.check.Close()
		expect.Error(t, <-done, cas.ErrUnavailable, "closed")
	})
}
