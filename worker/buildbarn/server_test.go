// SPDX-License-Identifier: Apache-2.0

package buildbarn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/castest/faulty"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/tests/syncbuf"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A head is a Server with its queue and a client, in a synctest bubble.
type head struct {
	remoteworkerpb.OperationQueueClient
	server *buildbarn.Server
	queue  *queue.Queue
	in     *cas.Instance
	log    *syncbuf.Buffer
}

// inBubble runs test with a head and a fake clock; change may be nil.
func inBubble(t *testing.T, change func(*buildbarn.ServerConfig), test func(t *testing.T, h *head)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &head{log: &syncbuf.Buffer{}}
		instances := castest.Instances()
		h.in = must.Get(instances(""))(t)
		h.queue = must.Get(queue.New(queue.Config{Head: true}))(t)
		defer func() { h.queue.Close() }()
		c := buildbarn.ServerConfig{Queue: h.queue, Instances: instances, Log: slog.New(slog.NewTextHandler(h.log, nil))}
		if change != nil {
			change(&c)
		}
		h.queue = c.Queue
		server := grpc.NewServer()
		h.server = must.Get(buildbarn.Register(server, c))(t)
		defer h.server.Close()
		h.OperationQueueClient = remoteworkerpb.NewOperationQueueClient(grpctest.Connect(t, server))
		test(t, h)
	})
}

// submit submits an action that its salt makes unique, and waits for it in the background.
func (h *head) submit(t *testing.T, salt string, change ...func(*queue.Request, *repb.Action)) *queue.Operation {
	t.Helper()
	a := &repb.Action{Salt: []byte(salt)}
	r := queue.Request{}
	for _, c := range change {
		c(&r, a)
	}
	fn := cas.SHA256
	if r.Task.Action.Function() == cas.BLAKE3 {
		fn = cas.BLAKE3
	}
	r.Task.Action = must.Get(cas.PutProto(t.Context(), h.in.Store, fn, a))(t)
	o := must.Get(h.queue.Submit(r))(t)
	// Keep the operation alive.
	go func() {
		for seen := 0; ; {
			s, version, err := o.Wait(t.Context(), seen)
			if err != nil || s.Stage == repb.ExecutionStage_COMPLETED {
				return
			}
			seen = version
		}
	}()
	synctest.Wait()
	return o
}

// put stores a blob.
func (h *head) put(t *testing.T, fn cas.Function, text string) *repb.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), h.in.Store, fn, []byte(text)))(t).Proto()
}

type syncRequest = remoteworkerpb.SynchronizeRequest

// A slot is a simulated worker: the request it sends.
type slot struct {
	h   *head
	req *remoteworkerpb.SynchronizeRequest
}

// slot returns a slot of a machine with properties NAME=VALUE.
func (h *head) slot(machine, name string, properties ...string) *slot {
	p := &repb.Platform{}
	for _, text := range properties {
		k, v, _ := strings.Cut(text, "=")
		p.Properties = append(p.Properties, &repb.Platform_Property{Name: k, Value: v})
	}
	return &slot{h, &remoteworkerpb.SynchronizeRequest{WorkerId: map[string]string{"worker": machine, "slot": name}, Platform: p}}
}

// report synchronizes with a state and returns the answer.
func (s *slot) report(t *testing.T, state *remoteworkerpb.CurrentState) *remoteworkerpb.SynchronizeResponse {
	t.Helper()
	return must.Get(s.try(t.Context(), state))(t)
}

func (s *slot) try(ctx context.Context, state *remoteworkerpb.CurrentState) (*remoteworkerpb.SynchronizeResponse, error) {
	req := proto.CloneOf(s.req)
	req.CurrentState = state
	return s.h.Synchronize(ctx, req)
}

// The states of a worker.
func idle() *remoteworkerpb.CurrentState {
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Idle{Idle: &emptypb.Empty{}}}
}

func executing(d *repb.Digest) *remoteworkerpb.CurrentState {
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Executing_{Executing: &remoteworkerpb.CurrentState_Executing{
		ActionDigest: d, ExecutionState: &remoteworkerpb.CurrentState_Executing_Running{Running: &emptypb.Empty{}},
	}}}
}

func completed(d *repb.Digest, r *repb.ExecuteResponse) *remoteworkerpb.CurrentState {
	return &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Executing_{Executing: &remoteworkerpb.CurrentState_Executing{
		ActionDigest: d, ExecutionState: &remoteworkerpb.CurrentState_Executing_Completed{Completed: r},
	}}}
}

// exited returns the response of an action with that exit code.
func exited(code int32) *repb.ExecuteResponse {
	return &repb.ExecuteResponse{Status: &statuspb.Status{}, Result: &repb.ActionResult{ExitCode: code}}
}

// wantTask checks that a response assigns the action of o, and returns the assignment.
func wantTask(t *testing.T, r *remoteworkerpb.SynchronizeResponse, o *queue.Operation) *remoteworkerpb.DesiredState_Executing {
	t.Helper()
	e := r.GetDesiredState().GetExecuting()
	must.Be(t, proto.Equal(e.GetActionDigest(), o.Action().Proto()),
		"desired state is %v, want execution of %v", r.DesiredState, o.Action())
	return e
}

func wantIdle(t *testing.T, r *remoteworkerpb.SynchronizeResponse) {
	t.Helper()
	must.Be(t, r.GetDesiredState().GetIdle() != nil, "desired state is %v, want idle", r.DesiredState)
	if at := r.NextSynchronizationAt.AsTime(); at.After(time.Now()) {
		t.Errorf("next call is at %v, want now", at)
	}
}

func wantCarryOn(t *testing.T, r *remoteworkerpb.SynchronizeResponse) {
	t.Helper()
	must.Be(t, r.DesiredState == nil, "desired state is %v, want none", r.DesiredState)
}

// ended returns the final state of o.
func ended(t *testing.T, o *queue.Operation) queue.State {
	t.Helper()
	synctest.Wait()
	s := o.State()
	must.Be(t, s.Stage == repb.ExecutionStage_COMPLETED, "stage is %v, want COMPLETED", s.Stage)
	return s
}

func wantSuccess(t *testing.T, o *queue.Operation) {
	t.Helper()
	if s := ended(t, o); s.Fault != nil || s.Outcome.Result.ExitCode != 0 {
		t.Errorf("got outcome %v and fault %v, want success", s.Outcome, s.Fault)
	}
}

func wantFault(t *testing.T, o *queue.Operation, k worker.FaultKind, texts ...string) *worker.Fault {
	t.Helper()
	s := ended(t, o)
	must.Be(t, s.Fault != nil && s.Fault.Kind == k,
		"got outcome %v and fault %v, want a fault of kind %d", s.Outcome, s.Fault, k)
	expect.Texts(t, s.Fault.Error(), texts, "fault")
	return s.Fault
}

