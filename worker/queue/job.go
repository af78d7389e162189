// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/worker"
)

// A job is one run of an action, or what is to become one.
type job struct {
	req Request
	ops map[*Operation]bool

	lot     lot       // where it waits for a slot
	lane    *lane     // there; nil while it is worked on
	entered time.Time // when it came to wait for a slot, the first time
	turn    *party    // in whose turn it was taken
	cancel  context.CancelFunc
	// ran says that the result will be a new one: nobody looks into the action cache any more.
	ran      bool
	run      *Run // nil unless a slot has it
	losses   []loss
	prefetch prefetch
	// flight is where later requests find the job, once it is prepared and if it can be shared.
	flight flight
}

// serve takes jobs that have arrived, one at a time, until the queue is closed, and prepares them.
func (q *Queue) serve() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for q.arrived.waiting == 0 && q.ctx.Err() == nil {
			q.arrived.more.Wait()
		}
		if q.ctx.Err() != nil {
			return
		}
		j := q.arrived.take(q.arrived.open[0])
		// Nothing but leave cancels a job: its operations know why by then.
		ctx, cancel := context.WithCancel(context.Background())
		j.cancel = cancel

		q.mu.Unlock()
		out, err := guard(func() (*worker.Outcome, error) { return j.req.Prepare(ctx, &j.req) })
		cancel()
		e := q.endOf(out, err)
		q.mu.Lock()

		q.arrived.done(j)
		q.prepared(j, e)
		q.checkEmpty()
	}
}

// prepared passes on a job from a preparer.
func (q *Queue) prepared(j *job, e end) {
	switch {
	case len(j.ops) == 0: // left meanwhile
	case e.outcome != nil || e.fault != nil:
		q.finish(j, e)
	default:
		q.enter(j)
	}
}

// enter lets j share the run of an equal action, or else wait for a slot.
func (q *Queue) enter(j *job) {
	if !j.req.Alone {
		key := flight{j.req.Task.Instance, j.req.Task.Action, j.req.Terms}
		if f := q.flights[key]; f != nil && f.admits(j) {
			q.merge(f, j)
			return
		}
		j.flight = key
		q.flights[key] = j
	}
	j.lot = lot{instance: j.req.Task.Instance, demands: encodeDemands(j.req.Demands)}
	j.entered = time.Now()
	q.await(j)
}

// await lets j wait for a slot, unless one is free or none will ever be.
func (q *Queue) await(j *job) {
	q.ready.push(j)
	if f := q.hopeless(j.lane, j, time.Now()); f != nil {
		q.abandon(j, f)
		return
	}
	q.dispatch(j.lane)
	switch {
	case j.lane == nil:
		return
	case q.own != nil && q.own.busy+j.lane.waiting <= q.cfg.Slots && q.may(q.own, j.lane):
		// One of the queue's own slots is on its way: j will not wait for long enough to be told, but for who asks.
		for o := range j.ops {
			o.state = State{Stage: repb.ExecutionStage_QUEUED}
		}
	default:
		j.advance(j.ops, repb.ExecutionStage_QUEUED)
	}
	q.waiting.Signal()
}

// admits reports whether the operations of j may have the result of f. A result that a client does
// not want from the cache must not have been visible before it asked.
func (f *job) admits(j *job) bool {
	return f.lane != nil || f.ran || f.req.Task.SkipCacheLookup || !j.req.Task.SkipCacheLookup
}

// merge gives the operations of j to f, which takes on what is stricter in j if it still can.
func (q *Queue) merge(f, j *job) {
	stage := repb.ExecutionStage_EXECUTING
	if f.lane != nil {
		stage = repb.ExecutionStage_QUEUED
		f.req.Task.SkipCacheLookup = f.req.Task.SkipCacheLookup || j.req.Task.SkipCacheLookup
	}
	f.advance(j.ops, stage)
	for o := range j.ops {
		o.job = f
		f.ops[o] = true
		if f.lane != nil {
			f.lane.line.join(o)
		}
	}
	clear(j.ops)
	q.waiting.Signal()
	q.room.Broadcast()
}

// finish completes the operations of j.
func (q *Queue) finish(j *job, e end) {
	q.forget(j)
	e.bytes /= int64(max(1, len(j.ops))) // they share it
	for o := range j.ops {
		q.complete(o, e)
	}
	clear(j.ops)
}

// leave completes o with f before its job has ended, and cancels the job if o was the last.
func (q *Queue) leave(o *Operation, f *worker.Fault) {
	j := o.job
	if j.lane != nil {
		j.lane.line.part(o)
	}
	delete(j.ops, o)
	q.complete(o, end{fault: f})
	if len(j.ops) > 0 {
		return
	}
	q.forget(j)
	if j.lane == nil {
		j.cancel()
		return
	}
	j.lane.line.drop(j)
	q.giveRoom(j)
	q.checkEmpty()
}

// abandon completes the operations of j, which waits, with f.
func (q *Queue) abandon(j *job, f *worker.Fault) {
	for o := range j.ops {
		q.leave(o, f)
	}
}

// forget keeps later requests from sharing j, and ends what is fetched for it.
func (q *Queue) forget(j *job) {
	if stop := j.prefetch.stop; stop != nil {
		stop()
	}
	// Of a job that is being prepared the key is still empty: the request is Prepare's until it ends.
	if q.flights[j.flight] == j {
		delete(q.flights, j.flight)
	}
}

// advance brings operations, which are those of j or come to be, to a stage.
func (j *job) advance(ops map[*Operation]bool, s repb.ExecutionStage_Value) {
	state := State{Stage: s}
	if r := j.run; r != nil {
		state.Began, state.Worker = r.began, r.slot.of.name
		state.Stdout, state.Stderr = r.task.Logs.Names()
	}
	for o := range ops {
		o.change(state)
	}
}

// A Panic is the error of work that panicked.
type Panic struct {
	Value any
	Stack []byte // as debug.Stack writes it
}

// Error returns the value of the panic, without the stack.
func (p *Panic) Error() string { return fmt.Sprintf("panic: %v", p.Value) }

// guard calls do. A panic in it is a Fault, so that one action cannot end all others.
func guard(do func() (*worker.Outcome, error)) (out *worker.Outcome, err error) {
	defer func() {
		if v := recover(); v != nil {
			out, err = nil, &worker.Fault{Kind: worker.Internal, Err: &Panic{v, debug.Stack()}}
		}
	}()
	return do()
}
