// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// executor is an Executor whose actions run until the test releases them.
type executor struct {
	fetched bool // actions pass the Fetch stage at once

	mu      sync.Mutex
	begun   []*worker.Task
	ends    map[cas.Digest]chan struct{}
	killed  int
	running int
}

func (e *executor) Execute(
	ctx context.Context, t *worker.Task, report func(worker.Stage),
) (*worker.Outcome, error) {
	report(worker.StageFetch)
	if e.fetched {
		report(worker.StageConfine)
	}
	e.mu.Lock()
	e.begun = append(e.begun, t)
	n := len(e.begun)
	end := e.end(t.Action)
	e.running++
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		e.running--
		e.mu.Unlock()
	}()
	select {
	case <-end:
		// Results differ, so that tests recognise a shared one.
		return &worker.Outcome{Result: &repb.ActionResult{ExitCode: int32(n)}}, nil
	case <-ctx.Done():
		e.mu.Lock()
		e.killed++
		e.mu.Unlock()
		return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
	}
}

// end returns the channel that ends every run of d when closed.
func (e *executor) end(d cas.Digest) chan struct{} {
	if e.ends == nil {
		e.ends = make(map[cas.Digest]chan struct{})
	}
	if e.ends[d] == nil {
		e.ends[d] = make(chan struct{})
	}
	return e.ends[d]
}

// release ends every run of the named actions.
func (e *executor) release(names ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, name := range names {
		close(e.end(action(name)))
	}
}

// counts returns how many runs began, how many were cancelled, and how many are alive.
func (e *executor) counts() [3]int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return [3]int{len(e.begun), e.killed, e.running}
}

func action(name string) cas.Digest { return cas.SHA256.Sum([]byte(name)) }

// bubble runs f with a queue and a fake clock, and closes the queue.
func bubble(t *testing.T, c queue.Config, f func(t *testing.T, q *queue.Queue, e *executor)) {
	t.Helper()
	e := &executor{}
	if c.Executor == nil {
		c.Executor = e
	}
	synctest.Test(t, func(t *testing.T) {
		q := must.Get(queue.New(c))(t)
		defer q.Close()
		f(t, q, e)
	})
}

// TestNewWithoutExecutor checks that only a head has none.
func TestNewWithoutExecutor(t *testing.T) {
	if q, err := queue.New(queue.Config{}); err == nil || !strings.Contains(err.Error(), "Config.Executor") {
		t.Errorf("got %v, %v, want an error that names Config.Executor", q, err)
	}
}

// submit submits the action of that name; change may be nil.
func submit(t *testing.T, q *queue.Queue, name string, change func(*queue.Request)) *queue.Operation {
	t.Helper()
	r := queue.Request{Task: worker.Task{Action: action(name)}}
	if change != nil {
		change(&r)
	}
	o, err := q.Submit(r)
	must.Be(t, err == nil, "Submit(%s): %v", name, err)
	synctest.Wait()                    // let every action begin that can
	_, _, err = o.Wait(t.Context(), 0) // its client has come, and may return
	must.Succeed(t, err)
	return o
}

// state returns the present state of o.
func state(t *testing.T, o *queue.Operation) queue.State {
	t.Helper()
	s, _, err := o.Wait(t.Context(), 0)
	must.Be(t, err == nil, "Wait: %v", err)
	return s
}

func wantStage(t *testing.T, o *queue.Operation, want repb.ExecutionStage_Value) {
	t.Helper()
	synctest.Wait()
	expect.Equal(t, state(t, o).Stage, want, "stage")
}

func wantFault(t *testing.T, o *queue.Operation, want worker.FaultKind) *worker.Fault {
	t.Helper()
	synctest.Wait()
	s := state(t, o)
	must.Be(t, s.Stage == repb.ExecutionStage_COMPLETED && s.Fault != nil && s.Fault.Kind == want,
		"state is %+v, want COMPLETED with a fault of kind %d", s, want)
	return s.Fault
}

// wantRun checks that o ended with the result of the n-th run.
func wantRun(t *testing.T, o *queue.Operation, n int32) {
	t.Helper()
	synctest.Wait()
	s := state(t, o)
	must.Be(t, s.Stage == repb.ExecutionStage_COMPLETED && s.Fault == nil,
		"state is %+v, want COMPLETED without a fault", s)
	expect.Equal(t, s.Outcome.Result.ExitCode, n, "number of the run")
}

func wantCounts(t *testing.T, e *executor, begun, killed, running int) {
	t.Helper()
	synctest.Wait()
	expect.Equal(t, e.counts(), [3]int{begun, killed, running}, "runs begun, cancelled, alive")
}

// watch waits for the end of o in the background, as a client does, until leave is called.
func watch(t *testing.T, o *queue.Operation) (leave func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for v := 0; ; {
			s, next, err := o.Wait(ctx, v)
			if err != nil || s.Stage == repb.ExecutionStage_COMPLETED {
				return
			}
			v = next
		}
	})
	synctest.Wait()
	return func() { cancel(); wg.Wait() }
}

