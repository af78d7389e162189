// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"slices"
	"time"

	"github.com/cloister-build/cloister/worker"
)

// A job is unwanted while none of its operations has a client. It waits behind all others, and its run ends when
// another job waits for the slot: a build that failed or was interrupted must not delay the next one.

// wanted reports whether an operation of j has a client, or expects its first.
func (j *job) wanted() bool {
	for o := range j.ops {
		if !o.entry.Flow.Background {
			return true
		}
	}
	return false
}

// setBackground records whether o, which is not completed, has lost its last client.
func (q *Queue) setBackground(o *Operation, background bool) {
	flow, j := o.entry.Flow, o.job
	if flow.Background == background {
		return
	}
	flow.Background = background
	o.entry.Move(flow)
	q.noteUnwanted(j)
	if !background {
		q.makeRoom(j)
		return
	}
	q.yieldLater(o)
}

// yieldLater calls yieldIfAwaited for the job of o after Config.CancelGrace.
func (q *Queue) yieldLater(o *Operation) {
	time.AfterFunc(q.cfg.CancelGrace, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if j := o.job; j != nil { // another job if o shares its run by now
			q.yieldIfAwaited(j)
		}
	})
}

// yieldIfAwaited ends the run of j if it may yield and the jobs that wait for its slot outnumber the yielding runs. If
// any job waits, it tries again later.
func (q *Queue) yieldIfAwaited(j *job) {
	if q.noteUnwanted(j); j.run != nil && q.unwanted[j.run.slot.worker][j.run] {
		q.yieldTo(q.waitingFor(j.run.slot.worker), j.run)
	}
}

// yieldAwaited calls yieldIfAwaited for all unwanted runs.
func (q *Queue) yieldAwaited() {
	for w, runs := range q.unwanted {
		waiting := q.waitingFor(w)
		for r := range runs {
			q.yieldTo(waiting, r)
		}
	}
}

// waitingFor returns the number of waiting jobs that are wanted and that w may take.
func (q *Queue) waitingFor(w *workerGroup) int {
	waiting := 0
	for _, b := range q.ready.Buckets() {
		if n := b.Foreground(); n > 0 && q.mayTake(w, b.Peek()) {
			waiting += n
		}
	}
	return waiting
}

// yieldTo ends r, which is unwanted, if the number of jobs that wait for its slot exceeds the number of yielding runs.
// The slots of those runs may suit other jobs only, so if any job waits, it tries again later.
func (q *Queue) yieldTo(waiting int, r *Run) {
	switch {
	case waiting > q.yielding:
		q.yield(r.job)
	case waiting > 0 && !r.retries:
		r.retries = true
		time.AfterFunc(q.cfg.CancelGrace, func() {
			q.mu.Lock()
			defer q.mu.Unlock()
			if r.retries = false; !r.over {
				q.yieldIfAwaited(r.job)
			}
		})
	}
}

// noteUnwanted updates q.unwanted after a change of j, or Config.CancelGrace after a client has left.
func (q *Queue) noteUnwanted(j *job) {
	r := j.run
	if r == nil {
		return
	}
	w := r.slot.worker
	if r.over || r.yielding || !q.mayYield(j) {
		if delete(q.unwanted[w], r); len(q.unwanted[w]) == 0 {
			delete(q.unwanted, w)
		}
		return
	}
	if q.unwanted[w] == nil {
		q.unwanted[w] = make(map[*Run]bool)
	}
	q.unwanted[w][r] = true
}

// makeRoom ends an unwanted run if j, which is wanted, waits for its slot. If clients of j leave and return while it
// waits, it ends another one only if too few are yielding: while j had no client, another job may have taken the slot.
func (q *Queue) makeRoom(j *job) {
	if len(q.unwanted) == 0 || !j.item.Waiting() || !j.wanted() {
		return
	}
	if j.madeRoom {
		q.yieldAwaited()
		return
	}
	for w, runs := range q.unwanted {
		if !q.mayTake(w, j) {
			continue
		}
		for r := range runs {
			j.madeRoom = true
			q.yield(r.job)
			return
		}
	}
}

// mayYield reports whether j has had no client for Config.CancelGrace, and expects none, so that its run may end.
func (q *Queue) mayYield(j *job) bool {
	for o := range j.ops {
		q.visits++
		if !o.entry.Flow.Background || time.Since(o.unwatched) < q.cfg.CancelGrace {
			return false
		}
	}
	return true
}

// yield ends the run of an unwanted job, which then waits again.
func (q *Queue) yield(j *job) {
	j.run.yielding = true
	q.yielding++
	q.noteUnwanted(j)
	j.cancel()
}

// settle no longer counts s in q.yielding: s asks for its next job or leaves.
func (q *Queue) settle(s *Slot) {
	if s.yielded {
		s.yielded = false
		q.yielding--
	}
}

// A departure records that the last client of an operation has left. It is outdated once a client has returned or the
// operation is completed.
type departure struct {
	of *Operation
	at time.Time // Operation.unwatched, unless it is outdated
}

func (d departure) outdated() bool {
	d.of.q.visits++
	return d.of.job == nil || d.of.clients > 0 || !d.of.unwatched.Equal(d.at)
}

// dropAbandoned cancels the operations that have had no client for Config.Grace.
func (q *Queue) dropAbandoned(now time.Time) {
	for q.trimLeft(); len(q.left) > 0 && now.Sub(q.left[0].at) > q.cfg.Grace; q.trimLeft() {
		q.leave(q.left[0].of, fault(worker.FaultCancelled,
			"cancelled: no client waited for the operation for %v; execute the action again", q.cfg.Grace))
	}
}

// dropBackground cancels the operation that has been without a client for the longest time, to make room for another. It
// reports whether it found one.
func (q *Queue) dropBackground() bool {
	q.trimLeft()
	i := slices.IndexFunc(q.left, func(d departure) bool { return !d.outdated() && d.of.entry.Flow.Background })
	if i < 0 {
		return false
	}
	q.leave(q.left[i].of, fault(worker.FaultCancelled,
		"cancelled: the queue is full, and no client waited for the operation; execute the action again"))
	return true
}

// trimLeft removes outdated departures from the front of q.left. Each is visited once, however many there are.
func (q *Queue) trimLeft() {
	for len(q.left) > 0 && q.left[0].outdated() {
		q.left[0] = departure{} // release it to the garbage collector
		q.left = q.left[1:]
	}
}
