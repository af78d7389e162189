// SPDX-License-Identifier: Apache-2.0

package queue

import "time"

// renew has the inputs of all that waits for a slot renewed, one action at a time. What waits to be prepared
// needs it not: Prepare looks for its inputs.
func (q *Queue) renew() {
	tick := time.NewTicker(q.cfg.RenewEvery)
	defer tick.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case <-tick.C:
		}
		q.mu.Lock()
		for _, j := range q.ready.all() {
			// Whoever took it marks what it fetches; whom nobody waits for needs nothing.
			if j.lane == nil || len(j.ops) == 0 {
				continue
			}
			task := j.req.Task
			q.mu.Unlock()
			q.cfg.Renew(q.ctx, &task)
			q.mu.Lock()
		}
		q.mu.Unlock()
	}
}
