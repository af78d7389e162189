// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// keepInputs calls RenewInputs every l.Renew until the function that it returns is called, which waits for
// a call that is under way. The first is due after l.Renew: fetch has just marked them.
func (l *Local) keepInputs(ctx context.Context, t *Task) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(l.Renew)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				l.RenewInputs(ctx, t)
			}
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// RenewInputs marks as used all that the action of t needs, as cas.MarkInputs does, so that a store keeps it
// for as long again. What is absent or goes wrong is told to the log alone: the run may not need it any more,
// and fails in its own words if it does. Calls take turns, so that only one holds a list of blobs.
func (l *Local) RenewInputs(ctx context.Context, t *Task) {
	select {
	case l.renewing <- struct{}{}:
		defer func() { <-l.renewing }()
	case <-ctx.Done():
		return
	}
	log := l.Log.With("action", t.Action.String(), "instance", t.Instance)
	defer func() {
		// It is called by goroutines of which nobody else would survive a panic.
		if v := recover(); v != nil {
			log.Error("panic while the inputs of an action were renewed", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	in, err := l.Instances(t.Instance)
	if err != nil {
		log.Warn("inputs of an action cannot be renewed", "err", err)
		return
	}
	missing, err := cas.MarkInputs(ctx, in.Store, t.Action)
	switch {
	case ctx.Err() != nil: // the action is over
	case err != nil:
		log.Warn("inputs of an action cannot be renewed", "err", err)
	case len(missing) > 0:
		log.Warn("inputs of an action are gone from the store before its end", "blobs", len(missing), "first", missing[0].String())
	}
}
