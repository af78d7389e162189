// SPDX-License-Identifier: Apache-2.0

// Package fairqueue orders jobs for workers that each take only some of them.
//
// The algorithm is max-min fair sharing of slots under placement constraints: a free slot goes to the flow with the
// fewest jobs in service among the flows that have a job this slot can run. It is the scheduler of Ghodsi et al.,
// "Choosy: Max-Min Fair Sharing for Datacenter Jobs with Constraints" (EuroSys 2013), with equal weights; without
// constraints it is "naive fair sharing", Algorithm 1 of Zaharia et al., "Delay Scheduling" (EuroSys 2010). Two rules
// complete the order:
//
//   - Background flows come last; among the others, and among themselves, a lower priority value always runs before a
//     higher one.
//   - Flows with equally many jobs in service take turns (round robin): the least recently served is next. A new flow
//     counts as served when it arrives, so it overtakes no flow that already waits. Within a flow, jobs are first in,
//     first out.
//
// A flow is a build; one of 50,000 actions cannot delay one of five. A bucket holds the jobs that the same workers can
// run. A flow has one rank in all buckets, so what it runs on one platform counts on every other.
//
// Each bucket keeps its flows in an indexed binary heap, and each flow its jobs of that bucket in another. A step costs
// the logarithm of the number waiting, for each bucket in which the flow has jobs, plus a look at the head of each
// bucket.
//
// The package runs nothing, locks nothing and knows no worker: callers serialise access and say which buckets match.
package fairqueue

import (
	"cmp"
	"container/heap"
	"time"
)

// A Queue holds waiting items and counts those in service. The zero Queue is empty and ready for use.
type Queue[T any] struct {
	waiting, inService int
	flows              map[FlowKey]*flow[T] // with items waiting or in service
	byKey              map[MatchKey]*Bucket[T]
	buckets            []*Bucket[T] // the same
	clock              uint64       // advances with each arrival of a flow and each service
}

// A MatchKey is equal for items that the same workers can run.
type MatchKey string

// A FlowKey identifies a flow: a build of an instance, at one priority.
type FlowKey struct {
	Instance, Invocation string
	Priority             int32
	Background           bool // runs only while nothing else waits
}

// An Item is one job, which several entries may request. It waits under each entry's flow and is served in the turn of
// the first to come up.
type Item[T any] struct {
	Value      T
	bucket     *Bucket[T]  // nil unless waiting
	entries    []*Entry[T] // while waiting
	foreground int         // number of entries in flows that are not background
	servedIn   *flow[T]    // nil unless in service
}

// An Entry is one request for an item.
type Entry[T any] struct {
	Flow    FlowKey
	Seq     uint64 // position in the order of arrival
	Arrived time.Time

	item       *Item[T]
	itemIndex  int            // in item.entries
	bucketFlow *bucketFlow[T] // nil unless waiting
	index      int            // in bucketFlow.entries
}

// A Bucket holds the waiting items of one MatchKey. It is never empty.
type Bucket[T any] struct {
	queue      *Queue[T]
	key        MatchKey
	waiting    int
	foreground int // waiting items with an entry in a flow that is not background
	flows      indexedHeap[*bucketFlow[T]]
	index      int // in Queue.buckets
}

// A flow is the state of one FlowKey.
type flow[T any] struct {
	rank
	key         FlowKey
	bucketFlows map[*Bucket[T]]*bucketFlow[T] // one for each bucket in which it has items
}

// A bucketFlow is the part of a flow that waits in one bucket.
type bucketFlow[T any] struct {
	*flow[T]
	bucket  *Bucket[T]
	entries indexedHeap[*Entry[T]]
	index   int // in bucket.flows; -1 if absent
}

// A rank orders flows.
type rank struct {
	background bool
	priority   int32
	inService  int
	lastServed uint64 // Queue.clock at its last service, or at its arrival
}

func (a rank) before(b rank) bool {
	if a.background != b.background {
		return b.background
	}
	return cmp.Or(cmp.Compare(a.priority, b.priority), cmp.Compare(a.inService, b.inService),
		cmp.Compare(a.lastServed, b.lastServed)) < 0
}

