// SPDX-License-Identifier: Apache-2.0

package buildbarn_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/response"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A head is a Server with its queue, and a client of it. It lives in a bubble, where time passes only while all wait.
type head struct {
	remoteworkerpb.OperationQueueClient
	server *buildbarn.Server
	queue  *queue.Queue
	in     *cas.Instance
	log    *buffer
}

// buffer is what a test reads of a log.
type buffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// inBubble runs a test of a head; change may be nil.
func inBubble(t *testing.T, change func(*buildbarn.ServerConfig), test func(t *testing.T, h *head)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &head{log: &buffer{}}
		instances := castest.Instances()
		var err error
		if h.in, err = instances(""); err != nil {
			t.Fatal(err)
		}
		h.queue = queue.New(queue.Config{Head: true})
		defer func() { h.queue.Close() }()
		c := buildbarn.ServerConfig{Queue: h.queue, Instances: instances, Log: slog.New(slog.NewTextHandler(h.log, nil))}
		if change != nil {
			change(&c)
		}
		h.queue = c.Queue
		listener, server := bufconn.Listen(1<<20), grpc.NewServer()
		h.server = buildbarn.Register(server, c)
		var serving sync.WaitGroup
		serving.Go(func() { _ = server.Serve(listener) })
		conn, err := grpc.NewClient("passthrough:///head", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
		if err != nil {
			t.Fatal(err)
		}
		h.OperationQueueClient = remoteworkerpb.NewOperationQueueClient(conn)
		test(t, h)
		h.server.Close()
		conn.Close()
		server.Stop()
		serving.Wait()
	})
}

// submit has an action executed, which its salt makes different from others.
func (h *head) submit(t *testing.T, salt string, change ...func(*queue.Request, *repb.Action)) *queue.Operation {
	t.Helper()
	a := &repb.Action{Salt: []byte(salt)}
	r := queue.Request{}
	for _, c := range change {
		c(&r, a)
	}
	in, err := h.in, error(nil)
	fn := cas.SHA256
	if r.Task.Action.Function() == cas.BLAKE3 {
		fn = cas.BLAKE3
	}
	if r.Task.Action, err = cas.PutProto(t.Context(), in.Store, fn, a); err != nil {
		t.Fatal(err)
	}
	o, err := h.queue.Submit(r)
	if err != nil {
		t.Fatal(err)
	}
	// Somebody waits for it, as long as the test goes on.
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
	d, err := cas.PutBytes(t.Context(), h.in.Store, fn, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d.Proto()
}

// A slot is a worker of the test's: what it sends each time.
type slot struct {
	h   *head
	req *remoteworkerpb.SynchronizeRequest
}

// slot returns a slot of a machine, which offers properties NAME=VALUE.
func (h *head) slot(machine, name string, properties ...string) *slot {
	p := &repb.Platform{}
	for _, text := range properties {
		k, v, _ := strings.Cut(text, "=")
		p.Properties = append(p.Properties, &repb.Platform_Property{Name: k, Value: v})
	}
	return &slot{h, &remoteworkerpb.SynchronizeRequest{WorkerId: map[string]string{"worker": machine, "slot": name}, Platform: p}}
}

// say synchronizes in a state, and returns what is desired.
func (s *slot) say(t *testing.T, state *remoteworkerpb.CurrentState) *remoteworkerpb.SynchronizeResponse {
	t.Helper()
	r, err := s.try(t.Context(), state)
	if err != nil {
		t.Fatal(err)
	}
	return r
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

// exited is the response of an action that ended with a code.
func exited(code int32) *repb.ExecuteResponse {
	return &repb.ExecuteResponse{Status: &statuspb.Status{}, Result: &repb.ActionResult{ExitCode: code}}
}

// wantTask returns what a response says to execute, which must be the action of o.
func wantTask(t *testing.T, r *remoteworkerpb.SynchronizeResponse, o *queue.Operation) *remoteworkerpb.DesiredState_Executing {
	t.Helper()
	e := r.GetDesiredState().GetExecuting()
	if !proto.Equal(e.GetActionDigest(), o.Action().Proto()) {
		t.Fatalf("desired is %v, want the execution of %v", r.DesiredState, o.Action())
	}
	return e
}

func wantIdle(t *testing.T, r *remoteworkerpb.SynchronizeResponse) {
	t.Helper()
	if r.GetDesiredState().GetIdle() == nil {
		t.Fatalf("desired is %v, want idle", r.DesiredState)
	}
	if at := r.NextSynchronizationAt.AsTime(); at.After(time.Now()) {
		t.Errorf("an idle worker is to call at %v, want at once", at)
	}
}

func wantCarryOn(t *testing.T, r *remoteworkerpb.SynchronizeResponse) {
	t.Helper()
	if r.DesiredState != nil {
		t.Fatalf("desired is %v, want nothing", r.DesiredState)
	}
}

// ended returns how o has ended, once all that goes on has come to rest.
func ended(t *testing.T, o *queue.Operation) queue.State {
	t.Helper()
	synctest.Wait()
	s := o.State()
	if s.Stage != repb.ExecutionStage_COMPLETED {
		t.Fatalf("the operation is %v, want COMPLETED", s.Stage)
	}
	return s
}

func wantSuccess(t *testing.T, o *queue.Operation) {
	t.Helper()
	if s := ended(t, o); s.Fault != nil || s.Outcome.Result.ExitCode != 0 {
		t.Errorf("the operation ended with %v, %v", s.Outcome, s.Fault)
	}
}

func wantFault(t *testing.T, o *queue.Operation, k worker.Kind, texts ...string) *worker.Fault {
	t.Helper()
	s := ended(t, o)
	if s.Fault == nil || s.Fault.Kind != k {
		t.Fatalf("the operation ended with %v, %v; want a fault of kind %d", s.Outcome, s.Fault, k)
	}
	for _, text := range texts {
		if !strings.Contains(s.Fault.Error(), text) {
			t.Errorf("the fault does not say %q: %v", text, s.Fault)
		}
	}
	return s.Fault
}

func wantWaiting(t *testing.T, o *queue.Operation, stage repb.ExecutionStage_Value) {
	t.Helper()
	synctest.Wait()
	if s := o.State(); s.Stage != stage {
		t.Errorf("the operation is %v (%v), want %v", s.Stage, s.Fault, stage)
	}
}

// TestLongPoll: a call of an idle worker waits until there is an action, and is told all that the worker needs of it.
func TestLongPoll(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		began := time.Now()
		var answer *remoteworkerpb.SynchronizeResponse
		var calling sync.WaitGroup
		w := h.slot("anvil", "0")
		calling.Go(func() {
			for answer.GetDesiredState().GetExecuting() == nil { // or the interval of an idle worker has ended
				r, err := w.try(t.Context(), idle())
				if err != nil {
					t.Error(err)
					return
				}
				answer = r
			}
		})
		time.Sleep(30 * time.Second)
		aux, err := anypb.New(&repb.Command{Arguments: []string{"anything"}})
		if err != nil {
			t.Fatal(err)
		}
		trace := map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
		o := h.submit(t, "a", func(r *queue.Request, _ *repb.Action) {
			r.Task = worker.Task{Target: "//x", Mnemonic: "M", Invocation: "i", Correlated: "c", Auxiliary: []*anypb.Any{aux}, Trace: trace}
		})
		calling.Wait()
		if waited := time.Since(began); waited != 30*time.Second {
			t.Errorf("the call took %v, want until there is an action", waited)
		}
		got := wantTask(t, answer, o)
		if next := answer.NextSynchronizationAt.AsTime().Sub(time.Now()); next != 10*time.Second {
			t.Errorf("the worker is to call again in %v, want 10s", next)
		}
		who, err := anypb.New(&repb.RequestMetadata{
			ActionId: o.Action().Hash(), TargetId: "//x", ActionMnemonic: "M", ToolInvocationId: "i", CorrelatedInvocationsId: "c",
		})
		if err != nil {
			t.Fatal(err)
		}
		want := &remoteworkerpb.DesiredState_Executing{
			ActionDigest:      o.Action().Proto(),
			Action:            &repb.Action{Salt: []byte("a"), Timeout: durationpb.New(24 * time.Hour)},
			QueuedTimestamp:   timestamppb.New(o.Info().Queued),
			AuxiliaryMetadata: []*anypb.Any{who, aux},
			W3CTraceContext:   trace,
			DigestFunction:    repb.DigestFunction_SHA256,
		}
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("-want +got\n%s", diff)
		}
	})
}