func wantWaiting(t *testing.T, o *queue.Operation, stage repb.ExecutionStage_Value) {
	t.Helper()
	synctest.Wait()
	if s := o.State(); s.Stage != stage {
		t.Errorf("stage is %v with fault %v, want %v", s.Stage, s.Fault, stage)
	}
}

func TestIdleWorkerWaitsForAnAction(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		began := time.Now()
		var answer *remoteworkerpb.SynchronizeResponse
		var calling sync.WaitGroup
		w := h.slot("anvil", "0")
		calling.Go(func() {
			for answer.GetDesiredState().GetExecuting() == nil { // the interval of an idle call may end
				r, err := w.try(t.Context(), idle())
				if err != nil {
					t.Error(err)
					return
				}
				answer = r
			}
		})
		time.Sleep(30 * time.Second)
		aux := must.Get(anypb.New(&repb.Command{Arguments: []string{"anything"}}))(t)
		trace := map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
		o := h.submit(t, "a", func(r *queue.Request, _ *repb.Action) {
			r.Task = worker.Task{Target: "//x", Mnemonic: "M", Invocation: "i", Correlated: "c", Auxiliary: []*anypb.Any{aux}, Trace: trace}
		})
		calling.Wait()
		expect.Equal(t, time.Since(began), 30*time.Second, "the call")
		got := wantTask(t, answer, o)
		expect.Equal(t, time.Until(answer.NextSynchronizationAt.AsTime()), 10*time.Second, "next call is in")
		md, err := anypb.New(&repb.RequestMetadata{
			ActionId: o.Action().Hash(), TargetId: "//x", ActionMnemonic: "M", ToolInvocationId: "i", CorrelatedInvocationsId: "c",
		})
		must.Succeed(t, err)
		want := &remoteworkerpb.DesiredState_Executing{
			ActionDigest:      o.Action().Proto(),
			Action:            &repb.Action{Salt: []byte("a"), Timeout: durationpb.New(24 * time.Hour)},
			QueuedTimestamp:   timestamppb.New(o.Info().Queued),
			AuxiliaryMetadata: []*anypb.Any{md, aux},
			W3CTraceContext:   trace,
			DigestFunction:    repb.DigestFunction_SHA256,
		}
		expect.Equal(t, cmp.Diff(want, got, protocmp.Transform()), "", "-want +got")
	})
}

func TestTimeoutOfTheActionIsSent(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = durationpb.New(7 * time.Second) })
		got := wantTask(t, h.slot("anvil", "0").report(t, idle()), o)
		expect.Equal(t, got.Action.Timeout.AsDuration(), 7*time.Second, "timeout")
	})
}

// TestRootIsNotLost: a worker never executes a task with a root file system in its own instead.
func TestRootIsNotLost(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a", func(r *queue.Request, _ *repb.Action) { r.Task.Root = cas.SHA256.Sum([]byte("a root")) })
		h.slot("anvil", "0").report(t, idle())
		wantFault(t, o, worker.FaultUnmet, "anvil", "root file system", o.Action().String())
	})
}

// TestIdleCallEndsAfterARandomTime also checks that a worker is not lost during a call longer than Silence.
func TestIdleCallEndsAfterARandomTime(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) { c.Idle, c.Silence = 5*time.Minute, time.Minute }, func(t *testing.T, h *head) {
		var times []time.Duration
		w := h.slot("anvil", "0")
		for range 20 {
			began := time.Now()
			wantIdle(t, w.report(t, idle()))
			took := time.Since(began)
			expect.That(t, took <= 5*time.Minute, "a call took %v, want at most 5m", took)
			times = append(times, took)
		}
		short, long := times[0], times[0]
		for _, d := range times {
			short, long = min(short, d), max(long, d)
		}
		expect.That(t, long-short >= time.Second && long >= time.Minute,
			"calls took %v to %v, want random times", short, long)
		expect.That(t, !strings.Contains(h.log.String(), "left"), "log is\n%s, want no worker that left", h.log)
	})
}

func TestConcurrentCallWithTheSameIDIsRefused(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		var calling sync.WaitGroup
		var o *queue.Operation
		ready := make(chan struct{})
		calling.Go(func() {
			r, err := w.try(t.Context(), idle())
			<-ready
			if err != nil {
				t.Error(err)
				return
			}
			wantTask(t, r, o)
		})
		synctest.Wait()
		_, err := w.try(t.Context(), idle())
		if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "A worker with the same worker ID is already synchronizing") {
			t.Errorf("concurrent call: %v, want RESOURCE_EXHAUSTED", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
		defer cancel()
		expect.Code(t, expect.Err(h.slot("anvil", "1").try(ctx, idle())), codes.DeadlineExceeded,
			"call of another slot")
		synctest.Wait() // until the server has ended that call
		o = h.submit(t, "a")
		close(ready)
		calling.Wait()
	})
}

// TestCallAfterAnAbandonedOne is not refused as concurrent. A worker that is stopped while it waits makes such calls.
func TestCallAfterAnAbandonedOne(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, leaving := h.slot("anvil", "0"), h.slot("anvil", "0")
		leaving.req.PreferBeingIdle = true
		for range 200 {
			ctx, cancel := context.WithCancel(t.Context())
			var calling sync.WaitGroup
			calling.Go(func() {
				expect.Code(t, expect.Err(w.try(ctx, idle())), codes.Canceled, "abandoned call")
			})
			synctest.Wait()
			cancel()
			calling.Wait()
			wantIdle(t, leaving.report(t, idle()))
		}
	})
}

func TestExecutingWorkerCarriesOn(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		for range 12 { // for two minutes, longer than Silence
			began := time.Now()
			r := w.report(t, executing(o.Action().Proto()))
			wantCarryOn(t, r)
			if next := r.NextSynchronizationAt.AsTime(); !next.Equal(began.Add(10 * time.Second)) {
				t.Errorf("called at %v, next call at %v; want 10s later", began, next)
			}
			wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
			time.Sleep(10 * time.Second)
		}
		wantIdle(t, w.report(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

// TestUnassignedActionIsKilled such as one that an earlier server assigned.
func TestUnassignedActionIsKilled(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		other := cas.SHA256.Sum([]byte("other")).Proto()
		wantIdle(t, w.report(t, executing(other)))
		o := h.submit(t, "a")
		wantIdle(t, w.report(t, executing(other))) // gets no action before it has killed the other
		r := w.report(t, completed(other, exited(1)))
		wantTask(t, r, o)
		// It has missed that answer.
		wantTask(t, w.report(t, executing(other)), o)
		wantTask(t, w.report(t, completed(other, exited(1))), o)
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
		wantIdle(t, w.report(t, completed(o.Action().Proto(), exited(1)))) // again: the answer was lost
		wantSuccess(t, o)
	})
}

func TestActionThatIsNeverStartedFailsAfterTenAttempts(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		for range 10 {
			wantTask(t, w.report(t, idle()), o)
		}
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, idle()))
		wantFault(t, o, worker.FaultInternal, "Attempted to execute task 10 times, but it never completed. This task may cause worker",
			`{"slot":"0","worker":"anvil"}`)
	})
}

