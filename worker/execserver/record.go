// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"cmp"
	"context"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/internal/requestmetadata"
	"github.com/cloister-build/cloister/worker/internal/response"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// RecordOperations returns a queue.Config.Ended that adds each operation to l, and the results of failed actions to
// failures, which may be nil.
func RecordOperations(
	l *history.Log, failures *history.Failures,
) func(*worker.Task, *worker.Outcome, *worker.Fault) func(queue.Info, queue.State) {
	return func(t *worker.Task, out *worker.Outcome, f *worker.Fault) func(queue.Info, queue.State) {
		e := history.Entry{How: history.Executed}
		if f != nil {
			code, text := response.FaultText(f)
			e.Code, e.Message = int32(code), text
		} else {
			e.Code = int32(response.Code(out.Status))
			if out.Cached {
				e.How = history.Cached
			}
			describe(&e, out.Result)
			if e.Failed() && failures != nil {
				if d := failures.Put(t.Instance, t.Action, response.Of(out, "")); !d.IsZero() {
					e.Response = d.String()
				}
			}
		}
		return func(i queue.Info, s queue.State) {
			e := e // operations may share this end
			e.Instance, e.Action = i.Instance, i.Action.String()
			e.Caller = i.Caller
			e.Invocation, e.Correlated, e.Target, e.Mnemonic = i.Invocation, i.Correlated, i.Target, i.Mnemonic
			e.Worker = cmp.Or(e.Worker, s.Worker) // if there is no result
			if !s.Began.IsZero() {
				e.Waited = max(s.Began.Sub(i.Queued), 0)
			}
			l.Add(e)
		}
	}
}

// RecordLookups returns a casserver.Config.OnLookup that adds each answer of GetActionResult to l, if the client states
// its build. Other clients are people and servers in front of this one. caller, if not nil, returns who calls.
func RecordLookups(
	l *history.Log, caller func(context.Context) string,
) func(context.Context, string, cas.Digest, *repb.ActionResult) {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) {
		how := history.Found
		if r == nil {
			how = history.Absent
		}
		recordCall(ctx, l, caller, how, instance, action, r)
	}
}

// RecordUploads is like RecordLookups, for casserver.Config.OnUpdate and UpdateActionResult.
func RecordUploads(
	l *history.Log, caller func(context.Context) string,
) func(context.Context, string, cas.Digest, *repb.ActionResult) {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) {
		recordCall(ctx, l, caller, history.Uploaded, instance, action, r)
	}
}

// recordCall adds an action cache call to l, if the client states its build.
func recordCall(
	ctx context.Context, l *history.Log, caller func(context.Context) string, how history.How, instance string,
	action cas.Digest, r *repb.ActionResult,
) {
	md := requestmetadata.Of(ctx)
	invocation := worker.Sanitize(md.ToolInvocationId)
	if invocation == "" {
		return
	}
	e := history.Entry{
		How: how, Instance: instance, Action: action.String(), Invocation: invocation,
		Correlated: worker.Sanitize(md.CorrelatedInvocationsId), Target: worker.Sanitize(md.TargetId),
		Mnemonic: worker.Sanitize(md.ActionMnemonic),
	}
	if caller != nil {
		e.Caller = caller(ctx)
	}
	describe(&e, r)
	l.Add(e)
}

// describe adds the facts of a result to e.
func describe(e *history.Entry, r *repb.ActionResult) {
	if r == nil {
		return
	}
	e.Exit, e.Result = r.ExitCode, history.Identity(r)
	text, stable := worker.RecordedManifest(r)
	if e.StableHash = stable; !text.IsZero() {
		e.Manifest = text.String()
	}
	m := r.ExecutionMetadata
	if m == nil {
		return
	}
	e.Worker = m.Worker
	e.Prepared = between(m.WorkerStartTimestamp, m.ExecutionStartTimestamp)
	e.Ran = between(m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp)
	e.Stored = between(m.ExecutionCompletedTimestamp, m.OutputUploadCompletedTimestamp)
}

// between returns the time between two timestamps of a worker, or 0 if one is missing.
func between(from, to *timestamppb.Timestamp) time.Duration {
	if from == nil || to == nil {
		return 0
	}
	return max(to.AsTime().Sub(from.AsTime()), 0)
}