func (f *bucketFlow[T]) before(g *bucketFlow[T]) bool { return f.rank.before(g.rank) }
func (f *bucketFlow[T]) setIndex(i int)               { f.index = i }

func (e *Entry[T]) before(f *Entry[T]) bool { return e.Seq < f.Seq }
func (e *Entry[T]) setIndex(i int)          { e.index = i }

// Waiting returns the number of waiting items.
func (q *Queue[T]) Waiting() int { return q.waiting }

// InService returns the number of items taken and not yet done.
func (q *Queue[T]) InService() int { return q.inService }

// Flows returns the number of flows with items waiting or in service.
func (q *Queue[T]) Flows() int { return len(q.flows) }

// Buckets returns the buckets with waiting items. The caller must not modify the slice, and clones it to modify the
// queue in a loop over it.
func (q *Queue[T]) Buckets() []*Bucket[T] { return q.buckets }

// Push adds an item under at least one entry.
func (q *Queue[T]) Push(it *Item[T], key MatchKey, entries ...*Entry[T]) {
	b := q.byKey[key]
	if b == nil {
		b = &Bucket[T]{queue: q, key: key, index: len(q.buckets)}
		if q.byKey == nil {
			q.byKey = make(map[MatchKey]*Bucket[T])
			q.flows = make(map[FlowKey]*flow[T])
		}
		q.byKey[key] = b
		q.buckets = append(q.buckets, b)
	}
	it.bucket = b
	b.waiting++
	q.waiting++
	for _, e := range entries {
		it.Add(e)
	}
}

// Waiting reports whether the item waits in a queue.
func (it *Item[T]) Waiting() bool { return it.bucket != nil }

// Bucket returns the bucket in which the item waits, or nil.
func (it *Item[T]) Bucket() *Bucket[T] { return it.bucket }

// Add adds an entry to a waiting item.
func (it *Item[T]) Add(e *Entry[T]) {
	b := it.bucket
	q := b.queue
	f := q.flows[e.Flow]
	if f == nil {
		q.clock++
		f = &flow[T]{
			key: e.Flow, rank: rank{e.Flow.Background, e.Flow.Priority, 0, q.clock}, bucketFlows: make(map[*Bucket[T]]*bucketFlow[T]),
		}
		q.flows[e.Flow] = f
	}
	bf := f.bucketFlows[b]
	if bf == nil {
		bf = &bucketFlow[T]{flow: f, bucket: b, index: -1}
		f.bucketFlows[b] = bf
	}
	if !f.background {
		if it.foreground++; it.foreground == 1 {
			b.foreground++
		}
	}
	e.item, e.itemIndex, e.bucketFlow = it, len(it.entries), bf
	it.entries = append(it.entries, e)
	heap.Push(&bf.entries, e)
	if bf.index < 0 {
		heap.Push(&b.flows, bf)
	}
}

// Remove withdraws a request. An item without entries leaves the queue. Remove does nothing unless the entry waits.
func (e *Entry[T]) Remove() {
	if e.bucketFlow == nil {
		return
	}
	if it := e.detach(); len(it.entries) == 0 {
		it.leave()
	}
}

// Move assigns the entry to another flow, in which it keeps its position in the order of arrival.
func (e *Entry[T]) Move(to FlowKey) {
	if e.bucketFlow == nil {
		e.Flow = to
		return
	}
	it := e.detach()
	e.Flow = to
	it.Add(e)
}

// detach removes a waiting entry from its item, and returns the item.
func (e *Entry[T]) detach() *Item[T] {
	it := e.item
	last := len(it.entries) - 1
	it.entries[e.itemIndex] = it.entries[last]
	it.entries[e.itemIndex].itemIndex = e.itemIndex
	it.entries = it.entries[:last]
	e.unlink()
	return it
}

