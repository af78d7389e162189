// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime/debug"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/pulls"
	"github.com/cloister-build/cloister/worker/queue/internal/fairqueue"
)

// A job is one run of an action, present or future.
type job struct {
	req  Request
	ops  map[*Operation]bool
	item fairqueue.Item[*job]

	entered  time.Time // when it first waited for a slot
	cancel   context.CancelFunc
	ran      bool // past the lookup in the action cache, so its result will be new
	pulling  pulls.State
	run      *Run // nil unless a slot has it
	losses   []loss
	avoid    []string      // sorted names of the workers that lost it, and of those like a worker that refused it
	refused  []uint64      // numbers of the workers that cannot enforce what it demands, sorted
	refusal  *worker.Fault // the last one's reason
	prefetch prefetch
	demand   *demand   // nil unless counted by noteWaiting
	madeRoom bool      // a run has yielded to it since it last waited
	flight   flightKey // under which later requests find the job; zero while it cannot be shared
}

// A flightKey is equal for actions that may share a run.
type flightKey struct {
	instance string
	action   cas.Digest
	terms    string
	depth    int // an action must not wait for a slot of another depth
}

// depth returns the depth of the action; see Config.Depth.
func (j *job) depth() int { return j.req.Task.Caller.Nesting() }

// matchKey encodes what determines the workers that may take j: its depth, instance and demands, and the workers that
// lost or refused it.
func (j *job) matchKey() fairqueue.MatchKey {
	b := j.appendDemands(binary.AppendUvarint(nil, uint64(j.depth())))
	b = binary.AppendUvarint(b, uint64(len(j.refused)))
	for _, number := range j.refused {
		b = binary.AppendUvarint(b, number)
	}
	for _, name := range j.avoid {
		b = appendString(b, name)
	}
	return fairqueue.MatchKey(b)
}

// appendDemands appends the instance and the demands of j, so that only equal ones have equal prefixes.
func (j *job) appendDemands(b []byte) []byte {
	b = appendString(b, j.req.Task.Instance)
	b = binary.AppendUvarint(b, uint64(len(j.req.Demands)))
	for _, d := range j.req.Demands {
		b = appendString(appendString(b, d.Name), d.Value)
	}
	return b
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// prepareJobs prepares arrived jobs, one at a time, until the queue is closed.
func (q *Queue) prepareJobs() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for q.arrived.Waiting() == 0 && q.ctx.Err() == nil {
			q.toPrepare.Wait()
		}
		if q.ctx.Err() != nil {
			return
		}
		j := q.arrived.Buckets()[0].Take()
		// Only leave cancels a job; its operations carry the reason.
		ctx, cancel := context.WithCancel(context.Background())
		j.cancel = cancel

		q.mu.Unlock()
		out, err := guard(func() (*worker.Outcome, error) { return j.req.Prepare(ctx, &j.req) })
		e := q.endOf(&j.req.Task, out, err)
		q.mu.Lock()

		q.arrived.Done(&j.item)
		if e.outcome == nil && e.fault == nil && j.req.Pull != nil {
			q.pulling[j] = true
			j.advance(j.ops, repb.ExecutionStage_QUEUED)
			q.wg.Go(func() { q.pull(ctx, cancel, j) })
			continue
		}
		cancel()
		q.prepared(j, e)
		q.checkEmpty()
	}
}

// pull calls the Pull of a prepared job, and passes the job on.
func (q *Queue) pull(ctx context.Context, cancel context.CancelFunc, j *job) {
	watched := pulls.Watch(ctx, func(s pulls.State) {
		q.mu.Lock()
		defer q.mu.Unlock()
		if j.pulling = s; s != nil {
			j.advance(j.ops, repb.ExecutionStage_QUEUED)
		}
	})
	_, err := guard(func() (*worker.Outcome, error) { return nil, j.req.Pull(watched) })
	cancel()
	e := q.endOf(&j.req.Task, nil, err)
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.pulling, j)
	q.prepared(j, e)
	q.checkEmpty()
}

// prepared passes on a job that needs nothing more before it takes a slot.
func (q *Queue) prepared(j *job, e end) {
	switch {
	case len(j.ops) == 0: // all have left
	case e.outcome != nil || e.fault != nil:
		q.finish(j, e)
	default:
		q.enter(j)
	}
}

// enter merges j into the job of an equal action, queues it, or refuses it.
func (q *Queue) enter(j *job) {
	key := flightKey{j.req.Task.Instance, j.req.Task.Action, j.req.Terms, j.depth()}
	if f := q.flights[key]; f != nil && !j.req.Alone && f.admits(j) {
		q.merge(f, j)
		return
	}
	j.entered = time.Now()
	if f := q.admitDemands(j); f != nil {
		q.finish(j, endOf(nil, f))
		return
	}
	if !j.req.Alone {
		j.flight = key
		q.flights[key] = j
	}
	q.await(j)
}