// TestTimeoutOfTheAction: a timeout that the action states is the worker's.
func TestTimeoutOfTheAction(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = durationpb.New(7 * time.Second) })
		got := wantTask(t, h.slot("anvil", "0").say(t, idle()), o)
		if d := got.Action.Timeout.AsDuration(); d != 7*time.Second {
			t.Errorf("the timeout is %v", d)
		}
	})
}

// TestIdleInterval: a call for which there is nothing ends after a random time, and the worker is to call again. While it
// calls, a worker is not lost, however long it takes.
func TestIdleInterval(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) { c.Idle, c.Silence = 5*time.Minute, time.Minute }, func(t *testing.T, h *head) {
		var times []time.Duration
		w := h.slot("anvil", "0")
		for range 20 {
			began := time.Now()
			wantIdle(t, w.say(t, idle()))
			took := time.Since(began)
			if took > 5*time.Minute {
				t.Errorf("a call took %v", took)
			}
			times = append(times, took)
		}
		short, long := times[0], times[0]
		for _, d := range times {
			short, long = min(short, d), max(long, d)
		}
		if long-short < time.Second || long < time.Minute {
			t.Errorf("calls take from %v to %v: not random", short, long)
		}
		if strings.Contains(h.log.String(), "left") {
			t.Errorf("a worker that calls was lost:\n%s", h.log)
		}
	})
}

// TestOneCallForEachID: a second call at the same time is refused, and the first goes on.
func TestOneCallForEachID(t *testing.T) {
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
			t.Errorf("a second call: %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
		defer cancel()
		if _, err := h.slot("anvil", "1").try(ctx, idle()); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a call of another slot: %v", err)
		}
		synctest.Wait() // until the server knows that it has ended
		o = h.submit(t, "a")
		close(ready)
		calling.Wait()
	})
}

// TestCallAfterOneThatWasGivenUp: a worker that ends its call to make another, as when it is told to stop while it waits, is
// answered; the call that nobody waits for is none at the same time.
func TestCallAfterOneThatWasGivenUp(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, leaving := h.slot("anvil", "0"), h.slot("anvil", "0")
		leaving.req.PreferBeingIdle = true
		for range 200 {
			ctx, cancel := context.WithCancel(t.Context())
			var calling sync.WaitGroup
			calling.Go(func() {
				if _, err := w.try(ctx, idle()); status.Code(err) != codes.Canceled {
					t.Errorf("the call that was given up: %v", err)
				}
			})
			synctest.Wait()
			cancel()
			calling.Wait()
			wantIdle(t, leaving.say(t, idle()))
		}
	})
}

