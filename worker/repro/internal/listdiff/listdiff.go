// SPDX-License-Identifier: Apache-2.0

// Package listdiff compares two lists of strings by patience diff (Bram Cohen,
// https://bramcohen.livejournal.com/73318.html). It is fast for any input: it takes O(n log n) time a bounded number of
// times.
package listdiff

import "slices"

// A Hunk says that a[A:EndA] and b[B:EndB] are equal, or that the one replaces the other.
type Hunk struct {
	A, EndA, B, EndB int
	Same             bool
}

// Hunks returns the hunks of two lists in order. Equal and different hunks alternate.
func Hunks(a, b []string) []Hunk {
	var hs []Hunk
	diff(a, b, 0, 0, 0, func(h Hunk) {
		if last := len(hs) - 1; last >= 0 && hs[last].Same == h.Same {
			hs[last].EndA, hs[last].EndB = h.EndA, h.EndB
			return
		}
		hs = append(hs, h)
	})
	return hs
}

// diff emits the hunks of a and b, which begin at offA and offB of the whole lists.
func diff(a, b []string, offA, offB, depth int, emit func(Hunk)) {
	put := func(i, j, n, m int, same bool) {
		if n+m > 0 {
			emit(Hunk{offA + i, offA + i + n, offB + j, offB + j + m, same})
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
	const maxDepth = 16
	if pairs := anchors(midA, midB); len(pairs) == 0 || depth == maxDepth {
		put(head, head, len(midA), len(midB), false)
	} else {
		i, j := 0, 0
		for _, p := range append(pairs, [2]int{len(midA), len(midB)}) {
			diff(midA[i:p[0]], midB[j:p[1]], offA+head+i, offB+head+j, depth+1, emit)
			if p[0] < len(midA) {
				put(head+p[0], head+p[1], 1, 1, true)
			}
			i, j = p[0]+1, p[1]+1
		}
	}
	put(len(a)-tail, len(b)-tail, tail, tail, true)
}

// anchors returns the longest list of index pairs, increasing in both, of items that occur once in a and once in b.
func anchors(a, b []string) [][2]int {
	inA, inB := unique(a), unique(b)
	// Patience sorting: piles[n] is the card with the smallest index in b that ends an increasing list of n+1 cards.
	type card struct {
		at     [2]int
		before int // in cards, or -1
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

// unique maps items to their index, or to -1 if they occur more than once.
func unique(s []string) map[string]int {
	at := make(map[string]int, len(s))
	for i, item := range s {
		if _, ok := at[item]; ok {
			i = -1
		}
		at[item] = i
	}
	return at
}