// unlink removes e from its flow.
func (e *Entry[T]) unlink() {
	bf := e.bucketFlow
	e.bucketFlow = nil
	if !bf.background {
		if e.item.foreground--; e.item.foreground == 0 {
			bf.bucket.foreground--
		}
	}
	heap.Remove(&bf.entries, e.index)
	if len(bf.entries) > 0 {
		return
	}
	heap.Remove(&bf.bucket.flows, bf.index)
	delete(bf.bucketFlows, bf.bucket)
	bf.bucket.queue.forget(bf.flow)
}

// leave removes an item, whose entries are unlinked, from its bucket.
func (it *Item[T]) leave() {
	b := it.bucket
	q := b.queue
	it.bucket, it.entries = nil, nil
	q.waiting--
	if b.waiting--; b.waiting > 0 {
		return
	}
	delete(q.byKey, b.key)
	last := len(q.buckets) - 1
	q.buckets[b.index] = q.buckets[last]
	q.buckets[b.index].index = b.index
	q.buckets[last] = nil // release it to the garbage collector
	q.buckets = q.buckets[:last]
}

// forget deletes a flow with nothing waiting or in service.
func (q *Queue[T]) forget(f *flow[T]) {
	if len(f.bucketFlows) == 0 && f.inService == 0 {
		delete(q.flows, f.key)
	}
}

// setRank changes the flow's rank, and its position in every bucket.
func (f *flow[T]) setRank(inService int, lastServed uint64) {
	f.inService, f.lastServed = inService, lastServed
	for _, bf := range f.bucketFlows {
		heap.Fix(&bf.bucket.flows, bf.index)
	}
}

// Next returns the bucket to serve next among those whose items match, or nil. All items of a bucket match alike, so
// match is called with any of them.
func (q *Queue[T]) Next(match func(T) bool) *Bucket[T] {
	var next *Bucket[T]
	for _, b := range q.buckets {
		if (next == nil || b.flows[0].precedes(next.flows[0])) && match(b.Peek()) {
			next = b
		}
	}
	return next
}

// precedes reports whether f is served before g, which waits in another bucket.
func (f *bucketFlow[T]) precedes(g *bucketFlow[T]) bool {
	if f.flow == g.flow {
		return f.entries[0].before(g.entries[0])
	}
	return f.before(g)
}

// Take removes and returns the next item of b, which is in service until Done.
func (b *Bucket[T]) Take() T {
	q, f, it := b.queue, b.flows[0].flow, b.flows[0].entries[0].item
	q.clock++
	q.inService++
	f.setRank(f.inService+1, q.clock)
	it.servedIn = f
	for _, e := range it.entries {
		e.unlink()
	}
	it.leave()
	return it.Value
}

// Done ends the service of an item.
func (q *Queue[T]) Done(it *Item[T]) {
	q.inService--
	f := it.servedIn
	it.servedIn = nil
	f.setRank(f.inService-1, f.lastServed)
	q.forget(f)
}

// Len returns the number of items that wait in b.
func (b *Bucket[T]) Len() int { return b.waiting }

// Peek returns the item that Take would return.
func (b *Bucket[T]) Peek() T { return b.flows[0].entries[0].item.Value }

// Foreground returns the number of items that wait in b with an entry in a flow that is not background.
func (b *Bucket[T]) Foreground() int { return b.foreground }

// Values returns the items that wait in b, in no particular order.
func (b *Bucket[T]) Values() []T {
	values := make([]T, 0, b.waiting)
	for _, bf := range b.flows {
		for _, e := range bf.entries {
			if e == e.item.entries[0] {
				values = append(values, e.item.Value)
			}
		}
	}
	return values
}

// Values returns the items that wait, in no particular order.
func (q *Queue[T]) Values() []T {
	values := make([]T, 0, q.waiting)
	for _, b := range q.buckets {
		values = append(values, b.Values()...)
	}
	return values
}

// Oldest returns the arrival time of the entry with the lowest Seq; zero if none waits.
func (q *Queue[T]) Oldest() time.Time {
	var oldest *Entry[T]
	for _, b := range q.buckets {
		for _, bf := range b.flows {
			if e := bf.entries[0]; oldest == nil || e.before(oldest) {
				oldest = e
			}
		}
	}
	if oldest == nil {
		return time.Time{}
	}
	return oldest.Arrived
}
