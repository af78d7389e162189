// SPDX-License-Identifier: Apache-2.0

package buildbarn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/buildbarn"
	"github.com/cloister-build/cloister/worker/internal/response"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// A scheduler is a fake scheduler that can fail.
type scheduler struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced when a field below changes
	queue   []*remoteworkerpb.DesiredState_Executing
	has     map[string]*remoteworkerpb.DesiredState_Executing // by slot
	calling map[string]bool
	calls   []string // slot, state, and "!" for prefer_being_idle
	last    *remoteworkerpb.SynchronizeRequest
	answers []*repb.ExecuteResponse
	away    error         // of each call, if not nil
	lose    int           // number of answers to lose
	mute    bool          // never answer
	skew    time.Duration // of its clock
	fixed   func() *remoteworkerpb.SynchronizeResponse
}

func newScheduler() *scheduler {
	return &scheduler{
		changed: make(chan struct{}), has: map[string]*remoteworkerpb.DesiredState_Executing{}, calling: map[string]bool{},
	}
}

// change runs f and wakes waiting calls.
func (s *scheduler) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *scheduler) add(tasks ...*remoteworkerpb.DesiredState_Executing) {
	s.change(func() { s.queue = append(s.queue, tasks...) })
}

// get calls f with s locked.
func get[T any](s *scheduler, f func() T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f()
}

func stateName(c *remoteworkerpb.CurrentState) string {
	e := c.GetExecuting()
	if e == nil {
		return "idle"
	}
	switch e.ExecutionState.(type) {
	case *remoteworkerpb.CurrentState_Executing_Started:
		return "started"
	case *remoteworkerpb.CurrentState_Executing_FetchingInputs:
		return "fetching"
	case *remoteworkerpb.CurrentState_Executing_Running:
		return "running"
	case *remoteworkerpb.CurrentState_Executing_UploadingOutputs:
		return "uploading"
	case *remoteworkerpb.CurrentState_Executing_Completed:
		return "completed"
	}
	return "nothing"
}

// Synchronize implements the client interface. It copies messages, as gRPC does.
func (s *scheduler) Synchronize(ctx context.Context, req *remoteworkerpb.SynchronizeRequest, _ ...grpc.CallOption) (*remoteworkerpb.SynchronizeResponse, error) {
	req = proto.CloneOf(req)
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	if s.away != nil {
		return nil, s.away
	}
	if s.mute {
		s.mu.Unlock()
		<-ctx.Done()
		s.mu.Lock()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	slot := req.WorkerId["slot"]
	if s.calling[slot] {
		return nil, status.Error(codes.ResourceExhausted, "A worker with the same worker ID is already synchronizing")
	}
	s.calling[slot] = true
	defer delete(s.calling, slot)
	text := slot + " " + stateName(req.CurrentState)
	if req.PreferBeingIdle {
		text += "!"
	}
	s.calls, s.last = append(s.calls, text), req
	r, err := s.answer(ctx, slot, req)
	if err == nil && s.lose > 0 {
		s.lose--
		return nil, status.Error(codes.Unavailable, "the answer was lost")
	}
	return proto.CloneOf(r), err
}

// answer answers a call. The caller holds s.mu, which answer releases while it waits.
func (s *scheduler) answer(ctx context.Context, slot string, req *remoteworkerpb.SynchronizeRequest) (*remoteworkerpb.SynchronizeResponse, error) {
	if s.fixed != nil {
		return s.fixed(), nil
	}
	executing, has := req.CurrentState.GetExecuting(), s.has[slot]
	right := executing != nil && has != nil && proto.Equal(executing.ActionDigest, has.ActionDigest)
	done := executing.GetCompleted()
	if right && done == nil {
		return s.response(nil, 10*time.Second), nil
	}
	if right {
		s.answers = append(s.answers, done)
		delete(s.has, slot)
		has = nil
	}
	if has != nil {
		return s.response(desired(has), 10*time.Second), nil // again
	}
	wait := executing == nil || done != nil
	timeout := time.After(time.Minute)
	for !req.PreferBeingIdle {
		if len(s.queue) > 0 {
			s.has[slot], s.queue = s.queue[0], s.queue[1:]
			return s.response(desired(s.has[slot]), 10*time.Second), nil
		}
		if !wait {
			break
		}
		changed := s.changed
		s.mu.Unlock()
		var late, gone bool
		select {
		case <-changed:
		case <-timeout:
			late = true
		case <-ctx.Done():
			gone = true
		}
		s.mu.Lock()
		switch {
		case gone:
			return nil, status.FromContextError(ctx.Err()).Err()
		case s.away != nil:
			return nil, s.away
		case late:
			return s.response(nothing(), 0), nil
		}
	}
	return s.response(nothing(), 0), nil
}

func (s *scheduler) response(d *remoteworkerpb.DesiredState, in time.Duration) *remoteworkerpb.SynchronizeResponse {
	return &remoteworkerpb.SynchronizeResponse{NextSynchronizationAt: timestamppb.New(time.Now().Add(in + s.skew)), DesiredState: d}
}

func nothing() *remoteworkerpb.DesiredState {
	return &remoteworkerpb.DesiredState{WorkerState: &remoteworkerpb.DesiredState_Idle{Idle: &emptypb.Empty{}}}
}

func desired(e *remoteworkerpb.DesiredState_Executing) *remoteworkerpb.DesiredState {
	return &remoteworkerpb.DesiredState{WorkerState: &remoteworkerpb.DesiredState_Executing_{Executing: e}}
}

// digestOf returns the digest of the action of that name.
func digestOf(name string) cas.Digest { return cas.SHA256.Sum([]byte(name)) }

// task returns an assignment of the action of that name.
func task(name string) *remoteworkerpb.DesiredState_Executing {
	return &remoteworkerpb.DesiredState_Executing{
		ActionDigest: digestOf(name).Proto(), DigestFunction: repb.DigestFunction_SHA256,
		Action: &repb.Action{Timeout: durationpb.New(time.Hour)}, QueuedTimestamp: timestamppb.Now(),
	}
}

// An executor is a function that implements worker.Executor.
type executor func(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error)

func (e executor) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	return e(ctx, t, report)
}

