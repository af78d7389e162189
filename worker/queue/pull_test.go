// SPDX-License-Identifier: Apache-2.0

package queue_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	imagepulls "github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/queue"
)

// pulls makes Prepare ask for a pull that ends when done is closed, or with its context.
func pulls(done <-chan struct{}, err error) func(*queue.Request) {
	return func(r *queue.Request) {
		r.Prepare = func(_ context.Context, r *queue.Request) (*worker.Outcome, error) {
			r.Pull = func(ctx context.Context) error {
				defer imagepulls.Begin(ctx, func() *cloisterpb.ImagePull { return &cloisterpb.ImagePull{Pinned: "tools"} })()
				select {
				case <-done:
					return err
				case <-ctx.Done():
					return &worker.Fault{Kind: worker.FaultCancelled, Err: ctx.Err()}
				}
			}
			return nil, nil
		}
	}
}

// pinned returns the image whose pull o shows, or "".
func pinned(t *testing.T, o *queue.Operation) string {
	t.Helper()
	if pull := state(t, o).Pulling; pull != nil {
		return pull().Pinned
	}
	return ""
}

// TestPullHoldsNoSlot checks that requests which pull hold neither a slot nor a preparer, and then take their turn.
func TestPullHoldsNoSlot(t *testing.T) {
	bubble(t, queue.Config{Slots: 1, Preparers: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		done, failed := make(chan struct{}), make(chan struct{})
		first, second := submit(t, q, "first", pulls(done, nil)), submit(t, q, "second", pulls(done, nil))
		refused := submit(t, q, "refused", pulls(failed, &worker.Fault{Kind: worker.FaultUnmet, Err: errors.New("unknown manifest")}))
		for _, o := range []*queue.Operation{first, second, refused} {
			wantStage(t, o, repb.ExecutionStage_QUEUED)
			expect.Equal(t, pinned(t, o), "tools", "the image that is pulled")
		}
		d := q.Demands()
		expect.That(t, len(d) == 1 && d[0].Queued == 3 && d[0].Unmet != "", "Demands = %+v, want one of three actions, with a reason", d)
		other := submit(t, q, "other", answer(nil, nil))
		next := submit(t, q, "next", answer(nil, nil))
		d = q.Demands()
		expect.That(t, len(d) == 2 && d[0].Queued == 1 && d[0].Unmet == "" && d[1].Queued == 3 && d[1].Unmet != "",
			"Demands = %+v, want one action that a worker may take, and the three", d)
		expect.Equal(t, q.Stats(), (queue.Stats{Queued: 4, Oldest: time.Now(), Running: 1, Slots: 1, Working: 1}), "Stats")
		e.release("other", "next")
		wantRun(t, other, 1)
		wantRun(t, next, 2)
		close(failed)
		wantFault(t, refused, worker.FaultUnmet)
		wantCounts(t, e, 2, 0, 0)
		close(done)
		synctest.Wait()
		for _, o := range []*queue.Operation{first, second} {
			expect.Equal(t, pinned(t, o), "", "the image that is pulled afterwards")
		}
		d = q.Demands()
		expect.That(t, len(d) == 1 && d[0].Queued == 1 && d[0].Unmet == "", "Demands = %+v, want one action", d)
		e.release("first", "second")
		wantStage(t, first, repb.ExecutionStage_COMPLETED)
		wantStage(t, second, repb.ExecutionStage_COMPLETED)
		wantCounts(t, e, 4, 0, 0)
	})
}

// TestPullEndsWithItsOperation checks that a pull is cancelled when no client waits, and when the queue closes, and
// that a queue which drains waits for it.
func TestPullEndsWithItsOperation(t *testing.T) {
	bubble(t, queue.Config{Slots: 1}, func(t *testing.T, q *queue.Queue, e *executor) {
		left := submit(t, q, "left", pulls(nil, nil))
		time.Sleep(2 * time.Minute)
		wantFault(t, left, worker.FaultCancelled)
		done := make(chan struct{})
		kept, ended := submit(t, q, "kept", pulls(done, nil)), submit(t, q, "ended", pulls(nil, nil))
		defer watch(t, kept)()
		defer watch(t, ended)()
		ctx, cancel := context.WithCancel(t.Context())
		drained := make(chan error, 1)
		go func() { drained <- q.Drain(ctx) }()
		e.release("kept")
		close(done)
		wantRun(t, kept, 1)
		wantStage(t, ended, repb.ExecutionStage_QUEUED)
		cancel()
		expect.Error(t, <-drained, context.Canceled, "Drain")
		wantFault(t, ended, worker.FaultUnavailable)
		wantCounts(t, e, 1, 0, 0)
	})
}