func skip(r *queue.Request)  { r.Task.SkipCacheLookup = true }
func alone(r *queue.Request) { r.Alone = true }

func priority(p int32) func(*queue.Request) {
	return func(r *queue.Request) { r.Priority = p }
}

func TestRule089_Stages(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		first := submit(t, q, "first", nil)
		wantStage(t, first, repb.ExecutionStage_EXECUTING)
		resolved := make(chan struct{})
		second := submit(t, q, "second", func(r *queue.Request) {
			r.Prepare = func(context.Context, *queue.Request) (*worker.Outcome, error) {
				<-resolved
				return nil, nil
			}
		})
		wantStage(t, second, repb.ExecutionStage_CACHE_CHECK)
		close(resolved)
		wantStage(t, second, repb.ExecutionStage_QUEUED)
		e.release("first", "second")
		wantRun(t, first, 1)
		wantRun(t, second, 2)
	})
}

// TestRule089_QueuedIsSkippedWhenASlotIsFree since the state would end before a client reads it.
func TestRule089_QueuedIsSkippedWhenASlotIsFree(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		o := submit(t, q, "x", nil)
		if s, v, err := o.Wait(t.Context(), 0); err != nil || v != queue.FirstVersion+1 || s.Stage != repb.ExecutionStage_EXECUTING {
			t.Errorf("Wait = %v, version %d, %v; want EXECUTING as the second", s.Stage, v, err)
		}
		e.release("x")
		wantRun(t, o, 1)
	})
}

func TestWaitReturnsAtEachChange(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "first", nil)
		o := submit(t, q, "second", nil)
		s, seen, err := o.Wait(t.Context(), 0)
		must.Be(t, err == nil && s.Stage == repb.ExecutionStage_QUEUED, "Wait = %v, %v; want QUEUED", s.Stage, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if s, v, err := o.Wait(ctx, seen); !errors.Is(err, context.DeadlineExceeded) || v != seen ||
			s.Stage != repb.ExecutionStage_QUEUED {
			t.Errorf("Wait = %v, %d, %v; want the state seen and the error of the context", s.Stage, v, err)
		}
		e.release("first")
		if s, seen, err = o.Wait(t.Context(), seen); err != nil || s.Stage != repb.ExecutionStage_EXECUTING {
			t.Errorf("Wait = %v, %v; want EXECUTING", s.Stage, err)
		}
		e.release("second")
		if s, seen, err = o.Wait(t.Context(), seen); err != nil || s.Stage != repb.ExecutionStage_COMPLETED {
			t.Errorf("Wait = %v, %v; want COMPLETED", s.Stage, err)
		}
		if s, _, err = o.Wait(t.Context(), seen); err != nil || s.Stage != repb.ExecutionStage_COMPLETED {
			t.Errorf("Wait after the end = %v, %v; want COMPLETED at once", s.Stage, err)
		}
	})
}

func TestRule087_LowerPriorityValueRunsSooner(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", nil)
		for _, a := range []struct {
			name     string
			priority int32
		}{
			{"default, first", 0},
			{"least", 1 << 30},
			{"urgent, first", -7},
			{"default, second", 0},
			{"most", -1 << 31},
			{"urgent, second", -7},
			{"default, third", 0},
		} {
			submit(t, q, a.name, priority(a.priority))
		}
		want := []string{
			"holds the slot", "most", "urgent, first", "urgent, second",
			"default, first", "default, second", "default, third", "least",
		}
		e.release(want...)
		synctest.Wait()
		var got []string
		for _, task := range e.begun {
			i := slices.IndexFunc(want, func(name string) bool { return action(name) == task.Action })
			got = append(got, want[i])
		}
		expect.That(t, slices.Equal(got, want), "actions ran in the order\n%q, want\n%q", got, want)
	})
}

func TestRule095_EqualActionsShareOneRun(t *testing.T) {
	bubble(t, queue.Config{Slots: 2}, func(t *testing.T, q *queue.Queue, e *executor) {
		a := submit(t, q, "x", nil)
		b := submit(t, q, "x", nil)
		expect.That(t, a.Name() != b.Name(), "two requests have the same operation name")
		wantStage(t, b, repb.ExecutionStage_EXECUTING)
		elsewhere := submit(t, q, "x", func(r *queue.Request) { r.Task.Instance = "other" })
		wantCounts(t, e, 2, 0, 2)
		e.release("x")
		wantRun(t, a, 1)
		wantRun(t, b, 1)
		wantRun(t, elsewhere, 2)
		later := submit(t, q, "x", nil)
		wantRun(t, later, 3)
	})
}

func TestRule095_QueuedEqualActionsShareOneRun(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", nil)
		a := submit(t, q, "x", nil)
		b := submit(t, q, "x", nil)
		wantStage(t, b, repb.ExecutionStage_QUEUED)
		if got := q.Stats(); got.Queued != 1 || got.Running != 1 {
			t.Errorf("Stats = %+v, want 1 queued and 1 running", got)
		}
		e.release("holds the slot", "x")
		wantRun(t, a, 2)
		wantRun(t, b, 2)
		wantCounts(t, e, 2, 0, 0)
	})
}

