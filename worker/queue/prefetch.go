// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"slices"
)

// fetchers is how many waiting actions are fetched for at once: enough to hide the way to a store that is far, and few
// beside the calls that such a store's client makes at once for the actions that run.
const fetchers = 4

// A prefetch is how near the inputs of a waiting job are.
type prefetch struct {
	begun bool
	bytes int64              // of Config.FetchBytes
	stop  context.CancelFunc // nil unless a fetch is under way
}

// fetchAhead fetches for jobs that wait, one at a time, until the queue is closed.
func (q *Queue) fetchAhead() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.ctx.Err() == nil {
		j := q.nextToFetch()
		if j == nil {
			q.waiting.Wait()
			continue
		}
		var ctx context.Context
		ctx, j.prefetch.stop = context.WithCancel(q.ctx)
		j.prefetch.begun = true
		task := j.req.Task
		q.waiting.Signal() // there may be another
		q.mu.Unlock()
		q.cfg.Fetch(ctx, &task, func(bytes int64) bool { return q.takeRoom(ctx, j, bytes) })
		q.mu.Lock()
		j.prefetch.stop()
		j.prefetch.stop = nil
	}
}

// upcoming returns the next 2*Slots jobs in line for the queue's own slots.
func (q *Queue) upcoming() []*job {
	return q.ready.ahead(2*q.cfg.Slots, func(n *lane) bool { return q.may(q.own, n) })
}

// nextToFetch returns the first of the upcoming jobs that nobody fetches for, or nil. While a slot is free there is none:
// it fetches itself.
func (q *Queue) nextToFetch() *job {
	if q.own.busy < q.cfg.Slots {
		return nil
	}
	for _, j := range q.upcoming() {
		if !j.prefetch.begun {
			return j
		}
	}
	return nil
}

// takeRoom waits for room for what is to be fetched for j, as long as j waits. It reports whether there is any. Whoever
// is next in line has it first.
func (q *Queue) takeRoom(ctx context.Context, j *job, bytes int64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.asking = append(q.asking, j)
	defer func() {
		q.asking = slices.DeleteFunc(q.asking, func(other *job) bool { return other == j })
		q.room.Broadcast()
	}()
	for ctx.Err() == nil && j.lane != nil && bytes <= q.cfg.FetchBytes {
		if q.fetched <= q.cfg.FetchBytes-bytes && q.firstToAsk() == j {
			q.fetched += bytes
			j.prefetch.bytes = bytes
			return true
		}
		q.room.Wait()
	}
	return false
}

// firstToAsk returns the next in line of those that wait and ask for room, of which there must be one.
func (q *Queue) firstToAsk() *job {
	for _, j := range q.upcoming() {
		if slices.Contains(q.asking, j) {
			return j
		}
	}
	// None is as near as it was any more.
	return q.asking[slices.IndexFunc(q.asking, func(j *job) bool { return j.lane != nil })]
}

// giveRoom gives back the room that was taken for j, which waits no more.
func (q *Queue) giveRoom(j *job) {
	q.fetched -= j.prefetch.bytes
	j.prefetch.bytes = 0
	q.room.Broadcast()
	q.waiting.Signal()
}
