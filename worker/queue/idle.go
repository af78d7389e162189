// SPDX-License-Identifier: Apache-2.0

package queue

import "context"

// runIdle calls Config.Idle whenever a local slot is free, until the queue is closed.
func (q *Queue) runIdle() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.ctx.Err() == nil {
		if !q.hasFreeSlot() {
			q.slotFree.Wait()
			continue
		}
		var ctx context.Context
		ctx, q.stopIdle = context.WithCancel(q.ctx)
		q.mu.Unlock()
		q.cfg.Idle(ctx)
		q.mu.Lock()
		q.stopIdle()
		q.stopIdle = nil
	}
}

// hasFreeSlot reports whether a local slot waits for a job.
func (q *Queue) hasFreeSlot() bool {
	return !q.draining && q.own != nil && q.own.drained == nil && len(q.own.idle) > 0
}

// reclaimSlot stops Config.Idle unless a slot is still free. It is called when a slot gets a job or may get none.
func (q *Queue) reclaimSlot() {
	if q.stopIdle != nil && !q.hasFreeSlot() {
		q.stopIdle()
	}
}