func TestRule095_UrgentRequestRaisesQueuedRun(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", nil)
		submit(t, q, "y", nil)
		submit(t, q, "x", priority(5))
		submit(t, q, "x", priority(-5))
		submit(t, q, "x", priority(9))
		e.release("holds the slot")
		wantCounts(t, e, 2, 0, 1)
		expect.That(t, e.begun[1].Action == action("x"), "the raised run did not run first")
	})
}

func TestRule096_DoNotCacheIsNotShared(t *testing.T) {
	bubble(t, queue.Config{Slots: 9}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "x", alone)
		submit(t, q, "x", alone)
		submit(t, q, "x", nil)
		wantCounts(t, e, 3, 0, 3)
		submit(t, q, "x", func(r *queue.Request) {
			r.Prepare = func(_ context.Context, r *queue.Request) (*worker.Outcome, error) {
				r.Alone = true
				return nil, nil
			}
		})
		wantCounts(t, e, 4, 0, 4)
		submit(t, q, "x", nil)
		wantCounts(t, e, 4, 0, 4)
	})
}

func TestRunsWithDifferentTermsAreNotShared(t *testing.T) {
	bubble(t, queue.Config{Slots: 9}, func(t *testing.T, q *queue.Queue, e *executor) {
		on := func(terms string) func(*queue.Request) {
			return func(r *queue.Request) {
				r.Prepare = func(_ context.Context, r *queue.Request) (*worker.Outcome, error) {
					r.Terms = terms
					return nil, nil
				}
			}
		}
		submit(t, q, "x", on("build"))
		submit(t, q, "x", on("test"))
		wantCounts(t, e, 2, 0, 2)
		submit(t, q, "x", on("test"))
		wantCounts(t, e, 2, 0, 2)
	})
}

func TestRule094_SkipCacheLookupSharesOnlyNewResults(t *testing.T) {
	for _, c := range []struct {
		name    string
		fetched bool
		first   func(*queue.Request)
		begun   int
	}{
		{"first may be served from the cache", false, nil, 2},
		{"first has begun to run", true, nil, 1},
		{"first skips the cache too", false, skip, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, queue.Config{Slots: 3}, func(t *testing.T, q *queue.Queue, e *executor) {
				e.fetched = c.fetched
				submit(t, q, "x", c.first)
				second := submit(t, q, "x", skip)
				wantCounts(t, e, c.begun, 0, c.begun)
				third := submit(t, q, "x", nil)
				wantCounts(t, e, c.begun, 0, c.begun)
				e.release("x")
				wantRun(t, second, int32(c.begun))
				wantRun(t, third, int32(c.begun))
			})
		})
	}
	t.Run("first runs again", func(t *testing.T) {
		bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
			e.fetched = true
			submit(t, q, "x", nil).Follow()(false)
			second := submit(t, q, "x", skip)
			second.Follow()(false)
			time.Sleep(10 * time.Second)
			defer submit(t, q, "y", nil).Follow()(false)
			wantCounts(t, e, 2, 1, 1) // x has yielded
			defer second.Follow()(false)
			e.release("y")
			wantCounts(t, e, 3, 1, 1)
			expect.That(t, e.begun[2].SkipCacheLookup,
				"the second run may use the cache although one of its clients skips the lookup")
		})
	})
	t.Run("first is queued", func(t *testing.T) {
		bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
			submit(t, q, "holds the slot", nil)
			submit(t, q, "x", nil)
			submit(t, q, "x", skip)
			submit(t, q, "x", nil)
			e.release("holds the slot")
			wantCounts(t, e, 2, 0, 1)
			expect.That(t, e.begun[1].SkipCacheLookup,
				"the shared run may use the cache although one of its clients skips the lookup")
		})
	})
}

// TestRule093_OperationWaitsForItsFirstClient: on an overloaded machine the call that submits an action may take longer
// than Config.Grace until it follows.
func TestRule093_OperationWaitsForItsFirstClient(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Grace: time.Minute}, func(t *testing.T, q *queue.Queue, _ *executor) {
		o := must.Get(q.Submit(queue.Request{Task: worker.Task{Action: action("x")}}))(t)
		time.Sleep(time.Hour)
		wantStage(t, o, repb.ExecutionStage_EXECUTING)
		o.Follow()(false)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		wantFault(t, o, worker.FaultCancelled)
	})
}

