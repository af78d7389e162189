// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// of sets the build of a request.
func of(invocation string) func(*queue.Request) {
	return func(r *queue.Request) { r.Task.Invocation = invocation }
}

// order returns the builds of the runs of e, in order.
func (e *executor) order() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	var names []string
	for _, t := range e.begun {
		names = append(names, t.Invocation)
	}
	return strings.Join(names, " ")
}

// fill submits n actions of each build, in order, each of which ends as soon as it runs.
func fill(t *testing.T, q *queue.Queue, e *executor, n int, change func(*queue.Request), builds ...string) {
	t.Helper()
	for _, b := range builds {
		for i := range n {
			name := fmt.Sprint(b, i)
			submit(t, q, name, func(r *queue.Request) {
				of(b)(r)
				if change != nil {
					change(r)
				}
			})
			e.release(name)
		}
	}
}

func TestRule087_BuildsTakeTurns(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", of("first"))
		fill(t, q, e, 4, nil, "a")
		fill(t, q, e, 2, nil, "b", "")
		e.release("holds the slot")
		synctest.Wait()
		expect.Equal(t, e.order(), "first a b  a b  a a", "runs")
		// Actions of one build run in order of arrival.
		for i := range 4 {
			k := slices.IndexFunc(e.begun, func(task *worker.Task) bool { return task.Action == action(fmt.Sprint("a", i)) })
			expect.Equal(t, k, []int{1, 4, 7, 8}[i], "a%d ran at", i)
		}
	})
}

// TestRule087_SmallBuildIsNotStarved checks that five actions are next although 50,000 of another build came before.
func TestRule087_SmallBuildIsNotStarved(t *testing.T) {
	bubble(t, queue.Config{Slots: 4}, func(t *testing.T, q *queue.Queue, e *executor) {
		for i := range 50_000 {
			r := queue.Request{Task: worker.Task{Action: action(fmt.Sprint(i)), Invocation: "large"}}
			must.Get(q.Submit(r))(t)
		}
		wantCounts(t, e, 4, 0, 4)
		for i := range 5 {
			submit(t, q, fmt.Sprint("small ", i), of("small"))
			e.release(fmt.Sprint("small ", i))
		}
		e.release("0") // the other runs of the large build continue
		synctest.Wait()
		expect.Equal(t, strings.Count(e.order(), "small"), 5, "actions of the small build began")
	})
}

func TestRule087_FewestRunningIsNext(t *testing.T) {
	bubble(t, queue.Config{Slots: 3}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"a0", "a1", "a2", "a3", "a4"} {
			submit(t, q, name, of("a"))
		}
		for _, name := range []string{"b0", "b1", "b2"} {
			submit(t, q, name, of("b"))
		}
		e.release("a0")
		wantCounts(t, e, 4, 0, 3) // a a b
		e.release("a1")
		wantCounts(t, e, 5, 0, 3) // one each: a was served before b
		e.release("b0")
		wantCounts(t, e, 6, 0, 3)
		expect.Equal(t, e.order(), "a a a b a b", "runs")
	})
}

func TestRule087_NewBuildsDoNotStarveAnOldOne(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", of("old"))
		fill(t, q, e, 3, nil, "old")
		held := "holds the slot"
		for i := range 6 {
			b := fmt.Sprint("new", i)
			submit(t, q, b, of(b))
			e.release(held)
			synctest.Wait()
			e.mu.Lock()
			last := e.begun[len(e.begun)-1]
			e.mu.Unlock()
			held = last.Invocation
			if held == "old" {
				t.Fatal("a released action is still running") // fill released it
			}
		}
		expect.Equal(t, strings.Count(e.order(), "old"), 4,
			"actions of the old build that ran while new builds kept arriving, of %s", e.order())
	})
}