// TestCarryOn: a worker that executes what it should is answered at once, with nothing, and told when to call again.
func TestCarryOn(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		for range 12 { // for two minutes, which is longer than a worker may be silent
			began := time.Now()
			r := w.say(t, executing(o.Action().Proto()))
			wantCarryOn(t, r)
			if next := r.NextSynchronizationAt.AsTime(); !next.Equal(began.Add(10 * time.Second)) {
				t.Errorf("asked at %v, to call again at %v", began, next)
			}
			wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
			time.Sleep(10 * time.Second)
		}
		wantIdle(t, w.say(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

// TestUnknownAction: a worker that executes what this server has not assigned, which may be another than it was when it
// did, is told to be idle.
func TestUnknownAction(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		other := cas.SHA256.Sum([]byte("other")).Proto()
		wantIdle(t, w.say(t, executing(other)))
		o := h.submit(t, "a")
		wantIdle(t, w.say(t, executing(other))) // rather than to be given more while it has something to kill
		r := w.say(t, completed(other, exited(1)))
		wantTask(t, r, o)
		// It has not heard that.
		wantTask(t, w.say(t, executing(other)), o)
		wantTask(t, w.say(t, completed(other, exited(1))), o)
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
		wantIdle(t, w.say(t, completed(o.Action().Proto(), exited(1)))) // once more: the answer was lost
		wantSuccess(t, o)
	})
}

// TestNeverReported: an action that a worker never says it executes is handed to it ten times, and then INTERNAL.
func TestNeverReported(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		for range 10 {
			wantTask(t, w.say(t, idle()), o)
		}
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, idle()))
		wantFault(t, o, worker.Internal, "Attempted to execute task 10 times, but it never completed. This task may cause worker",
			`{"slot":"0","worker":"anvil"}`)
	})
}

// TestStartedAgain: a worker that had begun an action and is idle now has lost it, and another executes it.
func TestStartedAgain(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, first.say(t, idle()), o)
		wantCarryOn(t, first.say(t, executing(o.Action().Proto())))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.say(t, idle()))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		wantTask(t, second.say(t, idle()), o)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.say(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

// TestCancellation: nobody waits any more, and the worker is told to be idle when it calls.
func TestCancellation(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		o.Cancel("enough")
		wantFault(t, o, worker.Cancelled, "enough")
		if s := h.queue.Stats(); s.Running != 0 {
			t.Errorf("%d actions run", s.Running)
		}
		wantIdle(t, w.say(t, executing(o.Action().Proto())))
		again := h.submit(t, "a")
		wantTask(t, w.say(t, idle()), again)
		again.Cancel("enough")
		synctest.Wait()
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, completed(again.Action().Proto(), exited(0))))
		wantFault(t, again, worker.Cancelled)
	})
}

// TestPreferBeingIdle: such a call is never given an action and never waits, whatever is queued.
func TestPreferBeingIdle(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		next := h.submit(t, "b")
		wantTask(t, w.say(t, idle()), o)
		w.req.PreferBeingIdle = true
		wantCarryOn(t, w.say(t, executing(o.Action().Proto()))) // a drain lets it finish
		began := time.Now()
		wantIdle(t, w.say(t, completed(o.Action().Proto(), exited(0))))
		wantIdle(t, w.say(t, idle()))
		if took := time.Since(began); took != 0 {
			t.Errorf("two calls took %v", took)
		}
		wantSuccess(t, o)
		wantWaiting(t, next, repb.ExecutionStage_QUEUED)
		w.req.PreferBeingIdle = false
		wantTask(t, w.say(t, idle()), next)
	})
}

// TestSilentWorker: one that is not heard of for a minute is lost, and another executes what it had. What it says later is
// not taken.
func TestSilentWorker(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		lost, other, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, lost.say(t, idle()), o)
		wantCarryOn(t, lost.say(t, executing(o.Action().Proto())))
		time.Sleep(time.Minute - time.Nanosecond)
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
		time.Sleep(time.Nanosecond)
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		if text := h.log.String(); !strings.Contains(text, "level=WARN msg=\"worker has left\" worker=anvil") || !strings.Contains(text, "not heard of for 1m0s") {
			t.Errorf("the log says\n%s", text)
		}
		wantTask(t, other.say(t, idle()), o)
		wantIdle(t, lost.say(t, executing(o.Action().Proto())))
		lost.req.PreferBeingIdle = true
		wantIdle(t, lost.say(t, completed(o.Action().Proto(), exited(1))))
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
		other.req.PreferBeingIdle = true
		wantIdle(t, other.say(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

// TestWorkersThatVanish: an action with which one worker after the other is lost is given to no more than three, and the
// client is told which these were.
func TestWorkersThatVanish(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		for _, name := range []string{"anvil", "bellows", "chisel"} {
			wantTask(t, h.slot(name, "0").say(t, idle()), o)
			time.Sleep(time.Minute)
		}
		wantFault(t, o, worker.Unmet, "anvil", "bellows", "chisel", "not heard of", o.Action().String())
	})
}

// TestCallThatWasGivenUp: a worker whose connection ends while it waits, and that never hears of the action it is given,
// gets it once more.
func TestCallThatWasGivenUp(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.try(ctx, idle()); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("a call that was given up: %v", err)
		}
		synctest.Wait()
		o := h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
	})
}

// TestCallThatComesTooLate: what a worker said in a call that it has given up, and that is looked at only after the next
// one, is not what it does now. It has not lost its action.
func TestCallThatComesTooLate(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		late := proto.CloneOf(w.req)
		late.CurrentState = idle()
		// The client's end would not send it any more.
		if _, err := h.server.Synchronize(ctx, late); status.Code(err) != codes.Canceled {
			t.Errorf("the call that was given up: %v", err)
		}
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		wantWaiting(t, o, repb.ExecutionStage_EXECUTING)
	})
}