func TestActionOfARestartedWorkerRunsElsewhere(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, first.report(t, idle()), o)
		wantCarryOn(t, first.report(t, executing(o.Action().Proto())))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.report(t, idle()))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		wantTask(t, second.report(t, idle()), o)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.report(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

func TestCancelledActionIsKilledAtTheNextCall(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		o.Cancel("enough")
		wantFault(t, o, worker.FaultCancelled, "enough")
		expect.Equal(t, h.queue.Stats().Running, 0, "Running")
		wantIdle(t, w.report(t, executing(o.Action().Proto())))
		again := h.submit(t, "a")
		wantTask(t, w.report(t, idle()), again)
		again.Cancel("enough")
		synctest.Wait()
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, completed(again.Action().Proto(), exited(0))))
		wantFault(t, again, worker.FaultCancelled)
	})
}

func TestPreferBeingIdleNeitherWaitsNorTakes(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		next := h.submit(t, "b")
		wantTask(t, w.report(t, idle()), o)
		w.req.PreferBeingIdle = true
		wantCarryOn(t, w.report(t, executing(o.Action().Proto()))) // a draining worker finishes its action
		began := time.Now()
		wantIdle(t, w.report(t, completed(o.Action().Proto(), exited(0))))
		wantIdle(t, w.report(t, idle()))
		expect.Equal(t, time.Since(began), 0, "two calls")
		wantSuccess(t, o)
		wantWaiting(t, next, repb.ExecutionStage_QUEUED)
		w.req.PreferBeingIdle = false
		wantTask(t, w.report(t, idle()), next)
	})
}

// TestSilentWorkerIsLost after a minute. Another executes its action, and its late result is ignored.
func TestSilentWorkerIsLost(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		lost, other, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, lost.report(t, idle()), o)
		wantCarryOn(t, lost.report(t, executing(o.Action().Proto())))
		time.Sleep(time.Minute - time.Nanosecond)
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
		time.Sleep(time.Nanosecond)
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		if text := h.log.String(); !strings.Contains(text, "level=WARN msg=\"worker has left\" worker=anvil") || !strings.Contains(text, "silent for 1m0s") {
			t.Errorf("log is\n%s, want a warning that anvil left", text)
		}
		wantTask(t, other.report(t, idle()), o)
		wantIdle(t, lost.report(t, executing(o.Action().Proto())))
		lost.req.PreferBeingIdle = true
		wantIdle(t, lost.report(t, completed(o.Action().Proto(), exited(1))))
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
		other.req.PreferBeingIdle = true
		wantIdle(t, other.report(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

func TestActionThatLosesThreeWorkersFails(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		for _, name := range []string{"anvil", "bellows", "chisel"} {
			wantTask(t, h.slot(name, "0").report(t, idle()), o)
			time.Sleep(time.Minute)
		}
		wantFault(t, o, worker.FaultUnmet, "anvil", "bellows", "chisel", "silent for", o.Action().String())
	})
}

func TestWorkerWhoseCallEndedGetsActions(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) { c.Idle = 1000 * time.Hour }, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		// A deadline would also reach the server, which may answer in the very instant in which the client gives up.
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		expect.Code(t, expect.Err(w.try(ctx, idle())), codes.Canceled, "abandoned call")
		synctest.Wait()
		o := h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
	})
}

// TestOutdatedCallIsIgnored checks that an abandoned call, handled after a newer one, does not lose the worker's
// action.
func TestOutdatedCallIsIgnored(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		late := proto.CloneOf(w.req)
		late.CurrentState = idle()
		// A gRPC client would not send it.
		expect.Code(t, expect.Err(h.server.Synchronize(ctx, late)), codes.Canceled, "abandoned call")
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
	})
}

// TestRepeatedAnswerIsNotTheNextRuns checks a worker that misses the reply to its answer and repeats it. If the reply
// assigned the same action again, such as the retry of a failed test, the repeated answer must not end the second run.
func TestRepeatedAnswerIsNotTheNextRuns(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		answer := func(code int32, at int64) *repb.ExecuteResponse {
			r := exited(code)
			r.Result.ExecutionMetadata = &repb.ExecutedActionMetadata{WorkerStartTimestamp: &timestamppb.Timestamp{Seconds: at}}
			return r
		}
		alone := func(r *queue.Request, _ *repb.Action) { r.Alone = true }
		w, first, second := h.slot("anvil", "0"), h.submit(t, "a", alone), h.submit(t, "a", alone)
		d := first.Action().Proto()
		wantTask(t, w.report(t, idle()), first)
		wantTask(t, w.report(t, completed(d, answer(1, 10))), second)
		if s := ended(t, first); s.Outcome == nil || s.Outcome.Result.ExitCode != 1 {
			t.Errorf("first run: outcome %v and fault %v, want exit code 1", s.Outcome, s.Fault)
		}
		wantTask(t, w.report(t, completed(d, answer(1, 10))), second)
		wantWaiting(t, second, repb.ExecutionStage_EXECUTING)
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, completed(d, answer(0, 20))))
		wantSuccess(t, second)
	})
}

// TestSlotWaitsForTheEndOfItsRun checks that a worker gets its next action even if recording the end of a cancelled one
// takes a while.
func TestSlotWaitsForTheEndOfItsRun(t *testing.T) {
	recorded := make(chan struct{})
	inBubble(t, func(c *buildbarn.ServerConfig) {
		c.Queue.Close()
		c.Idle = 1000 * time.Hour // a poll waits for a random part of it
		recorded = make(chan struct{})
		var err error
		if c.Queue, err = queue.New(queue.Config{Head: true, Ended: func(_ *worker.Task, _ *worker.Outcome, f *worker.Fault) func(queue.Info, queue.State) {
			if f != nil && strings.Contains(f.Error(), "no client waits") {
				<-recorded
			}
			return func(queue.Info, queue.State) {}
		}}); err != nil {
			t.Fatal(err)
		}
	}, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		o.Cancel("enough")
		synctest.Wait()
		wantIdle(t, w.report(t, executing(o.Action().Proto())))
		next := h.submit(t, "b")
		time.AfterFunc(time.Second, func() { close(recorded) })
		wantTask(t, w.report(t, idle()), next)
	})
}

