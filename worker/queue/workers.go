// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/worker"
)

// A workerGroup is the slots of one worker with equal offers.
type workerGroup struct {
	number       uint64 // unique
	name, prefix string
	properties   []worker.Property // sorted
	any, places  bool
	own          bool // they are local
	depth        int  // of the actions that they take, 0 unless they are local

	// The fields below are guarded by the queue's mutex.
	slots      map[string]*Slot // that have joined, by name
	idle       []*Slot          // those that wait for a job
	busy       int              // slots with a run
	drained    *drain           // nil if it may take actions
	seen       time.Time        // when the worker was last heard from
	left       time.Time        // when the last slot left; zero if one is present
	done, lost int64            // runs
}

// group returns the workerGroup of an offer. Local slots have a separate group, even from a worker of the same name.
func (q *Queue) group(o Offer, own bool, depth int) *workerGroup {
	offered := &workerGroup{
		name: o.Worker, prefix: o.Prefix, any: o.Any, places: o.Places, own: own, depth: depth,
		properties: slices.Compact(slices.SortedFunc(slices.Values(o.Properties), worker.Property.Compare)),
		slots:      make(map[string]*Slot),
	}
	known := q.byName[o.Worker]
	for _, w := range known {
		q.visits++
		if own == w.own && depth == w.depth && w.like(offered) {
			return w
		}
	}
	if d := q.drainJoining; d != nil && len(known) == 0 && q.drained[o.Worker] == nil && !q.undrained[o.Worker] {
		q.drained[o.Worker] = d
	}
	q.groups++
	offered.number = q.groups
	if depth == 0 { // running actions need the nested slots even while the worker drains
		offered.drained = q.drained[o.Worker]
	}
	q.workers = append(q.workers, offered)
	q.byName[o.Worker] = append(known, offered)
	return offered
}

// matches reports whether the offer of w covers j, which w has not refused.
func (w *workerGroup) matches(j *job) bool {
	return w.depth == j.depth() && w.serves(j.req.Task.Instance) && (w.any || len(w.missing(j.req.Demands)) == 0) &&
		!contains(j.refused, w.number)
}

// like reports whether w and v offer the same.
func (w *workerGroup) like(v *workerGroup) bool {
	return w.prefix == v.prefix && w.any == v.any && w.places == v.places && slices.Equal(w.properties, v.properties)
}

// contains reports whether a sorted list has v, and insert adds v.
func contains[T cmp.Ordered](list []T, v T) bool {
	_, found := slices.BinarySearch(list, v)
	return found
}

func insert[T cmp.Ordered](list []T, v T) []T {
	if i, found := slices.BinarySearch(list, v); !found {
		return slices.Insert(list, i, v)
	}
	return list
}

// serves reports whether w takes actions of an instance.
func (w *workerGroup) serves(instance string) bool {
	rest, ok := strings.CutPrefix(instance, w.prefix)
	return ok && (w.prefix == "" || rest == "" || rest[0] == '/')
}

// missing returns the demands that w does not meet.
func (w *workerGroup) missing(demands []worker.Property) []worker.Property {
	var missing []worker.Property
	for _, d := range demands {
		if w.places && worker.IsPlacement(d.Name) {
			continue
		}
		if _, ok := slices.BinarySearchFunc(w.properties, d, worker.Property.Compare); !ok {
			missing = append(missing, d)
		}
	}
	return missing
}

// mayTake reports whether w may take j now.
func (q *Queue) mayTake(w *workerGroup, j *job) bool {
	q.visits++
	if w.drained != nil || !w.matches(j) {
		return false
	}
	if !contains(j.avoid, w.name) {
		return true
	}
	// This worker has lost j, or one like it has refused j. While another is present, that one takes it, even if it is
	// busy.
	return !slices.ContainsFunc(q.workers, func(other *workerGroup) bool {
		return len(other.slots) > 0 && other.drained == nil && !contains(j.avoid, other.name) && other.matches(j)
	})
}

// leastLoadedSlot returns an idle slot that may take j, of the worker with the smallest fraction of busy slots, or nil.
// Ties go to the worker that joined first.
func (q *Queue) leastLoadedSlot(j *job) *Slot {
	var best *workerGroup
	for w := range q.idle {
		q.visits++
		// Compares w.busy/slots with best.busy/slots without a division.
		if (best == nil || cmp.Or(cmp.Compare(w.busy*len(best.slots), best.busy*len(w.slots)),
			cmp.Compare(w.number, best.number)) < 0) && q.mayTake(w, j) {
			best = w
		}
	}
	if best == nil {
		return nil
	}
	return best.idle[len(best.idle)-1]
}

// maxLeft limits the remembered workers that have left: a head runs for months, and one worker may return under many
// names or with many properties.
const maxLeft = 1000

// forgetWorkers forgets workers that left long ago, and the first to leave if there are too many.
func (q *Queue) forgetWorkers(now time.Time) {
	var left []time.Time
	for _, w := range q.workers {
		if !w.left.IsZero() {
			left = append(left, w.left)
		}
	}
	since := now.Add(-q.cfg.Remembered)
	if excess := len(left) - maxLeft; excess > 0 {
		slices.SortFunc(left, time.Time.Compare)
		if last := left[excess-1]; last.After(since) {
			since = last
		}
	}
	q.workers = slices.DeleteFunc(q.workers, func(w *workerGroup) bool {
		if w.left.IsZero() || w.left.After(since) {
			return false
		}
		others := slices.DeleteFunc(q.byName[w.name], func(other *workerGroup) bool { return other == w })
		if q.byName[w.name] = others; len(others) > 0 {
			return true
		}
		delete(q.byName, w.name)
		if q.drained[w.name] == q.drainJoining {
			delete(q.drained, w.name) // drainJoining applies when it joins again
		}
		return true
	})
}
