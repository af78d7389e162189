// SPDX-License-Identifier: Apache-2.0

package queue

import (
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
		q.background--
		q.makeRoom(j)
		return
	}
	q.background++
	q.yieldLater(j)
}

// yieldLater ends the run of j after Config.CancelGrace if it is unwanted, and more jobs wait for such slots than runs
// are about to yield.
func (q *Queue) yieldLater(j *job) {
	time.AfterFunc(q.cfg.CancelGrace, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if !q.unwanted[j] || !q.mayYield(j) {
			return
		}
		waiting, yielding := 0, 0
		for _, b := range q.ready.Buckets() {
			if n := b.Foreground(); n > 0 && q.mayTake(j.run.slot.worker, b.Peek()) {
				waiting += n
			}
		}
		for u := range q.unwanted {
			if u.run.yielding {
				yielding++
			}
		}
		switch {
		case waiting > yielding:
			q.yield(j)
		case waiting > 0:
			q.yieldLater(j) // those that yield may be slots for other jobs
		}
	})
}

// noteUnwanted updates q.unwanted after a change of j.
func (q *Queue) noteUnwanted(j *job) {
	if j.run != nil && !j.run.over && !j.wanted() {
		q.unwanted[j] = true
	} else {
		delete(q.unwanted, j)
	}
}

// makeRoom ends an unwanted run if j, which is wanted, waits for its slot.
func (q *Queue) makeRoom(j *job) {
	if len(q.unwanted) == 0 || !j.item.Waiting() || !j.wanted() {
		return
	}
	for u := range q.unwanted {
		if q.mayYield(u) && q.mayTake(u.run.slot.worker, j) {
			q.yield(u)
			return
		}
	}
}

// mayYield reports whether the clients of an unwanted job have been gone for Config.CancelGrace, so that its run may
// end.
func (q *Queue) mayYield(j *job) bool {
	for o := range j.ops {
		if time.Since(o.unwatched) < q.cfg.CancelGrace {
			return false
		}
	}
	return !j.run.yielding
}

// yield ends the run of an unwanted job, which then waits again.
func (q *Queue) yield(j *job) {
	j.run.yielding = true
	j.cancel()
}

// dropBackground cancels the oldest operation without a client, to make room for another. It reports whether it
// found one.
func (q *Queue) dropBackground() bool {
	if q.background == 0 {
		return false
	}
	for _, o := range q.listed.ops {
		if o != nil && o.job != nil && o.entry.Flow.Background {
			q.leave(o, fault(worker.FaultCancelled,
				"cancelled: the queue is full, and no client waited for the operation; execute the action again"))
			return true
		}
	}
	return false
}
