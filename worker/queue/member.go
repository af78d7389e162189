// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
)

// A member is a worker as far as its slots offer the same.
type member struct {
	name, prefix string
	properties   []worker.Property // sorted
	any          bool

	// The rest is guarded by the queue's mutex.
	slots      map[string]*Slot // that have joined, by name
	idle       []*Slot          // those of them that wait
	busy       int              // how many have a run
	drained    *drain           // nil if it may take actions
	seen       time.Time        // when it was heard of the last time
	left       time.Time        // when the last slot left; zero if one is there
	done, lost int64
}

// A drain is why a worker is given no actions, and since when.
type drain struct {
	since time.Time
	why   string
}

// member returns who makes an offer. Only an own one is that of the queue's own slots, whatever the name.
func (q *Queue) member(o Offer, own bool) *member {
	properties := slices.Compact(slices.SortedFunc(slices.Values(o.Properties), worker.Property.Compare))
	known := false
	for _, m := range q.members {
		if m.name != o.Worker {
			continue
		}
		if own == (m == q.own) && m.prefix == o.Prefix && m.any == o.Any && slices.Equal(m.properties, properties) {
			return m
		}
		known = true
	}
	if d := q.drainJoining; d != nil && !known && q.drained[o.Worker] == nil && !q.admitted[o.Worker] {
		q.drained[o.Worker] = d
	}
	m := &member{
		name: o.Worker, prefix: o.Prefix, properties: properties, any: o.Any,
		slots: make(map[string]*Slot), drained: q.drained[o.Worker],
	}
	q.members = append(q.members, m)
	return m
}

// fits reports whether m offers to take what waits in n.
func (m *member) fits(n *lane) bool {
	return m.serves(n.instance) && (m.any || len(m.lacks(n.demands)) == 0)
}

// serves reports whether m takes actions of an instance.
func (m *member) serves(instance string) bool {
	rest, ok := strings.CutPrefix(instance, m.prefix)
	return ok && (m.prefix == "" || rest == "" || rest[0] == '/')
}

// lacks returns those of the demands that m does not have.
func (m *member) lacks(demands []worker.Property) []worker.Property {
	var lacks []worker.Property
	for _, d := range demands {
		if _, ok := slices.BinarySearchFunc(m.properties, d, worker.Property.Compare); !ok {
			lacks = append(lacks, d)
		}
	}
	return lacks
}

// may reports whether m may take from n now.
func (q *Queue) may(m *member, n *lane) bool {
	if m.drained != nil || !m.fits(n) {
		return false
	}
	if !slices.Contains(n.avoided, m.name) {
		return true
	}
	// It has lost what waits here. Whoever has not is to take it, even if that takes longer.
	return !slices.ContainsFunc(q.members, func(other *member) bool {
		return len(other.slots) > 0 && other.drained == nil && !slices.Contains(n.avoided, other.name) && other.fits(n)
	})
}

// idler returns a slot that waits and may take from n, or nil: of the worker with the smallest part of its slots busy.
func (q *Queue) idler(n *lane) *Slot {
	var best *member
	for _, m := range q.members {
		// Both sides of busy/slots < busy/slots are multiplied by both numbers of slots.
		if len(m.idle) > 0 && (best == nil || m.busy*len(best.slots) < best.busy*len(m.slots)) && q.may(m, n) {
			best = m
		}
	}
	if best == nil {
		return nil
	}
	return best.idle[len(best.idle)-1]
}

// maxLeft is how many workers are remembered that have left: a head lives for months, and one worker can come back under
// many names, or with many properties.
const maxLeft = 1000

// forgetWorkers forgets those that left too long ago, and the first to leave where there are too many.
func (q *Queue) forgetWorkers(now time.Time) {
	var left []time.Time
	for _, m := range q.members {
		if !m.left.IsZero() {
			left = append(left, m.left)
		}
	}
	since := now.Add(-q.cfg.Remembered)
	if more := len(left) - maxLeft; more > 0 {
		slices.SortFunc(left, time.Time.Compare)
		if last := left[more-1]; last.After(since) {
			since = last
		}
	}
	forgotten := make(map[string]bool)
	q.members = slices.DeleteFunc(q.members, func(m *member) bool {
		if m.left.IsZero() || m.left.After(since) {
			return false
		}
		forgotten[m.name] = true
		return true
	})
	if len(forgotten) == 0 {
		return
	}
	for _, m := range q.members {
		delete(forgotten, m.name)
	}
	for name := range forgotten {
		if q.drained[name] == q.drainJoining {
			delete(q.drained, name) // if it joins again, it is drained as all others are
		}
	}
}

