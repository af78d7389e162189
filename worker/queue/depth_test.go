// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/queue"
)

// at returns a request of an action of some depth.
func at(depth int, name string) queue.Request {
	return queue.Request{Task: worker.Task{Action: action(name), Caller: &actionapi.Caller{Depth: depth}}}
}

// TestActionsOfActionsHaveSlots: each depth has its own slots, so nested actions run although every other slot is busy
// with an action that waits for them. They neither share the run of an equal action of another depth, nor are refused
// when the queue is full.
func TestActionsOfActionsHaveSlots(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Depth: 2, MaxLive: 3}, func(t *testing.T, q *queue.Queue, e *executor) {
		submit := func(depth int, name string) *queue.Operation {
			t.Helper()
			o := must.Get(q.Submit(at(depth, name)))(t)
			synctest.Wait()
			return o
		}
		stage := func(o *queue.Operation) repb.ExecutionStage_Value { return o.State().Stage }
		outer := submit(0, "outer")
		waiting := submit(0, "same")
		submit(0, "another") // the queue is full
		inner, deepest := submit(1, "same"), submit(2, "same")
		second := submit(1, "second")
		for _, row := range []struct {
			o    *queue.Operation
			want repb.ExecutionStage_Value
		}{
			{outer, repb.ExecutionStage_EXECUTING},
			{waiting, repb.ExecutionStage_QUEUED},
			{inner, repb.ExecutionStage_EXECUTING},
			{deepest, repb.ExecutionStage_EXECUTING},
			{second, repb.ExecutionStage_QUEUED},
		} {
			expect.Equal(t, stage(row.o), row.want, "%s", row.o.Action())
		}
		expect.Equal(t, q.Stats().Slots, 1, "slots")
		expect.Equal(t, len(q.Workers()[0].Slots), 3, "slots of the worker while all are busy")
		expect.That(t, expect.Err(q.Submit(at(3, "deeper"))) != nil, "an action deeper than Config.Depth was accepted")
		e.release("same", "second")
		synctest.Wait()
		expect.Equal(t, stage(second), repb.ExecutionStage_COMPLETED, "second")
		expect.Equal(t, stage(waiting), repb.ExecutionStage_QUEUED, "the equal action of depth 0, whose slot is busy")
		expect.Equal(t, len(q.Workers()[0].Slots), 1, "slots of the worker while those of actions are idle")
		e.release("outer", "another")
		synctest.Wait()
		expect.Equal(t, stage(waiting), repb.ExecutionStage_COMPLETED, "the equal action of depth 0")
	})
}

// TestDrainsLetActionsExecuteActions: a running action can still execute others while its worker drains or the server
// shuts down.
func TestDrainsLetActionsExecuteActions(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Depth: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		outer := must.Get(q.Submit(at(0, "outer")))(t)
		synctest.Wait()
		q.DrainWorker("local", "test")
		drained := make(chan error, 1)
		go func() { drained <- q.Drain(context.Background()) }()
		synctest.Wait()
		inner := must.Get(q.Submit(at(1, "inner")))(t)
		expect.That(t, expect.Err(q.Submit(at(0, "late"))) != nil, "a client's action was accepted")
		e.release("inner", "outer")
		must.Succeed(t, <-drained)
		for _, o := range []*queue.Operation{outer, inner} {
			expect.That(t, o.State().Outcome != nil, "%s: got %+v, want an outcome", o.Action(), o.State())
		}
		_, err := q.Submit(at(1, "late"))
		f, ok := errors.AsType[*worker.Fault](err)
		expect.That(t, ok && f.Kind == worker.FaultUnavailable, "after the drain: got %v", err)
	})
}

// TestRefuseKeepsActionsOfActions: they have local slots.
func TestRefuseKeepsActionsOfActions(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Depth: 1}, func(t *testing.T, q *queue.Queue, _ *executor) {
		must.Get(q.Submit(at(1, "first")))(t)
		second := must.Get(q.Submit(at(1, "second")))(t)
		time.Sleep(time.Second)
		q.Refuse(time.Millisecond, "test")
		expect.Equal(t, second.State().Stage, repb.ExecutionStage_QUEUED, "second")
	})
}
