// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"

	"google.golang.org/grpc/codes"
)

// publish records the result of an action that succeeded and may be cached. Every blob that the result
// names is in the store by now (rule 119).
func (l *Local) publish(ctx context.Context, t *Task, req *Request, out *Outcome) error {
	if req.Action.DoNotCache || out.Code != codes.OK || out.Result.ExitCode != 0 {
		return nil
	}
	return req.Instance.Actions.Record(ctx, t.Action, out.Result)
}
