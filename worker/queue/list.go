// SPDX-License-Identifier: Apache-2.0

package queue

import "slices"

// An opList holds operations in order of arrival.
type opList struct {
	ops  []*Operation // nil where one was removed
	seqs []uint64     // of each, including removed ones
	gaps int
}

// add appends o, the newest.
func (l *opList) add(o *Operation) {
	l.ops, l.seqs = append(l.ops, o), append(l.seqs, o.Seq())
}

// remove removes o, which must be present. It compacts the list when half of it is gaps, so that each call is cheap.
func (l *opList) remove(o *Operation) {
	i, _ := slices.BinarySearch(l.seqs, o.Seq())
	l.ops[i] = nil
	if l.gaps++; l.gaps <= len(l.ops)/2 {
		return
	}
	var kept opList
	for _, o := range l.ops {
		if o != nil {
			kept.add(o)
		}
	}
	*l = kept
}

// Older returns at most n operations that arrived before the one numbered seq, newest first, and the number to continue
// with. A seq of 0 starts with the newest of all; the list ends when Older returns none.
func (q *Queue) Older(seq uint64, n int) (ops []*Operation, next uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := len(q.listed.ops)
	if seq != 0 {
		i, _ = slices.BinarySearch(q.listed.seqs, seq)
	}
	for i--; i >= 0 && len(ops) < n; i-- {
		if o := q.listed.ops[i]; o != nil {
			ops, next = append(ops, o), o.Seq()
		}
	}
	return ops, next
}

// Forget removes the operation of that name if it is completed. It reports whether the operation was known, and whether
// it was completed.
func (q *Queue) Forget(name string) (known, completed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	o, ok := q.ops[name]
	if !ok || o.job != nil {
		return ok, false
	}
	for _, list := range []*[]*Operation{&q.answered, &q.executed} {
		if i := slices.Index(*list, o); i >= 0 {
			*list = slices.Delete(*list, i, i+1)
		}
	}
	q.unlist(o)
	return true, true
}
