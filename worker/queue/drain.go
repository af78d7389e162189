// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"maps"
	"slices"
	"time"
)

// A drain records when and why a worker was drained.
type drain struct {
	since time.Time
	why   string
}

// DrainWorker stops assigning actions to the worker of that name and records why; running actions continue. The name ""
// means every worker, including those that join later. A worker that leaves and joins again is still drained.
// DrainWorker returns the names of the workers concerned, none if there is no such worker, and the number of actions
// they run.
func (q *Queue) DrainWorker(name, why string) (names []string, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	d := &drain{time.Now(), why}
	if name == "" {
		q.drainJoining = d
		clear(q.undrained)
	} else {
		delete(q.undrained, name)
	}
	for _, w := range q.workers {
		if name != "" && name != w.name || w.depth > 0 {
			continue
		}
		if name != "" || q.drained[w.name] == nil {
			q.drained[w.name] = d
		}
		w.drained = q.drained[w.name]
		names = append(names, w.name)
		running += w.busy
	}
	q.reclaimSlot()
	q.dispatchAll() // workers that lost a job may have to take it again
	slices.Sort(names)
	return slices.Compact(names), running
}

// UndrainWorker reverts DrainWorker; the name "" reverts all drains. It returns what DrainWorker returns.
func (q *Queue) UndrainWorker(name string) (names []string, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if name == "" {
		q.drainJoining = nil
		clear(q.drained)
		clear(q.undrained)
	} else if q.drained[name] != nil {
		delete(q.drained, name)
		names = append(names, name) // it may have left
	}
	for _, w := range q.workers {
		if (name == "" || name == w.name) && w.depth == 0 {
			w.drained = nil
			names = append(names, w.name)
			running += w.busy
		}
	}
	if q.drainJoining != nil && len(names) > 0 {
		q.undrained[name] = true
	}
	q.dispatchAll()
	q.slotFree.Signal()
	q.toFetch.Signal()
	slices.Sort(names)
	return slices.Compact(names), running
}

// A DrainState is the serialisable set of drained workers.
type DrainState struct {
	// Joining applies to every worker that joins, except those in Workers and Admitted; nil if there is no such drain.
	Joining *Drain `json:"joining,omitempty"`
	// Workers are the workers drained by name.
	Workers map[string]Drain `json:"workers,omitempty"`
	// Admitted are the names exempt from Joining, sorted.
	Admitted []string `json:"admitted,omitempty"`
}

// A Drain records when and why a worker was drained.
type Drain struct {
	Since time.Time `json:"since"`
	Why   string    `json:"why,omitempty"`
}

// DrainState returns the drained workers, for Config.Drains of a later queue.
func (q *Queue) DrainState() DrainState {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := DrainState{Admitted: slices.Sorted(maps.Keys(q.undrained))}
	if d := q.drainJoining; d != nil {
		s.Joining = &Drain{d.since, d.why}
	}
	for name, d := range q.drained {
		if d == q.drainJoining {
			continue
		}
		if s.Workers == nil {
			s.Workers = make(map[string]Drain)
		}
		s.Workers[name] = Drain{d.since, d.why}
	}
	return s
}

// restoreDrains applies the drains of an earlier queue, before any worker has joined.
func (q *Queue) restoreDrains(s DrainState) {
	if d := s.Joining; d != nil {
		q.drainJoining = &drain{d.Since, d.Why}
	}
	for name, d := range s.Workers {
		q.drained[name] = &drain{d.Since, d.Why}
	}
	for _, name := range s.Admitted {
		q.undrained[name] = true
	}
}

// Drained returns when and why the last drain was set, if no worker gets actions: every present worker is drained, or
// none is present and those that join will be. Otherwise it returns the zero time.
func (q *Queue) Drained() (since time.Time, why string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	last := q.drainJoining
	for _, w := range q.workers {
		switch {
		case len(w.slots) == 0, w.depth > 0:
		case w.drained == nil:
			return time.Time{}, ""
		case last == nil || w.drained.since.After(last.since):
			last = w.drained
		}
	}
	if last == nil {
		return time.Time{}, ""
	}
	return last.since, last.why
}
