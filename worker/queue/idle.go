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

// free reports whether there is a slot that no job has or waits for.
func (q *Queue) free() bool {
	return !q.draining && q.ready.waiting+q.ready.busy < q.cfg.Slots
}

// claim ends what Config.Idle does if the slot for it is wanted. It is called when a job has come to wait for one.
func (q *Queue) claim() {
	if q.spare != nil && !q.free() {
		q.spare()
	}
}
