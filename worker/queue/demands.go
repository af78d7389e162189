// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"time"

	"github.com/cloister-build/cloister/worker"
)

// maxDemands limits the different demands with which actions of one instance wait: each slot that becomes free looks at
// all of them, and clients choose them.
const maxDemands = 1000

// A demand counts the waiting actions of one instance that demand the same, whatever workers they avoid. Nested actions
// do not count: the actions that requested them wait for them.
type demand struct {
	key, instance string
	waiting       int
}

// noteWaiting counts j, which waits for a slot.
func (q *Queue) noteWaiting(j *job) {
	if j.depth() > 0 {
		return
	}
	key := j.appendDemands(nil)
	d := q.demands[string(key)]
	if d == nil {
		d = &demand{key: string(key), instance: j.req.Task.Instance}
		q.demands[d.key] = d
		q.distinct[d.instance]++
	}
	d.waiting++
	j.demand = d
}

// noteTaken reverts noteWaiting. It does nothing if j does not count.
func (q *Queue) noteTaken(j *job) {
	d := j.demand
	if d == nil {
		return
	}
	j.demand = nil
	if d.waiting--; d.waiting > 0 {
		return
	}
	delete(q.demands, d.key)
	if q.distinct[d.instance]--; q.distinct[d.instance] == 0 {
		delete(q.distinct, d.instance)
	}
}

// admitDemands returns the fault of j, a new job, if it would wait with one demand too many for its instance. Jobs that
// wait again are always accepted.
func (q *Queue) admitDemands(j *job) *worker.Fault {
	instance := j.req.Task.Instance
	switch {
	case j.depth() > 0, q.distinct[instance] < maxDemands, q.demands[string(j.appendDemands(nil))] != nil:
		return nil
	case q.unmatchable(j, time.Now()) != nil, q.leastLoadedSlot(j) != nil: // it does not wait
		return nil
	case q.dropDemand(instance):
		return nil
	}
	return fault(worker.FaultExhausted,
		"actions with %d different sets of platform properties wait in instance %+q; retry later", maxDemands, instance)
}

// dropDemand cancels the operation that has been without a client for the longest time among those of an instance that
// are the only ones with their demands, to make room for other demands. It reports whether it found one.
func (q *Queue) dropDemand(instance string) bool {
	var oldest *Operation
	for _, b := range q.ready.Buckets() {
		j := b.Peek()
		if d := j.demand; d == nil || d.instance != instance || d.waiting > 1 || len(j.ops) > 1 {
			continue
		}
		for o := range j.ops {
			if o.entry.Flow.Background && (oldest == nil || o.unwatched.Before(oldest.unwatched)) {
				oldest = o
			}
		}
	}
	if oldest == nil {
		return false
	}
	q.leave(oldest, fault(worker.FaultCancelled, "cancelled: actions with too many different sets of platform properties wait, "+
		"and no client waited for the operation; execute the action again"))
	return true
}
