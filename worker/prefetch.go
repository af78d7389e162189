// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"runtime/debug"

	"github.com/cloister-build/cloister/cas"
)

// PrefetchInputs brings all input files of the action of t near, if its store is a cas.Fetcher and room, which is told
// their bytes, returns true. What goes wrong is not told: fetch and stage come upon it again.
func (l *Local) PrefetchInputs(ctx context.Context, t *Task, room func(bytes int64) bool) {
	defer func() {
		// It is called by goroutines of which nobody else would survive a panic.
		if v := recover(); v != nil {
			l.Log.Error("panic while the inputs of an action were fetched", "action", t.Action.String(), "instance", t.Instance,
				"panic", v, "stack", string(debug.Stack()))
		}
	}()
	in, err := l.Instances(t.Instance)
	if err != nil {
		return
	}
	if _, far := cas.As[cas.Fetcher](in.Store); !far {
		return
	}
	if req, err := l.resolve(ctx, in, t.Action); err == nil && room(req.Input.Bytes()) {
		_ = req.Layout.Fetch(ctx, in.Store)
	}
}