// TestUnrequestedCancellationIsAShutdown of the worker: another executes the action.
func TestUnrequestedCancellationIsAShutdown(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, first.report(t, idle()), o)
		first.req.PreferBeingIdle, second.req.PreferBeingIdle = true, true
		wantIdle(t, first.report(t, completed(o.Action().Proto(), &repb.ExecuteResponse{Status: &statuspb.Status{Code: int32(codes.Canceled), Message: "drained"}})))
		second.req.PreferBeingIdle = false
		wantTask(t, second.report(t, idle()), o)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.report(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

func TestMessagesOfFailuresHaveAPage(t *testing.T) {
	page := func(_ string, action cas.Digest) string { return "http://console/a/" + action.Hash()[:8] }
	inBubble(t, func(c *buildbarn.ServerConfig) { c.Page = page }, func(t *testing.T, h *head) {
		s := h.slot("anvil", "0")
		s.req.PreferBeingIdle = true
		for salt, c := range map[string]struct {
			answer *repb.ExecuteResponse
			before string
			has    bool
		}{
			"success":   {exited(0), "", false},
			"exit code": {exited(3), "", true},
			"message":   {&repb.ExecuteResponse{Status: &statuspb.Status{}, Result: &repb.ActionResult{ExitCode: 3}, Message: "denied"}, "denied\n", true},
		} {
			o := h.submit(t, salt)
			s.req.PreferBeingIdle = false
			wantTask(t, s.report(t, idle()), o)
			s.req.PreferBeingIdle = true
			wantIdle(t, s.report(t, completed(o.Action().Proto(), c.answer)))
			want := ""
			if c.has {
				want = c.before + "cloister: page: " + page("", o.Action())
			}
			expect.Equal(t, ended(t, o).Outcome.Message, want, salt)
		}
	})
}

func TestActionGivenBackThriceMayBeRetried(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		for _, name := range []string{"anvil", "bellows", "crucible"} {
			w := h.slot(name, "0")
			wantTask(t, w.report(t, idle()), o)
			w.req.PreferBeingIdle = true
			wantIdle(t, w.report(t, completed(o.Action().Proto(), response.Stopped(name))))
		}
		wantFault(t, o, worker.FaultUnavailable, "anvil", "crucible", "retry")
	})
}

// TestActionWithoutSupportRunsElsewhere: an action that its worker cannot enforce runs on another, but one that a
// policy refuses does not.
func TestActionWithoutSupportRunsElsewhere(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		for _, c := range []struct {
			err  error
			text string
		}{{sandbox.ErrUnsupported, ""}, {policy.ErrRefused, policy.ErrRefused.Error()}} {
			o, first, second := h.submit(t, c.err.Error()), h.slot("anvil", "0"), h.slot("bellows", "0", "OS=linux")
			d := o.Action().Proto()
			wantTask(t, first.report(t, idle()), o)
			first.req.PreferBeingIdle = true
			refusal := response.OfFault(&worker.Fault{Kind: worker.FaultUnmet, Err: c.err}, "worker anvil")
			wantIdle(t, first.report(t, completed(d, refusal)))
			if c.text != "" {
				wantFault(t, o, worker.FaultUnmet, c.text)
				continue
			}
			wantWaiting(t, o, repb.ExecutionStage_QUEUED)
			wantTask(t, second.report(t, idle()), o)
			second.req.PreferBeingIdle = true
			wantIdle(t, second.report(t, completed(d, exited(0))))
			wantSuccess(t, o)
		}
	})
}

// TestCommandLongPastItsTimeoutRunsElsewhere since its worker cannot kill it.
func TestCommandLongPastItsTimeoutRunsElsewhere(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = durationpb.New(time.Minute) })
		d := o.Action().Proto()
		wantTask(t, w.report(t, idle()), o)
		fetching := executing(d)
		fetching.GetExecuting().ExecutionState = &remoteworkerpb.CurrentState_Executing_FetchingInputs{FetchingInputs: &emptypb.Empty{}}
		for range 300 { // the timeout does not apply
			wantCarryOn(t, w.report(t, fetching))
			time.Sleep(10 * time.Second)
		}
		for range 72 {
			wantCarryOn(t, w.report(t, executing(d)))
			time.Sleep(10 * time.Second)
		}
		wantCarryOn(t, w.report(t, executing(d)))
		time.Sleep(time.Second)
		wantIdle(t, w.report(t, executing(d)))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		wantIdle(t, w.report(t, executing(d)))
		wantTask(t, h.slot("bellows", "0").report(t, idle()), o)
	})
}

func TestLongestTimeoutDoesNotOverflow(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = &durationpb.Duration{Seconds: 315_576_000_000} })
		wantTask(t, w.report(t, idle()), o)
		for range 1000 {
			wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
			time.Sleep(10 * time.Second)
		}
	})
}

// TestTooLargeActionFails rather than ten calls of a worker.
func TestTooLargeActionFails(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		large := h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Salt = make([]byte, 5<<20) })
		next := h.submit(t, "b")
		wantTask(t, h.slot("anvil", "0").report(t, idle()), next)
		wantFault(t, large, worker.FaultInvalid, "salt")
	})
}

func TestJoiningAClosedQueueIsUnavailable(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		h.queue.Close()
		expect.Code(t, expect.Err(h.slot("anvil", "0").try(t.Context(), idle())), codes.Unavailable)
	})
}

func TestMalformedCallsAreInvalid(t *testing.T) {
	d := cas.SHA256.Sum([]byte("x")).Proto()
	property := func(name, value string) *repb.Platform_Property {
		return &repb.Platform_Property{Name: name, Value: value}
	}
	for name, row := range map[string]struct {
		change func(*syncRequest)
		want   string
	}{
		"no id":        {func(r *syncRequest) { r.WorkerId = nil }, "worker_id is empty"},
		"an empty id":  {func(r *syncRequest) { r.WorkerId = map[string]string{"": ""} }, "worker_id is empty"},
		"a long id":    {func(r *syncRequest) { r.WorkerId["x"] = strings.Repeat("x", 1<<20) }, "worker_id"},
		"line breaks":  {func(r *syncRequest) { r.WorkerId["x"] = "a\nb" }, "printable"},
		"no state":     {func(r *syncRequest) { r.CurrentState = nil }, "current state"},
		"empty state":  {func(r *syncRequest) { r.CurrentState = &remoteworkerpb.CurrentState{} }, "current state"},
		"no digest":    {func(r *syncRequest) { r.CurrentState = executing(nil) }, "no action digest"},
		"size class":   {func(r *syncRequest) { r.SizeClass = 7 }, "size_class 7"},
		"prefix":       {func(r *syncRequest) { r.InstanceNamePrefix = "a/blobs" }, "instance_name_prefix"},
		"empty prefix": {func(r *syncRequest) { r.InstanceNamePrefix = "a//b" }, "instance_name_prefix"},
		"unsorted": {func(r *syncRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("b", "1"), property("a", "1")}
		}, "not lexicographically sorted, as property a=1 should have been placed before property b=1"},
		"unsorted values": {func(r *syncRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", "2"), property("a", "1")}
		}, "not lexicographically sorted"},
		"twice": {func(r *syncRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", "1"), property("a", "1")}
		}, "not lexicographically sorted"},
		"long platform": {func(r *syncRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", strings.Repeat("x", 1<<20))}
		}, "platform"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *head) {
				w := h.slot("anvil", "0")
				w.req.CurrentState = executing(d)
				row.change(w.req)
				_, err := h.Synchronize(t.Context(), w.req)
				expect.That(t, status.Code(err) == codes.InvalidArgument && strings.Contains(err.Error(), row.want),
					"got %.300v, want INVALID_ARGUMENT with %q", err, row.want)
				if text := h.log.String(); strings.Contains(text, "joined") {
					t.Errorf("log is\n%s, want no worker that joined", text)
				}
			})
		})
	}
}

