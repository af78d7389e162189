// SPDX-License-Identifier: Apache-2.0

package queue

// Parties returns how many builds the lines of q know.
func Parties(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.arrived.parties) + len(q.ready.parties)
}

// Lanes returns how many lanes the lines of q have.
func Lanes(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.arrived.open) + len(q.ready.open)
}

// Drains returns how many names of drained workers q keeps.
func Drains(q *Queue) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.drained)
}
