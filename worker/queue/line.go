// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"cmp"
	"container/heap"
	"encoding/binary"
	"slices"
	"sync"

	"github.com/cloister-build/cloister/worker"
)

// A line is where jobs wait for somebody to take them. What has the lower value of priority goes strictly first.
// Among equals the builds take turns, so that one of 50,000 actions does not hold up one of five: next is the build of
// which the fewest are being worked on, of those the one that was served least recently, and of that its request that
// came first. A line has a lane for all that the same workers may take, and a build has one standing in all of them: what
// runs of it on one platform counts on every other. Each step costs the logarithm of what waits, for each lane in which
// the build waits; whoever takes looks at the head of each lane.
type line struct {
	more    sync.Cond // for those that take from any lane
	waiting int       // jobs
	busy    int       // jobs taken and not yet done with

	parties map[who]*party // those of which something waits or is worked on
	lanes   map[lot]*lane  // those in which something waits
	open    []*lane        // the same
	turns   uint64
}

// A lot is what the jobs of a lane have in common.
type lot struct {
	instance string
	demands  string // as encode writes them
	avoided  string // the workers that have lost them, as encode writes them
}

// A lane is where jobs of one lot wait.
type lane struct {
	lot
	line    *line
	demands []worker.Property // sorted
	avoided []string          // sorted
	waiting int               // jobs
	next    pile[*share]      // one of each build of which something waits here
	index   int               // in line.open
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
	shares []*share // one for each lane in which something of it waits
}

// A share is what of a party waits in one lane.
type share struct {
	*party
	lane   *lane
	places pile[*Operation]
	index  int // in lane.next; -1 if it is not there
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

func (s *share) before(t *share) bool { return s.standing.before(t.standing) }
func (s *share) moved(to int)         { s.index = to }

// push lets j wait in l, among those of its lot.
func (l *line) push(j *job) {
	n := l.lanes[j.lot]
	if n == nil {
		n = &lane{lot: j.lot, line: l, demands: j.req.Demands, avoided: j.avoided(), index: len(l.open)}
		if l.lanes == nil {
			l.lanes = make(map[lot]*lane)
			l.parties = make(map[who]*party)
		}
		l.lanes[n.lot] = n
		l.open = append(l.open, n)
	}
	j.lane = n
	n.waiting++
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
		p = &party{who: o.who, standing: standing{o.who.priority, 0, l.turns}}
		l.parties[o.who] = p
	}
	n := o.job.lane
	i := slices.IndexFunc(p.shares, func(s *share) bool { return s.lane == n })
	if i < 0 {
		i = len(p.shares)
		p.shares = append(p.shares, &share{party: p, lane: n, index: -1})
	}
	s := p.shares[i]
	o.share = s
	heap.Push(&s.places, o)
	if s.index < 0 {
		heap.Push(&n.next, s)
	}
}

// part takes o out of l.
func (l *line) part(o *Operation) {
	s := o.share
	o.share = nil
	heap.Remove(&s.places, o.place)
	if len(s.places) > 0 {
		return
	}
	heap.Remove(&s.lane.next, s.index)
	s.shares = slices.DeleteFunc(s.shares, func(t *share) bool { return t == s })
	l.forget(s.party)
}

// forget drops p if nothing of it is left.
func (l *line) forget(p *party) {
	if len(p.shares) == 0 && p.busy == 0 {
		delete(l.parties, p.who)
	}
}

// stand gives p another standing, and moves it to where that belongs.
func (p *party) stand(busy int, turn uint64) {
	p.busy, p.turn = busy, turn
	for _, s := range p.shares {
		heap.Fix(&s.lane.next, s.index)
	}
}

// head returns the share whose turn it is in n, which has one.
func (n *lane) head() *share { return n.next[0] }

// sooner reports whether the turn of s comes before that of t, which is in another lane.
func (s *share) sooner(t *share) bool {
	if s.party == t.party {
		return s.places[0].before(t.places[0])
	}
	return s.before(t)
}

// first returns the lane of those admitted whose turn it is, or nil if none is.
func (l *line) first(admitted func(*lane) bool) *lane {
	var first *lane
	for _, n := range l.open {
		if (first == nil || n.head().sooner(first.head())) && admitted(n) {
			first = n
		}
	}
	return first
}

