// SPDX-License-Identifier: Apache-2.0

package queue

import "slices"

// A roll holds operations in order of arrival.
type roll struct {
	ops  []*Operation // nil where one was removed
	seqs []uint64     // of each, also of those that were removed
	gaps int
}

// add appends o, which is the newest.
func (r *roll) add(o *Operation) {
	r.ops, r.seqs = append(r.ops, o), append(r.seqs, o.seq)
}

// remove takes out o, which must be there. Gaps are closed when half of all are, so that each costs little.
func (r *roll) remove(o *Operation) {
	i, _ := slices.BinarySearch(r.seqs, o.seq)
	r.ops[i] = nil
	if r.gaps++; r.gaps <= len(r.ops)/2 {
		return
	}
	var kept roll
	for _, o := range r.ops {
		if o != nil {
			kept.add(o)
		}
	}
	*r = kept
}

// Older returns at most n operations that arrived before the one numbered seq, or any if seq is 0, the newest first, and
// the number with which the next call goes on. There are no more when it returns none.
func (q *Queue) Older(seq uint64, n int) (ops []*Operation, next uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := len(q.listed.ops)
	if seq != 0 {
		i, _ = slices.BinarySearch(q.listed.seqs, seq)
	}
	for i--; i >= 0 && len(ops) < n; i-- {
		if o := q.listed.ops[i]; o != nil {
			ops, next = append(ops, o), o.seq
		}
	}
	return ops, next
}

// Forget makes the operation of that name unknown, if it is completed. It reports whether it knew it, and whether it was
// completed.
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
