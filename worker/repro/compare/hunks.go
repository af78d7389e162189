// SPDX-License-Identifier: Apache-2.0

package compare

import "slices"

// A hunk is a run of items of two lists: a to endA of the one are b to endB of the other, or stand in their place.
type hunk struct {
	a, endA, b, endB int
	same             bool
}

// hunks compares two lists: what both have once, in the same order, is the same, as are its neighbours (patience
// diff). Neither the items nor their number can make it slow: it takes time in proportion to n log n, a bounded number of times.
func hunks(a, b []string) []hunk {
	var hs []hunk
	between(a, b, 0, 0, 0, func(h hunk) {
		if last := len(hs) - 1; last >= 0 && hs[last].same == h.same {
			hs[last].endA, hs[last].endB = h.endA, h.endB
			return
		}
		hs = append(hs, h)
	})
	return hs
}

// between emits the hunks of a and b in order, which begin at offA and offB of their lists.
func between(a, b []string, offA, offB, depth int, emit func(hunk)) {
	put := func(i, j, n, m int, same bool) {
		if n+m > 0 {
			emit(hunk{offA + i, offA + i + n, offB + j, offB + j + m, same})
		}
	}
	head := 0
	for head < min(len(a), len(b)) && a[head] == b[head] {
		head++
	}
	put(0, 0, head, head, true)
	tail := 0
	for tail < min(len(a), len(b))-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	midA, midB := a[head:len(a)-tail], b[head:len(b)-tail]
	const deepest = 16
	if pairs := anchors(midA, midB); len(pairs) == 0 || depth == deepest {
		put(head, head, len(midA), len(midB), false)
	} else {
		i, j := 0, 0
		for _, p := range append(pairs, [2]int{len(midA), len(midB)}) {
			between(midA[i:p[0]], midB[j:p[1]], offA+head+i, offB+head+j, depth+1, emit)
			if p[0] < len(midA) {
				put(head+p[0], head+p[1], 1, 1, true)
			}
			i, j = p[0]+1, p[1]+1
		}
	}
	put(len(a)-tail, len(b)-tail, tail, tail, true)
}

// anchors returns the longest list of places, rising in both, of items that a and b have once each.
func anchors(a, b []string) [][2]int {
	if len(a) == 0 || len(b) == 0 {
		return nil
	}
	once := func(s []string) map[string]int {
		at := make(map[string]int, len(s))
		for i, item := range s {
			if _, ok := at[item]; ok {
				i = -1
			}
			at[item] = i
		}
		return at
	}
	inA, inB := once(a), once(b)
	// Piles of places in b, the smallest end of a rising list of each length on top (patience sorting).
	type card struct {
		at     [2]int
		before int // in cards
	}
	var cards []card
	var piles []int
	for i, item := range a {
		j, ok := inB[item]
		if !ok || j < 0 || inA[item] < 0 {
			continue
		}
		n, _ := slices.BinarySearchFunc(piles, j, func(c, j int) int { return cards[c].at[1] - j })
		before := -1
		if n > 0 {
			before = piles[n-1]
		}
		cards = append(cards, card{[2]int{i, j}, before})
		if n == len(piles) {
			piles = append(piles, 0)
		}
		piles[n] = len(cards) - 1
	}
	var pairs [][2]int
	if len(piles) > 0 {
		for c := piles[len(piles)-1]; c >= 0; c = cards[c].before {
			pairs = append(pairs, cards[c].at)
		}
	}
	slices.Reverse(pairs)
	return pairs
}