// take takes the next job from n, a lane of l.
func (l *line) take(n *lane) *job {
	s := n.head()
	j, p := s.places[0].job, s.party
	l.turns++
	p.stand(p.busy+1, l.turns)
	l.busy++
	j.turn = p
	l.drop(j)
	return j
}

// drop takes j, and what places are left of it, out of l.
func (l *line) drop(j *job) {
	for o := range j.ops {
		if o.share != nil {
			l.part(o)
		}
	}
	n := j.lane
	j.lane = nil
	l.waiting--
	if n.waiting--; n.waiting > 0 {
		return
	}
	delete(l.lanes, n.lot)
	last := l.open[len(l.open)-1]
	l.open[n.index], last.index = last, n.index
	l.open[len(l.open)-1] = nil // else the array behind the slice would keep it
	l.open = l.open[:len(l.open)-1]
}

// done says that j, which was taken, is no longer worked on.
func (l *line) done(j *job) {
	l.busy--
	p := j.turn
	j.turn = nil
	p.stand(p.busy-1, p.turn)
	l.forget(p)
}

// all returns the jobs that wait.
func (l *line) all() []*job {
	jobs := make([]*job, 0, l.waiting)
	for _, n := range l.open {
		jobs = n.all(jobs)
	}
	return jobs
}

// all appends the jobs that wait in n.
func (n *lane) all(jobs []*job) []*job {
	seen := make(map[*job]bool, n.waiting)
	for _, s := range n.next {
		for _, o := range s.places {
			if !seen[o.job] {
				seen[o.job] = true
				jobs = append(jobs, o.job)
			}
		}
	}
	return jobs
}

// ahead returns the next n jobs of the lanes admitted, or all if there are fewer, as they will be taken if none comes and
// none ends.
func (l *line) ahead(n int, admitted func(*lane) bool) []*job {
	var jobs []*job
	taken := make(map[*job]bool)
	known := make(map[*party]bool)
	var coming pile[*prospect]
	for _, n := range l.open {
		if admitted(n) {
			coming = append(coming, n.head().prospect())
		}
	}
	heap.Init(&coming)
	for len(jobs) < n && len(coming) > 0 {
		p := heap.Pop(&coming).(*prospect)
		if s := p.share; s != nil {
			// This is its first turn: those right behind it in its lane may be next, too.
			for child := 2*s.index + 1; child <= 2*s.index+2 && child < len(s.lane.next); child++ {
				heap.Push(&coming, s.lane.next[child].prospect())
			}
			if known[s.party] {
				continue // by its share in another lane
			}
			known[s.party] = true
			p.open(admitted)
		}
		j := p.pop()
		for j != nil && taken[j] {
			j = p.pop()
		}
		if j == nil {
			continue
		}
		taken[j] = true
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
	share *share // by which it was found, before its first turn; then nil
	// front are the places, from the first turn on, of which all that stand before them in their heaps have been popped.
	front pile[spot]
}

func (s *share) prospect() *prospect { return &prospect{standing: s.standing, share: s} }

// open gives p the places of its party in all lanes admitted.
func (p *prospect) open(admitted func(*lane) bool) {
	for _, s := range p.share.shares {
		if admitted(s.lane) {
			heap.Push(&p.front, spot{s.places, 0})
		}
	}
	p.share = nil
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

// A spot is a place, by its index in the heap of all places of a share.
type spot struct {
	places pile[*Operation]
	index  int
}

func (s spot) before(t spot) bool { return s.places[s.index].before(t.places[t.index]) }
func (s spot) moved(int)          {}

// encode writes texts so that different ones are written differently; none is "".
func encode(texts ...string) string {
	var b []byte
	for _, t := range texts {
		b = binary.AppendUvarint(b, uint64(len(t)))
		b = append(b, t...)
	}
	return string(b)
}

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

// oldest returns the operation that has waited for the longest, or nil.
func (l *line) oldest() *Operation {
	var oldest *Operation
	for _, n := range l.open {
		for _, s := range n.next {
			if o := s.places[0]; oldest == nil || o.before(oldest) {
				oldest = o
			}
		}
	}
	return oldest
}
