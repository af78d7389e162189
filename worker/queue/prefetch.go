// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"container/heap"
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

// nextToFetch returns the first of the next 2*Slots jobs in line that nobody fetches for, or nil. While a slot is free
// there is none: it fetches itself.
func (q *Queue) nextToFetch() *job {
	f := front{jobs: q.ready.jobs}
	if len(f.jobs) == 0 || q.ready.busy < q.cfg.Slots {
		return nil
	}
	f.at = []int{0}
	for range 2 * q.cfg.Slots {
		if len(f.at) == 0 {
			return nil
		}
		i := heap.Pop(&f).(int)
		if !f.jobs[i].prefetch.begun {
			return f.jobs[i]
		}
		for child := 2*i + 1; child <= 2*i+2 && child < len(f.jobs); child++ {
			heap.Push(&f, child)
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
	for ctx.Err() == nil && j.line != nil && bytes <= q.cfg.FetchBytes {
		if q.fetched <= q.cfg.FetchBytes-bytes && !slices.ContainsFunc(q.asking, func(other *job) bool { return other.before(j) }) {
			q.fetched += bytes
			j.prefetch.bytes = bytes
			return true
		}
		q.room.Wait()
	}
	return false
}

// giveRoom gives back the room that was taken for j, which waits no more.
func (q *Queue) giveRoom(j *job) {
	q.fetched -= j.prefetch.bytes
	j.prefetch.bytes = 0
	q.room.Broadcast()
	q.waiting.Signal()
}

// A front is a heap of places in a heap of jobs: all jobs that stand before theirs have been seen.
type front struct {
	jobs jobs
	at   []int
}

func (f front) Len() int           { return len(f.at) }
func (f front) Less(i, k int) bool { return f.jobs.Less(f.at[i], f.at[k]) }
func (f front) Swap(i, k int)      { f.at[i], f.at[k] = f.at[k], f.at[i] }
func (f *front) Push(x any)        { f.at = append(f.at, x.(int)) }

func (f *front) Pop() any {
	last := len(f.at) - 1
	i := f.at[last]
	f.at = f.at[:last]
	return i
}