func TestWorkerWithOtherPropertiesIsANewOne(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		wantTask(t, h.slot("anvil", "0").report(t, idle()), o)
		w := h.slot("anvil", "0", "OSFamily=linux")
		wantIdle(t, w.report(t, executing(o.Action().Proto())))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
	})
}

func TestTwoIDsOfOneSlotAreRefused(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, idle()))
		w.req.WorkerId = map[string]string{"hostname": "anvil", "thread": "0"}
		if _, err := w.try(t.Context(), idle()); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "anvil") {
			t.Errorf("got %v, want FAILED_PRECONDITION", err)
		}
	})
}

// of sets the store of the slot's worker.
func (s *slot) of(store string) *slot {
	s.req.WorkerId["store"] = store
	return s
}

// TestSecondProcessOfOneNameIsRefused while the first may be alive, and accepted later. A restarted process, with the
// same store, is the first.
func TestSecondProcessOfOneNameIsRefused(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		d := o.Action().Proto()
		first, second := h.slot("anvil", "1").of("a1"), h.slot("anvil", "1").of("b2")
		refused := func(when string, want ...string) {
			t.Helper()
			_, err := second.try(t.Context(), idle())
			must.Be(t, status.Code(err) == codes.FailedPrecondition, "%s: got %v, want FAILED_PRECONDITION", when, err)
			expect.Texts(t, err.Error(), append(want, "anvil", "its own name"), "%s", when)
		}
		wantTask(t, first.report(t, idle()), o)
		time.Sleep(3 * time.Second)
		refused("while the first executes", "3s ago")
		wantCarryOn(t, first.report(t, executing(d)))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.report(t, completed(d, exited(0))))
		wantSuccess(t, o)

		first.req.PreferBeingIdle = false
		waits, cancel := context.WithCancel(t.Context())
		over := make(chan error, 1)
		go func() {
			_, err := first.try(waits, idle())
			over <- err
		}()
		synctest.Wait()
		refused("while the first waits", "calling now")
		if w := h.queue.Workers(); len(w) != 1 || w[0].Name != "anvil" || len(w[0].Slots) != 1 || w[0].Slots[0].Name != "1" {
			t.Errorf("Workers = %+v, want slot 1 of anvil", w)
		}
		cancel()
		<-over
		synctest.Wait()
		time.Sleep(10 * time.Second) // the longest gap between two calls of a Client
		refused("between two calls of the first", "10s ago")
		time.Sleep(5 * time.Second)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.report(t, idle())) // the first has left without an action
		if s := h.queue.Stats(); s.Lost != 0 || s.Failed != 0 {
			t.Errorf("Stats = %+v, want nothing lost", s)
		}
	})
	t.Run("killed", func(t *testing.T) {
		inBubble(t, nil, func(t *testing.T, h *head) {
			o := h.submit(t, "a")
			wantTask(t, h.slot("anvil", "1").of("a1").report(t, idle()), o)
			second := h.slot("anvil", "1").of("b2")
			if _, err := second.try(t.Context(), idle()); status.Code(err) != codes.FailedPrecondition {
				t.Fatal(err)
			}
			time.Sleep(time.Minute + time.Second)
			wantTask(t, second.report(t, idle()), o)
		})
	})
	t.Run("restarted", func(t *testing.T) {
		inBubble(t, nil, func(t *testing.T, h *head) {
			o := h.submit(t, "a")
			w := h.slot("anvil", "1").of("a1")
			wantTask(t, w.report(t, idle()), o)
			wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
			wantTask(t, w.report(t, idle()), o) // lost, and assigned again
		})
	})
}

// TestWorkerIsEndingUntilItReportsIdle after the order to kill an action: one of an earlier head, or a cancelled one.
func TestWorkerIsEndingUntilItReportsIdle(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "1")
		ending := func() bool {
			t.Helper()
			all := h.queue.Workers()
			must.Be(t, len(all) == 1 && len(all[0].Slots) == 1, "Workers = %+v, want one slot", all)
			return !all[0].Slots[0].Ending.IsZero()
		}
		old := h.put(t, cas.SHA256, "action of an earlier head")
		wantIdle(t, w.report(t, executing(old)))
		expect.That(t, ending(), "not Ending with the action of an earlier head")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, idle()))
		expect.That(t, !ending(), "Ending although it reported idle")
		w.req.PreferBeingIdle = false
		o := h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
		expect.That(t, !ending(), "Ending with its assigned action")
		o.Cancel("enough")
		synctest.Wait()
		wantIdle(t, w.report(t, executing(o.Action().Proto())))
		expect.That(t, ending(), "not Ending with a cancelled action")
		next := h.submit(t, "b")
		wantTask(t, w.report(t, idle()), next)
		expect.That(t, !ending(), "Ending with its next action")
	})
}

func TestWorkerIsNotEndingWhileTheServerIsNotReady(t *testing.T) {
	unready := func(c *buildbarn.ServerConfig) {
		c.Ready = func() error { return errors.New("upstream grpc://store is down") }
	}
	inBubble(t, unready, func(t *testing.T, h *head) {
		w := h.slot("anvil", "1")
		wantIdle(t, w.report(t, executing(h.put(t, cas.SHA256, "action of an earlier head"))))
		waits, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() {
			defer close(over)
			_, _ = w.try(waits, idle())
		}()
		synctest.Wait()
		if all := h.queue.Workers(); len(all) != 1 || len(all[0].Slots) != 1 || !all[0].Slots[0].Ending.IsZero() {
			t.Errorf("Workers = %+v, want one slot that is not Ending", all)
		}
		cancel()
		<-over
	})
}

