// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"

	"github.com/cloister-build/cloister/cas"
)

// publish ensures that the store has every blob of the result (rule 119). Then it writes the result to the action
// cache, if the action succeeded and may be cached.
func (l *Local) publish(ctx context.Context, t *Task, req *request, out *Outcome, blobs []cas.Digest) error {
	store := req.Instance.Store
	// A store that is too small for the outputs of one action, and grants no lease, evicts the first blobs for the
	// last.
	if len(blobs) > 0 {
		missing, err := store.Missing(ctx, blobs)
		if err != nil {
			return err
		}
		if len(missing) > 0 {
			return faultf(FaultExhausted, "publish: the store evicted %d of the %d blobs of action %s, including %s, "+
				"before the result was complete: increase the size of the store",
				len(missing), len(blobs), t.Action, missing[0])
		}
	}
	if !out.AuditLog.IsZero() {
		// It is not part of the result, so that hits in the action cache do not keep it alive.
		if gone, err := store.Missing(ctx, []cas.Digest{out.AuditLog}); err != nil || len(gone) > 0 {
			out.AuditLog = cas.Digest{}
		}
	}
	if req.Action.DoNotCache || out.Uncacheable || out.Status != StatusOK || out.Result.ExitCode != 0 {
		return nil
	}
	if t.Approve != nil && !t.Approve(ctx, out) {
		return nil
	}
	return req.Instance.Actions.Record(ctx, t.Action, out.Result)
}
