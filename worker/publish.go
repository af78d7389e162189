// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"

	"github.com/cloister-build/cloister/cas"
	"google.golang.org/grpc/codes"
)

// publish answers for the result: every blob that it names is in the store now (rule 119). Then it
// records it, if the action succeeded and may be cached.
func (l *Local) publish(ctx context.Context, t *Task, req *Request, out *Outcome) error {
	// A store that is too small for the outputs of one action evicts the first of them for the last.
	ds, err := cas.Closure(ctx, req.Instance.Store, t.Action.Function(), out.Result)
	if err != nil {
		return err
	}
	missing, err := req.Instance.Store.Missing(ctx, ds)
	if err != nil {
		return err
	}
	if !out.AuditLog.IsZero() {
		// It is a help to people and no part of the result: it lasts as long as what was used now, and no hit
		// of the action cache makes that longer.
		if gone, err := req.Instance.Store.Missing(ctx, []cas.Digest{out.AuditLog}); err != nil || len(gone) > 0 {
			out.AuditLog = cas.Digest{}
		}
	}
	if len(missing) > 0 {
		return faultf(Exhausted, "publish: the store evicted %d of the %d blobs that action %s made, %s among them, "+
			"before the result was whole: give it more room", len(missing), len(ds), t.Action, missing[0])
	}
	if req.Action.DoNotCache || out.OneOff || out.Code != codes.OK || out.Result.ExitCode != 0 {
		return nil
	}
	return req.Instance.Actions.Record(ctx, t.Action, out.Result)
}