// TestAnswerThatIsToldTwice: an answer is told again by a worker that has not heard what came of it. If what it has not heard
// is to execute the same action once more, as when a test that failed is tried again, that answer is not the one of the
// second time.
func TestAnswerThatIsToldTwice(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		answer := func(code int32, at int64) *repb.ExecuteResponse {
			r := exited(code)
			r.Result.ExecutionMetadata = &repb.ExecutedActionMetadata{WorkerStartTimestamp: &timestamppb.Timestamp{Seconds: at}}
			return r
		}
		alone := func(r *queue.Request, _ *repb.Action) { r.Alone = true }
		w, first, second := h.slot("anvil", "0"), h.submit(t, "a", alone), h.submit(t, "a", alone)
		d := first.Action().Proto()
		wantTask(t, w.say(t, idle()), first)
		wantTask(t, w.say(t, completed(d, answer(1, 10))), second)
		if s := ended(t, first); s.Outcome == nil || s.Outcome.Result.ExitCode != 1 {
			t.Errorf("the first ended with %v, %v", s.Outcome, s.Fault)
		}
		wantTask(t, w.say(t, completed(d, answer(1, 10))), second)
		wantWaiting(t, second, repb.ExecutionStage_EXECUTING)
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, completed(d, answer(0, 20))))
		wantSuccess(t, second)
	})
}

// TestSlotWhoseRunIsEnding: a worker of which an action is not wanted any more is given the next one once the end of the
// first has been told, which may take a while, and not turned away until then.
func TestSlotWhoseRunIsEnding(t *testing.T) {
	told := make(chan struct{})
	inBubble(t, func(c *buildbarn.ServerConfig) {
		c.Queue.Close()
		told = make(chan struct{})
		c.Queue = queue.New(queue.Config{Head: true, Ended: func(_ *worker.Outcome, f *worker.Fault) func(queue.Info, queue.State) {
			if f != nil && strings.Contains(f.Error(), "nobody waits") {
				<-told
			}
			return func(queue.Info, queue.State) {}
		}})
	}, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		o.Cancel("no more")
		synctest.Wait()
		wantIdle(t, w.say(t, executing(o.Action().Proto())))
		next := h.submit(t, "b")
		time.AfterFunc(time.Second, func() { close(told) })
		wantTask(t, w.say(t, idle()), next)
	})
}

// TestGaveUp: a worker that ends an action as cancelled, although nobody has asked it to, shuts down: another executes it.
func TestGaveUp(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second, o := h.slot("anvil", "0"), h.slot("bellows", "0"), h.submit(t, "a")
		wantTask(t, first.say(t, idle()), o)
		first.req.PreferBeingIdle, second.req.PreferBeingIdle = true, true
		wantIdle(t, first.say(t, completed(o.Action().Proto(), &repb.ExecuteResponse{Status: &statuspb.Status{Code: int32(codes.Canceled), Message: "drained"}})))
		second.req.PreferBeingIdle = false
		wantTask(t, second.say(t, idle()), o)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.say(t, completed(o.Action().Proto(), exited(0))))
		wantSuccess(t, o)
	})
}

// TestGaveUpThrice: workers that are stopped say nothing against the action, which clients may ask for again.
func TestGaveUpThrice(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		for _, name := range []string{"anvil", "bellows", "crucible"} {
			w := h.slot(name, "0")
			wantTask(t, w.say(t, idle()), o)
			w.req.PreferBeingIdle = true
			wantIdle(t, w.say(t, completed(o.Action().Proto(), response.Stopped(name))))
		}
		wantFault(t, o, worker.Unavailable, "anvil", "crucible", "ask again")
	})
}

// TestWorkerThatCannotEndAnAction: it says that the command runs, long after its timeout. Another executes it.
func TestWorkerThatCannotEndAnAction(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = durationpb.New(time.Minute) })
		d := o.Action().Proto()
		wantTask(t, w.say(t, idle()), o)
		fetching := executing(d)
		fetching.GetExecuting().ExecutionState = &remoteworkerpb.CurrentState_Executing_FetchingInputs{FetchingInputs: &emptypb.Empty{}}
		for range 300 { // which the timeout is not for
			wantCarryOn(t, w.say(t, fetching))
			time.Sleep(10 * time.Second)
		}
		for range 72 {
			wantCarryOn(t, w.say(t, executing(d)))
			time.Sleep(10 * time.Second)
		}
		wantCarryOn(t, w.say(t, executing(d)))
		time.Sleep(time.Second)
		wantIdle(t, w.say(t, executing(d)))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		wantIdle(t, w.say(t, executing(d)))
		wantTask(t, h.slot("bellows", "0").say(t, idle()), o)
	})
}

// TestTimeoutWithoutEnd: the longest timeout that can be written is not over soon.
func TestTimeoutWithoutEnd(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Timeout = &durationpb.Duration{Seconds: 315_576_000_000} })
		wantTask(t, w.say(t, idle()), o)
		for range 1000 {
			wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
			time.Sleep(10 * time.Second)
		}
	})
}

// TestActionThatNoWorkerCanBeTold: it fails, rather than ten calls of a worker one after the other.
func TestActionThatNoWorkerCanBeTold(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		large := h.submit(t, "a", func(_ *queue.Request, a *repb.Action) { a.Salt = make([]byte, 5<<20) })
		next := h.submit(t, "b")
		wantTask(t, h.slot("anvil", "0").say(t, idle()), next)
		wantFault(t, large, worker.Invalid, "salt")
	})
}

// TestJoinAtTheEnd: a worker that comes when the queue has ended, and the server not yet, is to try again; nothing is wrong
// with it.
func TestJoinAtTheEnd(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		h.queue.Close()
		if _, err := h.slot("anvil", "0").try(t.Context(), idle()); status.Code(err) != codes.Unavailable {
			t.Errorf("got %v, want UNAVAILABLE", err)
		}
	})
}

