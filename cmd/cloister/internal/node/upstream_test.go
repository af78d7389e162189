// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

// TestUpstreamStateFollowsTheBreaker checks that /ready, the metrics and the log do not wait for the next probe.
func TestUpstreamStateFollowsTheBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var state atomic.Pointer[error]
		var probes atomic.Int64
		u := &upstream{reason: errNotProbed, breaker: func() error {
			if err := state.Load(); err != nil {
				return *err
			}
			return nil
		}}
		u.check = func(context.Context) error { probes.Add(1); return u.breaker() }
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			u.watch(ctx, slog.New(slog.DiscardHandler))
		}()
		failure := errors.New("connection refused")
		for _, down := range []bool{false, true, false} {
			state.Store(nil)
			if down {
				state.Store(&failure)
			}
			time.Sleep(2 * time.Second)
			expect.Equal(t, u.Down() != "", down, "down")
		}
		probes.Store(0)
		time.Sleep(time.Minute)
		if n := probes.Load(); n < 5 || n > 7 {
			t.Errorf("got %d probes in a minute without changes, want 6", n)
		}
		cancel()
		<-done
	})
}