// TestStalledTransferRunsElsewhere after an hour. It does not count against the action, which the client may retry.
func TestStalledTransferRunsElsewhere(t *testing.T) {
	for name, state := range map[string]func(*remoteworkerpb.CurrentState_Executing){
		"fetching": func(e *remoteworkerpb.CurrentState_Executing) {
			e.ExecutionState = &remoteworkerpb.CurrentState_Executing_FetchingInputs{FetchingInputs: &emptypb.Empty{}}
		},
		"uploading": func(e *remoteworkerpb.CurrentState_Executing) {
			e.ExecutionState = &remoteworkerpb.CurrentState_Executing_UploadingOutputs{UploadingOutputs: &emptypb.Empty{}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *head) {
				o := h.submit(t, "a")
				stalled := executing(o.Action().Proto())
				state(stalled.GetExecuting())
				for _, machine := range []string{"anvil", "bellows", "chisel"} {
					w := h.slot(machine, "0")
					wantTask(t, w.report(t, idle()), o)
					// The time of an earlier stage does not count.
					wantCarryOn(t, w.report(t, executing(o.Action().Proto())))
					began := time.Now()
					for time.Since(began) < time.Hour {
						wantCarryOn(t, w.report(t, stalled))
						time.Sleep(10 * time.Second)
					}
					wantIdle(t, w.report(t, stalled))
				}
				s := ended(t, o)
				if s.Fault == nil || s.Fault.Kind != worker.FaultUnavailable || !strings.Contains(s.Fault.Error(), "worker chisel (the worker reports that it has been "+name+" for 1h0m0s)") {
					t.Errorf("fault is %v, want UNAVAILABLE with the stall", s.Fault)
				}
			})
		})
	}
}

// TestNoActionIsAssignedWhileNotReady to waiting or new workers. Actions that wait too long end as UNAVAILABLE.
func TestNoActionIsAssignedWhileNotReady(t *testing.T) {
	var ready atomic.Bool
	ready.Store(true)
	change := func(c *buildbarn.ServerConfig) {
		c.Ready = func() error {
			if ready.Load() {
				return nil
			}
			return errors.New("upstream grpc://store is down")
		}
	}
	inBubble(t, change, func(t *testing.T, h *head) {
		got := make(chan *remoteworkerpb.SynchronizeResponse, 2)
		for _, name := range []string{"0", "1"} {
			go func() {
				for {
					r, err := h.slot("anvil", name).try(t.Context(), idle())
					if err != nil || r.GetDesiredState().GetExecuting() != nil {
						got <- r
						return
					}
				}
			}()
		}
		time.Sleep(5 * time.Second)
		ready.Store(false)
		time.Sleep(2 * time.Second)
		first := h.submit(t, "a")
		time.Sleep(4 * time.Minute)
		second := h.submit(t, "b")
		wantWaiting(t, first, repb.ExecutionStage_QUEUED)
		time.Sleep(61 * time.Second)
		if s := ended(t, first); s.Fault == nil || s.Fault.Kind != worker.FaultUnavailable || !strings.Contains(s.Fault.Error(), "upstream grpc://store is down") {
			t.Errorf("after five minutes: state is %+v, want UNAVAILABLE with the reason", s)
		}
		wantWaiting(t, second, repb.ExecutionStage_QUEUED)
		ready.Store(true)
		wantTask(t, <-got, second)
		third := h.submit(t, "c")
		wantTask(t, <-got, third)
	})
}

// TestWorkerIDBelongsToItsCaller until the worker is lost, so that nobody takes actions of an instance he has no right
// to.
func TestWorkerIDBelongsToItsCaller(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) {
		c.Caller = func(ctx context.Context) string {
			return strings.Join(metadata.ValueFromIncomingContext(ctx, "caller"), "")
		}
	}, func(t *testing.T, h *head) {
		as := func(who string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), "caller", who) }
		w, thief := h.slot("anvil", "0"), h.slot("anvil", "0")
		thief.req.InstanceNamePrefix = "elsewhere"
		o := h.submit(t, "a")
		r := must.Get(w.try(as("smith"), idle()))(t)
		wantTask(t, r, o)
		for _, prefix := range []string{"elsewhere", ""} {
			thief.req.InstanceNamePrefix = prefix
			if _, err := thief.try(as("thief"), idle()); status.Code(err) != codes.PermissionDenied || strings.Contains(err.Error(), "smith") {
				t.Errorf("another caller with prefix %q: %v, want PERMISSION_DENIED without the owner's name", prefix, err)
			}
		}
		r = must.Get(w.try(as("smith"), executing(o.Action().Proto())))(t)
		wantCarryOn(t, r)
		w.req.PreferBeingIdle = true
		r = must.Get(w.try(as("smith"), completed(o.Action().Proto(), exited(0))))(t)
		wantIdle(t, r)
		wantSuccess(t, o)
		time.Sleep(time.Minute + time.Second)
		thief.req.PreferBeingIdle = true
		expect.Error(t, expect.Err(thief.try(as("thief"), idle())), nil, "worker ID of a lost worker")
	})
}

// TestRefusedWorkerTakesNothing: an action that is assigned at the moment when the server ends the call is free again,
// since its worker will not call for it.
func TestRefusedWorkerTakesNothing(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that the worker does not notice the end before the action is there
	for range 20 {
		inBubble(t, nil, func(t *testing.T, h *head) {
			ctx, refuse := context.WithCancelCause(t.Context())
			req := h.slot("anvil", "0").req
			req.CurrentState = idle()
			answered := make(chan error, 1)
			go func() {
				r, err := h.server.Synchronize(ctx, req)
				if err == nil {
					err = fmt.Errorf("no error but the state %v", r.DesiredState)
				}
				answered <- err
			}()
			synctest.Wait()
			o := h.submit(t, "a", func(*queue.Request, *repb.Action) { refuse(errors.New("the right is gone")) })
			expect.Code(t, <-answered, codes.Canceled, "the refused worker")
			wantTask(t, h.slot("bench", "0").report(t, idle()), o)
		})
	}
}

// TestToolchainIsRequired: a worker without the required toolchain is refused before it takes an action, also after its
// toolchain has changed, and a result of another toolchain is discarded.
func TestToolchainIsRequired(t *testing.T) {
	require := func(c *buildbarn.ServerConfig) { c.Toolchain = "gcc 14" }
	inBubble(t, require, func(t *testing.T, h *head) {
		with := func(toolchain string) context.Context {
			return metadata.AppendToOutgoingContext(t.Context(), "cloister-toolchain", toolchain)
		}
		anvil := h.slot("anvil", "0")
		for ctx, want := range map[context.Context]string{
			t.Context(): "states no fingerprint of its toolchain, and this server requires gcc 14", with("gcc 15"): `has the toolchain "gcc 15"`,
		} {
			if _, err := anvil.try(ctx, idle()); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want INVALID_ARGUMENT with %q", err, want)
			}
		}
		call := func(toolchain string, state *remoteworkerpb.CurrentState) *remoteworkerpb.SynchronizeResponse {
			t.Helper()
			return must.Get(anvil.try(with(toolchain), state))(t)
		}
		first, second := h.submit(t, "a"), h.submit(t, "b")
		wantTask(t, call("gcc 14", idle()), first)
		wantCarryOn(t, call("gcc 15", executing(first.Action().Proto())))
		wantIdle(t, call("gcc 15", completed(first.Action().Proto(), exited(0))))
		wantSuccess(t, first)
		wantWaiting(t, second, repb.ExecutionStage_QUEUED)
		wantTask(t, call("gcc 14", idle()), second)
		changed := exited(0)
		aux := must.Get(anypb.New(&cloisterpb.Execution{Toolchain: "gcc 15"}))(t)
		changed.Result.ExecutionMetadata = &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}
		wantIdle(t, call("gcc 15", completed(second.Action().Proto(), changed)))
		wantFault(t, second, worker.FaultUnavailable, `the toolchain of the worker changed to "gcc 15"`)
	})
}

