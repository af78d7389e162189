// SPDX-License-Identifier: Apache-2.0

package queue

import "context"

// spend has Config.Idle work whenever a slot is free, until the queue is closed.
func (q *Queue) spend() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.ctx.Err() == nil {
		if !q.free() {
			q.idle.Wait()
			continue
		}
		var ctx context.Context
		ctx, q.spare = context.WithCancel(q.ctx)
		q.mu.Unlock()
		q.cfg.Idle(ctx)
		q.mu.Lock()
		q.spare()
		q.spare = nil
	}
}

// free reports whether one of the queue's own slots waits for a job.
func (q *Queue) free() bool {
	return !q.draining && q.own != nil && q.own.drained == nil && len(q.own.idle) > 0
}

// claim ends what Config.Idle does if the slot for it is wanted. It is called when a slot has got a job, or is to get none.
func (q *Queue) claim() {
	if q.spare != nil && !q.free() {
		q.spare()
	}
}