func TestRule093_AbandonedOperationIsCancelledAfterGrace(t *testing.T) {
	c := queue.Config{Slots: 1, Grace: 8 * time.Minute, Retain: time.Hour}
	for _, stage := range []repb.ExecutionStage_Value{
		repb.ExecutionStage_CACHE_CHECK, repb.ExecutionStage_QUEUED, repb.ExecutionStage_EXECUTING,
	} {
		t.Run(stage.String(), func(t *testing.T) {
			bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
				var prepared error
				if stage == repb.ExecutionStage_QUEUED {
					defer watch(t, submit(t, q, "holds the slot", nil))()
				}
				o := submit(t, q, "x", func(r *queue.Request) {
					if stage == repb.ExecutionStage_CACHE_CHECK {
						r.Prepare = func(ctx context.Context, _ *queue.Request) (*worker.Outcome, error) {
							<-ctx.Done()
							prepared = ctx.Err()
							return nil, prepared
						}
					}
				})
				leave := watch(t, o)
				time.Sleep(time.Hour)
				wantStage(t, o, stage) // no limit while a client waits
				leave()
				time.Sleep(7 * time.Minute)
				wantStage(t, o, stage) // the client returns in time
				time.Sleep(7 * time.Minute)
				wantStage(t, o, stage)
				time.Sleep(11 * time.Minute)
				synctest.Wait()
				switch stage {
				case repb.ExecutionStage_CACHE_CHECK:
					expect.That(t, prepared != nil, "Prepare was not cancelled")
					wantCounts(t, e, 0, 0, 0)
				case repb.ExecutionStage_QUEUED:
					expect.Equal(t, q.Stats().Queued, 0, "Queued")
					wantCounts(t, e, 1, 0, 1)
				case repb.ExecutionStage_EXECUTING:
					wantCounts(t, e, 1, 1, 0)
				}
				wantFault(t, o, worker.FaultCancelled)
			})
		})
	}
}

// An operation whose clients cancel their calls ends in seconds; one whose client is lost lives for a minute.
func TestOperationEndsSoonAfterItsClientsCancelled(t *testing.T) {
	const cancelled, lost = true, false
	for _, test := range []struct {
		name   string
		queued bool
		leave  []bool        // how the clients leave, in order
		alive  time.Duration // for which it certainly lives
		dead   time.Duration // after which it has certainly ended
	}{
		{name: "running", leave: []bool{cancelled}, alive: 4 * time.Second, dead: 6 * time.Second},
		{name: "queued", queued: true, leave: []bool{cancelled}, alive: 4 * time.Second, dead: 6 * time.Second},
		{name: "a lost connection", leave: []bool{lost}, alive: time.Minute, dead: 2 * time.Minute},
		{name: "a lost connection, queued", queued: true, leave: []bool{lost}, alive: time.Minute, dead: 2 * time.Minute},
		{name: "two clients", leave: []bool{cancelled, cancelled}, alive: 4 * time.Second, dead: 6 * time.Second},
		{name: "one of two may return", leave: []bool{lost, cancelled}, alive: time.Minute, dead: 2 * time.Minute},
		{name: "the other of two may return", leave: []bool{cancelled, lost}, alive: time.Minute, dead: 2 * time.Minute},
	} {
		t.Run(test.name, func(t *testing.T) {
			bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, _ *executor) {
				if test.queued {
					defer watch(t, submit(t, q, "holds the slot", nil))()
				}
				o := submit(t, q, "x", nil)
				var clients []func(bool)
				for range test.leave {
					clients = append(clients, o.Follow())
				}
				time.Sleep(10 * time.Minute) // no limit while a client follows
				for i, how := range test.leave {
					clients[i](how)
				}
				time.Sleep(test.alive)
				// Not wantStage, which waits as a client does.
				expect.That(t, o.State().Stage != repb.ExecutionStage_COMPLETED, "after %v it has ended", test.alive)
				time.Sleep(test.dead - test.alive)
				synctest.Wait()
				wantFault(t, o, worker.FaultCancelled)
			})
		})
	}
}

// Another client that follows and cancels does not end the wait for the one whose connection broke.
func TestObserverDoesNotCancel(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, _ *executor) {
		o := submit(t, q, "x", nil)
		o.Follow()(false)
		observer := o.Follow()
		time.Sleep(3 * time.Second)
		observer(true)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		expect.Equal(t, o.State().Stage, repb.ExecutionStage_EXECUTING, "stage 20 s after an observer left")
	})
}

// A client that returns in time keeps the operation, and a new one that waits for a slot lives until its client comes.
func TestClientThatReturnsKeepsTheOperation(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, _ *executor) {
		o := submit(t, q, "x", nil)
		time.Sleep(50 * time.Second)
		o.Follow()(true)
		time.Sleep(4 * time.Second)
		leave := o.Follow()
		time.Sleep(time.Hour)
		wantStage(t, o, repb.ExecutionStage_EXECUTING)
		leave(true)
		time.Sleep(4 * time.Second)
		defer watch(t, o)() // Wait counts, too
		time.Sleep(time.Hour)
		wantStage(t, o, repb.ExecutionStage_EXECUTING)
	})
}

// An operation that gets a slot after its clients cancelled has the grace of a running one.
func TestQueuedOperationMayBeginAfterItsClientsCancelled(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		defer watch(t, submit(t, q, "holds the slot", nil))()
		o := submit(t, q, "x", nil)
		o.Follow()(true)
		time.Sleep(500 * time.Millisecond)
		e.release("holds the slot")
		time.Sleep(4 * time.Second)
		expect.Equal(t, o.State().Stage, repb.ExecutionStage_EXECUTING, "stage")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		wantFault(t, o, worker.FaultCancelled)
	})
}