// TestResultsAreOfTheOfferedSandbox: a worker that offers a sandbox returns no result of another one.
func TestResultsAreOfTheOfferedSandbox(t *testing.T) {
	for made, want := range map[string]string{
		"gvisor": "", "namespace": `it was made in the sandbox "namespace", and the worker offers gvisor`,
		"": `it was made in the sandbox "", and the worker offers gvisor`,
	} {
		inBubble(t, nil, func(t *testing.T, h *head) {
			anvil, o := h.slot("anvil", "0", "cloister-sandbox=gvisor"), h.submit(t, "a")
			wantTask(t, anvil.report(t, idle()), o)
			result := exited(0)
			aux := must.Get(anypb.New(&cloisterpb.Execution{Sandbox: &cloisterpb.Sandbox{Backend: made}}))(t)
			result.Result.ExecutionMetadata = &repb.ExecutedActionMetadata{AuxiliaryMetadata: []*anypb.Any{aux}}
			wantIdle(t, anvil.report(t, completed(o.Action().Proto(), result)))
			if want == "" {
				wantSuccess(t, o)
			} else {
				wantFault(t, o, worker.FaultInternal, want)
			}
		})
	}
}

func TestActionMissingFromTheStoreIsReported(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o, next := h.submit(t, "a"), h.submit(t, "b")
		h.in.Store.(*castest.Memory).Delete(o.Action())
		wantTask(t, h.slot("anvil", "0").report(t, idle()), next)
		if f := wantFault(t, o, worker.FaultMissing); len(f.Blobs) != 1 || f.Blobs[0] != o.Action() {
			t.Errorf("blobs are %v, want the action", f.Blobs)
		}
	})
}

// TestResultsAreChecked before they complete the operation: well formed, and all blobs in the store.
func TestResultsAreChecked(t *testing.T) {
	missing := func(d cas.Digest) *statuspb.Status {
		st, err := status.New(codes.FailedPrecondition, "inputs are missing").WithDetails(&errdetails.PreconditionFailure{
			Violations: []*errdetails.PreconditionFailure_Violation{{Type: "MISSING", Subject: fmt.Sprintf("blobs/%s/%d", d.Hash(), d.Size())}},
		})
		must.Succeed(t, err)
		return st.Proto()
	}
	absent := cas.SHA256.Sum([]byte("absent"))
	output := func(d *repb.Digest) *repb.ExecuteResponse {
		r := exited(0)
		r.Result.OutputFiles = []*repb.OutputFile{{Path: "o", Digest: d}}
		return r
	}
	with := func(change func(r *repb.ExecuteResponse, here *repb.Digest)) func(t *testing.T, h *head) *repb.ExecuteResponse {
		return func(t *testing.T, h *head) *repb.ExecuteResponse {
			r := exited(0)
			change(r, h.put(t, cas.SHA256, "here"))
			return r
		}
	}
	large := exited(0)
	large.Result.StderrRaw = make([]byte, worker.MaxResult)
	for name, row := range map[string]struct {
		answer func(t *testing.T, h *head) *repb.ExecuteResponse
		kind   worker.FaultKind // 0: an outcome
		want   string
	}{
		"success":   {answer: func(t *testing.T, h *head) *repb.ExecuteResponse { return output(h.put(t, cas.SHA256, "here")) }},
		"exit code": {answer: func(*testing.T, *head) *repb.ExecuteResponse { return exited(1) }},
		"nothing":   {func(*testing.T, *head) *repb.ExecuteResponse { return &repb.ExecuteResponse{} }, worker.FaultInternal, "no result"},
		"absent output": {
			func(*testing.T, *head) *repb.ExecuteResponse { return output(absent.Proto()) },
			worker.FaultUnavailable, `result of worker {"slot":"0","worker":"anvil"} rejected: 1 of its 1 blobs are absent`,
		},
		"no digest": {func(*testing.T, *head) *repb.ExecuteResponse { return output(nil) }, worker.FaultInternal, "rejected"},
		"no hash":   {func(*testing.T, *head) *repb.ExecuteResponse { return output(&repb.Digest{Hash: "garbage"}) }, worker.FaultInternal, "rejected"},
		"outputs of all kinds": {answer: with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "d/o", Digest: here, Contents: []byte("here")}}
			r.Result.OutputSymlinks = []*repb.OutputSymlink{{Path: "l", Target: "../elsewhere"}}
			r.Result.StdoutRaw, r.Result.StdoutDigest, r.Result.StderrRaw = []byte("here"), here, []byte("no digest")
		})},
		"path that leads out": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "d/../../../home/user/.profile", Digest: here}}
		}), worker.FaultInternal, "not a plain relative path"},
		"path of the root": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputSymlinks = []*repb.OutputSymlink{{Path: "/etc/passwd", Target: "x"}}
		}), worker.FaultInternal, "not a plain relative path"},
		"directory of nothing": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputDirectories = []*repb.OutputDirectory{{Path: "d"}}
		}), worker.FaultInternal, "has no digest"},
		"other contents": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "o", Digest: here, Contents: []byte("there")}}
		}), worker.FaultInternal, "rejected"},
		"other output": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.StdoutDigest, r.Result.StdoutRaw = here, []byte("there")
		}), worker.FaultInternal, "stdout"},
		"absent log": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.ServerLogs = map[string]*repb.LogFile{worker.AuditLogName: {Digest: absent.Proto()}}
		}), worker.FaultUnavailable, "are absent"},
		"too large":   {func(*testing.T, *head) *repb.ExecuteResponse { return large }, worker.FaultInternal, "bytes"},
		"unavailable": {func(*testing.T, *head) *repb.ExecuteResponse { return unavailable("the disk is full") }, worker.FaultUnavailable, "the disk is full"},
		"missing":     {func(*testing.T, *head) *repb.ExecuteResponse { return &repb.ExecuteResponse{Status: missing(absent)} }, worker.FaultMissing, "inputs are missing"},
		"unknown code": {func(*testing.T, *head) *repb.ExecuteResponse {
			return &repb.ExecuteResponse{Status: &statuspb.Status{Code: 99}}
		}, worker.FaultInternal, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *head) {
				w, o := h.slot("anvil", "0"), h.submit(t, "a")
				wantTask(t, w.report(t, idle()), o)
				w.req.PreferBeingIdle = true
				answer := row.answer(t, h)
				wantIdle(t, w.report(t, completed(o.Action().Proto(), answer)))
				if row.kind != 0 {
					wantFault(t, o, row.kind, row.want)
					return
				}
				s := ended(t, o)
				if s.Fault != nil {
					t.Fatal(s.Fault)
				}
				if diff := cmp.Diff(answer.Result, s.Outcome.Result, protocmp.Transform()); diff != "" || s.Outcome.Cached {
					t.Errorf("-want +got\n%s", diff)
				}
			})
		})
	}
}

