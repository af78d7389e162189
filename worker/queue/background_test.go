// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// timed is an Executor whose actions take a second if their target is "slow", else no time.
type timed struct{ slow atomic.Int32 }

func (e *timed) Execute(ctx context.Context, t *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	if t.Target == "slow" {
		e.slow.Add(1)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
		}
	}
	return &worker.Outcome{Result: &repb.ActionResult{}}, nil
}

// A build of 60 actions fails and its client disconnects. The ten actions of the next build must not wait for them,
// although neither names its build, so that they share one place in the order. All times are those of a fake clock.
func TestAbandonedBuildDoesNotDelayTheNext(t *testing.T) {
	for _, arrival := range []string{"at once", "in sequence"} {
		t.Run(arrival, func(t *testing.T) {
			e := &timed{}
			bubble(t, queue.Config{Slots: 2, Executor: e}, func(t *testing.T, q *queue.Queue, _ *executor) {
				var old []*queue.Operation
				var leave []func(bool)
				for i := range 60 {
					o := submit(t, q, fmt.Sprint("old", i), func(r *queue.Request) { r.Task.Target = "slow" })
					old, leave = append(old, o), append(leave, o.Follow())
				}
				for _, l := range leave {
					l(false)
				}
				var next []func()
				began := time.Now()
				for i := range 10 {
					o := submit(t, q, fmt.Sprint("new", i), nil)
					end := o.Follow()
					wait := func() {
						s, seen, _ := o.Wait(t.Context(), 0)
						for s.Stage != repb.ExecutionStage_COMPLETED {
							s, seen, _ = o.Wait(t.Context(), seen)
						}
						end(false)
					}
					if arrival == "in sequence" {
						wait()
					} else {
						next = append(next, wait)
					}
				}
				for _, wait := range next {
					wait()
				}
				// Those that run when the next build begins may end. In sequence, others begin between its actions.
				most := map[string]time.Duration{"at once": time.Second, "in sequence": 6 * time.Second}[arrival]
				if took := time.Since(began); took > most {
					t.Errorf("%d abandoned actions ran first, for %v; want at most %v", e.slow.Load(), took, most)
				}
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				for _, o := range old {
					must.Be(t, o.State().Stage == repb.ExecutionStage_COMPLETED,
						"an abandoned action is neither executed nor dropped after the grace period")
				}
				expect.Equal(t, queue.Flows(q), 0, "flows are left")
			})
		})
	}
}

// An abandoned run keeps its slot for CancelGrace, and then until another action waits for the slot. Then it is queued
// again.
func TestAbandonedRunYieldsItsSlot(t *testing.T) {
	var ended []string
	c := queue.Config{Slots: 1}
	c.Ended = func(t *worker.Task, _ *worker.Outcome, f *worker.Fault) func(queue.Info, queue.State) {
		ended = append(ended, fmt.Sprint(t.Invocation, f != nil))
		return func(queue.Info, queue.State) {}
	}
	for _, early := range []bool{true, false} {
		ended = nil
		bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
			old := submit(t, q, "old", of("old"))
			leave := old.Follow()
			if !early {
				leave(false)
				time.Sleep(time.Minute - 10*time.Second)
				wantCounts(t, e, 1, 0, 1) // nothing else waits
			}
			defer submit(t, q, "next", of("next")).Follow()(false)
			if early {
				leave(false)
				time.Sleep(4 * time.Second)
				wantCounts(t, e, 1, 0, 1)
				time.Sleep(2 * time.Second)
			}
			wantCounts(t, e, 2, 1, 1)
			expect.Equal(t, old.State().Stage, repb.ExecutionStage_QUEUED, "stage of the abandoned action")
			defer old.Follow()(false)
			e.release("next", "old")
			wantRun(t, old, 3)
			expect.Equal(t, strings.Join(ended, " "), "nextfalse oldfalse", "ended")
		})
	}
}

