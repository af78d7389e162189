// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"sync"

	"github.com/cloister-build/cloister/cas/quota"
)

// A limiter limits concurrent work of one kind. A call first waits for the limit of its caller, so that other callers
// wait for at most that much of its work.
type limiter struct {
	all  chan struct{}
	each int // limit of one caller

	mu      sync.Mutex
	callers map[string]*callerLimiter // guarded by mu
}

// A callerLimiter limits the work of one caller.
type callerLimiter struct {
	running chan struct{}
	calls   int // that wait or run; guarded by limiter.mu
}

func newLimiter(all, each int) *limiter {
	return &limiter{all: make(chan struct{}, all), each: each, callers: map[string]*callerLimiter{}}
}

// acquire waits until the client of ctx may begin. Call release when the work is done.
func (l *limiter) acquire(ctx context.Context) (release func(), err error) {
	key := quota.Caller(ctx)
	l.mu.Lock()
	own := l.callers[key]
	if own == nil {
		own = &callerLimiter{running: make(chan struct{}, l.each)}
		l.callers[key] = own
	}
	own.calls++
	l.mu.Unlock()
	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if own.calls--; own.calls == 0 {
			delete(l.callers, key)
		}
	}
	select {
	case own.running <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
	select {
	case l.all <- struct{}{}:
	case <-ctx.Done():
		<-own.running
		leave()
		return nil, ctx.Err()
	}
	return func() {
		<-l.all
		<-own.running
		leave()
	}, nil
}
