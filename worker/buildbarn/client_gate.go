// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A gate is before actions: while it is shut, none is asked for. It is shut at first.
type gate struct {
	mu     sync.Mutex
	why    string             // guarded by mu; why it is shut, "" while it is open
	ever   bool               // guarded by mu; it stays shut
	until  context.Context    // guarded by mu; ends when it is shut, if it is open
	end    context.CancelFunc // guarded by mu; of until
	opened chan struct{}      // guarded by mu; closed once it is open, if it is shut
}

func newGate(why string) *gate { return &gate{why: why, opened: make(chan struct{})} }

// open opens the gate, and reports whether it was shut.
func (g *gate) open() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.why == "" || g.ever {
		return false
	}
	g.why = ""
	g.until, g.end = context.WithCancel(context.Background())
	close(g.opened)
	return true
}

// shut shuts the gate, perhaps for ever, and reports whether it was open, or shut for another reason.
func (g *gate) shut(why string, ever bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.why == why || g.ever {
		return false
	}
	if g.why == "" {
		g.opened = make(chan struct{})
		g.end()
	}
	g.why, g.ever = why, ever
	return true
}

// isShut reports whether it is shut.
func (g *gate) isShut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.why != ""
}

// wait waits until the gate is open, or it is time to leave.
func (g *gate) wait(ctx context.Context, draining <-chan struct{}) {
	g.mu.Lock()
	opened := g.opened
	g.mu.Unlock()
	select {
	case <-opened:
	case <-draining:
	case <-ctx.Done():
	}
}

// onShut calls f once the gate is shut, unless stop is called before.
func (g *gate) onShut(f func()) (stop func() bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.why != "" {
		f()
		return func() bool { return false }
	}
	return context.AfterFunc(g.until, f)
}

// A link is whether the scheduler answers. It tells the log when that changes.
type link struct {
	log *slog.Logger

	mu    sync.Mutex
	since time.Time // guarded by mu; zero while it answers
	text  string    // guarded by mu
}

// answered notes that the scheduler answers.
func (l *link) answered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.since.IsZero() {
		l.log.Info("the scheduler answers", "after", time.Since(l.since).Round(time.Second).String())
	}
	l.since, l.text = time.Time{}, ""
}

// failed notes that it does not, or does not want us.
func (l *link) failed(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := status.Convert(err)
	text := fmt.Sprintf("%s: %s", st.Code(), st.Message())
	if l.since.IsZero() {
		l.since = time.Now()
	}
	if text != l.text {
		l.text = text
		l.log.Warn("the scheduler cannot be asked for actions; trying again", "err", text, "hint", hint(st.Code()))
	}
}

// hint says what a person can do about a refusal.
func hint(c codes.Code) string {
	switch c {
	case codes.Unimplemented:
		return "the address is not that of a scheduler's port for workers"
	case codes.ResourceExhausted, codes.FailedPrecondition:
		return "another worker, or the scheduler's own machine, may have the same name: choose one with --name"
	case codes.InvalidArgument:
		return "the scheduler does not take workers with this instance, these properties or this size class"
	case codes.Unauthenticated, codes.PermissionDenied:
		return "the scheduler does not take workers with this certificate or token, or of this name"
	}
	return "none"
}

// down says since when the scheduler does not answer, and why, or "".
func (l *link) down() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		return ""
	}
	return fmt.Sprintf("no actions from the scheduler since %s: %s", l.since.UTC().Format(time.RFC3339), l.text)
}