// TestMalformedCalls are INVALID_ARGUMENT and say what is wrong, and nobody joins by one.
func TestMalformedCalls(t *testing.T) {
	d := cas.SHA256.Sum([]byte("x")).Proto()
	property := func(name, value string) *repb.Platform_Property {
		return &repb.Platform_Property{Name: name, Value: value}
	}
	for name, row := range map[string]struct {
		change func(*remoteworkerpb.SynchronizeRequest)
		says   string
	}{
		"no id":        {func(r *remoteworkerpb.SynchronizeRequest) { r.WorkerId = nil }, "worker_id is empty"},
		"an empty id":  {func(r *remoteworkerpb.SynchronizeRequest) { r.WorkerId = map[string]string{"": ""} }, "worker_id is empty"},
		"a long id":    {func(r *remoteworkerpb.SynchronizeRequest) { r.WorkerId["x"] = strings.Repeat("x", 1<<20) }, "worker_id"},
		"lines in it":  {func(r *remoteworkerpb.SynchronizeRequest) { r.WorkerId["x"] = "a\nb" }, "printable"},
		"no state":     {func(r *remoteworkerpb.SynchronizeRequest) { r.CurrentState = nil }, "current state"},
		"empty state":  {func(r *remoteworkerpb.SynchronizeRequest) { r.CurrentState = &remoteworkerpb.CurrentState{} }, "current state"},
		"no digest":    {func(r *remoteworkerpb.SynchronizeRequest) { r.CurrentState = executing(nil) }, "no action digest"},
		"size class":   {func(r *remoteworkerpb.SynchronizeRequest) { r.SizeClass = 7 }, "size_class 7"},
		"prefix":       {func(r *remoteworkerpb.SynchronizeRequest) { r.InstanceNamePrefix = "a/blobs" }, "instance_name_prefix"},
		"empty prefix": {func(r *remoteworkerpb.SynchronizeRequest) { r.InstanceNamePrefix = "a//b" }, "instance_name_prefix"},
		"unsorted": {func(r *remoteworkerpb.SynchronizeRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("b", "1"), property("a", "1")}
		}, "not lexicographically sorted, as property a=1 should have been placed before property b=1"},
		"unsorted values": {func(r *remoteworkerpb.SynchronizeRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", "2"), property("a", "1")}
		}, "not lexicographically sorted"},
		"twice": {func(r *remoteworkerpb.SynchronizeRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", "1"), property("a", "1")}
		}, "not lexicographically sorted"},
		"long platform": {func(r *remoteworkerpb.SynchronizeRequest) {
			r.Platform.Properties = []*repb.Platform_Property{property("a", strings.Repeat("x", 1<<20))}
		}, "platform"},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *head) {
				w := h.slot("anvil", "0")
				w.req.CurrentState = executing(d)
				row.change(w.req)
				_, err := h.Synchronize(t.Context(), w.req)
				if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), row.says) {
					t.Errorf("got %.300v, want INVALID_ARGUMENT with %q", err, row.says)
				}
				if text := h.log.String(); strings.Contains(text, "joined") {
					t.Errorf("the log says\n%s", text)
				}
			})
		})
	}
}

// TestJoinsAgain: a worker that comes back with other properties is another, which has nothing of what the first had.
func TestJoinsAgain(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		wantTask(t, h.slot("anvil", "0").say(t, idle()), o)
		w := h.slot("anvil", "0", "OSFamily=linux")
		wantIdle(t, w.say(t, executing(o.Action().Proto())))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
	})
}

// TestTwoOfOneName: ids that differ, and name the same slot of the same machine, are a mistake of whoever wrote them.
func TestTwoOfOneName(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, idle()))
		w.req.WorkerId = map[string]string{"hostname": "anvil", "thread": "0"}
		if _, err := w.try(t.Context(), idle()); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "anvil") {
			t.Errorf("got %v", err)
		}
	})
}

// of returns the slot as one of a worker with a store.
func (s *slot) of(store string) *slot {
	s.req.WorkerId["store"] = store
	return s
}

// TestTwoProcessesOfOneName: the second is told so, while the first is there or may be, and takes no action from it; it is
// let in once that has gone. One that was started again, with the store of the first, is the first.
func TestTwoProcessesOfOneName(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a")
		d := o.Action().Proto()
		first, second := h.slot("anvil", "1").of("a1"), h.slot("anvil", "1").of("b2")
		refused := func(when string, want ...string) {
			t.Helper()
			_, err := second.try(t.Context(), idle())
			if status.Code(err) != codes.FailedPrecondition {
				t.Fatalf("%s: %v", when, err)
			}
			for _, text := range append(want, "anvil", "--name") {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%s: no %q in %v", when, text, err)
				}
			}
		}
		wantTask(t, first.say(t, idle()), o)
		time.Sleep(3 * time.Second)
		refused("while the first executes", "3s ago")
		wantCarryOn(t, first.say(t, executing(d)))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.say(t, completed(d, exited(0))))
		wantSuccess(t, o)

		first.req.PreferBeingIdle = false
		waits, cancel := context.WithCancel(t.Context())
		over := make(chan error, 1)
		go func() {
			_, err := first.try(waits, idle())
			over <- err
		}()
		synctest.Wait()
		refused("while the first waits", "waits for an action")
		if w := h.queue.Workers(); len(w) != 1 || w[0].Name != "anvil" || len(w[0].Slots) != 1 || w[0].Slots[0].Name != "1" {
			t.Errorf("the workers are %+v", w)
		}
		cancel()
		<-over
		synctest.Wait()
		time.Sleep(10 * time.Second) // as long as one of ours takes from one call to the next at most
		refused("between two calls of the first", "10s ago")
		time.Sleep(5 * time.Second)
		second.req.PreferBeingIdle = true
		wantIdle(t, second.say(t, idle())) // the first has gone, and had nothing
		if s := h.queue.Stats(); s.Lost != 0 || s.Failed != 0 {
			t.Errorf("something was lost: %+v", s)
		}
	})
	t.Run("it was killed", func(t *testing.T) {
		inBubble(t, nil, func(t *testing.T, h *head) {
			o := h.submit(t, "a")
			wantTask(t, h.slot("anvil", "1").of("a1").say(t, idle()), o)
			second := h.slot("anvil", "1").of("b2")
			if _, err := second.try(t.Context(), idle()); status.Code(err) != codes.FailedPrecondition {
				t.Fatal(err)
			}
			time.Sleep(time.Minute + time.Second)
			wantTask(t, second.say(t, idle()), o)
		})
	})
	t.Run("it was started again", func(t *testing.T) {
		inBubble(t, nil, func(t *testing.T, h *head) {
			o := h.submit(t, "a")
			w := h.slot("anvil", "1").of("a1")
			wantTask(t, w.say(t, idle()), o)
			wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
			wantTask(t, w.say(t, idle()), o) // lost, and given to it anew
		})
	})
}

