// SPDX-License-Identifier: Apache-2.0

package overlay

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// The time for which a query with WriteBack waits for the upstream. A bucket answers for at least 2,000 blobs per
// second.
const (
	queryTime     = 2 * time.Second
	queryTimeEach = 2 * time.Millisecond // in addition, for each blob
)

var errSlow = fmt.Errorf("%w: the upstream has not answered in time", cas.ErrUnavailable)

// query calls f, which queries the upstream for n blobs or results. With WriteBack it stops waiting when the upstream
// takes too long, and returns errSlow. Until that call of f has ended, other queries of its size or above return
// errSlow at once, since they would probably be late, too. Smaller queries are still made, since a distant upstream may
// answer them in time: a client with a long query must not stop others. Sizes are bit lengths of n, so that only a few
// queries wait for an upstream that does not answer.
func query[T any](ctx context.Context, o *Overlay, n int, f func(context.Context) (T, error)) (T, error) {
	if o.config.Policy == WriteThrough {
		return f(ctx)
	}
	var none T
	c, detached, err := o.startCall(ctx, n)
	if err != nil {
		return none, err
	}
	var answer T
	go func() {
		answer, c.err = f(detached)
		c.end()
	}()
	timer := time.NewTimer(queryTime + time.Duration(n)*queryTimeEach)
	defer timer.Stop()
	select {
	case <-c.done:
		return answer, c.err
	case <-ctx.Done():
		c.cancel()
		return none, ctx.Err()
	case <-timer.C:
		c.setLate()
		return none, errSlow
	}
}

// queryMissing returns the blobs of ds that are absent from the upstream. None of ds is local. It queues the present
// ones for renewal in the background, so that slow renewals do not delay it: if the client gave up, the next query
// would begin them again. It renews those that do not fit into the queue before it returns, since they may expire
// before their next use. The query may outlive the call, so callers must not modify ds.
func (s *store) queryMissing(ctx context.Context, ds []cas.Digest) ([]cas.Digest, error) {
	a := s.absenter()
	if a == nil {
		return s.ask(ctx, s.upstream.Store.Missing, ds)
	}
	absent, err := s.ask(ctx, a.Absent, ds)
	if err != nil {
		return nil, err
	}
	unqueued := s.o.uses.add(blob, s.name, without(ds, setOf(absent))...)
	if len(unqueued) == 0 {
		return absent, nil
	}
	lost, err := s.ask(ctx, s.upstream.Store.Missing, unqueued)
	if s.renewalDenied(err) {
		return absent, nil // the others exist, and failed renewals are logged
	}
	if err != nil {
		return nil, err
	}
	s.notRenewed(lost)
	s.o.uses.renewed(blob, s.name, without(unqueued, setOf(lost))...)
	return slices.Concat(absent, lost), nil
}

// ask calls query with absent, which returns the absent blobs of ds.
func (s *store) ask(ctx context.Context, absent func(context.Context, []cas.Digest) ([]cas.Digest, error),
	ds []cas.Digest,
) ([]cas.Digest, error) {
	return query(ctx, s.o, len(ds), func(ctx context.Context) ([]cas.Digest, error) { return absent(ctx, ds) })
}

// absenter returns the upstream's Absent method if queries must not renew, otherwise nil.
func (s *store) absenter() absenter {
	if s.o.uses.interval <= 0 {
		return nil
	}
	a, _ := cas.As[absenter](s.upstream.Store)
	return a
}

// unanswered reports whether a query that failed with err is answered without the upstream, and counts it. This happens
// with WriteBack, if the upstream is unusable or refuses to renew a blob.
func (s *store) unanswered(err error) bool {
	if s.o.config.Policy != WriteBack || !s.renewalDenied(err) && !s.o.unusable(s.name, err) {
		return false
	}
	s.o.count(func(st *Stats) { st.Unanswered++ })
	return true
}

// renewalDenied reports whether the error of a query may mean that the upstream denies a renewal. An upstream without
// renewals denies the query itself, and probably uploads, too: if its blobs counted as missing, clients would fill the
// journal with them.
func (s *store) renewalDenied(err error) bool {
	_, ok := cas.As[cas.Renewer](s.upstream.Store)
	return ok && errors.Is(err, cas.ErrDenied)
}

// A call is a running call of the upstream, which may outlive its caller.
type call struct {
	o      *Overlay
	size   int // bits.Len of the number of blobs or results
	cancel func()
	done   chan struct{} // closed when err is set
	err    error

	ended, late bool // guarded by o.mu
}

// startCall starts a call for n blobs or results with its own context. The caller calls end. It fails with errSlow if a
// late call has the same size or a smaller one.
func (o *Overlay) startCall(ctx context.Context, n int) (*call, context.Context, error) {
	size := bits.Len(uint(n))
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return nil, nil, errClosed
	}
	for _, late := range o.late[:size+1] {
		if late > 0 {
			return nil, nil, errSlow
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(o.ctx, cancel)
	o.work.Add(1)
	c := &call{o: o, size: size, done: make(chan struct{}), cancel: func() { stop(); cancel() }}
	return c, ctx, nil
}

// end ends the call.
func (c *call) end() {
	c.o.mu.Lock()
	c.ended = true
	if c.late {
		c.o.late[c.size]--
	}
	c.o.mu.Unlock()
	c.cancel()
	close(c.done)
	c.o.work.Done()
}

// setLate records that nobody waits for the call any more.
func (c *call) setLate() {
	c.o.mu.Lock()
	defer c.o.mu.Unlock()
	if !c.ended {
		c.late = true
		c.o.late[c.size]++
	}
}