func TestCancelledRunIsNotShared(t *testing.T) {
	var began int
	c := queue.Config{Slots: 2, Executor: function(func(ctx context.Context) (*worker.Outcome, error) {
		began++
		if began == 1 {
			<-ctx.Done()
			time.Sleep(time.Hour) // its processes die slowly
			return nil, ctx.Err()
		}
		return &worker.Outcome{}, nil
	})}
	bubble(t, c, func(t *testing.T, q *queue.Queue, _ *executor) {
		first := submit(t, q, "x", nil)
		time.Sleep(2 * time.Minute)
		wantFault(t, first, worker.FaultCancelled)
		second := submit(t, q, "x", nil)
		if s := state(t, second); s.Outcome == nil {
			t.Errorf("state is %+v, want the outcome of a second run", s)
		}
	})
}

func TestRule092_FinishedOperationAnswersUntilRetainEnds(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		o := submit(t, q, "x", nil)
		e.release("x")
		wantRun(t, o, 1)
		time.Sleep(5 * time.Minute)
		found, ok := q.Operation(o.Name())
		must.Be(t, ok && found == o, "the operation is unknown within five minutes")
		wantRun(t, found, 1)
		time.Sleep(5 * time.Minute)
		if _, ok := q.Operation(o.Name()); ok {
			t.Error("the operation is kept after ten minutes")
		}
		wantRun(t, o, 1) // the handle still works
	})
}

func TestFinishedOperationsAreBounded(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, MaxRetained: 2}, func(t *testing.T, q *queue.Queue, e *executor) {
		e.release("a", "b", "c")
		ops := []*queue.Operation{submit(t, q, "a", nil), submit(t, q, "b", nil), submit(t, q, "c", nil)}
		wantKnown(t, q, ops, false, true, true)
	})
}

// answer makes Prepare complete a request.
func answer(out *worker.Outcome, err error) func(*queue.Request) {
	return func(r *queue.Request) {
		r.Prepare = func(context.Context, *queue.Request) (*worker.Outcome, error) { return out, err }
	}
}

// wantKnown checks which of ops the queue still knows.
func wantKnown(t *testing.T, q *queue.Queue, ops []*queue.Operation, want ...bool) {
	t.Helper()
	var got []bool
	for _, o := range ops {
		_, ok := q.Operation(o.Name())
		got = append(got, ok)
	}
	expect.That(t, slices.Equal(got, want), "operations kept: %v, want %v", got, want)
}

func TestFinishedOperationsAreBoundedByBytes(t *testing.T) {
	const size = 300 << 10
	text := strings.Repeat("x", size)
	for _, c := range []struct {
		name string
		out  *worker.Outcome
		err  error
	}{
		{"result", &worker.Outcome{Result: &repb.ActionResult{StdoutRaw: []byte(text)}}, nil},
		{"message", &worker.Outcome{Message: text}, nil},
		{"error", nil, errors.New(text)},
		{"blobs", nil, &worker.Fault{
			Kind: worker.FaultMissing, Err: errors.New("absent"), Blobs: make([]cas.Digest, size/100),
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Two exceed the limit by any estimate.
			bubble(t, queue.Config{MaxRetainedBytes: size * 3 / 2}, func(t *testing.T, q *queue.Queue, _ *executor) {
				small := submit(t, q, "small", answer(&worker.Outcome{}, nil))
				first := submit(t, q, "first", answer(c.out, c.err))
				second := submit(t, q, "second", answer(c.out, c.err))
				wantKnown(t, q, []*queue.Operation{small, first, second}, false, false, true)
				// Expired operations make room.
				time.Sleep(10 * time.Minute)
				wantKnown(t, q, []*queue.Operation{second}, false)
				small = submit(t, q, "small", answer(&worker.Outcome{}, nil))
				if c.name != "result" { // its estimate alone exceeds the limit
					first = submit(t, q, "first", answer(c.out, c.err))
					wantKnown(t, q, []*queue.Operation{small, first}, true, true)
				}
			})
		})
	}
}

