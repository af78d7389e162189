// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/google/go-cmp/cmp"
)

func TestProcessesAreCountedByKind(t *testing.T) {
	for _, c := range []struct {
		name, output string
		want         map[string]int
	}{
		{
			"hits", "a\nINFO: 7 processes: 4 remote cache hit, 3 internal.\nb",
			map[string]int{"remote cache hit": 4, "internal": 3},
		},
		{"one", "INFO: 1 process: 1 internal.", map[string]int{"internal": 1}},
		{"none", "INFO: 0 processes.", map[string]int{}},
		{"no summary", "ERROR: no such target", map[string]int{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			expect.Equal(t, cmp.Diff(c.want, (&Build{Output: c.output}).Processes()), "")
		})
	}
}
