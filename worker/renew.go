// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// keepInputs calls RenewInputs every l.Renew until the function that it returns is called, which waits for
// a call that is under way. The first is due after l.Renew: fetch has marked them, or knows that they
// were marked at most a quarter of that ago.
func (l *Local) keepInputs(ctx context.Context, t *Task) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var working sync.Mutex
	working.Lock() // until there is a timer
	defer working.Unlock()
	var timer *time.Timer
	timer = time.AfterFunc(l.RenewInterval, func() {
		working.Lock()
		defer working.Unlock()
		if ctx.Err() == nil {
			l.RenewInputs(ctx, t)
			timer.Reset(l.RenewInterval)
		}
	})
	return func() {
		cancel()
		working.Lock() // so that nobody sets the timer again
		defer working.Unlock()
		timer.Stop()
	}
}

// RenewInputs marks as used all that the action of t needs, but for what was marked lately for another, so that
// a store keeps it for as long again. What is absent or goes wrong is told to the log alone: the run may not need
// it any more, and fails in its own words if it does. Calls take turns, so that only one holds a list of blobs.
func (l *Local) RenewInputs(ctx context.Context, t *Task) {
	select {
	case l.renewing <- struct{}{}:
		defer func() { <-l.renewing }()
	case <-ctx.Done():
		return
	}
	log := func() *slog.Logger { return l.Log.With("action", t.Action.String(), "instance", t.Instance) }
	defer func() {
		// It is called by goroutines of which nobody else would survive a panic.
		if v := recover(); v != nil {
			log().Error("panic while the inputs of an action were renewed", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	in, err := l.Instances(t.Instance)
	if err == nil {
		err = l.markInputs(ctx, in, t.Action)
	}
	var missing *tree.MissingError
	switch {
	case err == nil, ctx.Err() != nil: // else the action is over
	case errors.As(err, &missing):
		l.inputs.Invalidate(in.Name)
		log().Warn("inputs of an action are gone from the store before its end",
			"blobs", len(missing.Blobs), "first", missing.Blobs[0].String())
	default:
		log().Warn("inputs of an action cannot be renewed", "err", err)
	}
}

// markInputs marks the action and all that it refers to.
func (l *Local) markInputs(ctx context.Context, in *cas.Instance, action cas.Digest) error {
	a, err := l.Action(ctx, in, action)
	if err != nil {
		return absent(err, action)
	}
	command, root, err := parts(action, a)
	if err != nil {
		return err
	}
	missing, err := in.Store.Missing(ctx, []cas.Digest{action, command})
	if err == nil && len(missing) > 0 {
		err = &tree.MissingError{Blobs: missing}
	}
	_, treeErr := l.inputs.Load(ctx, in, root)
	return both(err, treeErr)
}
