// SPDX-License-Identifier: Apache-2.0

package buildbarn_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/queue"
)

// worker starts a client of h with the head's store. The caller waits for ended after kill or Drain.
func (h *head) worker(t *testing.T, name string, slots int, e executor, changes ...func(*buildbarn.ClientConfig),
) (c *buildbarn.Client, kill func(), ended chan struct{}) {
	t.Helper()
	config := buildbarn.ClientConfig{
		Scheduler: h.OperationQueueClient, Executor: e, Worker: name, Slots: slots,
		Instances: func(string) (*cas.Instance, error) { return h.in, nil },
	}
	for _, change := range changes {
		change(&config)
	}
	c = must.Get(buildbarn.NewClient(config))(t)
	ctx, kill := context.WithCancel(t.Context())
	ended = make(chan struct{})
	go func() {
		defer close(ended)
		c.Run(ctx)
	}()
	return c, kill, ended
}

// later waits for the end of o and returns its state.
func later(t *testing.T, o *queue.Operation) queue.State {
	t.Helper()
	for range 10_000 {
		if synctest.Wait(); o.State().Stage == repb.ExecutionStage_COMPLETED {
			break
		}
		time.Sleep(time.Second)
	}
	return ended(t, o)
}

// TestClientsExecuteTheServersActions checks that each runs once and no slot has two at once, and that clients drain.
func TestClientsExecuteTheServersActions(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		var mu sync.Mutex
		runs, now, most := map[cas.Digest]int{}, 0, 0
		e := func(_ context.Context, task *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
			mu.Lock()
			runs[task.Action]++
			now++
			most = max(most, now)
			mu.Unlock()
			report(worker.StageRun)
			time.Sleep(time.Duration(task.Action.Hash()[0]) * 100 * time.Millisecond)
			mu.Lock()
			now--
			mu.Unlock()
			return &worker.Outcome{Result: &repb.ActionResult{ExitCode: 3}, Message: "cloister: exit code 3"}, nil
		}
		var all []chan struct{}
		var clients []*buildbarn.Client
		for i := range 3 {
			c, _, ended := h.worker(t, fmt.Sprint("w", i), 2, e)
			clients, all = append(clients, c), append(all, ended)
		}
		var operations []*queue.Operation
		for i := range 100 {
			operations = append(operations, h.submit(t, fmt.Sprint(i)))
		}
		for _, o := range operations {
			if s := later(t, o); s.Fault != nil || s.Outcome.Result.ExitCode != 3 || s.Outcome.Message != "cloister: exit code 3" {
				t.Fatalf("state is %+v, want exit code 3 and its message", s)
			}
		}
		expect.That(t, len(runs) == 100 && most == 6,
			"%d actions ran, at most %d concurrently; want 100 and 6", len(runs), most)
		for a, n := range runs {
			expect.Equal(t, n, 1, "%v ran N times", a)
		}
		for i, c := range clients {
			c.Drain()
			<-all[i]
		}
	})
}

// TestClientsStateTheirToolchain checks that a client with the required toolchain gets actions, and another one does
// not.
func TestClientsStateTheirToolchain(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) { c.Toolchain = "gcc 14" }, func(t *testing.T, h *head) {
		stating := func(toolchain string) (*buildbarn.Client, chan struct{}) {
			c, _, left := h.worker(t, toolchain, 1, func(context.Context, *worker.Task, func(worker.Stage)) (*worker.Outcome, error) {
				return &worker.Outcome{Result: &repb.ActionResult{}, Message: "made by " + toolchain}, nil
			}, func(c *buildbarn.ClientConfig) { c.Toolchain = func() string { return toolchain } })
			return c, left
		}
		other, otherLeft := stating("gcc 15")
		o := h.submit(t, "a")
		time.Sleep(10 * time.Second)
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		expect.Text(t, other.Down(), "this server requires gcc 14",
			"the refused worker reports (the required toolchain)")
		right, rightLeft := stating("gcc 14")
		if s := later(t, o); s.Outcome == nil || s.Outcome.Message != "made by gcc 14" {
			t.Errorf("got %+v, want the result of the worker with the required toolchain", s)
		}
		other.Drain()
		right.Drain()
		<-otherLeft
		<-rightLeft
	})
}

