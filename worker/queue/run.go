// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/internal/pulls"
)

// A Run is an action assigned to a slot. Its methods are safe for concurrent use.
type Run struct {
	q       *Queue
	job     *job
	slot    *Slot
	task    worker.Task
	ctx     context.Context       // ended when the run is over or no client waits for it
	woke    chan struct{}         // Slot.woken of the Take that got it; nil if that did not wait
	endLogs func(*worker.Outcome) // returned by Config.Logs; nil if there are none
	began   time.Time

	// The fields below are guarded by q.mu.
	stage    worker.Stage
	over     bool // ended or lost
	yielding bool // cancelled in favour of another action; its action waits again
	retries  bool // yieldTo has set a timer
}

// begin assigns to s a job taken from q.ready.
func (q *Queue) begin(s *Slot, j *job) {
	q.noteTaken(j)
	q.unreserve(j)
	j.madeRoom = false
	r := &Run{q: q, job: j, slot: s, task: j.req.Task, woke: s.woken, began: time.Now()}
	// Only leave cancels a job; its operations carry the reason.
	ctx := context.Background()
	if j.req.Pull == nil { // a slot of a head pulls the image itself
		ctx = pulls.Watch(ctx, r.Pulling)
	}
	r.ctx, j.cancel = context.WithCancel(ctx)
	if s.worker.own {
		if q.cfg.Logs != nil {
			r.task.Logs, r.endLogs = q.cfg.Logs(&j.req.Task)
		}
	} else {
		// Prepare has looked into the action cache; another worker executes without a lookup.
		r.task.SkipCacheLookup = true
		j.ran = true
		if j.prefetch.stop != nil {
			j.prefetch.stop()
		}
	}
	j.run, s.run = r, r
	s.worker.busy++
	s.wake()
	j.advance(j.ops, repb.ExecutionStage_EXECUTING)
	q.reclaimSlot()
	q.noteUnwanted(j)
}

// Task returns the task to execute. For a slot of another worker it skips the cache lookup, which Prepare has done.
func (r *Run) Task() worker.Task { return r.task }

// Cancelled returns a channel that is closed when no client waits for the action, and when the run is over.
func (r *Run) Cancelled() <-chan struct{} { return r.ctx.Done() }

// Report records the present stage.
func (r *Run) Report(s worker.Stage) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if r.over {
		return
	}
	r.stage = s
	r.slot.worker.seen = time.Now()
	if s > worker.StageFetch {
		r.job.ran = true
	}
}

// Pulling records that the action waits for a container image; s is its State.Pulling from now on. A nil s records that
// it no longer waits.
func (r *Run) Pulling(s pulls.State) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if !r.over {
		r.job.pulling = s
		r.job.advance(r.job.ops, repb.ExecutionStage_EXECUTING)
	}
}

