// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
)

// An Operation is one request on its way to an end. Its methods are safe for concurrent use.
type Operation struct {
	name   string
	action cas.Digest
	q      *Queue

	// The rest is guarded by q.mu.
	job       *job // nil once completed
	state     State
	version   int           // of state
	changed   chan struct{} // closed at the next change
	waiters   int
	idle      time.Time // since when nobody waits, if waiters is 0
	completed time.Time
	bytes     int64 // what it takes once completed, estimated
}

// FirstVersion is the version of the state in which every operation begins.
const FirstVersion = 1

// A State is how far an operation has come.
type State struct {
	// Stage is CACHE_CHECK first and while the request is prepared, then QUEUED, EXECUTING and
	// COMPLETED, of which only the last is never left out.
	Stage repb.ExecutionStage_Value
	// Outcome or Fault is set at COMPLETED, not both. An Outcome may be shared by several operations
	// and must not be modified.
	Outcome *worker.Outcome
	Fault   *worker.Fault
	// Stdout and Stderr are the names of the run's logs, from EXECUTING on and "" if there are none. Operations
	// that share a run have the same.
	Stdout, Stderr string
}

func newOperation(q *Queue, j *job, now time.Time) *Operation {
	// The name is all that a client needs to see the result, so it must not be guessed.
	var name [16]byte
	rand.Read(name[:]) // never fails
	o := &Operation{
		name:    hex.EncodeToString(name[:]),
		action:  j.req.Task.Action,
		q:       q,
		job:     j,
		state:   State{Stage: repb.ExecutionStage_CACHE_CHECK},
		version: FirstVersion,
		changed: make(chan struct{}),
		idle:    now,
	}
	j.ops[o] = true
	return o
}

// Name returns the operation's name, which never changes and cannot be guessed.
func (o *Operation) Name() string { return o.name }

// Action returns the digest of the action.
func (o *Operation) Action() cas.Digest { return o.action }

// Wait returns the state and its version as soon as the version is not seen; versions begin at
// FirstVersion. The state COMPLETED is the last and is returned at once. When ctx ends, Wait returns
// the present state with the error of ctx. To wait is also to show interest: an operation that nobody
// has waited for during the queue's grace is cancelled.
func (o *Operation) Wait(ctx context.Context, seen int) (State, int, error) {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	o.waiters++
	defer func() {
		o.waiters--
		o.idle = time.Now()
	}()
	for o.version == seen && o.job != nil {
		if err := ctx.Err(); err != nil {
			return o.state, o.version, err
		}
		changed := o.changed
		o.q.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		o.q.mu.Lock()
	}
	return o.state, o.version, nil
}

// change makes s the state.
func (o *Operation) change(s State) {
	o.state = s
	o.version++
	close(o.changed)
	o.changed = make(chan struct{})
}
