// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"math/rand/v2"
	"slices"
)

// WithOrder returns the same layout with directories that list their entries in an order derived from seed, which must
// not be 0. Equal seeds give equal orders; different seeds give different orders if the directory has enough entries.
// This requires a workspace that lists the newest or the oldest entry first, as tmpfs does. It applies to all
// directories of the input root, but not to what the run makes in them.
//
// Images list their entries sorted, so a layout with an order is copied.
func (l *Layout) WithOrder(seed uint64) *Layout {
	ordered := *l
	ordered.order = seed
	return &ordered
}

// creationOrder returns names in the order in which they must be created. By default this is descending: tmpfs lists
// the newest entry first, so copies list their entries sorted, as images do. Beside an image, private inputs come last.
func (s *stager) creationOrder(names []stageFile) []stageFile {
	slices.SortFunc(names, func(a, b stageFile) int { return cmp.Compare(b.name, a.name) })
	if s.order == 0 {
		return names
	}
	// A name in both layers moves as one: a seed that moved only one of the two would leave the run's order as it is.
	var places [][]stageFile
	for i := 0; i < len(names); {
		n := 1
		for i+n < len(names) && names[i+n].name == names[i].name {
			n++
		}
		places = append(places, names[i:i+n])
		i += n
	}
	ordered := make([]stageFile, 0, len(names))
	for _, j := range permutation(s.order, len(places)) {
		ordered = append(ordered, places[j]...)
	}
	return ordered
}

// fewEntries is the largest number of entries for which random orders of two seeds would often coincide.
const fewEntries = 5

// permutation returns the numbers below n in an order derived from seed. For small n, the seed is the index of the
// order, so that adjacent seeds give different orders.
func permutation(seed uint64, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = i
	}
	random := rand.NewPCG(seed, 0) // Go guarantees that its sequence never changes
	for i := n; i > 1; i-- {
		choice := random.Uint64()
		if n <= fewEntries {
			choice, seed = seed, seed/uint64(i)
		}
		j := int(choice % uint64(i))
		p[i-1], p[j] = p[j], p[i-1]
	}
	return p
}