// End completes the action and frees the slot. Only the first End counts, and none after the run was lost. After
// sandbox.ErrUnsupported the action waits for another worker, if one matches: workers differ in what they can enforce.
func (r *Run) End(out *worker.Outcome, err error) {
	if err != nil {
		out = nil
	} else if out == nil {
		err = errors.New("the executor returned neither an outcome nor an error")
	}
	q := r.q
	q.mu.Lock()
	if r.over {
		q.mu.Unlock()
		return
	}
	r.over = true
	j := r.job
	cancel, yields := j.cancel, err != nil && r.yielding || errors.Is(err, sandbox.ErrUnsupported) && q.refuse(r, err)
	q.mu.Unlock()
	if r.endLogs != nil {
		r.endLogs(out)
	}
	cancel()
	var e end
	if !yields {
		e = q.endOf(&r.task, out, err)
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.release(r)
	if yields {
		q.queueAgain(j)
	} else {
		r.slot.worker.done++
		q.finish(j, e)
	}
	q.checkEmpty()
}

// maxRefusals limits the workers that are asked in turn to execute an action. Each has another offer than those before,
// unless all others have refused, so few remain after it.
const maxRefusals = 10

// refuse records that the worker of r cannot execute its job, and reports whether another is expected to.
func (q *Queue) refuse(r *Run, err error) bool {
	j := r.job
	j.refusal = asFault(err)
	j.refused = insert(j.refused, r.slot.worker.number)
	for _, w := range q.workers {
		if w.like(r.slot.worker) { // it would probably refuse as well
			j.avoid = insert(j.avoid, w.name)
		}
	}
	return len(j.refused) < maxRefusals && q.unmatchable(j, time.Now()) == nil
}

// queueAgain queues a job again after its run ended without a result, unless no operation is left.
func (q *Queue) queueAgain(j *job) {
	j.run, j.ran = nil, false
	if len(j.ops) > 0 {
		q.await(j)
	}
}

// release frees the slot of r.
func (q *Queue) release(r *Run) {
	s := r.slot
	s.run, r.job.pulling = nil, nil
	s.worker.busy--
	s.worker.seen = time.Now()
	q.ready.Done(&r.job.item)
	q.noteUnwanted(r.job)
	if r.yielding { // counted until the slot asks for the next job, which may take a remote worker seconds
		if s.yielded = !s.left; s.left {
			q.yielding--
		}
	}
}

// A loss records how a run was lost.
type loss struct {
	worker, why string
	givenBack   bool
}

// Lost frees the slot and queues the action again, at most Config.Attempts times in all. A worker that lost the action
// gets it again only while no other present worker may take it. Lost does nothing after End.
func (r *Run) Lost(why string) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	r.q.lose(r, why, false)
}

// GiveBack is like Lost, for a worker that stops without waiting for the action, or cannot start its command or deliver
// its result. The action is not suspected of causing it.
func (r *Run) GiveBack(why string) {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	r.q.lose(r, why, true)
}

func (q *Queue) lose(r *Run, why string, givenBack bool) {
	if r.over {
		return
	}
	r.over = true
	j := r.job
	j.cancel()
	if r.endLogs != nil {
		r.endLogs(nil)
	}
	name := r.slot.worker.name
	r.slot.worker.lost++
	q.stats.Lost++
	q.release(r)
	j.run, j.ran = nil, false
	j.losses = append(j.losses, loss{name, why, givenBack})
	j.avoid = insert(j.avoid, name)
	switch {
	case len(j.ops) == 0: // no client waits for it
	case len(j.losses) >= q.cfg.Attempts:
		q.finish(j, endOf(nil, j.poison()))
	default:
		q.stats.Again++
		q.await(j)
	}
	q.checkEmpty()
}

// poison returns the fault of an action that was lost too often. If it was given back at least once, it did not end its
// worker each time, and clients may retry.
func (j *job) poison() *worker.Fault {
	var losses []string
	for _, l := range j.losses {
		losses = append(losses, fmt.Sprintf("worker %s (%s)", printable.Quote(l.worker, maxQuoted), l.why))
	}
	if slices.ContainsFunc(j.losses, func(l loss) bool { return l.givenBack }) {
		return fault(worker.FaultUnavailable, "action %s was lost %d times, not always by its own fault; retry; lost with %s",
			j.req.Task.Action, len(losses), strings.Join(losses, ", "))
	}
	return fault(worker.FaultUnmet,
		"action %s is suspected of crashing its workers and is not retried: it was lost %d times, with %s",
		j.req.Task.Action, len(losses), strings.Join(losses, ", "))
}

// abandonRemoteRuns frees the slots of other workers at shutdown, when no client waits for their runs.
func (q *Queue) abandonRemoteRuns() {
	for _, w := range q.workers {
		if w.own {
			continue
		}
		for _, s := range w.slots {
			if s.run != nil {
				q.lose(s.run, "", false)
			}
		}
	}
	q.checkEmpty()
}