func TestSharedResultIsCountedOnce(t *testing.T) {
	big := &worker.Outcome{Result: &repb.ActionResult{StdoutRaw: make([]byte, 300<<10)}}
	c := queue.Config{Slots: 1, MaxRetainedBytes: 2 << 20, Executor: function(
		func(context.Context) (*worker.Outcome, error) {
			time.Sleep(time.Second)
			return big, nil
		})}
	bubble(t, c, func(t *testing.T, q *queue.Queue, _ *executor) {
		var ops []*queue.Operation
		var want []bool
		for range 100 {
			ops = append(ops, submit(t, q, "x", nil))
			want = append(want, true)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		wantKnown(t, q, ops, want...)
	})
}

func TestRule092_ResultsOutliveAnswersWithoutARun(t *testing.T) {
	missing := &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("absent"), Blobs: make([]cas.Digest, 1000)}
	for _, c := range []struct {
		name string
		out  *worker.Outcome
		err  error
	}{
		{"hits", &worker.Outcome{Cached: true}, nil},
		{"refusals", nil, missing},
	} {
		for _, limit := range []queue.Config{{MaxRetained: 4}, {MaxRetainedBytes: 500 << 10}} {
			t.Run(fmt.Sprintf("%s, at most %d", c.name, limit.MaxRetained), func(t *testing.T) {
				limit.Slots = 1
				bubble(t, limit, func(t *testing.T, q *queue.Queue, e *executor) {
					e.fetched = true
					e.release("a", "b")
					ops := []*queue.Operation{
						submit(t, q, "first answer", answer(c.out, c.err)), submit(t, q, "a", nil), submit(t, q, "b", nil),
					}
					for range 1000 {
						ops = append(ops[:3], submit(t, q, "answer", answer(c.out, c.err)))
					}
					wantKnown(t, q, ops, false, true, true, true)
				})
			})
		}
	}
	t.Run("hits in a slot", func(t *testing.T) {
		c := queue.Config{MaxRetained: 1, Executor: function(func(context.Context) (*worker.Outcome, error) {
			return &worker.Outcome{Cached: true}, nil
		})}
		bubble(t, c, func(t *testing.T, q *queue.Queue, _ *executor) {
			first, second := submit(t, q, "x", nil), submit(t, q, "y", nil)
			wantKnown(t, q, []*queue.Operation{first, second}, false, true)
		})
	})
}

func TestRule092_NewestResultIsKeptHoweverLarge(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, MaxRetainedBytes: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		e.fetched = true
		e.release("a", "b")
		ops := []*queue.Operation{
			submit(t, q, "a", nil), submit(t, q, "b", nil),
			submit(t, q, "hit", answer(&worker.Outcome{Cached: true}, nil)),
		}
		wantKnown(t, q, ops, false, true, false)
	})
}

// list is an error that references blobs.
type list struct{ blobs []cas.Digest }

func (l *list) Error() string { return "absent" }

func TestLongListOfBlobsIsTruncated(t *testing.T) {
	bubble(t, queue.Config{}, func(t *testing.T, q *queue.Queue, e *executor) {
		all := &list{make([]cas.Digest, queue.MaxBlobs+1)}
		given := &worker.Fault{Kind: worker.FaultMissing, Err: all, Blobs: all.blobs}
		f := wantFault(t, submit(t, q, "x", answer(nil, given)), worker.FaultMissing)
		if len(f.Blobs) != queue.MaxBlobs || cap(f.Blobs) > queue.MaxBlobs+queue.MaxBlobs/4 || &f.Blobs[0] == &all.blobs[0] {
			t.Errorf("%d blobs are kept, want a copy of the first %d", len(f.Blobs), queue.MaxBlobs)
		}
		if _, ok := errors.AsType[*list](f); ok {
			t.Error("the error keeps the whole list")
		}
		expect.Text(t, f.Error(), fmt.Sprintf("%d blobs are absent", len(all.blobs)), "fault")
		expect.That(t, len(given.Blobs) == len(all.blobs), "the fault passed in was modified")
	})
}

func TestNamesDiffer(t *testing.T) {
	bubble(t, queue.Config{}, func(t *testing.T, q *queue.Queue, e *executor) {
		names := make(map[string]bool)
		for range 100 {
			o := submit(t, q, "x", nil)
			if id, ok := strings.CutPrefix(o.Name(), "operations/"); !ok || len(id) != 32 {
				t.Fatalf("name is %q, want 128 bits in hexadecimal", o.Name())
			}
			names[o.Name()] = true
		}
		expect.That(t, len(names) == 100, "100 operations have %d names", len(names))
		if _, ok := q.Operation("no such"); ok {
			t.Error("an unknown name is known")
		}
	})
}

// TestNameBeginsWithTheInstance unchanged, since access rights depend on it.
func TestNameBeginsWithTheInstance(t *testing.T) {
	for _, instance := range []string{"main", "team/a", "team/../secret", "./main", ".."} {
		bubble(t, queue.Config{}, func(t *testing.T, q *queue.Queue, e *executor) {
			o := submit(t, q, "x", func(r *queue.Request) { r.Task.Instance = instance })
			if got, ok := strings.CutPrefix(o.Name(), instance+"/operations/"); !ok || strings.Contains(got, "/") {
				t.Errorf("instance %q: name is %q, want INSTANCE/operations/ID", instance, o.Name())
			}
		})
	}
}

func TestRule086_FullQueueRefuses(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, MaxLive: 2}, func(t *testing.T, q *queue.Queue, e *executor) {
		a := submit(t, q, "a", nil)
		submit(t, q, "b", nil)
		_, err := q.Submit(queue.Request{Task: worker.Task{Action: action("c")}})
		f, ok := errors.AsType[*worker.Fault](err)
		must.Be(t, ok && f.Kind == worker.FaultExhausted,
			"Submit to a full queue = %v, want a fault of kind Exhausted", err)
		e.release("a")
		wantRun(t, a, 1)
		submit(t, q, "c", nil)
	})
}