// succeed is an executor that succeeds at once.
func succeed(_ context.Context, _ *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	report(worker.StageFetch)
	report(worker.StageRun)
	report(worker.StagePublish)
	return &worker.Outcome{Result: &repb.ActionResult{}}, nil
}

// A joined is a running client with its scheduler.
type joined struct {
	*buildbarn.Client
	*scheduler
	*stages // the default executor
	t       *testing.T
	kill    context.CancelFunc
	ended   chan struct{}
	log     *strings.Builder
}

// join runs test with a client of one slot and a fake clock. Nothing of the client may be left afterwards.
func join(t *testing.T, e executor, change func(*buildbarn.ClientConfig), test func(j *joined)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		j := &joined{scheduler: newScheduler(), stages: newStages(), t: t, ended: make(chan struct{}), log: &strings.Builder{}}
		memory := castest.NewMemory()
		c := buildbarn.ClientConfig{
			Scheduler: j.scheduler, Executor: e, Worker: "w", Slots: 1,
			Instances: func(name string) (*cas.Instance, error) {
				return &cas.Instance{Name: name, Store: memory, Actions: memory}, cas.CheckInstanceName(name)
			},
			Log: slog.New(slog.NewTextHandler(j.log, nil)),
		}
		if e == nil {
			c.Executor = executor(j.stages.execute)
		}
		if change != nil {
			change(&c)
		}
		j.Client = must.Get(buildbarn.NewClient(c))(t)
		ctx, kill := context.WithCancel(t.Context())
		j.kill = kill
		go func() {
			j.Run(ctx)
			close(j.ended)
		}()
		defer func() {
			kill()
			<-j.ended
			expect.Equal(t, j.Busy(), 0, "slots are busy at the end")
		}()
		synctest.Wait()
		test(j)
	})
}

// over reports whether Run has returned.
func (j *joined) over() bool {
	synctest.Wait()
	select {
	case <-j.ended:
		return true
	default:
		return false
	}
}

// sleep advances the clock and waits for all goroutines.
func (j *joined) sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// wantCalls checks the calls since the last check.
func (j *joined) wantCalls(want ...string) {
	j.t.Helper()
	synctest.Wait()
	got := get(j.scheduler, func() []string {
		calls := j.calls
		j.calls = nil
		return calls
	})
	expect.Slices(j.t, got, want, "calls")
}

// answer waits for the next answer.
func (j *joined) answer() *repb.ExecuteResponse {
	j.t.Helper()
	for range 1000 {
		synctest.Wait()
		if r := get(j.scheduler, func() (r *repb.ExecuteResponse) {
			if len(j.answers) > 0 {
				r, j.answers = j.answers[0], j.answers[1:]
			}
			return r
		}); r != nil {
			return r
		}
		time.Sleep(time.Second)
	}
	j.t.Fatal("no answer, want one")
	return nil
}

// wantExit7 waits for the next answer, which must be the success of j.stages.
func (j *joined) wantExit7() {
	j.t.Helper()
	if r := j.answer(); r.Result.GetExitCode() != 7 || r.Status.GetCode() != 0 {
		j.t.Errorf("got %v, want exit code 7", r)
	}
}

