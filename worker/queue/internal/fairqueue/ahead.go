// SPDX-License-Identifier: Apache-2.0

package fairqueue

import "container/heap"

// Ahead returns the next n items of the matching buckets, or fewer if fewer wait, in the order in which they will be
// taken if none arrives and none ends. It modifies nothing: it searches the heaps best first, and so touches about n
// elements of each.
func (q *Queue[T]) Ahead(n int, match func(T) bool) []T {
	var values []T
	taken := make(map[*Item[T]]bool)
	expanded := make(map[*flow[T]]bool)
	var candidates indexedHeap[*candidate[T]]
	for _, b := range q.buckets {
		if match(b.Peek()) {
			candidates = append(candidates, newCandidate(b.flows[0]))
		}
	}
	heap.Init(&candidates)
	for len(values) < n && len(candidates) > 0 {
		c := heap.Pop(&candidates).(*candidate[T])
		if bf := c.found; bf != nil {
			// The flows below it in its bucket's heap are candidates now.
			for child := 2*bf.index + 1; child <= 2*bf.index+2 && child < len(bf.bucket.flows); child++ {
				heap.Push(&candidates, newCandidate(bf.bucket.flows[child]))
			}
			if expanded[bf.flow] {
				continue // found through another bucket
			}
			expanded[bf.flow] = true
			c.expand(match)
		}
		it := c.next()
		for it != nil && taken[it] {
			it = c.next()
		}
		if it == nil {
			continue
		}
		taken[it] = true
		values = append(values, it.Value)
		c.inService++
		c.lastServed = q.clock + uint64(len(values))
		heap.Push(&candidates, c)
	}
	return values
}

// A candidate is a flow with the rank it will have after some services.
type candidate[T any] struct {
	rank
	found    *bucketFlow[T]         // until its first service
	frontier indexedHeap[cursor[T]] // after it: the entries that may be next
}

func newCandidate[T any](bf *bucketFlow[T]) *candidate[T] {
	return &candidate[T]{rank: bf.rank, found: bf}
}

func (c *candidate[T]) before(d *candidate[T]) bool { return c.rank.before(d.rank) }
func (c *candidate[T]) setIndex(int)                {}

// expand starts a search of the flow's entries in every matching bucket.
func (c *candidate[T]) expand(match func(T) bool) {
	for _, bf := range c.found.bucketFlows {
		if match(bf.bucket.Peek()) {
			heap.Push(&c.frontier, cursor[T]{bf.entries, 0})
		}
	}
	c.found = nil
}

// next returns the item of the flow's next entry, or nil.
func (c *candidate[T]) next() *Item[T] {
	if len(c.frontier) == 0 {
		return nil
	}
	cur := heap.Pop(&c.frontier).(cursor[T])
	for child := 2*cur.index + 1; child <= 2*cur.index+2 && child < len(cur.entries); child++ {
		heap.Push(&c.frontier, cursor[T]{cur.entries, child})
	}
	return cur.entry().item
}

// A cursor is a position in the heap of a bucketFlow's entries.
type cursor[T any] struct {
	entries indexedHeap[*Entry[T]]
	index   int
}

func (c cursor[T]) entry() *Entry[T]        { return c.entries[c.index] }
func (c cursor[T]) before(d cursor[T]) bool { return c.entry().before(d.entry()) }
func (c cursor[T]) setIndex(int)            {}
