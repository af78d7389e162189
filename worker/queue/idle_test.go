// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker/queue"
)

// A background is a Config.Idle that works until its context ends.
type background struct{ working, begun atomic.Int32 }

func (i *background) idle(ctx context.Context) {
	i.begun.Add(1)
	i.working.Add(1)
	<-ctx.Done()
	i.working.Add(-1)
}

func (i *background) want(t *testing.T, working, begun int32) {
	t.Helper()
	synctest.Wait()
	if i.working.Load() != working || i.begun.Load() != begun {
		t.Errorf("%d working and %d begun, want %d and %d", i.working.Load(), i.begun.Load(), working, begun)
	}
}

func TestIdleWorksOnlyWhileASlotIsFree(t *testing.T) {
	i := &background{}
	bubble(t, queue.Config{Slots: 2, Idle: i.idle}, func(t *testing.T, q *queue.Queue, e *executor) {
		i.want(t, 1, 1)
		submit(t, q, "a", nil)
		i.want(t, 1, 1) // the other slot is free
		submit(t, q, "b", nil)
		i.want(t, 0, 1)
		o := submit(t, q, "c", nil)
		e.release("a")
		i.want(t, 0, 1) // c has it
		o.Cancel("requested")
		i.want(t, 1, 2)
		e.release("b")
		i.want(t, 1, 2)
	})
	expect.That(t, i.working.Load() == 0, "Idle still works after Close")
}

// TestIdleDelaysNoAction checks that an action starts although Idle ignores its context.
func TestIdleDelaysNoAction(t *testing.T) {
	deaf := func(context.Context) { time.Sleep(time.Hour) }
	bubble(t, queue.Config{Slots: 1, Idle: deaf}, func(t *testing.T, q *queue.Queue, e *executor) {
		synctest.Wait()
		submit(t, q, "a", nil)
		wantCounts(t, e, 1, 0, 1)
	})
}

func TestIdleStopsWhenTheQueueDrains(t *testing.T) {
	i := &background{}
	bubble(t, queue.Config{Slots: 2, Idle: i.idle}, func(t *testing.T, q *queue.Queue, e *executor) {
		i.want(t, 1, 1)
		submit(t, q, "a", nil)
		done := make(chan error)
		go func() { done <- q.Drain(t.Context()) }()
		i.want(t, 0, 1)
		e.release("a")
		expect.Error(t, <-done, nil)
		i.want(t, 0, 1)
	})
}
