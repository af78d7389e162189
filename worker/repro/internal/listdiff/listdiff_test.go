// SPDX-License-Identifier: Apache-2.0

package listdiff

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

func TestHunksCoverBothLists(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		list := func() []string {
			s := make([]string, r.IntN(12))
			for i := range s {
				s[i] = fmt.Sprint(r.IntN(9))
			}
			return s
		}
		a, b := list(), list()
		i, j := 0, 0
		for _, h := range Hunks(a, b) {
			if h.A != i || h.B != j || h.Same && !slices.Equal(a[h.A:h.EndA], b[h.B:h.EndB]) {
				t.Fatalf("Hunks(%q, %q): bad hunk %+v", a, b, h)
			}
			i, j = h.EndA, h.EndB
		}
		must.Be(t, i == len(a) && j == len(b), "Hunks(%q, %q) end at %d and %d", a, b, i, j)
	}
}
