// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"math/rand/v2"
	"slices"
)

// WithOrder returns the layout of the same in which directories list their entries in an order that the seed makes, which
// is not 0: always the same for one seed, and another for another, as far as there are others. That holds where a
// workspace lists what was made last first, or what was made first, as tmpfs does; and for all directories
// of the input root, but not for what the run makes in them.
//
// Images list what is in them sorted, so that all of it is copied.
func (l *Layout) WithOrder(seed uint64) *Layout { return &Layout{dirs: l.dirs, order: seed} }

// inOrder returns what a directory is to have in the order in which it is made. Usually that is from the last name to the
// first: tmpfs lists what was made last first, so that copies list as images do, sorted, and a run cannot tell which of
// them it has.
func (s *stager) inOrder(names []stageFile) []stageFile {
	slices.SortFunc(names, func(a, b stageFile) int { return cmp.Compare(b.name, a.name) })
	if s.order == 0 {
		return names
	}
	ordered := make([]stageFile, len(names))
	for i, j := range permutation(s.order, len(names)) {
		ordered[i] = names[j]
	}
	return ordered
}

// fewEntries is up to how many there are so few orders that two seeds would often make the same by chance.
const fewEntries = 5

// permutation returns the numbers below n in an order that the seed makes. Of few, the seed is the number of the order,
// so that two that are close make different ones.
func permutation(seed uint64, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = i
	}
	chance := rand.NewPCG(seed, 0) // whose numbers Go promises to be the same for ever
	for i := n; i > 1; i-- {
		choice := chance.Uint64()
		if n <= fewEntries {
			choice, seed = seed, seed/uint64(i)
		}
		j := int(choice % uint64(i))
		p[i-1], p[j] = p[j], p[i-1]
	}
	return p
}
