// SPDX-License-Identifier: Apache-2.0

package execserver

import (
	"cmp"
	"context"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/history"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/cloister-build/cloister/worker/response"
)

// Remember returns what, as queue.Config.Ended, adds to l an entry for each operation.
func Remember(l *history.Log) func(*worker.Outcome, *worker.Fault) func(queue.Info, queue.State) {
	return func(out *worker.Outcome, f *worker.Fault) func(queue.Info, queue.State) {
		e := history.Entry{How: history.Executed}
		if f != nil {
			code, _ := response.FaultText(f)
			e.Code = int32(code)
		} else {
			e.Code = int32(response.Code(out.Status))
			if out.Cached {
				e.How = history.Cached
			}
			describe(&e, out.Result)
		}
		return func(i queue.Info, s queue.State) {
			e := e // several operations may have this end
			e.Instance, e.Action = i.Instance, i.Action.String()
			e.Invocation, e.Correlated, e.Target, e.Mnemonic = i.Invocation, i.Correlated, i.Target, i.Mnemonic
			e.Worker = cmp.Or(e.Worker, s.Worker) // who had what has no result
			if !s.Began.IsZero() {
				e.Waited = max(s.Began.Sub(i.Queued), 0)
			}
			l.Add(e)
		}
	}
}

// RememberLookups returns what, as casserver.Config.OnLookup, adds to l an entry for each answer of GetActionResult to a
// client that says which build it asks for. Others are people who look, and servers that are in front of this one.
func RememberLookups(l *history.Log) func(context.Context, string, cas.Digest, *repb.ActionResult) {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) {
		how := history.Found
		if r == nil {
			how = history.Absent
		}
		rememberCall(ctx, l, how, instance, action, r)
	}
}

// RememberUploads is RememberLookups for casserver.Config.OnUpdate, and what UpdateActionResult has recorded.
func RememberUploads(l *history.Log) func(context.Context, string, cas.Digest, *repb.ActionResult) {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) {
		rememberCall(ctx, l, history.Uploaded, instance, action, r)
	}
}

// rememberCall adds to l an entry for a call about the action cache, if the client says which build it is of.
func rememberCall(ctx context.Context, l *history.Log, how history.How, instance string, action cas.Digest, r *repb.ActionResult) {
	who := identity(ctx)
	if worker.Sanitize(who.ToolInvocationId) == "" {
		return
	}
	e := history.Entry{
		How: how, Instance: instance, Action: action.String(), Invocation: worker.Sanitize(who.ToolInvocationId),
		Correlated: worker.Sanitize(who.CorrelatedInvocationsId), Target: worker.Sanitize(who.TargetId), Mnemonic: worker.Sanitize(who.ActionMnemonic),
	}
	describe(&e, r)
	l.Add(e)
}

// describe adds to e what is said of a result.
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
	if from, to := m.ExecutionStartTimestamp, m.ExecutionCompletedTimestamp; from != nil && to != nil {
		e.Ran = max(to.AsTime().Sub(from.AsTime()), 0)
	}
}