// stages is an executor that enters each stage it is sent, until stage 0 or the end of ctx.
type stages struct {
	next      chan worker.Stage // 0: the end
	cancelled chan error        // causes of cancelled executions
}

func newStages() *stages {
	return &stages{make(chan worker.Stage), make(chan error, 10)}
}

func (s *stages) execute(ctx context.Context, _ *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	for {
		select {
		case stage := <-s.next:
			if stage == 0 {
				return &worker.Outcome{Result: &repb.ActionResult{ExitCode: 7}}, nil
			}
			report(stage)
		case <-ctx.Done():
			s.cancelled <- context.Cause(ctx)
			return nil, &worker.Fault{Kind: worker.FaultCancelled, Err: context.Cause(ctx)}
		}
	}
}

// moment is a little longer than a stage that is not reported.
const moment = 25 * time.Millisecond

// TestStagesAreReported once each, and again when the scheduler expects a call.
func TestStagesAreReported(t *testing.T) {
	join(t, nil, nil, func(j *joined) {
		j.wantCalls("1 idle")
		j.sleep(time.Minute)
		j.wantCalls("1 idle") // the scheduler ends idle calls
		j.add(task("a"))
		j.sleep(moment)
		j.wantCalls("1 started")
		for _, c := range []struct {
			stage worker.Stage
			calls []string
		}{
			{worker.StageFetch, []string{"1 fetching"}},
			{worker.StageInputs, nil},
			{worker.StageRun, []string{"1 running"}},
			{worker.StageCollect, []string{"1 uploading"}},
			{worker.StageSeal, nil},
		} {
			j.next <- c.stage
			j.sleep(moment)
			j.wantCalls(c.calls...)
			expect.Equal(t, j.Busy(), 1, "Busy")
		}
		j.sleep(25 * time.Second)
		j.wantCalls("1 uploading", "1 uploading")
		j.next <- 0
		j.wantCalls("1 completed")
		j.wantExit7()
	})
}

// TestBriefStagesAreNotReported except in the call that the scheduler expects, or with the result.
func TestBriefStagesAreNotReported(t *testing.T) {
	stages := []worker.Stage{worker.StageFetch, worker.StageInputs, worker.StageRun, worker.StageCollect, worker.StagePublish}
	join(t, nil, nil, func(j *joined) {
		j.add(task("a"))
		synctest.Wait()
		for _, stage := range stages {
			j.next <- stage
			j.sleep(moment / 2)
		}
		j.next <- 0
		j.wantCalls("1 idle", "1 completed")
		j.add(task("b"))
		synctest.Wait()
		for i := range int(11 * time.Second / (moment / 2)) {
			j.next <- stages[i%len(stages)]
			j.sleep(moment / 2)
		}
		if calls := get(j.scheduler, func() []string { return j.calls }); len(calls) != 1 {
			t.Errorf("calls are %q within 11 s, want one after 10", calls)
		}
	})
}

// TestWorkersIdentifyThemselves with an ID per slot and sorted, distinct properties.
func TestWorkersIdentifyThemselves(t *testing.T) {
	change := func(c *buildbarn.ClientConfig) {
		c.Slots, c.Prefix, c.SizeClass = 3, "main", 4
		c.Properties = []worker.Property{{Name: "b", Value: "2"}, {Name: "a", Value: "1"}, {Name: "b", Value: "1"}, {Name: "a", Value: "1"}}
	}
	join(t, succeed, change, func(j *joined) {
		got := get(j.scheduler, func() []string { return slices.Sorted(slices.Values(j.calls)) })
		expect.Slices(t, got, []string{"1 idle", "2 idle", "3 idle"}, "calls (one of each slot)")
		req := get(j.scheduler, func() *remoteworkerpb.SynchronizeRequest { return j.last })
		var properties []string
		for _, p := range req.Platform.Properties {
			properties = append(properties, p.Name+"="+p.Value)
		}
		if req.WorkerId["worker"] != "w" || len(req.WorkerId) != 2 || req.InstanceNamePrefix != "main" || req.SizeClass != 4 ||
			!slices.Equal(properties, []string{"a=1", "b=1", "b=2"}) {
			t.Errorf("request is %v, want worker w, prefix main, size class 4 and three properties", req)
		}
	})
	join(t, succeed, func(c *buildbarn.ClientConfig) { c.Store = "f0" }, func(j *joined) {
		req := get(j.scheduler, func() *remoteworkerpb.SynchronizeRequest { return j.last })
		if len(req.WorkerId) != 3 || req.WorkerId["worker"] != "w" || req.WorkerId["slot"] == "" || req.WorkerId["store"] != "f0" {
			t.Errorf("worker_id is %v, want worker, slot and store", req.WorkerId)
		}
	})
	for want, change := range map[string]func(*buildbarn.ClientConfig){
		"Scheduler": func(c *buildbarn.ClientConfig) { c.Scheduler = nil },
		"Executor":  func(c *buildbarn.ClientConfig) { c.Executor = nil },
		"Instances": func(c *buildbarn.ClientConfig) { c.Instances = nil },
		"Worker":    func(c *buildbarn.ClientConfig) { c.Worker = "" },
		"Slots":     func(c *buildbarn.ClientConfig) { c.Slots = 0 },
		"a//b":      func(c *buildbarn.ClientConfig) { c.Prefix = "a//b" },
	} {
		c := buildbarn.ClientConfig{
			Scheduler: newScheduler(), Executor: executor(succeed), Instances: castest.Instances(), Worker: "w", Slots: 1,
		}
		change(&c)
		expect.Message(t, expect.Err(buildbarn.NewClient(c)), want)
	}
}

