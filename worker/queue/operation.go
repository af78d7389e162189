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
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/queue/internal/fairqueue"
)

// An Operation is one request until and after its completion. Its methods are safe for concurrent use.
type Operation struct {
	info  Info
	entry fairqueue.Entry[*job]
	q     *Queue

	// The fields below are guarded by q.mu.
	job       *job // nil once completed
	state     State
	version   int           // of state
	changed   chan struct{} // closed at the next change
	clients   int           // that follow or wait
	followed  bool          // a client has called Follow
	unwatched time.Time     // when the last client left; zero before the first has come
	lost      time.Time     // when the last client left that may return; zero if none did
	expiring  bool          // a timer of expireSoon runs
	completed time.Time
	bytes     int64 // estimated memory once completed
}

// Info holds the constant facts of an operation.
type Info struct {
	// Name is INSTANCE/operations/ID, or operations/ID if the instance has no name. The ID cannot be guessed.
	Name     string
	Instance string
	Action   cas.Digest
	// Target, Mnemonic, Invocation and Correlated are those of the Task.
	Target, Mnemonic, Invocation, Correlated string
	// Queued is when the request arrived, and Caller the Request's.
	Queued time.Time
	Caller string
}

// FirstVersion is the version of every operation's first state.
const FirstVersion = 1

// A State is the progress of an operation.
type State struct {
	// Stage is CACHE_CHECK until the request is prepared, then QUEUED, also during its Pull, EXECUTING and COMPLETED;
	// each except the last may be skipped. An action lost with its worker is QUEUED again.
	Stage repb.ExecutionStage_Value
	// Pulling is set while the action waits for a container image. It returns the pull, or nil if there is none yet.
	Pulling pulls.State
	// Began is when a slot took the action, and Worker the slot's worker; zero if none did.
	Began  time.Time
	Worker string
	// Outcome or Fault is set at COMPLETED, never both. Operations may share an Outcome, which must not be modified.
	Outcome *worker.Outcome
	Fault   *worker.Fault
	// Stdout and Stderr are the names of the run's logs from EXECUTING on; "" if there are none. Operations that share
	// a run share its logs.
	Stdout, Stderr string
}

func newOperation(q *Queue, j *job) *Operation {
	// A client that knows the name can read the result, so it must not be guessable.
	var id [16]byte
	rand.Read(id[:]) // never fails
	t := &j.req.Task
	name := "operations/" + hex.EncodeToString(id[:])
	if t.Instance != "" {
		name = t.Instance + "/" + name // unchanged: the instance decides who may query it
	}
	o := &Operation{
		info: Info{
			Name: name, Instance: t.Instance, Action: t.Action,
			Target: t.Target, Mnemonic: t.Mnemonic, Invocation: t.Invocation, Correlated: t.Correlated, Queued: t.Queued,
			Caller: j.req.Caller,
		},
		entry: fairqueue.Entry[*job]{
			Flow:    fairqueue.FlowKey{Instance: t.Instance, Invocation: t.Invocation, Priority: j.req.Priority},
			Seq:     q.seq,
			Arrived: t.Queued,
		},
		q:       q,
		job:     j,
		state:   State{Stage: repb.ExecutionStage_CACHE_CHECK},
		version: FirstVersion,
		changed: make(chan struct{}),
	}
	j.ops[o] = true
	return o
}

// Name returns the operation's name, which is constant and cannot be guessed.
func (o *Operation) Name() string { return o.info.Name }

// Seq returns the operation's number in order of arrival, from 1, for Older.
func (o *Operation) Seq() uint64 { return o.entry.Seq }

// Action returns the digest of the action.
func (o *Operation) Action() cas.Digest { return o.info.Action }

// Info returns the constant facts of the operation.
func (o *Operation) Info() Info { return o.info }

// State returns the present state. Unlike Wait it does not keep the operation alive.
func (o *Operation) State() State {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	return o.state
}

// Cancel completes the operation, unless it is completed, with a Fault of kind FaultCancelled that states why. Its
// action continues for other operations that share the run, and ends if there are none.
func (o *Operation) Cancel(why string) {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	if o.job != nil {
		o.q.leave(o, fault(worker.FaultCancelled, "%s", why))
	}
}

// Follow counts a client of the operation until the client calls leave, once. Clients keep the operation alive: it is
// cancelled Config.Grace after the last one has left, or Config.CancelGrace after that if each of them cancelled its
// call. A client that did not, because its connection broke, may return within Config.Grace. Without clients the action
// yields to actions with clients. Before its first client an operation lives without limit, so call Follow or Wait after
// each Submit.
func (o *Operation) Follow() (leave func(cancelled bool)) {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	if !o.followed {
		o.followed, o.lost = true, time.Time{} // the expected client has arrived
	}
	o.enter()
	return func(cancelled bool) {
		o.q.mu.Lock()
		defer o.q.mu.Unlock()
		o.exit(cancelled)
		if cancelled && o.clients == 0 && o.job != nil {
			o.expireSoon()
		}
	}
}

// enter counts a client.
func (o *Operation) enter() {
	if o.clients++; o.job != nil {
		o.q.setBackground(o, false)
	}
}

// exit reverts enter. The client may return unless it has cancelled its call.
func (o *Operation) exit(cancelled bool) {
	o.clients--
	o.unwatched = time.Now()
	if !cancelled {
		o.lost = o.unwatched
	}
	if o.clients > 0 || o.job == nil {
		return
	}
	o.q.left = append(o.q.left, departure{o, o.unwatched})
	if o.followed {
		o.q.setBackground(o, true)
	}
}

// expireSoon cancels o after Config.CancelGrace, unless a client has returned or may return. If one may, sweep cancels
// o later.
func (o *Operation) expireSoon() {
	if o.expiring {
		return
	}
	o.expiring = true
	time.AfterFunc(o.q.cfg.CancelGrace-time.Since(o.unwatched), func() {
		o.q.mu.Lock()
		defer o.q.mu.Unlock()
		o.expiring = false
		switch {
		case o.job == nil || o.clients > 0:
		case time.Since(o.unwatched) < o.q.cfg.CancelGrace: // a client was here again
			o.expireSoon()
		case o.abandoned(time.Now()):
			o.q.leave(o, fault(worker.FaultCancelled, "cancelled: the client cancelled its call; execute the action again"))
		}
	})
}

// abandoned reports whether o, which is not completed, is to be cancelled. It keeps an operation until its first client
// follows it, which may take minutes on an overloaded machine.
func (o *Operation) abandoned(now time.Time) bool {
	o.q.visits++
	return o.clients == 0 && !o.unwatched.IsZero() && now.Sub(o.unwatched) >= o.q.cfg.CancelGrace && now.Sub(o.lost) > o.q.cfg.Grace
}

// Wait returns the state and its version once the version differs from seen; versions begin at FirstVersion. COMPLETED
// is the last state and returned at once. When ctx ends, Wait returns the present state with the error of ctx. Waiting
// keeps the operation alive, too; a client that waits without Follow counts as one that may return.
func (o *Operation) Wait(ctx context.Context, seen int) (State, int, error) {
	o.q.mu.Lock()
	defer o.q.mu.Unlock()
	o.enter()
	defer func() { o.exit(o.clients > 1) }() // it may return, unless another client still follows
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

// change sets the state.
func (o *Operation) change(s State) {
	o.state = s
	o.version++
	close(o.changed)
	o.changed = make(chan struct{})
}