// DrainWorker gives the worker of that name no more actions, for the reason why; what it executes it goes on with. The
// name "" is every worker, also those that are still to join. A worker that leaves and joins again is still drained. It
// returns the names of those concerned, none if there is no such worker, and how many actions they have now.
func (q *Queue) DrainWorker(name, why string) (names []string, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	d := &drain{time.Now(), why}
	if name == "" {
		q.drainJoining = d
		clear(q.admitted)
	} else {
		delete(q.admitted, name)
	}
	for _, m := range q.members {
		if name != "" && name != m.name {
			continue
		}
		if name != "" || q.drained[m.name] == nil {
			q.drained[m.name] = d
		}
		m.drained = q.drained[m.name]
		names = append(names, m.name)
		running += m.busy
	}
	q.claim()
	q.dispatchAll() // what was kept from workers that lost it, since these would take it
	slices.Sort(names)
	return slices.Compact(names), running
}

// UndrainWorker undoes DrainWorker, with "" every one of them. It returns what DrainWorker does.
func (q *Queue) UndrainWorker(name string) (names []string, running int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if name == "" {
		q.drainJoining = nil
		clear(q.drained)
		clear(q.admitted)
	} else if q.drained[name] != nil {
		delete(q.drained, name)
		names = append(names, name) // it may be gone
	}
	for _, m := range q.members {
		if name == "" || name == m.name {
			m.drained = nil
			names = append(names, m.name)
			running += m.busy
		}
	}
	if q.drainJoining != nil && len(names) > 0 {
		q.admitted[name] = true
	}
	q.dispatchAll()
	q.idle.Signal()
	q.waiting.Signal()
	slices.Sort(names)
	return slices.Compact(names), running
}

// A DrainState is which workers are drained, in words that outlast the queue.
type DrainState struct {
	// Joining is of every worker that joins, but for those of Workers, and for those Admitted; nil if none is.
	Joining *Drain `json:"joining,omitempty"`
	// Workers are those that were drained by their names.
	Workers map[string]Drain `json:"workers,omitempty"`
	// Admitted are those that were undrained by their names, of which Joining is not, sorted.
	Admitted []string `json:"admitted,omitempty"`
}

// A Drain is since when a worker is drained, and why.
type Drain struct {
	Since time.Time `json:"since"`
	Why   string    `json:"why,omitempty"`
}

// DrainState returns which workers are drained: what Config.Drains of a later queue has to be for the same to be so there.
func (q *Queue) DrainState() DrainState {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := DrainState{Admitted: slices.Sorted(maps.Keys(q.admitted))}
	if d := q.drainJoining; d != nil {
		s.Joining = &Drain{d.since, d.why}
	}
	for name, d := range q.drained {
		if d == q.drainJoining {
			continue // as all are that join
		}
		if s.Workers == nil {
			s.Workers = make(map[string]Drain)
		}
		s.Workers[name] = Drain{d.since, d.why}
	}
	return s
}

// restore has those drained that were drained in an earlier queue, before anybody has joined.
func (q *Queue) restore(s DrainState) {
	if d := s.Joining; d != nil {
		q.drainJoining = &drain{d.Since, d.Why}
	}
	for name, d := range s.Workers {
		q.drained[name] = &drain{d.Since, d.Why}
	}
	for _, name := range s.Admitted {
		q.admitted[name] = true
	}
}

// Drained returns since when and why no action is given to anybody: each worker that is there is drained, or none is there
// and those that join are to be. It returns the zero time if actions are given, or would be to who joins.
func (q *Queue) Drained() (since time.Time, why string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	last := q.drainJoining
	for _, m := range q.members {
		switch {
		case len(m.slots) == 0:
		case m.drained == nil:
			return time.Time{}, ""
		case last == nil || m.drained.since.After(last.since):
			last = m.drained
		}
	}
	if last == nil {
		return time.Time{}, ""
	}
	return last.since, last.why
}

// A WorkerState is how a worker stands, as far as its slots offer the same.
type WorkerState struct {
	Name, Prefix string
	Properties   []worker.Property
	Any          bool
	// Local says that its slots are the queue's own.
	Local bool
	// Slots are those that have joined, by name.
	Slots []SlotState
	// Drained is since when it is given no more actions, for the reason Why; zero if it is given some.
	Drained time.Time
	Why     string
	// Seen is when it was heard of the last time.
	Seen time.Time
	// Left is when its last slot left; zero while there is one.
	Left time.Time
	// Done are the runs that it has ended, Lost those that were lost with it.
	Done, Lost int64
}