// TestAMachineIsIdleOnceItExecutesNothing: also not what an earlier head gave it, or what was cancelled, until it says that it
// has ended that.
func TestAMachineIsIdleOnceItExecutesNothing(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "1")
		ending := func() bool {
			t.Helper()
			all := h.queue.Workers()
			if len(all) != 1 || len(all[0].Slots) != 1 {
				t.Fatalf("the workers are %+v", all)
			}
			return !all[0].Slots[0].Ending.IsZero()
		}
		old := h.put(t, cas.SHA256, "an action of an earlier head")
		wantIdle(t, w.say(t, executing(old)))
		if !ending() {
			t.Error("what an earlier head gave it counts for nothing")
		}
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, idle()))
		if ending() {
			t.Error("it has said that it executes nothing")
		}
		w.req.PreferBeingIdle = false
		o := h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
		if ending() {
			t.Error("what it was given is to end")
		}
		o.Cancel("nobody wants it")
		synctest.Wait()
		wantIdle(t, w.say(t, executing(o.Action().Proto())))
		if !ending() {
			t.Error("what was cancelled counts for nothing")
		}
		next := h.submit(t, "b")
		wantTask(t, w.say(t, idle()), next)
		if ending() {
			t.Error("it has taken another")
		}
	})
}

// TestAMachineIsIdleWhileNothingIsHandedOut: what it has ended counts no more, though it gets nothing else.
func TestAMachineIsIdleWhileNothingIsHandedOut(t *testing.T) {
	unready := func(c *buildbarn.ServerConfig) {
		c.Ready = func() error { return errors.New("upstream grpc://far is down") }
	}
	inBubble(t, unready, func(t *testing.T, h *head) {
		w := h.slot("anvil", "1")
		wantIdle(t, w.say(t, executing(h.put(t, cas.SHA256, "an action of an earlier head"))))
		waits, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() {
			defer close(over)
			_, _ = w.try(waits, idle())
		}()
		synctest.Wait()
		if all := h.queue.Workers(); len(all) != 1 || len(all[0].Slots) != 1 || !all[0].Slots[0].Ending.IsZero() {
			t.Errorf("it has said that it executes nothing, and the workers are %+v", all)
		}
		cancel()
		<-over
	})
}

// TestAWorkerThatDoesNotGetOn: it is believed for an hour that it fetches inputs, or stores outputs, and then another has the
// action. That is no fault of the action's: if it happens again and again, the client may ask once more.
func TestAWorkerThatDoesNotGetOn(t *testing.T) {
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
				says := executing(o.Action().Proto())
				state(says.GetExecuting())
				for _, machine := range []string{"anvil", "bellows", "chisel"} {
					w := h.slot(machine, "0")
					wantTask(t, w.say(t, idle()), o)
					// That it was fetching before does not count for what it does then.
					wantCarryOn(t, w.say(t, executing(o.Action().Proto())))
					began := time.Now()
					for time.Since(began) < time.Hour {
						wantCarryOn(t, w.say(t, says))
						time.Sleep(10 * time.Second)
					}
					wantIdle(t, w.say(t, says))
				}
				s := ended(t, o)
				if s.Fault == nil || s.Fault.Kind != worker.Unavailable || !strings.Contains(s.Fault.Error(), "worker chisel (it says that it has been "+name+" for 1h0m0s)") {
					t.Errorf("the action ended with %v", s.Fault)
				}
			})
		})
	}
}

// TestNothingIsHandedOutThatCannotBeDone: while the head is not able to, no worker gets an action, neither one that waits for
// one nor one that comes; what has waited for too long meanwhile ends so that clients ask again.
func TestNothingIsHandedOutThatCannotBeDone(t *testing.T) {
	var able atomic.Bool
	able.Store(true)
	change := func(c *buildbarn.ServerConfig) {
		c.Ready = func() error {
			if able.Load() {
				return nil
			}
			return errors.New("upstream grpc://far is down")
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
		able.Store(false)
		time.Sleep(2 * time.Second)
		first := h.submit(t, "a")
		time.Sleep(4 * time.Minute)
		second := h.submit(t, "b")
		wantWaiting(t, first, repb.ExecutionStage_QUEUED)
		time.Sleep(61 * time.Second)
		if s := ended(t, first); s.Fault == nil || s.Fault.Kind != worker.Unavailable || !strings.Contains(s.Fault.Error(), "upstream grpc://far is down") {
			t.Errorf("what has waited for five minutes ended with %+v", s)
		}
		wantWaiting(t, second, repb.ExecutionStage_QUEUED)
		able.Store(true)
		wantTask(t, <-got, second)
		third := h.submit(t, "c")
		wantTask(t, <-got, third)
	})
}