func TestRule130_DrainLetsRunningFinish(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		running, queued := submit(t, q, "a", nil), submit(t, q, "b", nil)
		defer watch(t, running)()
		defer watch(t, queued)()
		drained := make(chan error, 1)
		go func() { drained <- q.Drain(t.Context()) }()
		synctest.Wait()
		_, err := q.Submit(queue.Request{Task: worker.Task{Action: action("c")}})
		if f, ok := errors.AsType[*worker.Fault](err); !ok || f.Kind != worker.FaultUnavailable {
			t.Errorf("Submit while draining = %v, want a fault of kind Unavailable", err)
		}
		time.Sleep(time.Hour)
		select {
		case err := <-drained:
			t.Fatalf("Drain = %v while actions were running", err)
		default:
		}
		e.release("a", "b")
		expect.Error(t, <-drained, nil, "Drain")
		wantRun(t, running, 1)
		wantRun(t, queued, 2)
		expect.Error(t, q.Drain(t.Context()), nil, "second Drain")
	})
}

func TestRule130_DrainCancelsTheRestWhenItsContextEnds(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Preparers: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		prepare := func(r *queue.Request) {
			r.Prepare = func(ctx context.Context, _ *queue.Request) (*worker.Outcome, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		}
		ops := []*queue.Operation{
			submit(t, q, "running", nil), submit(t, q, "running", nil), submit(t, q, "queued", nil),
			submit(t, q, "in preparation", prepare), submit(t, q, "arrived", prepare),
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		expect.Error(t, q.Drain(ctx), context.DeadlineExceeded, "Drain")
		for _, o := range ops {
			wantFault(t, o, worker.FaultUnavailable)
		}
		wantCounts(t, e, 1, 1, 0)
		expect.Equal(t, q.Stats(), (queue.Stats{Slots: 1, Working: 1, Done: 5, Failed: 5}), "Stats")
	})
}

func TestCloseCancelsRunningActions(t *testing.T) {
	e := &executor{}
	synctest.Test(t, func(t *testing.T) {
		q := must.Get(queue.New(queue.Config{Executor: e, Slots: 1}))(t)
		a, b := submit(t, q, "a", nil), submit(t, q, "b", nil)
		q.Close()
		// synctest fails if a goroutine is left.
		wantFault(t, a, worker.FaultUnavailable)
		wantFault(t, b, worker.FaultUnavailable)
		wantCounts(t, e, 1, 1, 0)
		expect.That(t, expect.Err(q.Submit(queue.Request{})) != nil, "a closed queue accepts requests")
		q.Close()
	})
}

func TestCloseRightAfterSubmit(t *testing.T) {
	// The slot may or may not have taken the job.
	for range 200 {
		bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
			o := must.Get(q.Submit(queue.Request{Task: worker.Task{Action: action("x")}}))(t)
			q.Close()
			wantFault(t, o, worker.FaultUnavailable)
		})
	}
}

// function is an Executor that ignores its task.
type function func(context.Context) (*worker.Outcome, error)

func (f function) Execute(ctx context.Context, _ *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
	return f(ctx)
}

func TestBrokenExecutorIsAnInternalFault(t *testing.T) {
	for _, c := range []struct {
		name string
		f    function
		want string
	}{
		{"panic", func(context.Context) (*worker.Outcome, error) { panic("defect") }, "panic: defect"},
		{"nothing", func(context.Context) (*worker.Outcome, error) { return nil, nil }, "neither"},
		{"bare error", func(context.Context) (*worker.Outcome, error) { return nil, errors.New("odd") }, "odd"},
		{"both", func(context.Context) (*worker.Outcome, error) {
			return &worker.Outcome{}, errors.New("odd")
		}, "odd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, queue.Config{Slots: 1, Executor: c.f}, func(t *testing.T, q *queue.Queue, _ *executor) {
				f := wantFault(t, submit(t, q, "x", nil), worker.FaultInternal)
				expect.That(t, strings.Contains(f.Error(), c.want), "fault is %q, want it to contain %q", f, c.want)
				if p, ok := errors.AsType[*queue.Panic](f); c.name == "panic" && (!ok || len(p.Stack) == 0) {
					t.Error("the fault has no stack of the panic")
				}
				// The slot survives.
				wantFault(t, submit(t, q, "y", nil), worker.FaultInternal)
			})
		})
	}
}

func TestPrepareAnswersWithoutASlot(t *testing.T) {
	known := &worker.Outcome{Cached: true, Result: &repb.ActionResult{ExitCode: 42}}
	missing := &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("absent"), Blobs: []cas.Digest{action("blob")}}
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", nil)
		hit := submit(t, q, "hit", answer(known, nil))
		if s := state(t, hit); s.Outcome != known {
			t.Errorf("state is %+v, want Prepare's outcome", s)
		}
		miss := submit(t, q, "miss", answer(nil, missing))
		if f := wantFault(t, miss, worker.FaultMissing); f != missing {
			t.Errorf("fault is %+v, want Prepare's", f)
		}
		broken := submit(t, q, "broken", func(r *queue.Request) {
			r.Prepare = func(context.Context, *queue.Request) (*worker.Outcome, error) { panic("defect") }
		})
		wantFault(t, broken, worker.FaultInternal)
		expect.Equal(t, q.Stats(), (queue.Stats{Running: 1, Slots: 1, Working: 1, Done: 3, Cached: 1, Failed: 2}), "Stats")
	})
}

