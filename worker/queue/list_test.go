// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/queue"
)

// older returns the targets of all operations, from pages of n.
func older(q *queue.Queue, n int) []string {
	var got []string
	for seq := uint64(0); ; {
		var ops []*queue.Operation
		if ops, seq = q.Older(seq, n); len(ops) == 0 {
			return got
		}
		for _, o := range ops {
			got = append(got, o.Info().Target)
		}
	}
}

// TestOlderFindsEveryOperationOnce checks the order while operations are dropped and added.
func TestOlderFindsEveryOperationOnce(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		if ops, _ := q.Older(0, 10); len(ops) != 0 {
			t.Errorf("an empty queue lists %d operations, want 0", len(ops))
		}
		var want []string
		ops := map[string]*queue.Operation{}
		for i := range 40 {
			name := fmt.Sprint(i)
			ops[name] = submit(t, q, name, func(r *queue.Request) { r.Task.Target = name })
			e.release(name)
			want = append(want, name)
		}
		synctest.Wait()
		slices.Reverse(want)
		for _, gone := range []string{"39", "0", "20", "21", "22"} {
			if known, completed := q.Forget(ops[gone].Name()); !known || !completed {
				t.Fatalf("Forget(%s) = %v, %v; want true, true", gone, known, completed)
			}
			want = slices.DeleteFunc(want, func(s string) bool { return s == gone })
		}
		for _, n := range []int{1, 7, 35, 100} {
			expect.Slices(t, older(q, n), want, "pages of %d", n)
		}
		_, seq := q.Older(0, 5)
		submit(t, q, "newer", nil)
		page, _ := q.Older(seq, 1)
		expect.Equal(t, page[0].Info().Target, want[5], "first of the next page")
		// Removing most operations compacts the list.
		for _, name := range want[:30] {
			q.Forget(ops[name].Name())
		}
		expect.Slices(t, older(q, 3), append([]string{""}, want[30:]...), "after compaction")
		time.Sleep(time.Hour)
		expect.Slices(t, older(q, 3), nil, "after expiry")
	})
}

func TestForgetRemovesOnlyCompletedOperations(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		a, b := submit(t, q, "a", nil), submit(t, q, "b", nil)
		for _, o := range []*queue.Operation{a, b} {
			if known, completed := q.Forget(o.Name()); !known || completed {
				t.Errorf("Forget of a live operation = %v, %v; want true, false", known, completed)
			}
		}
		if known, _ := q.Forget("no such"); known {
			t.Error("an unknown name is known")
		}
		e.release("a")
		wantRun(t, a, 1)
		if known, completed := q.Forget(a.Name()); !known || !completed {
			t.Errorf("Forget = %v, %v; want true, true", known, completed)
		}
		wantKnown(t, q, []*queue.Operation{a, b}, false, true)
		time.Sleep(time.Hour) // nothing is dropped twice
		e.release("b")
	})
}

func TestCancelledOperationLeavesTheRunToOthers(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		a, b, queued := submit(t, q, "x", nil), submit(t, q, "x", nil), submit(t, q, "y", nil)
		a.Cancel("the operator cancelled it")
		expect.Equal(t, wantFault(t, a, worker.FaultCancelled).Error(), "the operator cancelled it", "fault")
		wantCounts(t, e, 1, 0, 1)
		queued.Cancel("so did another")
		wantFault(t, queued, worker.FaultCancelled)
		e.release("x", "y")
		wantRun(t, b, 1)
		wantCounts(t, e, 1, 0, 0)
		b.Cancel("too late")
		wantRun(t, b, 1)
	})
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		only := submit(t, q, "x", nil)
		only.Cancel("requested")
		wantFault(t, only, worker.FaultCancelled)
		wantCounts(t, e, 1, 1, 0)
	})
}

// TestStateReportsWhenTheRunBegan, also for operations that join later.
func TestStateReportsWhenTheRunBegan(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		came := time.Now()
		submit(t, q, "holds the slot", nil)
		defer watch(t, submit(t, q, "holds the slot", nil))()
		o := submit(t, q, "x", nil)
		defer watch(t, o)()
		if s := o.State(); !s.Began.IsZero() || !o.Info().Queued.Equal(came) {
			t.Errorf("while waiting: Began %v, Queued %v; want zero and %v", s.Began, o.Info().Queued, came)
		}
		time.Sleep(time.Minute)
		e.release("holds the slot")
		wantCounts(t, e, 2, 0, 1)
		time.Sleep(time.Second)
		joined := submit(t, q, "x", nil)
		e.release("x")
		wantRun(t, joined, 2)
		for _, o := range []*queue.Operation{o, joined} {
			if s := o.State(); !s.Began.Equal(came.Add(time.Minute)) {
				t.Errorf("Began is %v, want a minute after %v", s.Began, came)
			}
		}
	})
}