func TestResultIsAnsweredWithTheNextAction(t *testing.T) {
	var got []string
	e := func(ctx context.Context, task *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
		got = append(got, task.Action.Hash())
		time.Sleep(time.Second)
		return succeed(ctx, task, func(worker.Stage) {})
	}
	join(t, e, nil, func(j *joined) {
		j.add(task("a"), task("b"), task("b"), task("c"))
		for range 4 {
			j.answer()
		}
		j.wantCalls("1 idle", "1 started", "1 completed", "1 started", "1 completed", "1 started", "1 completed", "1 started", "1 completed")
		expect.Slices(t, got, []string{digestOf("a").Hash(), digestOf("b").Hash(), digestOf("b").Hash(), digestOf("c").Hash()},
			"executed")
	})
}

// TestUnwantedActionIsKilledInEachStage before the next call, and has no answer, with and without a next action.
func TestUnwantedActionIsKilledInEachStage(t *testing.T) {
	for _, another := range []bool{false, true} {
		for stage := worker.Stage(0); stage <= worker.StagePublish; stage++ {
			join(t, nil, nil, func(j *joined) {
				j.add(task("a"))
				synctest.Wait()
				if stage > 0 {
					j.next <- stage
				}
				synctest.Wait()
				j.change(func() {
					delete(j.has, "1")
					if another {
						j.queue = append(j.queue, task("b"))
					}
				})
				j.sleep(11 * time.Second) // until it calls
				expect.Error(t, <-j.cancelled, context.Canceled, "stage %v", stage)
				if !another {
					j.add(task("b"))
				}
				synctest.Wait()
				j.next <- 0
				if r := j.answer(); r.Result.GetExitCode() != 7 || len(j.answers) > 0 {
					t.Errorf("stage %v: got %v, want only exit code 7", stage, r)
				}
				expect.That(t, !strings.Contains(j.log.String(), "level=WARN"),
					"stage %v: log is %s, want no warning", stage, j.log)
			})
		}
	}
}

// TestActionSurvivesASchedulerOutage and delivers its result; the log shows one line for each change.
func TestActionSurvivesASchedulerOutage(t *testing.T) {
	join(t, nil, nil, func(j *joined) {
		j.add(task("a"))
		synctest.Wait()
		j.change(func() { j.away = status.Error(codes.Unavailable, "connection refused") })
		j.next <- worker.StageRun
		j.sleep(10 * time.Minute)
		expect.Text(t, j.Down(), "connection refused", "Down")
		j.next <- 0
		j.sleep(10 * time.Minute)
		j.change(func() { j.away = nil })
		j.wantExit7()
		expect.Equal(t, j.Down(), "", "Down")
		if text := j.log.String(); strings.Count(text, "scheduler assigns no actions") != 1 || strings.Count(text, "scheduler answers again") != 1 {
			t.Errorf("log is\n%s, want one line of each change", text)
		}
	})
}

func TestRestartedSchedulerCancelsItsActions(t *testing.T) {
	join(t, nil, nil, func(j *joined) {
		j.add(task("a"))
		j.sleep(moment)
		j.change(func() { clear(j.has) })
		j.next <- worker.StageRun
		j.sleep(moment)
		j.wantCalls("1 idle", "1 started", "1 running", "1 idle")
		expect.Error(t, <-j.cancelled, context.Canceled)
	})
}

