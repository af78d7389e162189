// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

// TestTierTextNamesMissingLimits: the tier must not hide that an action may take all memory.
func TestTierTextNamesMissingLimits(t *testing.T) {
	for _, c := range []struct {
		tier   string
		limits []sandbox.Limit
		want   string
	}{
		{"full", sandbox.AllLimits, "full"},
		{"partial", sandbox.AllLimits[2:], "partial, without limits of memory, CPU time"},
	} {
		if got := TierText(sandbox.Features{Tier: c.tier, Limits: c.limits}); got != c.want {
			t.Errorf("limits %v: got %q, want %q", c.limits, got, c.want)
		}
	}
}
