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
	info Info
	seq  uint64 // in order of arrival
	who  who
	q    *Queue

	// The rest is guarded by q.mu.
	job       *job   // nil once completed
	share     *share // in which it waits, while job waits in a line
	place     int    // in share.places
	state     State
	version   int           // of state
	changed   chan struct{} // closed at the next change
	waiters   int
	idle      time.Time // since when nobody waits, if waiters is 0
	completed time.Time
	bytes     int64 // what it takes once completed, estimated
}

// Info is what is known of an operation from the start.
type Info struct {
	// Name is INSTANCE/operations/ID, without the first part where the instance has no name. The ID cannot be
	// guessed.
	Name     string
	Instance string
	Action   cas.Digest
	// Target, Mnemonic, Invocation and Correlated are those of the Task.
	Target, Mnemonic, Invocation, Correlated string
	// Queued is when the request arrived.
	Queued time.Time
}

// FirstVersion is the version of the state in which every operation begins.
const FirstVersion = 1

// A State is how far an operation has come.
type State struct {
	// Stage is CACHE_CHECK first and while the request is prepared, then QUEUED, EXECUTING and
	// COMPLETED, of which only the last is never left out. An action that was lost with its worker is QUEUED again.
	Stage repb.ExecutionStage_Value
	// Began is when a slot took the action, and Worker whose slot that is; zero before, and where none did.
	Began  time.Time
	Worker string
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
	var id [16]byte
	rand.Read(id[:]) // never fails
	t := &j.req.Task
	name := "operations/" + hex.EncodeToString(id[:])
	if t.Instance != "" {
		name = t.Instance + "/" + name // as it is: who may ask for it is told by the instance
	}
	o := &Operation{
		info: Info{
			Name: name, Instance: t.Instance, Action: t.Action,
			Target: t.Target, Mnemonic: t.Mnemonic, Invocation: t.Invocation, Correlated: t.Correlated, Queued: t.Queued,
		},
		seq:     q.seq,
		who:     who{t.Instance, t.Invocation, j.req.Priority},
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
func (o *Operation) Name() string { return o.info.Name }

// Seq returns its number among the operations of the queue, in order of arrival from 1, for Older.
func (o *Operation) Seq() uint64 { return o.seq }

// Action returns the digest of the action.
func (o *Operation) Action() cas.Digest { return o.info.Action }

// Info returns what was known of the operation from the start.
func (o *Operation) Info() Info { return o.info }

// State returns the present state. Unlike Wait it shows no interest.
func (o *Operation) State() State {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	return o.state
}

// Cancel completes the operation with a Fault of kind Cancelled that says why, unless it is completed. Its action goes
// on for other operations that share the run, and ends if there are none.
func (o *Operation) Cancel(why string) {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	if o.job != nil {
		o.q.leave(o, fault(worker.Cancelled, "%s", why))
	}
}

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

// before reports whether o came sooner than p.
func (o *Operation) before(p *Operation) bool { return o.seq < p.seq }

// moved notes the place of o.
func (o *Operation) moved(to int) { o.place = to }

// change makes s the state.
func (o *Operation) change(s State) {
	o.state = s
	o.version++
	close(o.changed)
	o.changed = make(chan struct{})
}
