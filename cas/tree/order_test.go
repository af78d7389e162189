// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPermutationsDiffer checks that seeds give different orders while there are enough orders.
func TestPermutationsDiffer(t *testing.T) {
	for n, orders := range map[int]int{0: 1, 1: 1, 2: 2, 3: 6, 4: 24, 5: 120, 6: 20, 100: 200} {
		seen := map[string]bool{}
		for seed := range uint64(orders) {
			p := permutation(seed+1, n)
			expect.Slices(t, p, permutation(seed+1, n), "seed %d gave two orders of %d", seed+1, n)
			seen[fmt.Sprint(p)] = true
			slices.Sort(p)
			for i, v := range p {
				must.Be(t, i == v, "seed %d, n %d: got %v, want a permutation", seed+1, n, p)
			}
		}
		if few := n <= fewEntries; few && len(seen) != orders || len(seen) < orders*9/10 {
			t.Errorf("%d seeds gave %d orders of %d", orders, len(seen), n)
		}
	}
}

// TestPermutationsAreStable: users record seeds, so every version must give the same order.
func TestPermutationsAreStable(t *testing.T) {
	for _, c := range []struct {
		seed uint64
		want []int
	}{
		{1, []int{3, 2, 0, 1}}, {7, []int{0, 4, 5, 7, 1, 3, 2, 6}}, {1 << 63, []int{5, 7, 0, 1, 6, 2, 4, 3}},
	} {
		expect.Slices(t, permutation(c.seed, len(c.want)), c.want, "seed %d", c.seed)
	}
}

// TestLayersShareAnOrder: each seed gives the names of a directory the same order in two layers as in one.
func TestLayersShareAnOrder(t *testing.T) {
	one := []stageFile{{name: "a"}, {name: "b"}, {name: "c"}, {name: "d"}}
	two := []stageFile{{name: "a"}, {name: "b"}, {name: "c"}, {name: "d"}, {name: "a"}, {name: "c"}, {name: "d"}}
	for seed := range uint64(24) {
		s := &stager{order: seed + 1}
		var got, want []string
		for _, f := range slices.CompactFunc(s.creationOrder(slices.Clone(two)), func(a, b stageFile) bool { return a.name == b.name }) {
			got = append(got, f.name)
		}
		for _, f := range s.creationOrder(slices.Clone(one)) {
			want = append(want, f.name)
		}
		expect.Slices(t, got, want, "seed %d", seed+1)
	}
}