// TestClientsStateTheirPulls checks that an operation shows the pull that its worker waits for while it lasts, and how
// it progresses.
func TestClientsStateTheirPulls(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		var read atomic.Int64
		pulled, finish := make(chan struct{}), make(chan struct{})
		c, _, left := h.worker(t, "w", 1, func(ctx context.Context, _ *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
			report(worker.StageFetch)
			time.Sleep(time.Minute) // it looks up the digest of a tag
			end := pulls.Begin(ctx, func() *cloisterpb.ImagePull {
				return &cloisterpb.ImagePull{Pinned: "example.com/tools@sha256:1f", ReadBytes: read.Load(), TotalBytes: 1 << 40}
			})
			<-pulled
			end()
			report(worker.StageRun)
			<-finish
			return &worker.Outcome{Result: &repb.ActionResult{}}, nil
		})
		o := h.submit(t, "a")
		time.Sleep(time.Minute)
		expect.That(t, o.State().Pulling == nil, "a pull is shown before it has begun")
		for _, n := range []int64{0, 1 << 20, 3 << 30} {
			read.Store(n)
			time.Sleep(3 * time.Second)
			state := o.State()
			must.Be(t, state.Pulling != nil && state.Stage == repb.ExecutionStage_EXECUTING && state.Worker == "w",
				"got %+v, want the pull of the action that executes", state)
			got := state.Pulling()
			expect.That(t, got.GetPinned() == "example.com/tools@sha256:1f" && got.GetReadBytes() == n && got.GetTotalBytes() == 1<<40,
				"got %v, want %d bytes", got, n)
			slot := h.queue.Workers()[0].Slots[0]
			expect.That(t, slot.Pulling && slot.Stage == worker.StageInputs, "the slot is reported as %+v, want a pull", slot)
		}
		close(pulled)
		time.Sleep(3 * time.Second)
		state, slot := o.State(), h.queue.Workers()[0].Slots[0]
		expect.That(t, state.Pulling == nil && !slot.Pulling && slot.Stage == worker.StageRun, "got %+v and %+v afterwards, want no pull", state, slot)
		close(finish)
		wantSuccess(t, o)
		c.Drain()
		<-left
	})
}

func TestStoppedWorkersActionRunsElsewhere(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		blocked := func(ctx context.Context, _ *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		_, kill, over := h.worker(t, "first", 1, blocked)
		synctest.Wait()
		o := h.submit(t, "a")
		synctest.Wait()
		second, _, left := h.worker(t, "second", 1, succeed)
		synctest.Wait()
		kill()
		<-over
		wantSuccess(t, o)
		second.Drain()
		<-left
	})
}

// TestCancelledOperationEndsTheRun when the worker calls next.
func TestCancelledOperationEndsTheRun(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		causes := make(chan error, 1)
		c, _, left := h.worker(t, "w", 1, func(ctx context.Context, _ *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
			report(worker.StageRun)
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return nil, context.Cause(ctx)
		})
		synctest.Wait()
		o := h.submit(t, "a")
		time.Sleep(time.Second)
		o.Cancel("enough")
		expect.Error(t, <-causes, context.Canceled, "run")
		c.Drain()
		<-left
	})
}

// TestFaultOfAWorkerReachesTheClient with its kind and the worker's name.
func TestFaultOfAWorkerReachesTheClient(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		gone := []cas.Digest{cas.SHA256.Sum([]byte("gone"))}
		c, _, left := h.worker(t, "w", 1, func(context.Context, *worker.Task, func(worker.Stage)) (*worker.Outcome, error) {
			return nil, &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("fetch: a blob is absent"), Blobs: gone}
		})
		f := wantFault(t, h.submit(t, "a"), worker.FaultMissing, "worker w: fetch: a blob is absent")
		expect.That(t, slices.Equal(f.Blobs, gone) && strings.Count(f.Error(), "worker w") == 1,
			"fault is %v with blobs %v, want the worker named once and %v", f, f.Blobs, gone)
		c.Drain()
		<-left
	})
}