// A SlotState is how a slot stands. But for Name and Ending all is zero while it has no action.
type SlotState struct {
	Name                         string
	Instance                     string
	Action                       cas.Digest
	Target, Mnemonic, Invocation string
	Began                        time.Time
	// Stage is the last that was reported, or 0.
	Stage worker.Stage
	// Ending is since when the worker is known to execute there what it was not given, and is to end; zero if nothing.
	Ending time.Time
}

// Workers returns the workers that have joined, and those that are remembered, by name.
func (q *Queue) Workers() []WorkerState {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []WorkerState
	for _, m := range q.members {
		w := WorkerState{
			Name: m.name, Prefix: m.prefix, Properties: slices.Clone(m.properties), Any: m.any, Local: m == q.own,
			Seen: m.seen, Left: m.left, Done: m.done, Lost: m.lost,
		}
		if d := m.drained; d != nil {
			w.Drained, w.Why = d.since, d.why
		}
		for _, s := range m.slots {
			state := SlotState{Name: s.name, Ending: s.ending}
			if r := s.run; r != nil {
				t := &r.task
				state.Instance, state.Action, state.Began, state.Stage = t.Instance, t.Action, r.began, r.stage
				state.Target, state.Mnemonic, state.Invocation = t.Target, t.Mnemonic, t.Invocation
			}
			w.Slots = append(w.Slots, state)
		}
		slices.SortFunc(w.Slots, func(a, b SlotState) int {
			return cmp.Or(cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name)) // 9 before 10
		})
		all = append(all, w)
	}
	slices.SortStableFunc(all, func(a, b WorkerState) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Prefix, b.Prefix), slices.CompareFunc(a.Properties, b.Properties, worker.Property.Compare))
	})
	return all
}

// A Demand is what waits for a slot of the actions of one instance that demand the same.
type Demand struct {
	Instance   string
	Properties []worker.Property
	Queued     int
	// Unmet says why no worker takes any of them now, but for want of a free slot; "" if one does.
	Unmet string
}

// Demands returns what waits for a slot, by what it demands and of which instance it is.
func (q *Queue) Demands() []Demand {
	q.mu.Lock()
	defer q.mu.Unlock()
	var all []Demand
	for _, n := range q.ready.open {
		i := slices.IndexFunc(all, func(d Demand) bool { return d.Instance == n.instance && slices.Equal(d.Properties, n.demands) })
		if i < 0 {
			i = len(all)
			all = append(all, Demand{Instance: n.instance, Properties: slices.Clone(n.demands)})
		}
		all[i].Queued += n.waiting
		if all[i].Unmet == "" {
			all[i].Unmet = q.unmet(n)
		}
	}
	slices.SortFunc(all, func(a, b Demand) int {
		return cmp.Or(slices.CompareFunc(a.Properties, b.Properties, worker.Property.Compare), strings.Compare(a.Instance, b.Instance))
	})
	return all
}

// unmet says why nobody takes from n now, or "" if somebody does.
func (q *Queue) unmet(n *lane) string {
	var drained, left *member
	for _, m := range q.members {
		switch {
		case !m.fits(n):
		case len(m.slots) == 0:
			left = m
		case m.drained != nil:
			drained = m
		default:
			return ""
		}
	}
	switch {
	case drained != nil:
		return fmt.Sprintf("worker %s is drained", word(drained.name))
	case left != nil:
		return fmt.Sprintf("worker %s has left", word(left.name))
	case len(q.members) == 0:
		return "no worker has joined"
	}
	return q.nearest(n)
}

// hopeless returns the fault with which j ends, which waits in n, if no worker is to be expected that takes it, or nil.
func (q *Queue) hopeless(n *lane, j *job, now time.Time) *worker.Fault {
	switch {
	case slices.ContainsFunc(q.members, func(m *member) bool { return m.fits(n) }):
		return nil
	case now.Sub(q.started) < q.cfg.Settle:
		return nil
	case len(q.members) > 0:
		return fault(worker.Unmet, "%s", q.nearest(n))
	case now.Sub(j.entered) < q.cfg.Unmatched:
		return nil
	}
	return fault(worker.Unavailable, "no worker has joined for %v: start one with cloister join, then ask again", q.cfg.Unmatched)
}