func TestActionOfALostAnswerIsExecutedOnce(t *testing.T) {
	n := 0
	e := func(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
		n++
		return succeed(ctx, t, func(worker.Stage) {})
	}
	join(t, e, nil, func(j *joined) {
		j.change(func() { j.lose = 1 })
		j.add(task("a"))
		j.answer()
		calls := get(j.scheduler, func() []string { return j.calls })
		expect.That(t, n == 1 && slices.Equal(calls, []string{"1 idle", "1 idle!", "1 completed"}),
			"executed %d times with calls %q, want once", n, calls)
		// The answer to a result is lost.
		j.change(func() { j.lose = 1 })
		j.add(task("b"))
		j.sleep(time.Minute)
		expect.That(t, n == 2 && len(get(j.scheduler, func() []*repb.ExecuteResponse { return j.answers })) == 1,
			"executed %d times, want 2 and one answer", n)
	})
}

// TestDrainEndsEachSlot: an idle one at once, a busy one when the scheduler has its result.
func TestDrainEndsEachSlot(t *testing.T) {
	join(t, nil, func(c *buildbarn.ClientConfig) { c.Slots = 1 }, func(j *joined) {
		j.Drain()
		if !j.over() {
			j.sleep(time.Second)
			t.Fatalf("Run continues with calls %q, want it to return", get(j.scheduler, func() []string { return j.calls }))
		}
		j.wantCalls("1 idle", "1 idle!")
	})
	join(t, nil, nil, func(j *joined) {
		j.add(task("a"), task("b"))
		synctest.Wait()
		j.Drain()
		j.sleep(5 * time.Minute)
		must.Be(t, !j.over(), "Run returned before the action ended")
		j.next <- 0
		j.wantExit7()
		expect.That(t, j.over() && len(j.queue) == 1 && len(j.has) == 0,
			"returned %v with %d queued and assigned %v; want true, 1 and none", j.over(), len(j.queue), j.has)
	})
}

// TestDrainDuringAnOutageEndsAfterAMinute when the scheduler must have given the worker up.
func TestDrainDuringAnOutageEndsAfterAMinute(t *testing.T) {
	for _, busy := range []bool{false, true} {
		join(t, nil, nil, func(j *joined) {
			if busy {
				j.add(task("a"))
				synctest.Wait()
			}
			j.change(func() { j.away = status.Error(codes.Unavailable, "gone") })
			j.Drain()
			j.sleep(50 * time.Second)
			expect.That(t, !j.over(), "busy %v: Run returned while the scheduler may still count on the worker", busy)
			j.sleep(30 * time.Second)
			expect.That(t, j.over(), "busy %v: Run did not return", busy)
			if busy {
				<-j.cancelled
			}
		})
	}
}

// TestDrainOfARefusedWorkerEndsAtOnce since it cannot have an action, unless the answer to an earlier call was lost.
func TestDrainOfARefusedWorkerEndsAtOnce(t *testing.T) {
	for _, c := range []struct {
		name   string
		errors []codes.Code
		leaves bool
	}{
		{"refused", []codes.Code{codes.PermissionDenied}, true},
		{"refused twice", []codes.Code{codes.FailedPrecondition, codes.Unimplemented}, true},
		{"away, and refused", []codes.Code{codes.Unavailable, codes.PermissionDenied}, false},
		{"refused, and away", []codes.Code{codes.PermissionDenied, codes.Unavailable}, false},
		{"too large an answer", []codes.Code{codes.ResourceExhausted}, false},
	} {
		join(t, nil, nil, func(j *joined) {
			for _, code := range c.errors {
				j.change(func() { j.away = status.Error(code, "no") })
				j.sleep(20 * time.Second)
			}
			j.Drain()
			j.sleep(10 * time.Second)
			expect.Equal(t, j.over(), c.leaves, "%s: returned", c.name)
			j.sleep(2 * time.Minute)
		})
	}
}

// TestKillReportsTheUnfinishedAction at once, so that it runs elsewhere, and does not wait for an absent scheduler.
func TestKillReportsTheUnfinishedAction(t *testing.T) {
	for _, away := range []bool{false, true} {
		join(t, nil, nil, func(j *joined) {
			j.add(task("a"))
			synctest.Wait()
			if away {
				j.change(func() { j.away = status.Error(codes.Unavailable, "gone") })
			}
			began := time.Now()
			j.kill()
			<-j.ended
			if took := time.Since(began); took > 15*time.Second || !away && took > 0 {
				t.Errorf("away %v: took %v, want less", away, took)
			}
			<-j.cancelled
			if away {
				return
			}
			if r := j.answer(); !response.IsStopped(r) || codes.Code(r.Status.Code) != codes.Unavailable || !strings.Contains(r.Message, "worker w, slot 1") {
				t.Errorf("got %v, want UNAVAILABLE from a stopped worker", r)
			}
		})
	}
}