// await queues j, which gets a slot at once if one is free, or a fault if no worker is expected for it.
func (q *Queue) await(j *job) {
	entries := make([]*fairqueue.Entry[*job], 0, len(j.ops))
	for o := range j.ops {
		entries = append(entries, &o.entry)
	}
	q.ready.Push(&j.item, j.matchKey(), entries...)
	q.noteWaiting(j)
	if f := q.unmatchable(j, time.Now()); f != nil {
		q.abandon(j, f)
		return
	}
	q.dispatch(j.item.Bucket())
	switch {
	case !j.item.Waiting():
		return
	case q.own != nil && q.own.busy+j.item.Bucket().Len() <= q.cfg.Slots && q.mayTake(q.own, j):
		// A local slot is about to take it: clients that ask see QUEUED, but it is not worth waking those that wait.
		for o := range j.ops {
			o.state = State{Stage: repb.ExecutionStage_QUEUED}
		}
	default:
		j.advance(j.ops, repb.ExecutionStage_QUEUED)
	}
	q.toFetch.Signal()
	q.makeRoom(j)
}

// admits reports whether the operations of k may have the result of j. A client that does not want a cached result
// must not get one that was visible before its request.
func (j *job) admits(k *job) bool {
	return j.item.Waiting() || j.ran || j.req.Task.SkipCacheLookup || !k.req.Task.SkipCacheLookup
}

// merge moves the operations of j to f, which adopts the stricter conditions of j if it still waits.
func (q *Queue) merge(f, j *job) {
	waiting := f.item.Waiting()
	revived := waiting && len(q.unwanted) > 0 && !f.wanted()
	stage := repb.ExecutionStage_EXECUTING
	if waiting {
		stage = repb.ExecutionStage_QUEUED
	}
	// Also if f runs: it may be lost or yield, and run again.
	f.req.Task.SkipCacheLookup = f.req.Task.SkipCacheLookup || j.req.Task.SkipCacheLookup
	f.advance(j.ops, stage)
	for o := range j.ops {
		o.job = f
		f.ops[o] = true
		if waiting {
			f.item.Add(&o.entry)
		}
	}
	clear(j.ops)
	q.noteUnwanted(f)
	if revived {
		q.makeRoom(f)
	}
	q.toFetch.Signal()
	q.reserved.Broadcast()
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
	waiting := j.item.Waiting()
	o.entry.Remove()
	delete(j.ops, o)
	q.complete(o, end{fault: f})
	if len(j.ops) > 0 {
		q.yieldIfAwaited(j)
		return
	}
	q.forget(j)
	if !waiting {
		j.cancel()
		return
	}
	q.noteTaken(j)
	q.unreserve(j)
	q.checkEmpty()
}

// abandon completes the operations of a waiting job with f.
func (q *Queue) abandon(j *job, f *worker.Fault) {
	for o := range j.ops {
		q.leave(o, f)
	}
}

// forget prevents later requests from sharing j, and ends its prefetch.
func (q *Queue) forget(j *job) {
	if stop := j.prefetch.stop; stop != nil {
		stop()
	}
	// While j is being prepared its key is zero: j.req belongs to Prepare.
	if q.flights[j.flight] == j {
		delete(q.flights, j.flight)
	}
}

// advance moves operations of j to a stage.
func (j *job) advance(ops map[*Operation]bool, s repb.ExecutionStage_Value) {
	state := State{Stage: s, Pulling: j.pulling}
	if r := j.run; r != nil {
		state.Began, state.Worker = r.began, r.slot.worker.name
		state.Stdout, state.Stderr = r.task.Logs.Names()
	}
	for o := range ops {
		o.change(state)
	}
}

// A Panic is the error of work that panicked.
type Panic struct {
	Value any
	Stack []byte // as debug.Stack returns it
}

// Error returns the value of the panic, without the stack.
func (p *Panic) Error() string { return fmt.Sprintf("panic: %v", p.Value) }

// guard calls do and turns a panic into a Fault, so that one action cannot end all others.
func guard(do func() (*worker.Outcome, error)) (out *worker.Outcome, err error) {
	defer func() {
		if v := recover(); v != nil {
			out, err = nil, &worker.Fault{Kind: worker.FaultInternal, Err: &Panic{v, debug.Stack()}}
		}
	}()
	return do()
}
