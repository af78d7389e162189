// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
)

// A WorkerState describes the slots of one worker with equal offers.
type WorkerState struct {
	Name, Prefix string
	Properties   []worker.Property
	Any          bool
	// Local marks the local slots.
	Local bool
	// Slots are the slots that have joined, by name.
	Slots []SlotState
	// Drained is when the worker was drained, for the reason Why; zero if it is not drained.
	Drained time.Time
	Why     string
	// Seen is when the worker was last heard from.
	Seen time.Time
	// Left is when its last slot left; zero while one is present.
	Left time.Time
	// Done counts completed runs, Lost those lost with the worker.
	Done, Lost int64
}

// A SlotState describes a slot. Without an action all fields but Name and Ending are zero.
type SlotState struct {
	Name                         string
	Instance                     string
	Action                       cas.Digest
	Target, Mnemonic, Invocation string
	Began                        time.Time
	// Stage is the last one reported, or 0.
	Stage worker.Stage
	// Pulling reports that the action waits for a container image that is being pulled.
	Pulling bool
	// Ending is when the worker was first known to be stopping an action that the slot does not have; see
	// Slot.SetEnding.
	Ending time.Time
}

// Workers returns the present and remembered workers, by name. Local slots for nested actions (Config.Depth) are
// included only while they are busy.
func (q *Queue) Workers() []WorkerState {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []WorkerState
	for _, w := range q.workers {
		if w.depth == 0 {
			all = append(all, q.workerState(w))
		}
	}
	slices.SortStableFunc(all, func(a, b WorkerState) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Prefix, b.Prefix),
			slices.CompareFunc(a.Properties, b.Properties, worker.Property.Compare))
	})
	return all
}

func (q *Queue) workerState(w *workerGroup) WorkerState {
	s := WorkerState{
		Name: w.name, Prefix: w.prefix, Properties: slices.Clone(w.properties), Any: w.any, Local: w.own,
		Seen: w.seen, Left: w.left, Done: w.done, Lost: w.lost,
	}
	if d := w.drained; d != nil {
		s.Drained, s.Why = d.since, d.why
	}
	for _, slot := range w.slots {
		s.Slots = append(s.Slots, slot.state())
	}
	if w == q.own {
		for _, deeper := range q.workers {
			if deeper.depth == 0 {
				continue
			}
			s.Done += deeper.done
			for _, slot := range deeper.slots {
				if slot.run != nil {
					s.Slots = append(s.Slots, slot.state())
				}
			}
		}
	}
	slices.SortFunc(s.Slots, func(a, b SlotState) int {
		return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name)) // 9 before 10
	})
	return s
}

func (s *Slot) state() SlotState {
	state := SlotState{Name: s.name, Ending: s.ending}
	if r := s.run; r != nil {
		t := &r.task
		state.Instance, state.Action, state.Began, state.Stage = t.Instance, t.Action, r.began, r.stage
		state.Pulling = r.job.pulling != nil && r.job.pulling() != nil
		state.Target, state.Mnemonic, state.Invocation = t.Target, t.Mnemonic, t.Invocation
	}
	return state
}

// A Demand counts the queued actions of one instance with equal demands that wait for the same reason, including those
// whose Pull runs.
type Demand struct {
	Instance   string
	Properties []worker.Property
	Queued     int
	// Unmet is the reason why no worker, busy or idle, may take any of them now, such as a Pull; "" if one may.
	Unmet string
}

// Demands returns the demands of all actions that wait for an image or a slot.
func (q *Queue) Demands() []Demand {
	all := q.unsortedDemands()
	slices.SortFunc(all, func(a, b Demand) int {
		return cmp.Or(slices.CompareFunc(a.Properties, b.Properties, worker.Property.Compare),
			strings.Compare(a.Unmet, b.Unmet), strings.Compare(a.Instance, b.Instance))
	})
	return all
}

func (q *Queue) unsortedDemands() []Demand {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []Demand
	var key []byte
	index := make(map[string]int) // in all; clients choose the demands, so there may be many
	add := func(j *job, queued int, unmet string) {
		key = append(j.appendDemands(key[:0]), unmet...)
		i, known := index[string(key)]
		if !known {
			i = len(all)
			index[string(key)] = i
			all = append(all, Demand{Instance: j.req.Task.Instance, Properties: slices.Clone(j.req.Demands), Unmet: unmet})
		}
		all[i].Queued += queued
	}
	for _, b := range q.ready.Buckets() {
		add(b.Peek(), b.Len(), q.unmet(b.Peek()))
	}
	for j := range q.pulling {
		if len(j.ops) > 0 {
			add(j, 1, "their container image is being pulled")
		}
	}
	return all
}