// fill8 starts eight runs in slots of worker a. Each ends as soon as it is asked to yield. abandon makes their clients
// leave.
func fill8(t *testing.T, q *queue.Queue) (slots []*queue.Slot, runs []*queue.Run, abandon func()) {
	var leave []func(bool)
	for i := range 8 {
		leave = append(leave, submit(t, q, fmt.Sprint("old", i), nil).Follow())
		s := join(t, q, "a", fmt.Sprint(i), "")
		r := wantTake(t, s, fmt.Sprint("old", i))
		slots, runs = append(slots, s), append(runs, r)
		go func() {
			<-r.Cancelled()
			r.End(nil, &worker.Fault{Kind: worker.FaultCancelled, Err: context.Canceled})
		}()
	}
	return slots, runs, func() {
		for _, l := range leave {
			l(false)
		}
	}
}

// wantYielded checks that n of the runs have yielded, and returns their indices.
func wantYielded(t *testing.T, runs []*queue.Run, n int) (yielded []int) {
	t.Helper()
	synctest.Wait()
	for i, r := range runs {
		select {
		case <-r.Cancelled():
			yielded = append(yielded, i)
		default:
		}
	}
	must.Be(t, len(yielded) == n, "%d runs have yielded, want %d", len(yielded), n)
	return yielded
}

// Only as many abandoned runs yield as actions wait, however long the slots take to ask for the next action.
func TestFewestRunsYield(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		slots, runs, abandon := fill8(t, q)
		for i := range 2 {
			defer submit(t, q, fmt.Sprint("new", i), nil).Follow()(false)
		}
		abandon()
		time.Sleep(20 * time.Second)
		yielded := wantYielded(t, runs, 2)
		wantTake(t, slots[yielded[0]], "new0")
		slots[yielded[1]].Leave("stops") // another has to yield instead
		time.Sleep(20 * time.Second)
		wantYielded(t, runs, 3)
	})
}

// One run yields to an action, however many clients request it.
func TestOneRunYieldsToEqualActions(t *testing.T) {
	for _, before := range []int{0, 1, 3} {
		head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
			_, runs, abandon := fill8(t, q)
			for range before {
				defer submit(t, q, "x", nil).Follow()(false)
			}
			abandon()
			time.Sleep(20 * time.Second)
			for range 3 {
				leave := submit(t, q, "x", nil).Follow()
				defer leave(false)
			}
			time.Sleep(20 * time.Second)
			wantYielded(t, runs, 1)
		})
	}
}

// Only one run yields to an action whose client leaves and returns. One more yields after the action's run is lost.
func TestOneRunYieldsToAReturningClient(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		slots, runs, abandon := fill8(t, q)
		abandon()
		time.Sleep(20 * time.Second)
		x := submit(t, q, "x", nil)
		for range 3 {
			x.Follow()(false)
		}
		defer x.Follow()(false)
		yielded := wantYielded(t, runs, 1)
		wantTake(t, slots[yielded[0]], "x").Lost("crash")
		wantYielded(t, runs, 2)
	})
}

// A run yields to an action whose client returns after an abandoned action has taken the slot that had yielded to it.
func TestRunYieldsAgainToAReturningClient(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		old := submit(t, q, "old", nil)
		s := join(t, q, "a", "0", "")
		first := wantTake(t, s, "old")
		old.Follow()(false)
		time.Sleep(20 * time.Second)
		x := submit(t, q, "x", nil)
		<-first.Cancelled()
		first.End(nil, &worker.Fault{Kind: worker.FaultCancelled, Err: context.Canceled})
		x.Follow()(false)
		second := wantTake(t, s, "old")
		time.Sleep(20 * time.Second)
		defer x.Follow()(false)
		wantYielded(t, []*queue.Run{second}, 1)
	})
}

// An abandoned run of a drained worker yields only when the worker is undrained.
func TestUndrainedWorkersRunYields(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		_, runs, abandon := fill8(t, q)
		abandon()
		q.DrainWorker("a", "")
		time.Sleep(20 * time.Second)
		defer submit(t, q, "x", nil).Follow()(false)
		wantYielded(t, runs, 0)
		q.UndrainWorker("a")
		wantYielded(t, runs, 1)
	})
}