// TestKillDuringAnUnansweredCall cancels the action at once and ends soon.
func TestKillDuringAnUnansweredCall(t *testing.T) {
	join(t, nil, nil, func(j *joined) {
		j.add(task("a"))
		synctest.Wait()
		j.change(func() { j.mute = true })
		j.next <- worker.StageRun
		synctest.Wait()
		began := time.Now()
		j.kill()
		<-j.cancelled
		if took := time.Since(began); took > 0 {
			t.Errorf("the action ended after %v, want 0", took)
		}
		<-j.ended
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("took %v, want at most 15s", took)
		}
	})
}

// TestNoActionIsRequestedWhileNotReady also checks that a waiting call is cancelled.
func TestNoActionIsRequestedWhileNotReady(t *testing.T) {
	var mu sync.Mutex
	why := errors.New("the store is down")
	set := func(err error) {
		mu.Lock()
		defer mu.Unlock()
		why = err
	}
	change := func(c *buildbarn.ClientConfig) {
		c.Ready = func() error {
			mu.Lock()
			defer mu.Unlock()
			return why
		}
	}
	join(t, succeed, change, func(j *joined) {
		j.add(task("a"))
		j.sleep(10 * time.Minute)
		j.wantCalls()
		set(nil)
		j.answer()
		j.sleep(time.Second)
		get(j.scheduler, func() any { j.calls = nil; return nil })
		set(errors.New("the disk is full"))
		j.sleep(2 * time.Second)
		j.wantCalls("1 completed!") // again: it has no answer yet
		j.add(task("b"))
		j.sleep(10 * time.Minute)
		j.wantCalls()
		if text := j.log.String(); strings.Count(text, "not ready for actions") != 2 || strings.Count(text, `"ready for actions"`) != 1 {
			t.Errorf("log is\n%s, want each change once", text)
		}
		j.Drain()
		expect.That(t, j.over(), "Run did not return")
	})
}

// TestFailuresNameTheWorker also checks that the worker pauses after a failure before it takes the next action.
func TestFailuresNameTheWorker(t *testing.T) {
	e := func(_ context.Context, task *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
		if task.Action == digestOf("panic") {
			panic("at the disco")
		}
		return nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: errors.New("fetch: the store is down")}
	}
	join(t, e, nil, func(j *joined) {
		a := task("a")
		a.W3CTraceContext = map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
		j.add(a, task("panic"))
		r := j.answer()
		if st := r.Status; codes.Code(st.Code) != codes.Unavailable || st.Message != "worker w: fetch: the store is down" ||
			!strings.HasSuffix(r.Message, "(worker w, slot 1, action "+digestOf("a").String()+")") || r.Result != nil {
			t.Errorf("got %v, want UNAVAILABLE with worker and action", r)
		}
		expect.Text(t, j.log.String(), "trace=0af7651916cd43dd8448eb211c80319c", "log")
		if r := j.answer(); codes.Code(r.Status.Code) != codes.Internal || !strings.Contains(r.Status.Message, "at the disco") {
			t.Errorf("got %v, want INTERNAL with the panic", r)
		}
		if calls := get(j.scheduler, func() []string { return j.calls }); !slices.Equal(calls[:3], []string{"1 idle", "1 completed!", "1 idle"}) {
			t.Errorf("calls are %q, want a pause after the failure", calls)
		}
	})
}

// TestInvalidAssignmentsAreAnswered so that the scheduler does not repeat them, and not executed.
func TestInvalidAssignmentsAreAnswered(t *testing.T) {
	e := func(context.Context, *worker.Task, func(worker.Stage)) (*worker.Outcome, error) {
		return nil, errors.New("executed")
	}
	for name, change := range map[string]func(*remoteworkerpb.DesiredState_Executing){
		"hash":     func(e *remoteworkerpb.DesiredState_Executing) { e.ActionDigest.Hash = "x" },
		"size":     func(e *remoteworkerpb.DesiredState_Executing) { e.ActionDigest.SizeBytes = -1 },
		"function": func(e *remoteworkerpb.DesiredState_Executing) { e.DigestFunction = 99 },
		"instance": func(e *remoteworkerpb.DesiredState_Executing) { e.InstanceNameSuffix = "a//b" },
	} {
		join(t, e, nil, func(j *joined) {
			garbage := task("a")
			change(garbage)
			j.add(garbage)
			if r := j.answer(); codes.Code(r.Status.Code) != codes.InvalidArgument || !strings.Contains(r.Status.Message, "worker w: ") {
				t.Errorf("%s: got %v, want INVALID_ARGUMENT", name, r)
			}
		})
	}
	for name, answer := range map[string]*remoteworkerpb.SynchronizeResponse{
		"no action":    {DesiredState: desired(&remoteworkerpb.DesiredState_Executing{})},
		"no state":     {DesiredState: &remoteworkerpb.DesiredState{}},
		"nothing":      {},
		"invalid time": {NextSynchronizationAt: &timestamppb.Timestamp{Seconds: 1 << 62, Nanos: -1}, DesiredState: nothing()},
	} {
		join(t, e, nil, func(j *joined) {
			j.change(func() { j.fixed = func() *remoteworkerpb.SynchronizeResponse { return answer } })
			j.sleep(10 * time.Minute)
			if n := len(get(j.scheduler, func() []string { return j.calls })); n < 60 || n > 700 {
				t.Errorf("%s: %d calls in ten minutes, want 60 to 700", name, n)
			}
			j.change(func() { j.fixed = nil })
			j.sleep(time.Minute)
			expect.Equal(t, j.Down(), "", "%s: Down", name)
		})
	}
}

