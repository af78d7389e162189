// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/internal/response"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
)

var (
	// errUnwanted cancels a run that the scheduler no longer wants, errStopped one whose worker stops.
	errUnwanted = fmt.Errorf("%w: the scheduler no longer wants the action", context.Canceled)
	errStopped  = fmt.Errorf("%w: the worker is shutting down", context.Canceled)
)

// maxAuxiliary bounds the bytes of scheduler metadata in a result.
const maxAuxiliary = 64 << 10

// Immutable states of the protocol.
var (
	stateIdle      = &remoteworkerpb.CurrentState_Idle{Idle: &emptypb.Empty{}}
	stateStarted   = &remoteworkerpb.CurrentState_Executing_Started{Started: &emptypb.Empty{}}
	stateFetching  = &remoteworkerpb.CurrentState_Executing_FetchingInputs{FetchingInputs: &emptypb.Empty{}}
	stateRunning   = &remoteworkerpb.CurrentState_Executing_Running{Running: &emptypb.Empty{}}
	stateUploading = &remoteworkerpb.CurrentState_Executing_UploadingOutputs{UploadingOutputs: &emptypb.Empty{}}
)

// completed returns the state of a slot with an answer.
func completed(action *repb.Digest, r *repb.ExecuteResponse) *remoteworkerpb.CurrentState_Executing {
	return &remoteworkerpb.CurrentState_Executing{
		ActionDigest:   action,
		ExecutionState: &remoteworkerpb.CurrentState_Executing_Completed{Completed: r},
	}
}

// task parses an assigned action.
func (s *slot) task(e *remoteworkerpb.DesiredState_Executing) (*worker.Task, error) {
	name := s.cfg.Prefix
	if name != "" && e.InstanceNameSuffix != "" {
		name += "/"
	}
	name += e.InstanceNameSuffix
	in, err := s.cfg.Instances(name)
	if err != nil {
		return nil, fmt.Errorf("instance %+.256q: %w", name, err)
	}
	fn, err := in.FunctionOf(e.DigestFunction, e.ActionDigest)
	if err != nil {
		return nil, fmt.Errorf("action_digest: %w", err)
	}
	action, err := cas.FromProto(fn, e.ActionDigest)
	if err != nil {
		return nil, fmt.Errorf("action_digest: %w", err)
	}
	// The scheduler has looked into the action cache, or is not to.
	t := &worker.Task{Instance: name, Action: action, ActionBlob: actionBlob(action, e.Action), SkipCacheLookup: true}
	if e.QueuedTimestamp.IsValid() {
		t.Queued = e.QueuedTimestamp.AsTime()
	}
	// The blob of the digest is executed. The message beside it may differ in the timeout and in do_not_cache, with
	// which a scheduler measures the size class that an action needs.
	if d := e.GetAction().GetTimeout(); d.IsValid() && d.AsDuration() > 0 {
		t.Timeout = d.AsDuration()
	}
	headers := map[string]string{}
	for name, value := range e.W3CTraceContext {
		headers[strings.ToLower(name)] = value
	}
	t.Trace = worker.ParseTrace(func(name string) string { return headers[name] })
	left := maxAuxiliary
	for _, aux := range e.AuxiliaryMetadata {
		if left -= proto.Size(aux); left < 0 {
			s.cfg.Log.Warn("scheduler metadata truncated: too large for the result", "action", action.String())
			break
		}
		t.Auxiliary = append(t.Auxiliary, aux)
		var md repb.RequestMetadata
		if aux.MessageIs(&md) && aux.UnmarshalTo(&md) == nil {
			t.SetMetadata(&md)
		}
	}
	return t, nil
}

// actionBlob returns the blob of an action if the message sent equals it, except perhaps for the timeout, which
// schedulers add if there is none; else nil.
func actionBlob(action cas.Digest, sent *repb.Action) []byte {
	if sent == nil {
		return nil
	}
	without := proto.CloneOf(sent)
	without.Timeout = nil
	for _, m := range []*repb.Action{without, sent} {
		b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err == nil && action.Function().Sum(b) == action {
			return b
		}
	}
	return nil
}

// A run is one execution of a task.
type run struct {
	cancel context.CancelCauseFunc
	over   chan struct{} // closed when it has ended
	news   chan struct{} // holds a value after a change that latest has not returned

	mu    sync.Mutex
	state *remoteworkerpb.CurrentState_Executing // guarded by mu
	ended bool                                   // guarded by mu; state is final
	pull  pulls.State                            // guarded by mu; nil unless it waits for a container image
}

// latest returns the state of the run, and whether it has ended.
func (r *run) latest() (*remoteworkerpb.CurrentState_Executing, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state, r.ended
}

