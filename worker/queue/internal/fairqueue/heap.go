// SPDX-License-Identifier: Apache-2.0

package fairqueue

// An indexedHeap implements heap.Interface for elements that know their index, so that any can be moved or removed.
type indexedHeap[E interface {
	before(E) bool
	setIndex(int)
}] []E

func (h indexedHeap[E]) Len() int           { return len(h) }
func (h indexedHeap[E]) Less(i, k int) bool { return h[i].before(h[k]) }

func (h indexedHeap[E]) Swap(i, k int) {
	h[i], h[k] = h[k], h[i]
	h[i].setIndex(i)
	h[k].setIndex(k)
}

func (h *indexedHeap[E]) Push(x any) {
	x.(E).setIndex(len(*h))
	*h = append(*h, x.(E))
}

func (h *indexedHeap[E]) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	var zero E
	(*h)[last] = zero // release it to the garbage collector
	*h = (*h)[:last]
	x.setIndex(-1)
	return x
}
