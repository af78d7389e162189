// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"context"
	"slices"
)

// fetchers is the number of concurrent prefetches: enough to hide the latency of a remote store, and few compared with
// the concurrent calls its client makes for running actions.
const fetchers = 4

// A prefetch is the state of fetching a waiting job's inputs.
type prefetch struct {
	begun bool
	bytes int64              // reserved of Config.FetchBytes
	stop  context.CancelFunc // nil unless under way
}

// prefetchJobs prefetches for waiting jobs, one at a time, until the queue is closed.
func (q *Queue) prefetchJobs() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.ctx.Err() == nil {
		j := q.nextToFetch()
		if j == nil {
			q.toFetch.Wait()
			continue
		}
		var ctx context.Context
		ctx, j.prefetch.stop = context.WithCancel(q.ctx)
		j.prefetch.begun = true
		task := j.req.Task
		q.toFetch.Signal() // there may be another
		q.mu.Unlock()
		q.cfg.Fetch(ctx, &task, func(bytes int64) bool { return q.reserve(ctx, j, bytes) })
		q.mu.Lock()
		j.prefetch.stop()
		j.prefetch.stop = nil
	}
}

// upcoming returns the next 2*Slots jobs for the local slots.
func (q *Queue) upcoming() []*job {
	return q.ready.Ahead(2*q.cfg.Slots, func(j *job) bool { return q.mayTake(q.own, j) })
}

// nextToFetch returns the first upcoming job that is not prefetched, or nil. It returns nil while a slot is free, since
// the slot fetches for itself.
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

// reserve reserves prefetched bytes for j, in queue order. It waits while j waits, and reports whether it succeeded.
func (q *Queue) reserve(ctx context.Context, j *job, bytes int64) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reserving = append(q.reserving, j)
	defer func() {
		q.reserving = slices.DeleteFunc(q.reserving, func(other *job) bool { return other == j })
		q.reserved.Broadcast()
	}()
	for ctx.Err() == nil && j.item.Waiting() && bytes <= q.cfg.FetchBytes {
		if q.fetched <= q.cfg.FetchBytes-bytes && q.nextToReserve() == j {
			q.fetched += bytes
			j.prefetch.bytes = bytes
			return true
		}
		q.reserved.Wait()
	}
	return false
}

// nextToReserve returns the first in queue order of the waiting jobs that reserve; there is at least one.
func (q *Queue) nextToReserve() *job {
	for _, j := range q.upcoming() {
		if slices.Contains(q.reserving, j) {
			return j
		}
	}
	// Others have overtaken all of them.
	return q.reserving[slices.IndexFunc(q.reserving, func(j *job) bool { return j.item.Waiting() })]
}

// unreserve releases the reservation of j, which no longer waits.
func (q *Queue) unreserve(j *job) {
	q.fetched -= j.prefetch.bytes
	j.prefetch.bytes = 0
	q.reserved.Broadcast()
	q.toFetch.Signal()
}
