// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"time"

	"github.com/cloister-build/cloister/worker"
)

// maxDemands limits the distinct demands of the waiting actions of one instance. Clients choose them, and each slot
// that becomes free checks all of them. maxCallerDemands limits those of one authenticated caller.
const (
	maxDemands       = 1000
	maxCallerDemands = maxDemands / 2
)

// A demand counts the waiting actions of one instance with equal demands, even if they avoid different workers. Nested
// actions do not count, since the actions that requested them wait for them.
type demand struct {
	key, instance string
	caller        callerKey // of the first action
	waiting       int
}

// A callerKey identifies an authenticated caller in an instance.
type callerKey struct{ instance, caller string }

// callerKey returns the key of the caller of j.
func (j *job) callerKey() callerKey { return callerKey{j.req.Task.Instance, j.req.Caller} }

// noteWaiting counts j, which waits for a slot.
func (q *Queue) noteWaiting(j *job) {
	if j.depth() > 0 {
		return
	}
	key := j.appendDemands(nil)
	d := q.demands[string(key)]
	if d == nil {
		d = &demand{key: string(key), instance: j.req.Task.Instance, caller: j.callerKey()}
		q.demands[d.key] = d
		q.distinct[d.instance]++
		q.callers[d.caller]++
	}
	d.waiting++
	j.demand = d
}

// noteTaken reverts noteWaiting. It does nothing if j is not counted.
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
	if q.callers[d.caller]--; q.callers[d.caller] == 0 {
		delete(q.callers, d.caller)
	}
}

// admitDemands returns a fault if j, a new job, would have to wait and exceed maxDemands or maxCallerDemands. Jobs
// that wait again are always accepted.
func (q *Queue) admitDemands(j *job) *worker.Fault {
	instance, caller := j.req.Task.Instance, j.callerKey()
	share := caller.caller != "" && q.callers[caller] >= maxCallerDemands
	switch {
	case j.depth() > 0, q.distinct[instance] < maxDemands && !share, q.demands[string(j.appendDemands(nil))] != nil:
		return nil
	case q.unmatchable(j, time.Now()) != nil, q.leastLoadedSlot(j) != nil: // it would not wait
		return nil
	case q.dropDemand(func(d *demand) bool { return d.instance == instance && (!share || d.caller == caller) }):
		return nil
	case share:
		return fault(worker.FaultExhausted, "%d different sets of platform properties of this caller are queued in instance %+q, which "+
			"is the limit; retry later", maxCallerDemands, instance)
	}
	return fault(worker.FaultExhausted,
		"%d different sets of platform properties are queued in instance %+q, which is the limit; retry later", maxDemands, instance)
}

// dropDemand makes room for another demand by ending one that eligible accepts. It cancels the operation whose last
// client left first, among those without a client for Config.CancelGrace whose demands no other waiting operation has.
// It reports whether it found one.
func (q *Queue) dropDemand(eligible func(*demand) bool) bool {
	var oldest *Operation
	for _, b := range q.ready.Buckets() {
		j := b.Peek()
		if d := j.demand; d == nil || !eligible(d) || d.waiting > 1 || len(j.ops) > 1 {
			continue
		}
		for o := range j.ops {
			gone := o.entry.Flow.Background && time.Since(o.unwatched) >= q.cfg.CancelGrace
			if gone && (oldest == nil || o.unwatched.Before(oldest.unwatched)) {
				oldest = o
			}
		}
	}
	if oldest == nil {
		return false
	}
	q.leave(oldest, fault(worker.FaultCancelled, "cancelled: too many different sets of platform properties are queued, "+
		"and no client waited for the operation; execute the action again"))
	return true
}
