// SPDX-License-Identifier: Apache-2.0

package buildbarn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker/queue"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// maxWorkers limits the sessions, one for each slot. It allows for 1,000 workers of 64 slots.
const maxWorkers = 100_000

// A session is one worker_id: a slot of a worker.
type session struct {
	identity
	owner string // returned by Caller when it joined
	offer queue.Offer
	slot  *queue.Slot

	// Guarded by Server.mu.
	call     *call       // present call, or nil
	calls    uint64      // number of calls
	silence  *time.Timer // runs between calls
	lastCall time.Time   // end of the last call

	// assigned is what the worker is to execute, or nil; previous what it was to execute before, and last describes its
	// last answer. They belong to the present call; between calls Server.mu guards them.
	assigned, previous *assignment
	last               runTimes
}

// unassign records that the worker is to execute nothing.
func (w *session) unassign() { w.assigned, w.previous = nil, w.assigned }

// A call is a call of a worker.
type call struct {
	ctx  context.Context
	over chan struct{} // closed when it is answered
}

// errClosed ends calls at shutdown.
var errClosed = status.Error(codes.Unavailable, "the server is shutting down; call again, it or its successor has actions")

// beginCall returns the session of a worker for a call, and creates it if necessary.
func (s *Server) beginCall(ctx context.Context, id identity, o queue.Offer) (*session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.awaitAbandoned(ctx, id)
	owner := ""
	if s.cfg.Caller != nil {
		owner = s.cfg.Caller(ctx)
	}
	switch {
	case s.closed:
		return nil, errClosed
	case ctx.Err() != nil:
		// The call is outdated: the worker may have made the next one.
		return nil, status.FromContextError(ctx.Err()).Err()
	case w != nil && w.owner != owner:
		return nil, status.Errorf(codes.PermissionDenied,
			"worker ID %s belongs to a caller other than %s until it has been silent for %v; give each slot of each machine its own ID",
			id.name, owner, s.cfg.Silence)
	case w != nil && w.store != id.store:
		// Of two processes that run, the first stays. One without an action that has missed a call may have ended, and
		// has nothing to lose: if it returns, it is refused.
		if why := w.alive(min(maxCallGap, s.cfg.Silence)); why != "" {
			return nil, status.Errorf(codes.FailedPrecondition,
				"another process, with another store, is worker %s: %s; give each worker its own name. "+
					"If that process has ended, its name is free after %v of silence", id.name, why, s.cfg.Silence)
		}
		s.lose(w, "another process has joined under its name")
		w = nil
	case w != nil && w.call != nil:
		return nil, status.Errorf(codes.ResourceExhausted, "A worker with the same worker ID is already synchronizing: %s; "+
			"give each slot of each machine its own ID", id.name)
	case w != nil && !sameOffer(w.offer, o):
		s.lose(w, "it has joined again with other properties")
		w = nil
	}
	if w == nil {
		var err error
		if w, err = s.join(id, owner, o); err != nil {
			return nil, err
		}
	}
	if w.silence != nil {
		w.silence.Stop()
	}
	w.call = &call{ctx, make(chan struct{})}
	w.calls++
	s.wg.Add(1)
	return w, nil
}

// awaitAbandoned waits for the end of a call that the worker has abandoned, and returns its session, or nil if there is
// none. s.mu is held, except while it waits.
func (s *Server) awaitAbandoned(ctx context.Context, id identity) *session {
	w := s.sessions[id.name]
	for w != nil && w.call != nil && w.call.ctx.Err() != nil && ctx.Err() == nil {
		over := w.call.over
		s.mu.Unlock()
		select {
		case <-over:
		case <-ctx.Done():
		}
		s.mu.Lock()
		w = s.sessions[id.name]
	}
	return w
}

// join creates a session, with s.mu held.
func (s *Server) join(id identity, owner string, o queue.Offer) (*session, error) {
	if len(s.sessions) >= maxWorkers {
		return nil, status.Errorf(codes.ResourceExhausted, "too many workers: %d have joined", len(s.sessions))
	}
	slot, err := s.cfg.Queue.Join(o)
	switch {
	case errors.Is(err, queue.ErrClosed):
		return nil, errClosed
	case err != nil:
		return nil, status.Errorf(codes.FailedPrecondition, "worker %s cannot join: %v", id.name, err)
	}
	w := &session{identity: id, owner: owner, offer: o, slot: slot}
	s.sessions[w.name] = w
	s.cfg.Log.Info("worker has joined", "worker", o.Worker, "slot", o.Slot, "instances", o.Prefix+"*",
		"properties", fmt.Sprint(o.Properties))
	return w, nil
}

// maxCallGap exceeds the time between two calls of a worker without an action: Clients call every ten seconds at least
// (maxInterval), Buildbarn's workers more often.
const maxCallGap = 15 * time.Second

// alive returns why the worker may still run, or "" if it has no action and has been silent for so long. Server.mu is
// held.
func (w *session) alive(silent time.Duration) string {
	ago := time.Since(w.lastCall).Round(time.Second)
	switch {
	case w.call != nil: // which owns w.assigned
		return "it is calling now"
	case w.assigned != nil && !w.assigned.over():
		return fmt.Sprintf("it has an action and last called %v ago", ago)
	case time.Since(w.lastCall) < silent:
		return fmt.Sprintf("it last called %v ago", ago)
	}
	return ""
}

// endCall ends the call of a worker and starts to wait for the next.
func (s *Server) endCall(w *session) {
	defer s.wg.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	close(w.call.over)
	w.call, w.lastCall = nil, time.Now()
	if s.closed {
		s.lose(w, "the server is shutting down")
		return
	}
	calls := w.calls
	w.silence = time.AfterFunc(s.cfg.Silence, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if w.calls == calls && s.sessions[w.name] == w {
			s.lose(w, fmt.Sprintf("silent for %v", s.cfg.Silence))
		}
	})
}

// lose removes a worker that has no call, with s.mu held.
func (s *Server) lose(w *session, why string) {
	delete(s.sessions, w.name)
	if w.silence != nil {
		w.silence.Stop()
	}
	level, attrs := slog.LevelInfo, []any{"worker", w.offer.Worker, "slot", w.offer.Slot, "why", why}
	if a := w.assigned; a != nil && !a.over() {
		level, attrs = slog.LevelWarn, append(attrs, "action", a.action.String())
	}
	w.slot.Leave(why)
	s.cfg.Log.Log(context.Background(), level, "worker has left", attrs...)
}

// A runTimes is when an action was executed by the worker's clock, which differs for all executions of a slot. It is
// zero for an answer without times.
type runTimes struct{ begin, start, completed, end int64 }

func timesOf(r *repb.ExecuteResponse) runTimes {
	m := r.GetResult().GetExecutionMetadata()
	at := func(t *timestamppb.Timestamp) int64 {
		if t == nil {
			return 0
		}
		return t.AsTime().UnixNano()
	}
	return runTimes{
		at(m.GetWorkerStartTimestamp()), at(m.GetExecutionStartTimestamp()),
		at(m.GetExecutionCompletedTimestamp()), at(m.GetWorkerCompletedTimestamp()),
	}
}

// sameOffer compares two offers, except for Ending.
func sameOffer(a, b queue.Offer) bool {
	return a.Worker == b.Worker && a.Slot == b.Slot && a.Prefix == b.Prefix && slices.Equal(a.Properties, b.Properties)
}
