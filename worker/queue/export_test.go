// SPDX-License-Identifier: Apache-2.0

package queue

// Flows returns the number of flows that q knows.
func Flows(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.arrived.Flows() + q.ready.Flows()
}

// Buckets returns the number of buckets that q has.
func Buckets(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.arrived.Buckets()) + len(q.ready.Buckets())
}

// Drains returns the number of drained workers that q remembers.
func Drains(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.drained)
}

// Visits returns the number of workers and operations that searches have visited.
func Visits(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.visits
}