func TestRule093_ActionAbandonedInPreparationDoesNotRun(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		o := submit(t, q, "x", func(r *queue.Request) {
			r.Prepare = func(context.Context, *queue.Request) (*worker.Outcome, error) {
				time.Sleep(time.Hour) // ignores its context
				return nil, nil
			}
		})
		time.Sleep(2 * time.Hour)
		wantFault(t, o, worker.FaultCancelled)
		wantCounts(t, e, 0, 0, 0)
	})
}

func TestPreparationIsBounded(t *testing.T) {
	bubble(t, queue.Config{Slots: 2}, func(t *testing.T, q *queue.Queue, e *executor) {
		var mu sync.Mutex
		var now, most, all int
		for i := range 20 {
			submit(t, q, fmt.Sprint(i), func(r *queue.Request) {
				r.Prepare = func(context.Context, *queue.Request) (*worker.Outcome, error) {
					mu.Lock()
					now++
					all++
					most = max(most, now)
					mu.Unlock()
					time.Sleep(time.Second)
					mu.Lock()
					now--
					mu.Unlock()
					return &worker.Outcome{}, nil
				}
			})
		}
		expect.Equal(t, q.Stats().Queued, 20, "Queued")
		time.Sleep(20 * time.Second)
		mu.Lock()
		defer mu.Unlock()
		expect.That(t, most == 4 && all == 20,
			"%d of %d requests were prepared concurrently, want 4 of 20", most, all)
	})
}

func TestTaskRecordsWhenItWasQueued(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		began := time.Now()
		submit(t, q, "holds the slot", nil)
		defer watch(t, submit(t, q, "x", nil))()
		time.Sleep(30 * time.Second)
		e.release("holds the slot")
		wantCounts(t, e, 2, 0, 1)
		if got := e.begun[1].Queued; !got.Equal(began) {
			t.Errorf("Queued is %v, want the time of Submit, %v", got, began)
		}
	})
}

// TestRule024_InputsOfAQueuedActionAreRenewed checks that each waiting action is renewed, one at a time, and no other.
func TestRule024_InputsOfAQueuedActionAreRenewed(t *testing.T) {
	var mu sync.Mutex
	var renewed []cas.Digest // guarded by mu
	working, most := 0, 0    // guarded by mu
	enter := func(n int) {
		mu.Lock()
		defer mu.Unlock()
		working += n
		most = max(most, working)
	}
	c := queue.Config{Slots: 1, Grace: 100 * time.Hour, Retain: 100 * time.Hour, RenewEvery: time.Hour}
	c.Renew = func(ctx context.Context, task *worker.Task) {
		enter(1)
		defer enter(-1)
		time.Sleep(time.Second)
		mu.Lock()
		defer mu.Unlock()
		renewed = append(renewed, task.Action)
	}
	bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "a", "b", "c"} {
			submit(t, q, name, nil)
		}
		submit(t, q, "a", nil) // shares the run
		want := func(names ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			var want []cas.Digest
			for _, name := range names {
				want = append(want, action(name))
			}
			expect.That(t, slices.Equal(renewed, want) && most <= 1,
				"renewed were %v, want %v; %d concurrently, want 1", renewed, want, most)
			renewed = nil
		}
		time.Sleep(time.Hour - time.Second)
		want()
		time.Sleep(time.Minute)
		want("a", "b", "c")
		e.release("running", "a") // b runs
		time.Sleep(time.Hour)
		want("c")
		e.release("b", "c")
		time.Sleep(time.Hour)
		want()
	})
}

// TestRenewalSkipsActionsThatNoLongerWait because they began or were abandoned meanwhile.
func TestRenewalSkipsActionsThatNoLongerWait(t *testing.T) {
	var mu sync.Mutex
	var renewed []cas.Digest // guarded by mu
	c := queue.Config{Slots: 1, Grace: 2 * time.Hour, RenewEvery: time.Hour}
	c.Renew = func(ctx context.Context, task *worker.Task) {
		mu.Lock()
		renewed = append(renewed, task.Action)
		mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(12 * time.Hour):
		}
	}
	bubble(t, c, func(t *testing.T, q *queue.Queue, e *executor) {
		defer watch(t, submit(t, q, "running", nil))()
		submit(t, q, "first", nil)
		submit(t, q, "abandoned", nil)
		defer watch(t, submit(t, q, "begins", nil))()
		defer watch(t, submit(t, q, "waits", nil))()
		time.Sleep(4 * time.Hour) // the first is being renewed
		e.release("running")
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		expect.Slices(t, renewed, []cas.Digest{action("first"), action("waits")}, "renewed")
		e.release("begins", "waits")
		// Close ends the current renewal.
	})
}
