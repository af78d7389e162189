// SPDX-License-Identifier: Apache-2.0

package queue

import "time"

// renew periodically renews the inputs of all jobs that wait for a slot, one at a time. Jobs that wait for Prepare need
// none: Prepare looks up their inputs.
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
		for _, j := range q.ready.Values() {
			// A slot that took it marks what it fetches.
			if !j.item.Waiting() {
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