// TestWrongClockOfTheScheduler causes neither a flood of calls nor silence.
func TestWrongClockOfTheScheduler(t *testing.T) {
	for _, skew := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		join(t, nil, nil, func(j *joined) {
			j.change(func() { j.skew = skew })
			j.add(task("a"))
			j.sleep(10 * time.Minute)
			if n := len(get(j.scheduler, func() []string { return j.calls })); n < 58 || n > 610 {
				t.Errorf("skew %v: %d calls in ten minutes, want 58 to 610", skew, n)
			}
		})
	}
}

func TestAssignmentBecomesATask(t *testing.T) {
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	var got *worker.Task
	var sent metadata.MD
	approved := false
	e := func(ctx context.Context, task *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
		got = task
		sent, _ = metadata.FromOutgoingContext(ctx)
		approved = task.Approve(ctx, nil)
		return &worker.Outcome{Result: &repb.ActionResult{}}, nil
	}
	md, err := anypb.New(&repb.RequestMetadata{TargetId: "//a:b", ActionMnemonic: "CppCompile", ToolInvocationId: "i\n"})
	must.Succeed(t, err)
	join(t, e, func(c *buildbarn.ClientConfig) { c.Prefix = "main" }, func(j *joined) {
		a := task("a")
		a.InstanceNameSuffix, a.W3CTraceContext = "sub", map[string]string{"traceparent": parent, "tracestate": "a=b"}
		a.AuxiliaryMetadata = []*anypb.Any{md, {TypeUrl: "x", Value: []byte("y")}}
		a.Action.Timeout, a.QueuedTimestamp = durationpb.New(time.Minute), timestamppb.New(time.Unix(5, 0))
		j.add(a)
		j.answer()
		if got.Instance != "main/sub" || got.Action != digestOf("a") || !got.SkipCacheLookup || got.Timeout != time.Minute || !got.Queued.Equal(time.Unix(5, 0)) ||
			got.Target != "//a:b" || got.Mnemonic != "CppCompile" || got.Invocation != "" || len(got.Auxiliary) != 2 || !proto.Equal(got.Auxiliary[0], md) {
			t.Errorf("task is %+v, want every field of the assignment", got)
		}
		if !maps.Equal(got.Trace, map[string]string{"traceparent": parent, "tracestate": "a=b"}) || sent.Get("traceparent")[0] != parent || sent.Get("tracestate")[0] != "a=b" {
			t.Errorf("task has trace %v and calls %v, want %v", got.Trace, sent, parent)
		}
		expect.That(t, approved, "Approve = false, want true")
		// An action that the scheduler must not cache, with too much metadata.
		b := task("b")
		b.Action.DoNotCache, b.DigestFunction, b.W3CTraceContext = true, repb.DigestFunction_UNKNOWN, map[string]string{"traceparent": "x"}
		b.AuxiliaryMetadata = []*anypb.Any{md, {TypeUrl: "x", Value: make([]byte, 100_000)}}
		j.add(b)
		j.answer()
		if approved || got.Instance != "main" || got.Trace != nil || len(sent) != 0 || len(got.Auxiliary) != 1 || !strings.Contains(j.log.String(), "too large") {
			t.Errorf("approved %v, task %+v, calls with %v, log %s; want no approval, no trace and truncated metadata", approved, got, sent, j.log)
		}
	})
}

