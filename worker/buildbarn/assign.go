// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/internal/results"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// An assignment is an action that a worker is to execute.
type assignment struct {
	run      *queue.Run
	in       *cas.Instance
	action   cas.Digest
	desired  *remoteworkerpb.DesiredState_Executing
	sent     int                                  // number of times
	started  bool                                 // the worker has reported that it executes it
	released chan struct{}                        // closed when the run has ended and the slot is free
	stage    worker.Stage                         // last reported
	since    time.Time                            // when it was first reported; zero while no stage is
	pull     atomic.Pointer[cloisterpb.ImagePull] // last reported
}

// killGrace is how long after twice its timeout a command is considered unkillable.
const killGrace = 10 * time.Minute

// stuck returns why the worker makes no progress with a, or "", and whether the action may be the cause. Workers
// enforce timeouts, and some do not count time spent waiting. But a worker that cannot kill a command, such as one in a
// dead file system, reports forever that it runs; one whose store hangs, that it fetches or uploads.
func (a *assignment) stuck(stage worker.Stage, stall time.Duration) (why string, actionFault bool) {
	if a.since.IsZero() || a.stage != stage {
		a.stage, a.since = stage, time.Now()
	}
	elapsed := time.Since(a.since)
	if stage != worker.StageRun {
		if elapsed < stall {
			return "", false
		}
		doing := "fetching"
		if stage > worker.StageRun {
			doing = "uploading"
		}
		return fmt.Sprintf("the worker reports that it has been %s for %v", doing, elapsed.Round(time.Second)), false
	}
	timeout := a.desired.Action.Timeout.AsDuration()
	// This order of operations does not overflow, even with the longest of all timeouts.
	if elapsed-killGrace > timeout && elapsed-killGrace-timeout > timeout {
		return fmt.Sprintf("the worker reports that the command has run for %v with a timeout of %v",
			elapsed.Round(time.Second), timeout), true
	}
	return "", false
}

// over reports whether the run has ended or no client waits for it.
func (a *assignment) over() bool {
	select {
	case <-a.run.Cancelled():
		return true
	default:
		return false
	}
}

// tooManyAttempts returns the fault of an action that its worker never starts.
func tooManyAttempts(w *session, a *assignment) *worker.Fault {
	return &worker.Fault{Kind: worker.FaultInternal, Err: fmt.Errorf(
		"Attempted to execute task %d times, but it never completed. This task may cause worker %s to crash.", a.sent, w.name)}
}

// stageOf returns the stage that a worker reports.
func stageOf(e *remoteworkerpb.CurrentState_Executing) worker.Stage {
	switch e.ExecutionState.(type) {
	case *remoteworkerpb.CurrentState_Executing_FetchingInputs:
		return worker.StageInputs
	case *remoteworkerpb.CurrentState_Executing_Running:
		return worker.StageRun
	case *remoteworkerpb.CurrentState_Executing_UploadingOutputs:
		return worker.StageCollect
	}
	return worker.StageFetch
}

// assign assigns a run to a worker. It fails with a *worker.Fault, and the caller then ends the run.
func (s *Server) assign(w *session, run *queue.Run) (*assignment, error) {
	t := run.Task()
	if !t.Root.IsZero() { // the protocol cannot express it
		return nil, &worker.Fault{Kind: worker.FaultUnmet, Err: fmt.Errorf(
			"worker %s cannot receive the root file system %s of action %s: only slots of this server can run it", w.name, t.Root, t.Action)}
	}
	in, err := s.cfg.Instances(t.Instance)
	if err != nil {
		return nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: err}
	}
	action, err := s.cfg.Action(s.ctx, in, t.Action)
	switch {
	case errors.Is(err, cas.ErrNotFound):
		return nil, &worker.Fault{Kind: worker.FaultMissing, Err: err, Blobs: []cas.Digest{t.Action}}
	case err != nil:
		return nil, &worker.Fault{Kind: worker.FaultUnavailable, Err: fmt.Errorf("read the action for worker %s: %w", w.name, err)}
	}
	if action.Timeout.AsDuration() <= 0 {
		action = proto.CloneOf(action)
		action.Timeout = durationpb.New(s.cfg.MaxTimeout)
	}
	aux, err := auxiliary(&t)
	if err != nil {
		return nil, &worker.Fault{Kind: worker.FaultInternal, Err: err}
	}
	a := &assignment{
		run: run, in: in, action: t.Action, released: make(chan struct{}),
		desired: &remoteworkerpb.DesiredState_Executing{
			ActionDigest:       t.Action.Proto(),
			Action:             action,
			QueuedTimestamp:    timestamppb.New(t.Queued),
			AuxiliaryMetadata:  aux,
			InstanceNameSuffix: strings.TrimPrefix(strings.TrimPrefix(t.Instance, w.offer.Prefix), "/"),
			W3CTraceContext:    t.Trace,
			DigestFunction:     t.Action.Function().Proto(),
		},
	}
	if n := proto.Size(a.desired); n > response.MaxBytes {
		return nil, &worker.Fault{Kind: worker.FaultInvalid, Err: fmt.Errorf(
			"the action's message takes %d bytes, and workers accept %d; shorten its platform properties or its salt",
			n, response.MaxBytes)}
	}
	s.wg.Go(func() {
		defer close(a.released)
		<-run.Cancelled()
		// Unless the run is over, its clients have left; the worker learns of that with its next call.
		run.End(nil, &worker.Fault{Kind: worker.FaultCancelled, Err: errors.New("no client waits for the action")})
	})
	return a, nil
}

