// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"sync"
	"time"
)

// readyInterval is how often Ready is checked.
const readyInterval = time.Second

// A readiness records whether actions can be executed, and lets others wait for changes. It begins unready.
type readiness struct {
	mu     sync.Mutex
	why    string             // guarded by mu; the reason while unready, else ""
	final  bool               // guarded by mu; it stays unready
	ctx    context.Context    // guarded by mu; ends with readiness
	end    context.CancelFunc // guarded by mu; of ctx
	opened chan struct{}      // guarded by mu; closed when ready
}

func newReadiness() *readiness {
	return &readiness{why: "not checked yet", opened: make(chan struct{})}
}

// set records readiness and reports whether that is a change.
func (r *readiness) set() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == "" || r.final {
		return false
	}
	r.why = ""
	r.ctx, r.end = context.WithCancel(context.Background())
	close(r.opened)
	return true
}

// clear records why nothing is ready, finally or for now, and reports whether that is a change.
func (r *readiness) clear(why string, final bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == why || r.final {
		return false
	}
	if r.why == "" {
		r.opened = make(chan struct{})
		r.end()
	}
	r.why, r.final = why, final
	return true
}

// ready reports whether actions can be executed.
func (r *readiness) ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why == ""
}

// wait returns when actions can be executed, stop is closed or ctx ends.
func (r *readiness) wait(ctx context.Context, stop <-chan struct{}) {
	r.mu.Lock()
	opened := r.opened
	r.mu.Unlock()
	select {
	case <-opened:
	case <-stop:
	case <-ctx.Done():
	}
}

// onClear calls f when readiness ends, unless stop is called before.
func (r *readiness) onClear(f func()) (stop func() bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why != "" {
		f()
		return func() bool { return false }
	}
	return context.AfterFunc(r.ctx, f)
}
