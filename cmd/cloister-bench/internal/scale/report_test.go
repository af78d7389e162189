// SPDX-License-Identifier: Apache-2.0

package scale

import (
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
)

// TestExcess compares orders of assignment, one each second, of two builds of priority 0 and one of priority 1.
func TestExcess(t *testing.T) {
	t.Parallel()
	builds := []build{{0, make([]*action, 3)}, {1, make([]*action, 2)}, {0, make([]*action, 2)}}
	const s = time.Second
	for _, c := range []struct {
		name  string
		order []int
		want  Excess
	}{
		{"Fair", []int{0, 2, 0, 2, 0, 1, 1}, Excess{0, 0, 6 * s}},
		{"FirstComeFirstServed", []int{0, 0, 0, 2, 2, 1, 1}, Excess{0, 2 * s, 6 * s}},
		{"LowPriorityFirst", []int{1, 1, 0, 2, 0, 2, 0}, Excess{2 * s, 2 * s, 6 * s}},
		{"FirstHalf", []int{2, 2, 2}, Excess{0, 2 * s, 2 * s}},
		{"Nothing", nil, Excess{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var gave []assignment
			for i, b := range c.order {
				gave = append(gave, assignment{b, time.Unix(int64(i), 0)})
			}
			expect.Equal(t, excess(builds, gave), c.want)
		})
	}
}