// A run yields although the last client to leave requested the action again, and left before its request shared the
// run.
func TestSharedAbandonedRunYields(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		submit(t, q, "x", nil).Follow()(false)
		r := wantTake(t, join(t, q, "a", "0", ""), "x")
		time.Sleep(10 * time.Second)
		again := queue.Request{Task: worker.Task{Action: action("x")}, Prepare: func(context.Context, *queue.Request) (*worker.Outcome, error) {
			time.Sleep(time.Second)
			return nil, nil
		}}
		must.Get(q.Submit(again))(t).Follow()(false)
		time.Sleep(10 * time.Second)
		defer submit(t, q, "next", nil).Follow()(false)
		select {
		case <-r.Cancelled():
		default:
			t.Error("the run keeps its slot")
		}
	})
}

// TestSharedRunYieldsWhenItsLastOperationWithAClientIsCancelled lets the client of one operation disconnect long before
// the other one is cancelled.
func TestSharedRunYieldsWhenItsLastOperationWithAClientIsCancelled(t *testing.T) {
	head(t, queue.Config{}, func(t *testing.T, q *queue.Queue) {
		first, second := submit(t, q, "x", nil), submit(t, q, "x", nil)
		defer second.Follow()(false)
		r := wantTake(t, join(t, q, "a", "0", ""), "x")
		first.Follow()(false)
		defer submit(t, q, "next", nil).Follow()(false)
		time.Sleep(20 * time.Second)
		second.Cancel("by an operator")
		synctest.Wait()
		select {
		case <-r.Cancelled():
		default:
			t.Error("the run keeps its slot")
		}
	})
}

// A run that another client waits for does not yield, nor does one whose slot no waiting action may take.
func TestWantedRunDoesNotYield(t *testing.T) {
	head(t, queue.Config{Attempts: 1}, func(t *testing.T, q *queue.Queue) {
		a, b := join(t, q, "a", "0", "on=a"), join(t, q, "b", "0", "on=b")
		first := submit(t, q, "x", demands("on=a"))
		defer submit(t, q, "x", demands("on=a")).Follow()(false)
		shared := wantTake(t, a, "x")
		first.Follow()(false)
		other := submit(t, q, "y", demands("on=b"))
		lone := wantTake(t, b, "y")
		other.Follow()(false)
		waits := submit(t, q, "z", demands("on=a"))
		defer waits.Follow()(false)
		time.Sleep(time.Hour)
		for _, r := range []*queue.Run{shared, lone} {
			select {
			case <-r.Cancelled():
				t.Errorf("the run of %v has yielded", r.Task().Action)
			default:
			}
		}
		// A run on another machine yields, too, and does not count as an attempt.
		defer submit(t, q, "w", demands("on=b")).Follow()(false)
		<-lone.Cancelled()
		lone.End(nil, &worker.Fault{Kind: worker.FaultCancelled, Err: context.Canceled})
		r := wantTake(t, b, "w")
		r.End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
		wantTake(t, b, "y").End(&worker.Outcome{Result: &repb.ActionResult{}}, nil)
		if s := other.State(); s.Outcome == nil {
			t.Errorf("the action that yielded ended as %+v, want an outcome", s)
		}
	})
}

// An action whose client returns regains its place in the queue.
func TestReturningClientRestoresTheTurn(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		defer submit(t, q, "holds the slot", of("first")).Follow()(false)
		var ops []*queue.Operation
		for _, name := range []string{"a", "b", "c"} {
			ops = append(ops, submit(t, q, name, of(name)))
			e.release(name)
		}
		ops[0].Follow()(false)
		ops[1].Follow()(false)
		defer ops[1].Follow()(false)
		e.release("holds the slot")
		synctest.Wait()
		expect.Equal(t, e.order(), "first c b a", "runs")
	})
}

// A full queue drops operations without clients.
func TestFullQueueDropsAbandonedOperations(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, MaxLive: 3}, func(t *testing.T, q *queue.Queue, _ *executor) {
		submit(t, q, "a", nil)
		b := submit(t, q, "b", nil)
		c := submit(t, q, "c", nil)
		b.Follow()(false)
		c.Follow()(false)
		submit(t, q, "d", nil)
		wantFault(t, b, worker.FaultCancelled)
		if s := c.State(); s.Stage == repb.ExecutionStage_COMPLETED {
			t.Errorf("more than the oldest was dropped: %+v", s)
		}
		submit(t, q, "e", nil)
		expect.That(t, expect.Err(q.Submit(queue.Request{Task: worker.Task{Action: action("f")}})) != nil,
			"the queue accepts more than 3 operations with clients")
	})
}