// auxiliary returns the metadata of a result: the client's request metadata, as Buildbarn sends it, and that of the
// task.
func auxiliary(t *worker.Task) ([]*anypb.Any, error) {
	var tool *repb.ToolDetails
	if name, version, _ := strings.Cut(t.Tool, " "); name != "" {
		tool = &repb.ToolDetails{ToolName: name, ToolVersion: version}
	}
	md, err := anypb.New(&repb.RequestMetadata{
		ToolDetails: tool, ActionId: t.Action.Hash(), ActionMnemonic: t.Mnemonic, TargetId: t.Target,
		ToolInvocationId: t.Invocation, CorrelatedInvocationsId: t.Correlated,
	})
	if err != nil {
		return nil, err
	}
	return append([]*anypb.Any{md}, t.Auxiliary...), nil
}

// complete ends an assignment with the worker's answer. It fails only if the worker has hung up, and then answers
// again.
func (s *Server) complete(ctx context.Context, w *session, a *assignment, r *repb.ExecuteResponse) error {
	if a.over() {
		return nil
	}
	out, f := response.Parse(r, a.action.Function())
	if f == nil {
		f = s.check(ctx, w, a, out)
	}
	if err := ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	switch {
	case f == nil:
		s.addPage(a, out)
		a.run.End(out, nil)
	case response.IsStopped(r), f.Kind == worker.FaultCancelled:
		// The server did not cancel it, so the worker is shutting down.
		a.run.GiveBack("the worker gave up the action: " + f.Error())
	default:
		a.run.End(nil, f)
	}
	return nil
}

// addPage adds the URL of the page about a failed action to its message.
func (s *Server) addPage(a *assignment, out *worker.Outcome) {
	if s.cfg.Page == nil || out.Status == worker.StatusOK && out.Result.GetExitCode() == 0 {
		return
	}
	if page := s.cfg.Page(a.in.Name, a.action); page != "" {
		out.Message = strings.TrimPrefix(out.Message+"\ncloister: page: "+page, "\n")
	}
}

// check verifies what clients rely on: a result was made with the required toolchain and in the sandbox that its worker
// offers, is well formed, fits into a message, names no path outside the output directory (rule 66), and every blob it
// names is in the store (rule 119).
func (s *Server) check(ctx context.Context, w *session, a *assignment, out *worker.Outcome) *worker.Fault {
	refuse := func(k worker.FaultKind, format string, args ...any) *worker.Fault {
		why := fmt.Errorf(format, args...)
		s.cfg.Log.Warn("result of a worker rejected", "worker", w.offer.Worker, "slot", w.offer.Slot,
			"action", a.action.String(), "err", why)
		return &worker.Fault{Kind: k, Err: fmt.Errorf("result of worker %s rejected: %w", w.name, why)}
	}
	if has := results.Recorded(out.Result).GetToolchain(); has != "" && s.cfg.Toolchain != "" && has != s.cfg.Toolchain {
		return refuse(worker.FaultUnavailable, "the toolchain of the worker changed to %+.80q", has)
	}
	for _, p := range w.offer.Properties { // an action may have required it
		if made := results.Recorded(out.Result).GetSandbox().GetBackend(); p.Name == worker.PropertySandbox && made != p.Value {
			return refuse(worker.FaultInternal, "it was made in the sandbox %+.80q, and the worker offers %s", made, p.Value)
		}
	}
	if n := proto.Size(out.Result); n > worker.MaxResult {
		return refuse(worker.FaultInternal, "it takes %d bytes, a message at most %d", n, worker.MaxResult)
	}
	if err := errors.Join(cas.CheckOutputs(out.Result), cas.CheckInlined(a.action.Function(), out.Result)); err != nil {
		return refuse(worker.FaultInternal, "%w", err)
	}
	blobs, err := cas.Closure(ctx, a.in.Store, a.action.Function(), out.Result)
	switch {
	case errors.Is(err, cas.ErrInvalid):
		return refuse(worker.FaultInternal, "%w", err)
	case err != nil:
		return refuse(worker.FaultUnavailable, "%w", err)
	}
	if !out.AuditLog.IsZero() {
		blobs = append(blobs, out.AuditLog)
	}
	missing, err := a.in.Store.Missing(ctx, blobs)
	switch {
	case err != nil:
		return refuse(worker.FaultUnavailable, "%w", err)
	case len(missing) > 0:
		return refuse(worker.FaultUnavailable, "%d of its %d blobs are absent, first %s", len(missing), len(blobs), missing[0])
	}
	return nil
}
