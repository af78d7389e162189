// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

// TestTierTextNamesMissingLimits: "full" must not hide that an action may take all memory.
func TestTierTextNamesMissingLimits(t *testing.T) {
	for _, c := range []struct {
		limits []sandbox.Limit
		want   string
	}{
		{sandbox.AllLimits, "full"},
		{sandbox.AllLimits[2:], "full, without limits of memory, CPU time"},
	} {
		if got := TierText(sandbox.Features{Tier: "full", Limits: c.limits}); got != c.want {
			t.Errorf("limits %v: got %q, want %q", c.limits, got, c.want)
		}
	}
}
