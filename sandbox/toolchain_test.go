// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"slices"
	"testing"
)

// TestToolchainOfMacOSIsItsOwn: on other systems its path may be anything.
func TestToolchainOfMacOSIsItsOwn(t *testing.T) {
	for system, want := range map[string]bool{"darwin": true, "linux": false, "windows": false} {
		if got := slices.Contains(toolchainOf(system), "/Library/Developer/CommandLineTools"); got != want {
			t.Errorf("%s: has the path of macOS: got %t, want %t", system, got, want)
		}
	}
}
