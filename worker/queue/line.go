// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"container/heap"
	"sync"
)

// A line is where jobs wait for a goroutine to take them. What has the lower value of priority goes strictly first.
// Among equals the builds take turns, so that one of 50,000 actions does not hold up one of five: next is the build of
// which the fewest are being worked on, of those the one that was served least recently, and of that its request that
// came first. Each step costs the logarithm of what waits.
type line struct {
	more    sync.Cond
	waiting int // jobs
	busy    int // jobs taken and not yet done with

	parties map[who]*party // those of which something waits or is worked on
	next    pile[*party]   // of them those of which something waits
	turns   uint64
}

// A who is what has a turn: a build of an instance, as far as its requests have one priority. Requests that do not say
// of which build they are count as one.
type who struct {
	instance, invocation string
	priority             int32
}

// A party is what a line knows of a who.
type party struct {
	who
	standing
	places pile[*Operation]
	index  int // in line.next; -1 if it is not there
}

// A standing orders parties.
type standing struct {
	priority int32
	busy     int    // jobs that were taken in its turn and are not yet done with
	turn     uint64 // its last one; a newcomer's is when it came, so that it passes nobody by who has waited
}

func (a standing) before(b standing) bool {
	return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.busy, b.busy), cmp.Compare(a.turn, b.turn)) < 0
}

func (p *party) before(q *party) bool { return p.standing.before(q.standing) }
func (p *party) moved(to int)         { p.index = to }

// push lets j wait in l.
func (l *line) push(j *job) {
	j.line = l
	l.waiting++
	for o := range j.ops {
		l.join(o)
	}
	l.more.Signal()
}

// join gives o a place in l, where its job waits. A job that several operations share has a place for each: the first
// whose turn comes takes the job for all.
func (l *line) join(o *Operation) {
	p := l.parties[o.who]
	if p == nil {
		l.turns++
		p = &party{who: o.who, standing: standing{o.who.priority, 0, l.turns}, index: -1}
		if l.parties == nil {
			l.parties = make(map[who]*party)
		}
		l.parties[o.who] = p
	}
	o.party = p
	heap.Push(&p.places, o)
	if p.index < 0 {
		heap.Push(&l.next, p)
	}
}

// part takes o out of l.
func (l *line) part(o *Operation) {
	p := o.party
	o.party = nil
	heap.Remove(&p.places, o.place)
	l.settle(p)
}

// settle moves p to where it belongs after a change.
func (l *line) settle(p *party) {
	switch {
	case p.index >= 0 && len(p.places) == 0:
		heap.Remove(&l.next, p.index)
	case p.index >= 0:
		heap.Fix(&l.next, p.index)
	}
	if len(p.places) == 0 && p.busy == 0 {
		delete(l.parties, p.who)
	}
}

// take takes the next job from l, which must have one.
func (l *line) take() *job {
	p := l.next[0]
	o := p.places[0]
	j := o.job
	l.turns++
	p.turn = l.turns
	p.busy++
	l.part(o) // which settles p, before anything else moves in l.next
	l.busy++
	j.turn = p
	l.drop(j)
	return j
}

// drop takes j, and what places are left of it, out of l.
func (l *line) drop(j *job) {
	for o := range j.ops {
		if o.party != nil {
			l.part(o)
		}
	}
	j.line = nil
	l.waiting--
}

// done says that j, which was taken, is no longer worked on.
func (l *line) done(j *job) {
	l.busy--
	j.turn.busy--
	l.settle(j.turn)
}

// all returns the jobs that wait.
func (l *line) all() []*job {
	jobs := make([]*job, 0, l.waiting)
	seen := make(map[*job]bool, l.waiting)
	for _, p := range l.next {
		for _, o := range p.places {
			if !seen[o.job] {
				seen[o.job] = true
				jobs = append(jobs, o.job)
			}
		}
	}
	return jobs
}

// ahead returns the next n jobs, or all if there are fewer, as they will be taken if none comes and none ends.
func (l *line) ahead(n int) []*job {
	var jobs []*job
	seen := make(map[*job]bool)
	var coming pile[*prospect]
	if len(l.next) > 0 {
		coming = append(coming, l.next[0].prospect())
	}
	for len(jobs) < n && len(coming) > 0 {
		p := heap.Pop(&coming).(*prospect)
		if p.index >= 0 {
			// This is its first turn: those right behind it in the heap may be next, too.
			for child := 2*p.index + 1; child <= 2*p.index+2 && child < len(l.next); child++ {
				heap.Push(&coming, l.next[child].prospect())
			}
			p.index = -1
		}
		j := p.pop()
		for j != nil && seen[j] {
			j = p.pop()
		}
		if j == nil {
			continue
		}
		seen[j] = true
		jobs = append(jobs, j)
		p.busy++
		p.turn = l.turns + uint64(len(jobs))
		heap.Push(&coming, p)
	}
	return jobs
}

// A prospect is a party as it will stand after some turns.
type prospect struct {
	standing
	index int // in line.next, before its first turn; then -1
	// front are the places of which all that stand before them in the heap have been popped.
	front pile[spot]
}

func (p *party) prospect() *prospect {
	return &prospect{standing: p.standing, index: p.index, front: pile[spot]{{p.places, 0}}}
}

func (p *prospect) before(q *prospect) bool { return p.standing.before(q.standing) }
func (p *prospect) moved(int)               {}

// pop returns the job of the next place, or nil.
func (p *prospect) pop() *job {
	if len(p.front) == 0 {
		return nil
	}
	s := heap.Pop(&p.front).(spot)
	for child := 2*s.index + 1; child <= 2*s.index+2 && child < len(s.places); child++ {
		heap.Push(&p.front, spot{s.places, child})
	}
	return s.places[s.index].job
}

// A spot is a place, by its index in the heap of all places of a party.
type spot struct {
	places pile[*Operation]
	index  int
}

func (s spot) before(t spot) bool { return s.places[s.index].before(t.places[t.index]) }
func (s spot) moved(int)          {}

// A pile is a heap as package heap keeps it. Its items know where they are.
type pile[T interface {
	before(T) bool
	moved(to int)
}] []T

// Len, Less, Swap, Push and Pop are for package heap alone.
func (h pile[T]) Len() int           { return len(h) }
func (h pile[T]) Less(i, k int) bool { return h[i].before(h[k]) }

func (h pile[T]) Swap(i, k int) {
	h[i], h[k] = h[k], h[i]
	h[i].moved(i)
	h[k].moved(k)
}

func (h *pile[T]) Push(x any) {
	x.(T).moved(len(*h))
	*h = append(*h, x.(T))
}

func (h *pile[T]) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	var none T
	(*h)[last] = none // else the array behind the slice would keep it
	*h = (*h)[:last]
	x.moved(-1)
	return x
}