// refuse ends what waits and is hopeless.
func (q *Queue) refuse(now time.Time) {
	for _, n := range slices.Clone(q.ready.open) {
		if slices.ContainsFunc(q.members, func(m *member) bool { return m.fits(n) }) {
			continue
		}
		for _, j := range n.all(nil) {
			if f := q.hopeless(n, j, now); f != nil {
				q.abandon(j, f)
			}
		}
	}
}

// Refuse ends with UNAVAILABLE what has waited for a slot for that long at least, and that no slot of the queue's own may take:
// the slots of others get nothing, for the reason why.
func (q *Queue) Refuse(waited time.Duration, why string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	before := time.Now().Add(-waited)
	for _, n := range slices.Clone(q.ready.open) {
		if q.own != nil && q.may(q.own, n) {
			continue
		}
		for _, j := range n.all(nil) {
			if !j.entered.After(before) {
				q.abandon(j, fault(worker.Unavailable, "the action has waited for %v: %s; ask again", waited, why))
			}
		}
	}
}

// maxValues is how many of the values that are offered are told.
const maxValues = 10

// nearest says what separates n from the member that is nearest to taking what waits there: it lacks the least, and of
// that has the most with another value. There is one, and none fits. Whoever asks for an action of the instance reads it,
// and may know nothing of other instances: workers that do not take actions of this one are not told of.
func (q *Queue) nearest(n *lane) string {
	var nearest *member
	var lacks []worker.Property
	var strange int
	for _, m := range q.members {
		if !m.serves(n.instance) {
			continue
		}
		l := m.lacks(n.demands)
		s := m.strange(l)
		if nearest == nil || cmp.Or(cmp.Compare(len(l), len(lacks)), cmp.Compare(s, strange), strings.Compare(m.name, nearest.name)) < 0 {
			nearest, lacks, strange = m, l, s
		}
	}
	if nearest == nil {
		return fmt.Sprintf("no worker takes actions of the instance %s: ask for one of those that cloister status has a worker for, or start one with another cloister join --instance",
			strconv.QuoteToASCII(n.instance))
	}
	return fmt.Sprintf("no worker offers %s; nearest is worker %s, which has %s; %s: add --property %s to its cloister join, or demand what is offered",
		together(lacks), word(nearest.name), nearest.instead(lacks), q.offered(n.instance, lacks[0].Name), lacks[0])
}

// strange returns how many of the demands name what m has with no value.
func (m *member) strange(demands []worker.Property) int {
	n := 0
	for _, d := range demands {
		if !slices.ContainsFunc(m.properties, func(p worker.Property) bool { return p.Name == d.Name }) {
			n++
		}
	}
	return n
}

// together names what is demanded together.
func together(demands []worker.Property) string {
	var each []string
	for _, d := range demands {
		each = append(each, d.String())
	}
	return list(each)
}

// instead names what m has of the properties that it lacks.
func (m *member) instead(lacks []worker.Property) string {
	var each []string
	for _, name := range names(lacks) {
		has := false
		for _, p := range m.properties {
			if p.Name == name {
				each = append(each, p.String())
				has = true
			}
		}
		if !has {
			each = append(each, "no "+word(name))
		}
	}
	return list(each)
}

// offered names all values of a property that are offered to an instance.
func (q *Queue) offered(instance, name string) string {
	var values []string
	for _, m := range q.members {
		if !m.serves(instance) {
			continue
		}
		for _, p := range m.properties {
			if p.Name == name {
				values = append(values, word(p.Value))
			}
		}
	}
	if len(values) == 0 {
		return "none has any " + word(name)
	}
	slices.Sort(values)
	return fmt.Sprintf("all that is offered of %s is %s", word(name), list(slices.Compact(values)))
}

// names returns the names of properties that are sorted, each once.
func names(properties []worker.Property) []string {
	var all []string
	for _, p := range properties {
		all = append(all, p.Name)
	}
	return slices.Compact(all)
}

// list writes at most maxValues of some texts.
func list(texts []string) string {
	if more := len(texts) - maxValues; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(texts[:maxValues], ", "), more)
	}
	return strings.Join(texts, ", ")
}

// word returns s, quoted as in Go where it is more than printable ASCII or empty, and shortened.
func word(s string) string {
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	if q := strconv.QuoteToASCII(s); s == "" || q != `"`+s+`"` {
		return q
	}
	return s
}

// encodeDemands writes demands for a lot.
func encodeDemands(demands []worker.Property) string {
	var texts []string
	for _, d := range demands {
		texts = append(texts, d.Name, d.Value)
	}
	return encode(texts...)
}