// publish sets the state that latest returns.
func (r *run) publish(state *remoteworkerpb.CurrentState_Executing, ended bool) {
	r.mu.Lock()
	r.state, r.ended = state, ended
	r.mu.Unlock()
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// pulling returns the pull that the run waits for, or nil.
func (r *run) pulling() *cloisterpb.ImagePull {
	r.mu.Lock()
	pull := r.pull
	r.mu.Unlock()
	if pull == nil {
		return nil
	}
	return pull()
}

// wait waits until the run has ended.
func (r *run) wait() { <-r.over }

// start starts to execute a task. The end of ctx does not cancel it.
func (s *slot) start(ctx context.Context, t *worker.Task, e *remoteworkerpb.DesiredState_Executing) *run {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	for name, value := range t.Trace {
		ctx = metadata.AppendToOutgoingContext(ctx, name, value)
	}
	r := &run{cancel: cancel, over: make(chan struct{}), news: make(chan struct{}, 1)}
	r.publish(&remoteworkerpb.CurrentState_Executing{ActionDigest: e.ActionDigest, ExecutionState: stateStarted}, false)
	ctx = pulls.Watch(ctx, func(pull pulls.State) {
		r.mu.Lock()
		r.pull = pull
		r.mu.Unlock()
		if pull != nil { // a new state is reported soon, with the pull
			fetching := &remoteworkerpb.CurrentState_Executing_FetchingInputs{FetchingInputs: &emptypb.Empty{}}
			r.publish(&remoteworkerpb.CurrentState_Executing{ActionDigest: e.ActionDigest, ExecutionState: fetching}, false)
		}
	})
	go func() {
		defer close(r.over)
		defer cancel(nil)
		answer := s.execute(ctx, t, e, func(stage worker.Stage) {
			state := &remoteworkerpb.CurrentState_Executing{ActionDigest: e.ActionDigest}
			switch {
			case stage < worker.StageRun:
				state.ExecutionState = stateFetching
			case stage == worker.StageRun:
				state.ExecutionState = stateRunning
			default:
				state.ExecutionState = stateUploading
			}
			r.publish(state, false)
		})
		r.publish(completed(e.ActionDigest, answer), true)
	}()
	return r
}

// execute executes a task and returns the answer.
func (s *slot) execute(
	ctx context.Context, t *worker.Task, e *remoteworkerpb.DesiredState_Executing, report func(worker.Stage),
) *repb.ExecuteResponse {
	recorded := false
	t.Approve = func(context.Context, *worker.Outcome) bool {
		recorded = !e.GetAction().GetDoNotCache()
		return recorded
	}
	out, err := s.guard(ctx, t, report)
	if err != nil {
		if errors.Is(context.Cause(ctx), errStopped) {
			return response.Stopped(s.describe(e.ActionDigest))
		}
		f, ok := errors.AsType[*worker.Fault](err)
		if !ok {
			f = &worker.Fault{Kind: worker.FaultInternal, Err: err}
		}
		if !errors.Is(context.Cause(ctx), errUnwanted) {
			s.cfg.Log.Warn("action not executed", "worker", s.cfg.Worker, "slot", s.name, "action", t.Action.String(),
				"instance", t.Instance, "err", err, "trace", worker.TraceID(t.Trace))
		}
		return s.faultResponse(f, e.ActionDigest)
	}
	r := response.Of(out, s.browserLink(ctx, t, out, recorded))
	if n := proto.Size(r); n > response.MaxBytes {
		err := fmt.Errorf("the result lists too many outputs: it takes %d bytes, and clients accept %d; "+
			"declare output directories instead of files", n, response.MaxBytes)
		return s.faultResponse(&worker.Fault{Kind: worker.FaultUnmet, Err: err}, e.ActionDigest)
	}
	return r
}

// guard calls Execute and turns a panic into a Fault, so that the worker survives.
func (s *slot) guard(
	ctx context.Context, t *worker.Task, report func(worker.Stage),
) (out *worker.Outcome, err error) {
	defer func() {
		if v := recover(); v != nil {
			s.cfg.Log.Error("panic while executing an action", "action", t.Action.String(), "value", v, "stack", string(debug.Stack()))
			err = &worker.Fault{Kind: worker.FaultInternal, Err: fmt.Errorf("panic: %v", v)}
		}
	}()
	return s.cfg.Executor.Execute(ctx, t, report)
}

// faultResponse returns the answer for a fault. Its status, too, names the worker, since some clients show nothing
// else.
func (s *slot) faultResponse(f *worker.Fault, action *repb.Digest) *repb.ExecuteResponse {
	named := &worker.Fault{Kind: f.Kind, Blobs: f.Blobs, Err: fmt.Errorf("worker %s: %w", s.cfg.Worker, f.Err)}
	return response.OfFault(named, s.describe(action))
}

// browserLink returns a line with the action's page in the Buildbarn browser; "" without a browser.
func (s *slot) browserLink(ctx context.Context, t *worker.Task, out *worker.Outcome, recorded bool) string {
	if s.cfg.Browser == nil {
		return ""
	}
	page := func(kind string, d cas.Digest) string {
		name := fmt.Sprintf("%s-%d", d.Hash(), d.Size())
		return s.cfg.Browser.JoinPath(t.Instance, "blobs", d.Function().String(), kind, name, "/").String()
	}
	if recorded {
		return "action details (cached result): " + page("action", t.Action)
	}
	// For results that are not cached the browser reads a Buildbarn message from the store.
	d, err := s.storeResponse(ctx, t, out)
	if err != nil {
		s.cfg.Log.Warn("cannot store a result for the browser", "action", t.Action.String(), "err", err,
			"trace", worker.TraceID(t.Trace))
		return "action details (the result could not be stored): " + page("action", t.Action)
	}
	return "action details (uncached result): " + page("historical_execute_response", d)
}

// storeResponse stores a buildbarn.cas.HistoricalExecuteResponse: action_digest = 1, execute_response = 3.
func (s *slot) storeResponse(ctx context.Context, t *worker.Task, out *worker.Outcome) (cas.Digest, error) {
	in, err := s.cfg.Instances(t.Instance)
	if err != nil {
		return cas.Digest{}, err
	}
	var data []byte
	for _, field := range []struct {
		number  protowire.Number
		message proto.Message
	}{{1, t.Action.Proto()}, {3, response.Of(out, "")}} {
		encoded, err := proto.Marshal(field.message)
		if err != nil {
			return cas.Digest{}, err
		}
		data = protowire.AppendBytes(protowire.AppendTag(data, field.number, protowire.BytesType), encoded)
	}
	return cas.PutBytes(ctx, in.Store, t.Action.Function(), data)
}