// TestSentActionIsUsedIfItMatchesItsDigest with or without a timeout that the scheduler added.
func TestSentActionIsUsedIfItMatchesItsDigest(t *testing.T) {
	own := &repb.Action{CommandDigest: digestOf("c").Proto(), InputRootDigest: digestOf("i").Proto()}
	stated := proto.CloneOf(own)
	stated.Timeout = durationpb.New(time.Minute)
	hurried := proto.CloneOf(own)
	hurried.DoNotCache = true
	tests := []struct {
		name         string
		action, sent *repb.Action
		known        bool
	}{
		{"equal", own, own, true},
		{"equal, with a timeout", stated, stated, true},
		{"added timeout", own, stated, true},
		{"removed timeout", stated, own, false},
		{"other change", own, hurried, false},
		{"none", own, nil, false},
	}
	var got []byte
	e := func(_ context.Context, task *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
		got = task.ActionBlob
		return &worker.Outcome{Result: &repb.ActionResult{}}, nil
	}
	join(t, e, nil, func(j *joined) {
		for _, test := range tests {
			blob := must.Get(proto.Marshal(test.action))(t)
			a := task("")
			a.ActionDigest, a.Action = cas.SHA256.Sum(blob).Proto(), test.sent
			j.add(a)
			j.answer()
			if test.known != (got != nil) || test.known && !bytes.Equal(got, blob) {
				t.Errorf("%s: ActionBlob is %q, want it set: %v", test.name, got, test.known)
			}
		}
	})
}

// TestMessageLinksToTheBrowser checks the pages of cached results, found by action, and of others, found by a message
// in the store.
func TestMessageLinksToTheBrowser(t *testing.T) {
	base := must.Get(url.Parse("http://browser/"))(t)
	var store cas.Store
	e := func(ctx context.Context, task *worker.Task, _ func(worker.Stage)) (*worker.Outcome, error) {
		if task.Approve(ctx, nil) && task.Action == digestOf("good") {
			return &worker.Outcome{Result: &repb.ActionResult{}}, nil
		}
		return &worker.Outcome{Result: &repb.ActionResult{ExitCode: 3}, Message: "cloister: exit code 3"}, nil
	}
	change := func(c *buildbarn.ClientConfig) {
		c.Browser = base
		store = must.Get(c.Instances("sub"))(t).Store
	}
	join(t, e, change, func(j *joined) {
		good := task("good")
		good.InstanceNameSuffix = "sub"
		j.add(good)
		page := fmt.Sprintf("http://browser/sub/blobs/sha256/action/%s-4/", digestOf("good").Hash())
		expect.Equal(t, j.answer().Message, "cloister: action details (cached result): "+page)
		bad := task("again")
		bad.Action.DoNotCache = true
		j.add(bad)
		r := j.answer()
		first, page, _ := strings.Cut(r.Message, "\n")
		name, ok := strings.CutPrefix(page, "cloister: action details (uncached result): http://browser/blobs/sha256/historical_execute_response/")
		must.Be(t, first == "cloister: exit code 3" && ok, "got %q", r.Message)
		d := must.Get(cas.ParseDigest(strings.Replace(strings.TrimSuffix(name, "/"), "-", "/", 1)))(t)
		data := must.Get(cas.ReadAll(t.Context(), store, d, 1<<20))(t)
		if want := digestOf("again").Hash(); !strings.Contains(string(data), want) || !strings.Contains(string(data), "exit code 3") {
			t.Errorf("stored message is %q, want the action and the exit code", data)
		}
	})
}

func TestTooLargeResultFails(t *testing.T) {
	e := func(context.Context, *worker.Task, func(worker.Stage)) (*worker.Outcome, error) {
		return &worker.Outcome{Result: &repb.ActionResult{StdoutRaw: make([]byte, 5<<20)}}, nil
	}
	join(t, e, nil, func(j *joined) {
		j.add(task("a"))
		if r := j.answer(); codes.Code(r.Status.Code) != codes.FailedPrecondition || !strings.Contains(r.Message, "declare output directories") || r.Result != nil {
			t.Errorf("got %v, want FAILED_PRECONDITION with advice", r.Status)
		}
	})
}

func TestRefusalsAreLoggedWithAHint(t *testing.T) {
	for code, hint := range map[codes.Code]string{
		codes.Unimplemented: "address for workers", codes.ResourceExhausted: "another name", codes.FailedPrecondition: "another name", codes.InvalidArgument: "size class",
		codes.Unauthenticated: "token", codes.PermissionDenied: "token", codes.Unavailable: "hint=none",
	} {
		join(t, succeed, nil, func(j *joined) {
			j.change(func() { j.away = status.Error(code, "no") })
			j.sleep(10 * time.Minute)
			expect.Equal(t, strings.Count(j.log.String(), hint), 1, "%v: hints in %s", code, j.log.String())
		})
	}
}