// TestAnothersWorker: who has the right to work in one instance takes no action from a worker of another one by calling
// himself the same, neither while that executes nor while it waits; it may be his once nothing is heard of it.
func TestAnothersWorker(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) {
		c.Caller = func(ctx context.Context) string {
			return strings.Join(metadata.ValueFromIncomingContext(ctx, "who"), "")
		}
	}, func(t *testing.T, h *head) {
		as := func(who string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), "who", who) }
		w, thief := h.slot("anvil", "0"), h.slot("anvil", "0")
		thief.req.InstanceNamePrefix = "elsewhere"
		o := h.submit(t, "a")
		r, err := w.try(as("smith"), idle())
		if err != nil {
			t.Fatal(err)
		}
		wantTask(t, r, o)
		for _, prefix := range []string{"elsewhere", ""} {
			thief.req.InstanceNamePrefix = prefix
			if _, err := thief.try(as("thief"), idle()); status.Code(err) != codes.PermissionDenied || strings.Contains(err.Error(), "smith") {
				t.Errorf("another caller with prefix %q: %v", prefix, err)
			}
		}
		if r, err = w.try(as("smith"), executing(o.Action().Proto())); err != nil {
			t.Fatal(err)
		}
		wantCarryOn(t, r)
		w.req.PreferBeingIdle = true
		if r, err = w.try(as("smith"), completed(o.Action().Proto(), exited(0))); err != nil {
			t.Fatal(err)
		}
		wantIdle(t, r)
		wantSuccess(t, o)
		time.Sleep(time.Minute + time.Second)
		thief.req.PreferBeingIdle = true
		if _, err := thief.try(as("thief"), idle()); err != nil {
			t.Errorf("a worker that was not heard of for long: %v", err)
		}
	})
}

// TestMissingAction: the action has gone from the store while it waited. The client is told to upload it, and the worker
// is given the next.
func TestMissingAction(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o, next := h.submit(t, "a"), h.submit(t, "b")
		h.in.Store.(*castest.Memory).Delete(o.Action())
		wantTask(t, h.slot("anvil", "0").say(t, idle()), next)
		if f := wantFault(t, o, worker.Missing); len(f.Blobs) != 1 || f.Blobs[0] != o.Action() {
			t.Errorf("the fault names %v", f.Blobs)
		}
	})
}

// TestResults: what a worker answers becomes the operation's end, if it is whole and all that it names is in the store.
func TestResults(t *testing.T) {
	missing := func(d cas.Digest) *statuspb.Status {
		st, err := status.New(codes.FailedPrecondition, "inputs are missing").WithDetails(&errdetails.PreconditionFailure{
			Violations: []*errdetails.PreconditionFailure_Violation{{Type: "MISSING", Subject: fmt.Sprintf("blobs/%s/%d", d.Hash(), d.Size())}},
		})
		if err != nil {
			t.Fatal(err)
		}
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
		kind   worker.Kind // 0 is an outcome
		says   string
	}{
		"success":   {answer: func(t *testing.T, h *head) *repb.ExecuteResponse { return output(h.put(t, cas.SHA256, "here")) }},
		"exit code": {answer: func(*testing.T, *head) *repb.ExecuteResponse { return exited(1) }},
		"nothing":   {func(*testing.T, *head) *repb.ExecuteResponse { return &repb.ExecuteResponse{} }, worker.Internal, "no result"},
		"absent output": {func(*testing.T, *head) *repb.ExecuteResponse { return output(absent.Proto()) },
			worker.Unavailable, `the result of worker {"slot":"0","worker":"anvil"} is not used: 1 of the 1 blobs that it names are absent`},
		"no digest": {func(*testing.T, *head) *repb.ExecuteResponse { return output(nil) }, worker.Internal, "is not used"},
		"no hash":   {func(*testing.T, *head) *repb.ExecuteResponse { return output(&repb.Digest{Hash: "garbage"}) }, worker.Internal, "is not used"},
		"outputs of all kinds": {answer: with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "d/o", Digest: here, Contents: []byte("here")}}
			r.Result.OutputSymlinks = []*repb.OutputSymlink{{Path: "l", Target: "../elsewhere"}}
			r.Result.StdoutRaw, r.Result.StdoutDigest, r.Result.StderrRaw = []byte("here"), here, []byte("no digest")
		})},
		"path that leads out": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "d/../../../home/user/.profile", Digest: here}}
		}), worker.Internal, "not a plain relative path"},
		"path of the root": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputSymlinks = []*repb.OutputSymlink{{Path: "/etc/passwd", Target: "x"}}
		}), worker.Internal, "not a plain relative path"},
		"directory of nothing": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputDirectories = []*repb.OutputDirectory{{Path: "d"}}
		}), worker.Internal, "has no digest"},
		"other contents": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.OutputFiles = []*repb.OutputFile{{Path: "o", Digest: here, Contents: []byte("there")}}
		}), worker.Internal, "is not used"},
		"other output": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.Result.StdoutDigest, r.Result.StdoutRaw = here, []byte("there")
		}), worker.Internal, "stdout"},
		"absent log": {with(func(r *repb.ExecuteResponse, here *repb.Digest) {
			r.ServerLogs = map[string]*repb.LogFile{worker.AuditLogName: {Digest: absent.Proto()}}
		}), worker.Unavailable, "are absent"},
		"too large":   {func(*testing.T, *head) *repb.ExecuteResponse { return large }, worker.Internal, "bytes"},
		"unavailable": {func(*testing.T, *head) *repb.ExecuteResponse { return ended14("the disk is full") }, worker.Unavailable, "the disk is full"},
		"missing":     {func(*testing.T, *head) *repb.ExecuteResponse { return &repb.ExecuteResponse{Status: missing(absent)} }, worker.Missing, "inputs are missing"},
		"unknown code": {func(*testing.T, *head) *repb.ExecuteResponse {
			return &repb.ExecuteResponse{Status: &statuspb.Status{Code: 99}}
		}, worker.Internal, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, h *head) {
				w, o := h.slot("anvil", "0"), h.submit(t, "a")
				wantTask(t, w.say(t, idle()), o)
				w.req.PreferBeingIdle = true
				answer := row.answer(t, h)
				wantIdle(t, w.say(t, completed(o.Action().Proto(), answer)))
				if row.kind != 0 {
					wantFault(t, o, row.kind, row.says)
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

// ended14 is the response of a worker that could not execute.
func ended14(text string) *repb.ExecuteResponse {
	return &repb.ExecuteResponse{Status: &statuspb.Status{Code: int32(codes.Unavailable), Message: text}}
}

// TestInstances: a worker takes the actions of its prefix and of what is below, and is told the rest of the name.
func TestInstances(t *testing.T) {
	inBubble(t, func(c *buildbarn.ServerConfig) {
		one, _ := c.Instances("")
		c.Instances = func(string) (*cas.Instance, error) { return one, nil } // of which the test's own is one
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
			if got := wantTask(t, w.say(t, idle()), o); got.InstanceNameSuffix != suffix {
				t.Errorf("the suffix of %s is %q, want %q", instance, got.InstanceNameSuffix, suffix)
			}
			w.req.PreferBeingIdle = true
			wantIdle(t, w.say(t, completed(o.Action().Proto(), exited(0))))
			wantSuccess(t, o)
		}
		all := h.slot("bellows", "0")
		if got := wantTask(t, all.say(t, idle()), other); got.InstanceNameSuffix != "teams" {
			t.Errorf("the suffix of all of teams is %q", got.InstanceNameSuffix)
		}
	})
}

// TestProperties: a worker is given an action if it has all that this demands, whatever else it has.
func TestProperties(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		demanding := func(name, value string) func(*queue.Request, *repb.Action) {
			return func(r *queue.Request, _ *repb.Action) { r.Demands = []worker.Property{{Name: name, Value: value}} }
		}
		a := h.submit(t, "a", demanding("ISA", "arm64"))
		b := h.submit(t, "b", demanding("ISA", "amd64"))
		w := h.slot("anvil", "0", "ISA=amd64", "ISA=i386", "OSFamily=linux")
		wantTask(t, w.say(t, idle()), b)
		wantTask(t, h.slot("bellows", "0", "ISA=arm64").say(t, idle()), a)
	})
}

