// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"

	"github.com/cloister-build/cloister/cas"
)

// publish answers for the result: every blob that it names, all of which are among blobs, is in the store now
// (rule 119). Then it records it, if the action succeeded and may be cached.
func (l *Local) publish(ctx context.Context, t *Task, req *Request, out *Outcome, blobs []cas.Digest) error {
	store := req.Instance.Store
	// A store that is too small for the outputs of one action, and promises no lease, evicts the first of them
	// for the last.
	if len(blobs) > 0 {
		missing, err := store.Missing(ctx, blobs)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return faultf(Exhausted, "publish: the store evicted %d of the %d blobs that action %s made, %s among them, "+
				"before the result was whole: give it more room", len(missing), len(blobs), t.Action, missing[0])
		}
	}
	if !out.AuditLog.IsZero() {
		// It is a help to people and no part of the result: it lasts as long as what was used now, and no hit
		// of the action cache makes that longer.
		if gone, err := store.Missing(ctx, []cas.Digest{out.AuditLog}); err != nil || len(gone) > 0 {
			out.AuditLog = cas.Digest{}
		}
	}
	if req.Action.DoNotCache || out.Uncacheable || out.Status != OK || out.Result.ExitCode != 0 {
		return nil
	}
	if t.Approve != nil && !t.Approve(ctx, out) {
		return nil
	}
	return req.Instance.Actions.Record(ctx, t.Action, out.Result)
}
