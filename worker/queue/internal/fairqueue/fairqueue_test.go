// SPDX-License-Identifier: Apache-2.0

package fairqueue

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// A model is a Queue that sorts all entries at each step.
type model struct {
	clock   uint64
	flows   map[FlowKey]*rank
	waiting []*Entry[*job]
}

type job struct {
	Item[*job]
	name   string
	key    MatchKey
	flow   FlowKey // it was served in
	others []*Entry[*job]
}

func (m *model) arrive(e *Entry[*job]) {
	if m.flows[e.Flow] == nil {
		m.clock++
		m.flows[e.Flow] = &rank{e.Flow.Background, e.Flow.Priority, 0, m.clock}
	}
	m.waiting = append(m.waiting, e)
}

func (m *model) remove(gone func(*Entry[*job]) bool) {
	m.waiting = slices.DeleteFunc(m.waiting, gone)
	for key, r := range m.flows {
		if r.inService == 0 && !slices.ContainsFunc(m.waiting, func(e *Entry[*job]) bool { return e.Flow == key }) {
			delete(m.flows, key)
		}
	}
}

// take serves the next job that matches, or returns nil.
func (m *model) take(match func(*job) bool) *job {
	var best *Entry[*job]
	for _, e := range m.waiting {
		if !match(e.item.Value) {
			continue
		}
		if best == nil || m.flows[e.Flow].before(*m.flows[best.Flow]) || e.Flow == best.Flow && e.Seq < best.Seq {
			best = e
		}
	}
	if best == nil {
		return nil
	}
	j := best.item.Value
	m.clock++
	j.flow = best.Flow
	m.flows[best.Flow].inService++
	m.flows[best.Flow].lastServed = m.clock
	m.remove(func(e *Entry[*job]) bool { return e.item == &j.Item })
	return j
}

// names returns the names of jobs, for messages.
func names(jobs []*job) (all []string) {
	for _, j := range jobs {
		all = append(all, j.name)
	}
	return all
}

// TestQueueFollowsTheModel compares a random history of arrivals, shared jobs, withdrawals, moves, services and ends
// with the model, and checks that Ahead predicts the services that follow.
func TestQueueFollowsTheModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 0))
		var q Queue[*job]
		m := &model{flows: make(map[FlowKey]*rank)}
		var seq uint64
		var waiting, running []*job
		newFlow := func() FlowKey {
			return FlowKey{Invocation: fmt.Sprint(r.IntN(4)), Priority: int32(r.IntN(2)), Background: r.IntN(4) == 0}
		}
		newEntry := func() *Entry[*job] {
			seq++
			return &Entry[*job]{Flow: newFlow(), Seq: seq, Arrived: time.Unix(int64(seq), 0)}
		}
		match := func(r *rand.Rand) func(*job) bool {
			matching := []bool{r.IntN(3) > 0, r.IntN(3) > 0, r.IntN(3) > 0}
			return func(j *job) bool { return matching[j.key[0]-'a'] }
		}
		for range 200 {
			switch op := r.IntN(11); {
			case op < 4:
				j := &job{name: fmt.Sprint(seq), key: MatchKey([]string{"a", "b", "c"}[r.IntN(3)])}
				j.Value = j
				e := newEntry()
				q.Push(&j.Item, j.key, e)
				m.arrive(e)
				j.others = append(j.others, e)
				waiting = append(waiting, j)
			case op < 5 && len(waiting) > 0:
				j, e := waiting[r.IntN(len(waiting))], newEntry()
				j.Add(e)
				m.arrive(e)
				j.others = append(j.others, e)
			case op < 6 && len(waiting) > 0:
				j := waiting[r.IntN(len(waiting))]
				e := j.others[r.IntN(len(j.others))]
				e.Remove()
				e.Remove() // does nothing
				j.others = slices.DeleteFunc(j.others, func(other *Entry[*job]) bool { return other == e })
				m.remove(func(other *Entry[*job]) bool { return other == e })
				if len(j.others) == 0 {
					waiting = slices.DeleteFunc(waiting, func(other *job) bool { return other == j })
				}
			case op < 7 && len(waiting) > 0:
				j := waiting[r.IntN(len(waiting))]
				e, flow := j.others[r.IntN(len(j.others))], newFlow()
				e.Move(flow)
				m.remove(func(other *Entry[*job]) bool { return other == e })
				m.arrive(e)
			case op < 9 && len(running) > 0:
				i := r.IntN(len(running))
				j := running[i]
				running = slices.Delete(running, i, i+1)
				q.Done(&j.Item)
				m.flows[j.flow].inService--
				m.remove(func(*Entry[*job]) bool { return false })
			default:
				matches := match(r)
				ahead := q.Ahead(3, matches)
				for i := range 1 + r.IntN(3) {
					b, want := q.Next(matches), m.take(matches)
					if b == nil || want == nil {
						if b != nil || want != nil || i < len(ahead) {
							t.Fatalf("seed %d: Next = %v, want %v; Ahead = %v", seed, b, want, names(ahead))
						}
						break
					}
					got := b.Take()
					if got != want || ahead[i] != want {
						t.Fatalf("seed %d: took %s with Ahead = %v at %d, want %s", seed, got.name, names(ahead), i, want.name)
					}
					running = append(running, got)
					waiting = slices.DeleteFunc(waiting, func(j *job) bool { return j == got })
				}
			}
			check(t, &q, m, waiting, running)
		}
	}
}

// check compares the counts of q with those of the model.
func check(t *testing.T, q *Queue[*job], m *model, waiting, running []*job) {
	t.Helper()
	type counts struct{ waiting, inService, flows int }
	got := counts{q.Waiting(), q.InService(), q.Flows()}
	if want := (counts{len(waiting), len(running), len(m.flows)}); got != want {
		t.Fatalf("got %+v, want %+v", got, want)
	}
	byName := func(a, b *job) int { return cmp.Compare(a.name, b.name) }
	slices.SortFunc(waiting, byName)
	if got := slices.SortedFunc(slices.Values(q.Values()), byName); !slices.Equal(got, waiting) {
		t.Fatalf("Values = %v, want %v", names(got), names(waiting))
	}
	var oldest time.Time
	for _, e := range m.waiting {
		if oldest.IsZero() || e.Arrived.Before(oldest) {
			oldest = e.Arrived
		}
	}
	if got := q.Oldest(); !got.Equal(oldest) {
		t.Fatalf("Oldest = %v, want %v", got, oldest)
	}
	for _, b := range q.Buckets() {
		want := make(map[*job]bool)
		for _, e := range m.waiting {
			if !e.Flow.Background && e.item.Value.key == b.key {
				want[e.item.Value] = true
			}
		}
		if got := b.Foreground(); got != len(want) {
			t.Fatalf("Foreground of %s = %d, want %d", b.key, got, len(want))
		}
	}
}
