// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"errors"
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

	line   *line  // where it waits; nil while it is worked on
	turn   *party // in whose turn it was taken
	cancel context.CancelFunc
	began  time.Time // when a slot took it
	// ran says that the Executor is past its own look into the action cache, so that the result
	// will be a new one.
	ran      bool
	prefetch prefetch
	// logs and endLogs are of Config.Logs, nil before a slot has the job and if there are none.
	logs    *worker.Logs
	endLogs func(*worker.Outcome)
	// flight is where later requests find the job, once it is prepared and if it can be shared.
	flight flight
}

// serve takes jobs from l, one at a time, until the queue is closed: do works, then passes on what
// came of it.
func (q *Queue) serve(
	l *line,
	do func(context.Context, *job) (*worker.Outcome, error),
	then func(*job, end),
) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		for l.waiting == 0 && q.ctx.Err() == nil {
			l.more.Wait()
		}
		if q.ctx.Err() != nil {
			return
		}
		j := l.take()
		if l == &q.ready {
			q.giveRoom(j)
			j.began = time.Now()
			if q.cfg.Logs != nil {
				j.logs, j.endLogs = q.cfg.Logs(&j.req.Task)
			}
			j.advance(repb.ExecutionStage_EXECUTING)
		}
		// Nothing but leave cancels a job: its operations know why by then.
		ctx, cancel := context.WithCancel(context.Background())
		j.cancel = cancel

		q.mu.Unlock()
		out, err := guard(func() (*worker.Outcome, error) { return do(ctx, j) })
		cancel()
		e := endOf(out, err)
		if q.cfg.Ended != nil && (e.outcome != nil || e.fault != nil) {
			e.tell = q.cfg.Ended(e.outcome, e.fault)
		}
		q.mu.Lock()

		l.done(j)
		q.idle.Signal()
		then(j, e)
		q.checkEmpty()
	}
}

// prepare is what a preparer does.
func prepare(ctx context.Context, j *job) (*worker.Outcome, error) {
	return j.req.Prepare(ctx, &j.req)
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
	if q.ready.waiting+q.ready.busy < q.cfg.Slots {
		j.await() // it will not wait for long enough to be told
	} else {
		j.advance(repb.ExecutionStage_QUEUED)
	}
	q.ready.push(j)
	q.waiting.Signal()
	q.claim()
}

// admits reports whether the operations of j may have the result of f. A result that a client does
// not want from the cache must not have been visible before it asked.
func (f *job) admits(j *job) bool {
	return f.line != nil || f.ran || f.req.Task.SkipCacheLookup || !j.req.Task.SkipCacheLookup
}

// merge gives the operations of j to f, which takes on what is stricter in j if it still can.
func (q *Queue) merge(f, j *job) {
	stage := repb.ExecutionStage_EXECUTING
	if f.line != nil {
		stage = repb.ExecutionStage_QUEUED
		f.req.Task.SkipCacheLookup = f.req.Task.SkipCacheLookup || j.req.Task.SkipCacheLookup
	}
	j.began, j.logs = f.began, f.logs
	j.advance(stage)
	for o := range j.ops {
		o.job = f
		f.ops[o] = true
		if f.line != nil {
			f.line.join(o)
		}
	}
	clear(j.ops)
	q.waiting.Signal()
	q.room.Broadcast()
}

// execute is what a slot does.
func (q *Queue) execute(ctx context.Context, j *job) (out *worker.Outcome, err error) {
	task := j.req.Task
	task.Logs = j.logs
	if j.endLogs != nil {
		defer func() {
			if err != nil {
				out = nil // whatever the Executor returned beside it
			}
			j.endLogs(out)
		}()
	}
	out, err = q.cfg.Executor.Execute(ctx, &task, func(s worker.Stage) {
		if s > worker.Fetch {
			q.mu.Lock()
			j.ran = true
			q.mu.Unlock()
		}
	})
	if out == nil && err == nil {
		err = errors.New("the executor returned neither an outcome nor a fault")
	}
	return out, err
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
	if j.line != nil {
		j.line.part(o)
	}
	delete(j.ops, o)
	q.complete(o, end{fault: f})
	if len(j.ops) > 0 {
		return
	}
	q.forget(j)
	if j.line == nil {
		j.cancel()
		return
	}
	j.line.drop(j)
	q.giveRoom(j)
	q.idle.Signal()
	q.checkEmpty()
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

// advance brings the operations of j to a stage.
func (j *job) advance(s repb.ExecutionStage_Value) {
	stdout, stderr := j.logs.Names()
	for o := range j.ops {
		o.change(State{Stage: s, Began: j.began, Stdout: stdout, Stderr: stderr})
	}
}

// await makes QUEUED the stage of the operations of j, and wakes nobody to tell.
func (j *job) await() {
	for o := range j.ops {
		o.state = State{Stage: repb.ExecutionStage_QUEUED}
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
