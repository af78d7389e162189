// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"runtime/debug"

	"github.com/cloister-build/cloister/cas"
)

// PrefetchInputs fetches the input files of t's action to local storage, if the store is a cas.Fetcher and reserve,
// called with their total size, returns true. It does nothing if t is nil. It ignores errors, since fetch and stage
// will encounter them again.
func (l *Local) PrefetchInputs(ctx context.Context, t *Task, reserve func(bytes int64) bool) {
	if t == nil {
		return
	}
	defer func() {
		if v := recover(); v != nil { // it runs in a goroutine whose panic would end the process
			l.cfg.Log.Error("panic while prefetching inputs", "action", t.Action.String(), "instance", t.Instance,
				"panic", v, "stack", string(debug.Stack()))
		}
	}()
	in, err := l.cfg.Instances(t.Instance)
	if err != nil {
		return
	}
	if _, ok := cas.As[cas.Fetcher](in.Store); !ok {
		return
	}
	if req, err := l.resolve(ctx, in, t.Action); err == nil && reserve(req.Input.Bytes()) {
		_ = req.Layout.Fetch(ctx, in.Store)
	}
}