// TestDigestFunctions: the function of the action is told, and what the result names is looked for by it.
func TestDigestFunctions(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		o := h.submit(t, "a", func(r *queue.Request, _ *repb.Action) { r.Task.Action = cas.BLAKE3.Sum(nil) })
		w := h.slot("anvil", "0")
		if got := wantTask(t, w.say(t, idle()), o); got.DigestFunction != repb.DigestFunction_BLAKE3 {
			t.Errorf("the function is %v", got.DigestFunction)
		}
		r := exited(0)
		r.Result.StdoutDigest = h.put(t, cas.BLAKE3, "out")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, completed(o.Action().Proto(), r)))
		wantSuccess(t, o)
	})
}

// TestStoreThatDoesNotAnswer: a result that cannot be held against the store is not used.
func TestStoreThatDoesNotAnswer(t *testing.T) {
	var faulty *castest.Faulty
	inBubble(t, func(c *buildbarn.ServerConfig) {
		in, _ := c.Instances("")
		faulty = castest.NewFaulty(in.Store, in.Actions)
		c.Instances = func(string) (*cas.Instance, error) {
			return &cas.Instance{Store: faulty, Actions: faulty, Functions: in.Functions}, nil
		}
	}, func(t *testing.T, h *head) {
		w, o := h.slot("anvil", "0"), h.submit(t, "a")
		wantTask(t, w.say(t, idle()), o)
		faulty.Fail(cas.ErrUnavailable, castest.Missing)
		w.req.PreferBeingIdle = true
		r := exited(0)
		r.Result.StdoutDigest = h.put(t, cas.SHA256, "out")
		wantIdle(t, w.say(t, completed(o.Action().Proto(), r)))
		wantFault(t, o, worker.Unavailable, "anvil")
	})
}

// TestClose: calls that wait end, and later ones are told to come back.
func TestClose(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		var calling sync.WaitGroup
		calling.Go(func() {
			if _, err := h.slot("anvil", "0").try(t.Context(), idle()); status.Code(err) != codes.Unavailable {
				t.Errorf("a call that waits: %v", err)
			}
		})
		synctest.Wait()
		began := time.Now()
		h.server.Close()
		calling.Wait()
		if took := time.Since(began); took != 0 {
			t.Errorf("a call that waits ends after %v", took)
		}
		if _, err := h.slot("anvil", "1").try(t.Context(), idle()); status.Code(err) != codes.Unavailable {
			t.Errorf("a call afterwards: %v", err)
		}
	})
}

// TestDrain: while the queue drains, what runs on workers runs to its end within the grace; what does not is UNAVAILABLE to
// the client, and its worker is told to be idle.
func TestDrain(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		first, second := h.slot("anvil", "0"), h.slot("anvil", "1")
		quick, slow := h.submit(t, "quick"), h.submit(t, "slow")
		wantTask(t, first.say(t, idle()), quick)
		wantTask(t, second.say(t, idle()), slow)
		var draining sync.WaitGroup
		draining.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if err := h.queue.Drain(ctx); err == nil {
				t.Error("the drain ended well")
			}
		})
		time.Sleep(10 * time.Second)
		wantCarryOn(t, second.say(t, executing(slow.Action().Proto())))
		first.req.PreferBeingIdle = true
		wantIdle(t, first.say(t, completed(quick.Action().Proto(), exited(0))))
		wantSuccess(t, quick)
		draining.Wait()
		wantFault(t, slow, worker.Unavailable)
		wantIdle(t, second.say(t, executing(slow.Action().Proto())))
	})
}

// TestDrainedWorker: one that an operator has drained is told to be idle after its interval, however much waits.
func TestDrainedWorker(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, h *head) {
		w := h.slot("anvil", "0")
		w.req.PreferBeingIdle = true
		wantIdle(t, w.say(t, idle()))
		w.req.PreferBeingIdle = false
		h.queue.DrainWorker("anvil", "disk")
		o := h.submit(t, "a")
		wantIdle(t, w.say(t, idle()))
		wantWaiting(t, o, repb.ExecutionStage_QUEUED)
		h.queue.UndrainWorker("anvil")
		wantTask(t, w.say(t, idle()), o)
	})
}
