// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// A stormExecutor ends at random, and counts how many run.
type stormExecutor struct{ running, most atomic.Int64 }

func (e *stormExecutor) Execute(ctx context.Context, t *worker.Task, told func(worker.Stage)) (*worker.Outcome, error) {
	n := e.running.Add(1)
	defer e.running.Add(-1)
	for m := e.most.Load(); n > m && !e.most.CompareAndSwap(m, n); m = e.most.Load() {
	}
	if rand.IntN(2) == 0 {
		told(worker.Fetch + 1)
	}
	switch rand.IntN(5) {
	case 0:
		return nil, errors.New("no")
	case 1:
		panic("storm")
	case 2:
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return &worker.Outcome{Result: &repb.ActionResult{}}, nil
}

// TestStorm has requests of all kinds come, merge, wait, leave, be cancelled, listed and forgotten at once. Whatever the
// order: each ends exactly once, no wake-up is lost, and no more than the slots are used.
func TestStorm(t *testing.T) {
	const slots = 3
	e := &stormExecutor{}
	q := queue.New(queue.Config{
		Executor: e, Slots: slots, Preparers: 2,
		Grace: 30 * time.Millisecond, Retain: 50 * time.Millisecond, MaxRetained: 50,
		Renew: func(context.Context, *worker.Task) {}, RenewEvery: time.Millisecond,
		Fetch: func(_ context.Context, _ *worker.Task, room func(int64) bool) { room(int64(rand.IntN(3000))) }, FetchBytes: 2000,
	})
	var ops sync.Map
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 300 {
				r := queue.Request{Priority: int32(rand.IntN(3)) - 1, Alone: rand.IntN(8) == 0}
				r.Task.Instance = fmt.Sprint("i", rand.IntN(2))
				r.Task.Invocation = fmt.Sprint(rand.IntN(4))
				r.Task.Action = cas.SHA256.Sum([]byte{byte(rand.IntN(12))})
				r.Task.SkipCacheLookup = rand.IntN(2) == 0
				if rand.IntN(4) == 0 {
					r.Prepare = func(ctx context.Context, r *queue.Request) (*worker.Outcome, error) {
						if rand.IntN(4) == 0 {
							return &worker.Outcome{Cached: true, Result: &repb.ActionResult{}}, nil
						}
						r.Alone = rand.IntN(6) == 0
						return nil, nil
					}
				}
				o, err := q.Submit(r)
				if err != nil {
					t.Error(err)
					return
				}
				ops.Store(o, true)
				if rand.IntN(3) == 0 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(2000))*time.Microsecond)
					_, _, _ = o.Wait(ctx, 0)
					cancel()
				}
				if rand.IntN(3) == 0 {
					o.Cancel("storm")
				}
				if rand.IntN(10) == 0 {
					q.Forget(o.Name())
				}
				if rand.IntN(10) == 0 {
					last := uint64(1 << 63)
					for some, next := q.Older(0, 7); len(some) > 0; some, next = q.Older(next, 7) {
						for _, o := range some {
							if o.Seq() >= last {
								t.Errorf("operation %d is listed after %d", o.Seq(), last)
							}
							last = o.Seq()
						}
					}
				}
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := q.Drain(ctx); err != nil {
		t.Errorf("something waits for ever: %v, %+v", err, q.Stats())
	}
	var ended int64
	ops.Range(func(k, _ any) bool {
		o := k.(*queue.Operation)
		if s := o.State(); s.Stage != repb.ExecutionStage_COMPLETED || (s.Outcome == nil) == (s.Fault == nil) {
			t.Errorf("an operation ended as %v", s)
		}
		ended++
		return true
	})
	if s := q.Stats(); s.Queued != 0 || s.Running != 0 || s.Done != ended {
		t.Errorf("in the end %+v, of %d operations", s, ended)
	}
	if n := e.most.Load(); n > slots {
		t.Errorf("%d ran at once in %d slots", n, slots)
	}
	q.Close()
}
