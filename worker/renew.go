// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"runtime/debug"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree"
)

// keepInputs renews the inputs of t's action and its root file system every l.cfg.RenewInterval until stop is called,
// which waits for a call in progress. The first call comes after one interval, because fetch has marked the inputs or
// knows that they were marked recently.
func (l *Local) keepInputs(ctx context.Context, t *Task, root cas.Digest) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var mu sync.Mutex
	mu.Lock() // until timer is set
	defer mu.Unlock()
	var timer *time.Timer
	timer = time.AfterFunc(l.cfg.RenewInterval, func() {
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() == nil {
			l.renewInputs(ctx, t, root)
			timer.Reset(l.cfg.RenewInterval)
		}
	})
	return func() {
		cancel()
		mu.Lock() // so that nobody resets the timer
		defer mu.Unlock()
		timer.Stop()
	}
}

// RenewInputs marks the inputs of t's action as used, except those marked recently, so that the store keeps them. It
// only logs failures: the run may not need the inputs any more, and reports the problem itself if it does. Only one
// call at a time works, because each holds a list of blobs. It does nothing if t is nil.
func (l *Local) RenewInputs(ctx context.Context, t *Task) {
	if t != nil {
		l.renewInputs(ctx, t, t.Root)
	}
}

func (l *Local) renewInputs(ctx context.Context, t *Task, root cas.Digest) {
	select {
	case l.renewing <- struct{}{}:
		defer func() { <-l.renewing }()
	case <-ctx.Done():
		return
	}
	log := l.cfg.Log.With("action", t.Action.String(), "instance", t.Instance)
	defer func() {
		if v := recover(); v != nil { // it runs in a goroutine whose panic would end the process
			log.Error("panic while renewing inputs", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	in, err := l.cfg.Instances(t.Instance)
	if err == nil {
		err = l.markInputs(ctx, in, t.Action)
		if !root.IsZero() {
			_, rootErr := l.inputs.Load(ctx, in, root)
			err = joinMissing(err, rootErr)
		}
	}
	if err == nil || ctx.Err() != nil { // the action may be over
		return
	}
	if missing, ok := errors.AsType[*tree.MissingError](err); ok {
		l.inputs.Invalidate(in.Name)
		log.Warn("the store lost inputs of a running action",
			"blobs", len(missing.Blobs), "first", missing.Blobs[0].String())
		return
	}
	log.Warn("cannot renew the inputs of a running action", "err", err)
}

// markInputs marks the action and everything it refers to as used.
func (l *Local) markInputs(ctx context.Context, in *cas.Instance, action cas.Digest) error {
	a, err := l.Action(ctx, in, action)
	if err != nil {
		return missing(err, action)
	}
	command, root, err := parts(action, a)
	if err != nil {
		return err
	}
	gone, err := in.Store.Missing(ctx, []cas.Digest{action, command})
	if err == nil && len(gone) > 0 {
		err = &tree.MissingError{Blobs: gone}
	}
	_, treeErr := l.inputs.Load(ctx, in, root)
	return joinMissing(err, treeErr)
}