// unavailable returns the response of a worker that could not execute.
func unavailable(text string) *repb.ExecuteResponse {
	return &repb.ExecuteResponse{Status: &statuspb.Status{Code: int32(codes.Unavailable), Message: text}}
}

// TestWorkerTakesInstancesBelowItsPrefix and receives the rest of the name.
func TestWorkerTakesInstancesBelowItsPrefix(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) {
		one, _ := c.Instances("")
		c.Instances = func(string) (*cas.Instance, error) { return one, nil } // one store for every instance
	}, func(t *testing.T, h *head) {
		in := func(name string) func(*queue.Request, *repb.Action) {
			return func(r *queue.Request, _ *repb.Action) { r.Task.Instance = name }
		}
		w := h.slot("anvil", "0")
		w.req.InstanceNamePrefix = "team"
		other := h.submit(t, "a", in("teams"))
		for instance, suffix := range map[string]string{"team": "", "team/x/y": "x/y"} {
			o := h.submit(t, instance, in(instance))
			w.req.PreferBeingIdle = false
			got := wantTask(t, w.report(t, idle()), o)
			expect.Equal(t, got.InstanceNameSuffix, suffix, "suffix of %s", instance)
			w.req.PreferBeingIdle = true
			wantIdle(t, w.report(t, completed(o.Action().Proto(), exited(0))))
			wantSuccess(t, o)
		}
		all := h.slot("bellows", "0")
		got := wantTask(t, all.report(t, idle()), other)
		expect.Equal(t, got.InstanceNameSuffix, "teams", "suffix without a prefix")
	})
}

func TestWorkerTakesActionsThatItsPropertiesMeet(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		demanding := func(name, value string) func(*queue.Request, *repb.Action) {
			return func(r *queue.Request, _ *repb.Action) { r.Demands = []worker.Property{{Name: name, Value: value}} }
		}
		a := h.submit(t, "a", demanding("ISA", "arm64"))
		b := h.submit(t, "b", demanding("ISA", "amd64"))
		w := h.slot("anvil", "0", "ISA=amd64", "ISA=i386", "OSFamily=linux")
		wantTask(t, w.report(t, idle()), b)
		wantTask(t, h.slot("bellows", "0", "ISA=arm64").report(t, idle()), a)
	})
}

func TestDigestFunctionOfTheActionIsUsed(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a", func(r *queue.Request, _ *repb.Action) { r.Task.Action = cas.BLAKE3.Sum(nil) })
		w := h.slot("anvil", "0")
		expect.Equal(t, wantTask(t, w.report(t, idle()), o).DigestFunction, repb.DigestFunction_BLAKE3,
			"digest function")
		r := exited(0)
		r.Result.StdoutDigest = h.put(t, cas.BLAKE3, "out")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, completed(o.Action().Proto(), r)))
		wantSuccess(t, o)
	})
}

func TestResultIsRejectedWhenTheStoreFails(t *testing.T) {
	var flaky *faulty.Store
	inBubble(t, func(c *buildbarn.ServerConfig) {
		in, _ := c.Instances("")
		flaky = faulty.New(in.Store, in.Actions)
		c.Instances = func(string) (*cas.Instance, error) {
			return &cas.Instance{Store: flaky, Actions: flaky, Functions: in.Functions}, nil
		}
	}, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.report(t, idle()), o)
		flaky.Fail(cas.ErrUnavailable, faulty.Missing)
		w.req.PreferBeingIdle = true
		r := exited(0)
		r.Result.StdoutDigest = h.put(t, cas.SHA256, "out")
		wantIdle(t, w.report(t, completed(o.Action().Proto(), r)))
		wantFault(t, o, worker.FaultUnavailable, "anvil")
	})
}

func TestCloseEndsCalls(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		var calling sync.WaitGroup
		calling.Go(func() {
			expect.Code(t, expect.Err(h.slot("anvil", "0").try(t.Context(), idle())), codes.Unavailable, "waiting call")
		})
		synctest.Wait()
		began := time.Now()
		h.server.Close()
		calling.Wait()
		expect.Equal(t, time.Since(began), 0, "waiting call ended after")
		expect.Code(t, expect.Err(h.slot("anvil", "1").try(t.Context(), idle())), codes.Unavailable, "later call")
	})
}

// TestDrainWaitsForWorkers checks that actions still running at the end of the drain fail as UNAVAILABLE and are
// killed.
func TestDrainWaitsForWorkers(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second := h.slot("anvil", "0"), h.slot("anvil", "1")
		quick, slow := h.submit(t, "quick"), h.submit(t, "slow")
		wantTask(t, first.report(t, idle()), quick)
		wantTask(t, second.report(t, idle()), slow)
		var draining sync.WaitGroup
		draining.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			expect.That(t, h.queue.Drain(ctx) != nil, "Drain succeeded, want an error")
		})
		time.Sleep(10 * time.Second)
		wantCarryOn(t, second.report(t, executing(slow.Action().Proto())))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.report(t, completed(quick.Action().Proto(), exited(0))))
		wantSuccess(t, quick)
		draining.Wait()
		wantFault(t, slow, worker.FaultUnavailable)
		wantIdle(t, second.report(t, executing(slow.Action().Proto())))
	})
}

func TestDrainedWorkerGetsNoActions(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.report(t, idle()))
		w.req.PreferBeingIdle = false
		h.queue.DrainWorker("anvil", "disk")
		o := h.submit(t, "a")
		wantIdle(t, w.report(t, idle()))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		h.queue.UndrainWorker("anvil")
		wantTask(t, w.report(t, idle()), o)
	})
}

func TestRegisterNamesTheMissingField(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		for want, c := range map[string]buildbarn.ServerConfig{
			"ServerConfig.Queue": {Instances: castest.Instances()}, "ServerConfig.Instances": {Queue: h.queue},
		} {
			expect.Message(t, expect.Err(buildbarn.Register(grpc.NewServer(), c)), want)
		}
	})
}