// TestRule087_PriorityPrecedesFairness also checks that equally named builds of two instances are two flows.
func TestRule087_PriorityPrecedesFairness(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit(t, q, "holds the slot", of("first"))
		fill(t, q, e, 2, nil, "a")
		fill(t, q, e, 3, priority(-1), "b")
		submit(t, q, "elsewhere", func(r *queue.Request) { r.Task.Instance, r.Task.Invocation = "other", "a" })
		e.release("elsewhere")
		e.release("holds the slot")
		synctest.Wait()
		expect.Equal(t, e.order(), "first b b b a a a", "runs")
		expect.That(t, e.begun[5].Instance == "other", "the build of the other instance was not served in turn")
	})
}

func TestRule087_PreparationIsFair(t *testing.T) {
	var order []string
	bubble(t, queue.Config{Slots: 1, Preparers: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, b := range []string{"before", "a", "a", "a", "b", "b"} {
			r := queue.Request{Task: worker.Task{Action: action(b), Invocation: b}}
			r.Prepare = afterwards(func() {
				time.Sleep(time.Second)
				order = append(order, b)
			})
			must.Get(q.Submit(r))(t)
			synctest.Wait() // the only preparer is busy with the first until all others wait
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		expect.Equal(t, strings.Join(order, " "), "before a b a b a", "prepared")
	})
}

// TestRule095_SharedRunTakesTheEarliestTurn of its operations, unless that one leaves.
func TestRule095_SharedRunTakesTheEarliestTurn(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		t.Run(fmt.Sprintf("leaves: %v", leaves), func(t *testing.T) {
			bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
				submit(t, q, "holds the slot", of("first"))
				fill(t, q, e, 3, nil, "a")
				shared := submit(t, q, "x", of("a"))
				sooner := submit(t, q, "x", of("b"))
				fill(t, q, e, 2, nil, "b")
				e.release("x")
				if leaves {
					sooner.Cancel("requested")
				}
				e.release("holds the slot")
				synctest.Wait()
				if got, want := len(e.begun), 7; got != want {
					t.Fatalf("%d actions ran, want %d", got, want)
				}
				at := slices.IndexFunc(e.begun, func(task *worker.Task) bool { return task.Action == action("x") })
				expect.Equal(t, at, map[bool]int{false: 2, true: 6}[leaves],
					"number of the shared run in %s", e.order())
				wantRun(t, shared, int32(at+1))
			})
		})
	}
}

func TestPrefetchFollowsQueueOrder(t *testing.T) {
	f := &fetches{}
	bubble(t, queue.Config{Slots: 2, Fetch: f.fetch}, func(t *testing.T, q *queue.Queue, e *executor) {
		for _, name := range []string{"running", "too", "a1", "a2", "a3", "a4"} {
			submit(t, q, name, of("a"))
		}
		f.want(t, "one build", &f.ended, "a1", "a2", "a3", "a4")
		for _, name := range []string{"b1", "b2", "b3"} {
			submit(t, q, name, of("b"))
		}
		// Build a has two slots: next are b1, b2, then alternately a1, b3.
		f.want(t, "two builds", &f.ended, "a1", "a2", "a3", "a4", "b1", "b2", "b3")
		submit(t, q, "b4", of("b"))
		f.want(t, "beyond the next four", &f.ended, "a1", "a2", "a3", "a4", "b1", "b2", "b3")
	})
}

func TestFinishedBuildsAreForgotten(t *testing.T) {
	bubble(t, queue.Config{Slots: 2}, func(t *testing.T, q *queue.Queue, e *executor) {
		for i := range 100 {
			fill(t, q, e, 2, priority(int32(i%3)), fmt.Sprint(i))
		}
		submit(t, q, "left", of("x")).Cancel("requested")
		synctest.Wait()
		expect.Equal(t, queue.Flows(q), 0, "flows are left")
	})
}

// afterwards returns a Prepare that calls f and answers.
func afterwards(f func()) func(context.Context, *queue.Request) (*worker.Outcome, error) {
	return func(context.Context, *queue.Request) (*worker.Outcome, error) {
		f()
		return &worker.Outcome{}, nil
	}
}
