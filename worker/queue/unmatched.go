// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
)

// Unmatched describes an action that no worker is expected to take, for Config.Hint.
type Unmatched struct {
	Instance string
	// NoWorker reports that no worker has joined.
	NoWorker bool
	// Missing are the demands that the nearest worker lacks. If it is empty and NoWorker is false, no worker serves the
	// instance.
	Missing []worker.Property
}

// maxQuoted bounds the bytes of a name or value in a message.
const maxQuoted = 200

// unmet returns the reason why no worker takes j now, or "" if one does.
func (q *Queue) unmet(j *job) string {
	var drained, left *workerGroup
	for _, w := range q.workers {
		switch {
		case !w.matches(j):
		case len(w.slots) == 0:
			left = w
		case w.drained != nil:
			drained = w
		default:
			return ""
		}
	}
	switch {
	case drained != nil:
		return fmt.Sprintf("worker %s is drained", printable.Quote(drained.name, maxQuoted))
	case left != nil:
		return fmt.Sprintf("worker %s has left", printable.Quote(left.name, maxQuoted))
	case len(q.workers) == 0:
		return "no worker has joined"
	case j.refusal != nil:
		return j.refusal.Error()
	}
	text, _ := q.mismatch(j)
	return text
}

// matched reports whether a present or remembered worker matches j. Once a worker has refused j, those that left before
// Config.Settle are not expected to return in time.
func (q *Queue) matched(j *job) bool {
	return slices.ContainsFunc(q.workers, func(w *workerGroup) bool {
		return w.matches(j) && (j.refusal == nil || len(w.slots) > 0 || time.Since(w.left) < q.cfg.Settle)
	})
}

// unmatchable returns the fault of a waiting job for which no worker is expected, or nil.
func (q *Queue) unmatchable(j *job, now time.Time) *worker.Fault {
	switch {
	case q.matched(j):
		return nil
	case now.Sub(q.started) < q.cfg.Settle && !(q.own != nil && q.own.any): // there are no others then
		return nil
	case j.refusal != nil:
		return j.refusal
	case len(q.workers) > 0:
		text, u := q.mismatch(j)
		return q.unmatchedFault(worker.FaultUnmet, text, u)
	case now.Sub(j.entered) < q.cfg.Unmatched:
		return nil
	}
	text := fmt.Sprintf("no worker has joined for %v", q.cfg.Unmatched)
	return q.unmatchedFault(worker.FaultUnavailable, text, Unmatched{Instance: j.req.Task.Instance, NoWorker: true})
}

func (q *Queue) unmatchedFault(k worker.FaultKind, text string, u Unmatched) *worker.Fault {
	if q.cfg.Hint != nil {
		if hint := q.cfg.Hint(u); hint != "" {
			text += "; " + hint
		}
	}
	return fault(k, "%s", text)
}

// refuseUnmatched ends the waiting jobs for which no worker is expected.
func (q *Queue) refuseUnmatched(now time.Time) {
	for _, b := range slices.Clone(q.ready.Buckets()) {
		if q.matched(b.Peek()) {
			continue
		}
		for _, j := range b.Values() {
			if f := q.unmatchable(j, now); f != nil {
				q.abandon(j, f)
			}
		}
	}
}

// Refuse ends with UNAVAILABLE the actions that have waited at least that long for a slot and that no local slot may
// take. The reason why explains why other workers get nothing.
func (q *Queue) Refuse(waited time.Duration, why string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	before := time.Now().Add(-waited)
	for _, b := range slices.Clone(q.ready.Buckets()) {
		if j := b.Peek(); slices.ContainsFunc(q.workers, func(w *workerGroup) bool { return w.own && q.mayTake(w, j) }) {
			continue
		}
		for _, j := range b.Values() {
			if !j.entered.After(before) {
				q.abandon(j, fault(worker.FaultUnavailable, "the action has waited for %v: %s; retry later", waited, why))
			}
		}
	}
}

// mismatch explains what separates j from the nearest worker: the one that lacks the fewest demands, and among equals
// has a property of the same name for most of them. At least one worker is known, none matches, and none has refused j.
// The reader may know only the instance of j, so workers of other instances are not mentioned.
func (q *Queue) mismatch(j *job) (string, Unmatched) {
	instance := j.req.Task.Instance
	var nearest *workerGroup
	var missing []worker.Property
	var unknown int
	for _, w := range q.workers {
		if !w.serves(instance) || w.depth != j.depth() {
			continue
		}
		m := w.missing(j.req.Demands)
		u := w.unknownNames(m)
		if nearest == nil || cmp.Or(cmp.Compare(len(m), len(missing)), cmp.Compare(u, unknown),
			strings.Compare(w.name, nearest.name)) < 0 {
			nearest, missing, unknown = w, m, u
		}
	}
	if nearest == nil {
		return fmt.Sprintf("no worker serves instance %+q", instance), Unmatched{Instance: instance}
	}
	var demanded []string
	for _, d := range missing {
		demanded = append(demanded, d.String())
	}
	text := fmt.Sprintf("no worker offers %s; the nearest is worker %s with %s; %s",
		enumerate(demanded), printable.Quote(nearest.name, maxQuoted), nearest.alternatives(missing), q.offeredValues(instance, missing[0].Name))
	return text, Unmatched{Instance: instance, Missing: missing}
}

// unknownNames counts the demands for names of which w has no value.
func (w *workerGroup) unknownNames(demands []worker.Property) int {
	n := 0
	for _, d := range demands {
		if !slices.ContainsFunc(w.properties, func(p worker.Property) bool { return p.Name == d.Name }) {
			n++
		}
	}
	return n
}

// alternatives lists the values that w has for the names of missing demands.
func (w *workerGroup) alternatives(missing []worker.Property) string {
	var texts []string
	for i, d := range missing {
		if i > 0 && d.Name == missing[i-1].Name {
			continue
		}
		n := len(texts)
		for _, p := range w.properties {
			if p.Name == d.Name {
				texts = append(texts, p.String())
			}
		}
		if len(texts) == n {
			texts = append(texts, "no "+printable.Quote(d.Name, maxQuoted))
		}
	}
	return enumerate(texts)
}

// offeredValues lists all values of a property that workers offer to an instance.
func (q *Queue) offeredValues(instance, name string) string {
	var values []string
	for _, w := range q.workers {
		if !w.serves(instance) {
			continue
		}
		for _, p := range w.properties {
			if p.Name == name {
				values = append(values, printable.Quote(p.Value, maxQuoted))
			}
		}
	}
	if len(values) == 0 {
		return "no worker offers any " + printable.Quote(name, maxQuoted)
	}
	slices.Sort(values)
	return fmt.Sprintf("offered values of %s: %s", printable.Quote(name, maxQuoted), enumerate(slices.Compact(values)))
}

// enumerate joins texts, at most ten of them.
func enumerate(texts []string) string {
	const most = 10
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(texts[:most], ", "), more)
	}
	return strings.Join(texts, ", ")
}
