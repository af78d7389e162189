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
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// A stormExecutor returns random results and counts concurrent runs.
type stormExecutor struct{ running, most atomic.Int64 }

func (e *stormExecutor) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	n := e.running.Add(1)
	defer e.running.Add(-1)
	for m := e.most.Load(); n > m && !e.most.CompareAndSwap(m, n); m = e.most.Load() {
	}
	if rand.IntN(2) == 0 {
		report(worker.StageFetch + 1)
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

// TestStorm submits, merges, waits for, cancels, lists and forgets operations concurrently. Each must end exactly once,
// no wake-up may be lost, and no more runs than slots may be active.
func TestStorm(t *testing.T) {
	const slots = 3
	e := &stormExecutor{}
	q, err := queue.New(queue.Config{
		Executor: e, Slots: slots, Preparers: 2,
		Grace: 30 * time.Millisecond, Retain: 50 * time.Millisecond, MaxRetained: 50,
		Renew: func(context.Context, *worker.Task) {}, RenewEvery: time.Millisecond,
		Fetch: func(_ context.Context, _ *worker.Task, reserve func(int64) bool) { reserve(int64(rand.IntN(3000))) }, FetchBytes: 2000,
	})
	must.Succeed(t, err)
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
	expect.Error(t, q.Drain(ctx), nil, "Drain, with %+v", q.Stats())
	var ended int64
	ops.Range(func(k, _ any) bool {
		o := k.(*queue.Operation)
		if s := o.State(); s.Stage != repb.ExecutionStage_COMPLETED || (s.Outcome == nil) == (s.Fault == nil) {
			t.Errorf("final state is %+v", s)
		}
		ended++
		return true
	})
	if s := q.Stats(); s.Queued != 0 || s.Running != 0 || s.Done != ended {
		t.Errorf("Stats = %+v after %d operations", s, ended)
	}
	if n := e.most.Load(); n > slots {
		t.Errorf("%d concurrent runs in %d slots", n, slots)
	}
	q.Close()
}

// TestStormOfSlots lets slots of other workers join, take, end, lose and leave at random and drains workers, while
// clients submit, merge and cancel requests for several platforms. Each operation must end exactly once, each action
// must run in a slot that matches, no slot may have two, and nothing may be left.
func TestStormOfSlots(t *testing.T) {
	e := &stormExecutor{}
	q, err := queue.New(queue.Config{
		Executor: e, Slots: 1, Offer: &queue.Offer{Worker: "own", Properties: properties("p=0")},
		Attempts: 1000, Grace: time.Minute, Retain: 50 * time.Millisecond, MaxRetained: 50,
		Fetch: func(_ context.Context, _ *worker.Task, reserve func(int64) bool) { reserve(int64(rand.IntN(3000))) }, FetchBytes: 2000,
	})
	must.Succeed(t, err)
	over, stop := context.WithCancel(t.Context())
	var workers, clients sync.WaitGroup
	var runs atomic.Int64
	for i := range 12 {
		name := fmt.Sprint("w", i%4)
		offer := queue.Offer{Worker: name, Slot: fmt.Sprint(i), Properties: properties("p=0 p=" + fmt.Sprint(i%4))}
		workers.Go(func() {
			for over.Err() == nil {
				s, err := q.Join(offer)
				if errors.Is(err, queue.ErrClosed) {
					return // the last action has ended
				}
				if err != nil {
					t.Errorf("Join: %v", err)
					return
				}
				for range rand.IntN(20) {
					wait, cancel := context.WithTimeout(over, time.Duration(rand.IntN(3000))*time.Microsecond)
					r, err := s.Take(wait)
					cancel()
					if err != nil {
						continue
					}
					runs.Add(1)
					task := r.Task()
					if p := task.Mnemonic; p != "p=0" && p != "p="+fmt.Sprint(i%4) {
						t.Errorf("slot %d got an action that demands %s", i, p)
					}
					if wait, cancel := context.WithTimeout(over, time.Millisecond); rand.IntN(20) == 0 {
						expect.Error(t, expect.Err(s.Take(wait)), queue.ErrBusy, "Take with a run")
						cancel()
					} else {
						cancel()
					}
					r.Report(worker.Stage(1 + rand.IntN(7)))
					if rand.IntN(4) == 0 {
						time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
					}
					switch rand.IntN(8) {
					case 0:
						r.Lost("storm")
						r.End(&worker.Outcome{}, nil)
					case 1:
						// End and Leave race, as when a worker that timed out answers.
						var both sync.WaitGroup
						both.Go(func() { r.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil) })
						both.Go(func() { s.Leave("storm") })
						both.Wait()
					case 2:
						s.Leave("storm")
					case 3:
						r.End(nil, errors.New("no"))
					default:
						r.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
					}
				}
				s.Leave("storm")
			}
		})
	}
	workers.Go(func() {
		for over.Err() == nil {
			name := []string{"", "own", "w0", "w1", "w2", "w3"}[rand.IntN(6)]
			q.DrainWorker(name, "storm")
			time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
			q.UndrainWorker(name)
			q.Workers()
			q.Demands()
			q.Stats()
		}
		q.UndrainWorker("")
	})
	var ops sync.Map
	for range 8 {
		clients.Go(func() {
			for range 300 {
				r := queue.Request{Priority: int32(rand.IntN(3)) - 1, Alone: rand.IntN(8) == 0}
				n := rand.IntN(24)
				r.Task.Invocation = fmt.Sprint(rand.IntN(4))
				r.Task.Action = cas.SHA256.Sum([]byte{byte(n)})
				r.Task.Mnemonic = "p=" + fmt.Sprint(n%4) // its demand, for the check
				r.Task.SkipCacheLookup = rand.IntN(2) == 0
				r.Demands = properties(r.Task.Mnemonic)
				o, err := q.Submit(r)
				if err != nil {
					t.Error(err)
					return
				}
				ops.Store(o, true)
				switch rand.IntN(6) {
				case 0:
					o.Cancel("storm")
				case 1, 2:
					for seen := 0; ; {
						s, v, err := o.Wait(t.Context(), seen)
						if err != nil || s.Stage == repb.ExecutionStage_COMPLETED {
							break
						}
						seen = v
					}
				}
			}
		})
	}
	clients.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	// Slots join and leave until the last action has ended.
	expect.Error(t, q.Drain(ctx), nil, "Drain, with %+v", q.Stats())
	stop()
	workers.Wait()
	var all int64
	ops.Range(func(k, _ any) bool {
		o := k.(*queue.Operation)
		if s := o.State(); s.Stage != repb.ExecutionStage_COMPLETED || (s.Outcome == nil) == (s.Fault == nil) {
			t.Errorf("final state is %+v", s)
		}
		all++
		return true
	})
	if s := q.Stats(); s.Queued != 0 || s.Running != 0 || s.Done != all || s.Again == 0 {
		t.Errorf("Stats = %+v after %d operations", s, all)
	}
	if n := e.most.Load(); n > 1 {
		t.Errorf("%d concurrent runs in one slot", n)
	}
	if p, l := queue.Flows(q), queue.Buckets(q); p != 0 || l != 0 {
		t.Errorf("%d flows and %d buckets are left, want 0", p, l)
	}
	t.Logf("%d remote runs, %d retried", runs.Load(), q.Stats().Again)
	q.Close()
}
