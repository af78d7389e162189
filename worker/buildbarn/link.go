// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A link tracks and logs whether the scheduler answers.
type link struct {
	log *slog.Logger

	mu    sync.Mutex
	since time.Time // guarded by mu; zero while it answers
	text  string    // guarded by mu
}

// answered records an answer.
func (l *link) answered() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.since.IsZero() {
		l.log.Info("scheduler answers again", "after", time.Since(l.since).Round(time.Second).String())
	}
	l.since, l.text = time.Time{}, ""
}

// failed records a failed call.
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
		l.log.Warn("scheduler assigns no actions; retrying", "err", text, "hint", hint(st.Code()))
	}
}

// hint returns what an operator can do about a refusal.
func hint(c codes.Code) string {
	switch c {
	case codes.Unimplemented:
		return "use the scheduler's address for workers"
	case codes.ResourceExhausted, codes.FailedPrecondition:
		return "give this worker another name: another worker, or the scheduler's machine, may have the same"
	case codes.InvalidArgument:
		return "the scheduler accepts no workers with this instance, these properties, this toolchain or this size class"
	case codes.Unauthenticated, codes.PermissionDenied:
		return "the scheduler accepts no workers with this certificate, token or name"
	}
	return "none"
}

// down describes since when and why the scheduler does not answer; "" if it does.
func (l *link) down() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.since.IsZero() {
		return ""
	}
	return fmt.Sprintf("no actions from the scheduler since %s: %s", l.since.UTC().Format(time.RFC3339), l.text)
}
