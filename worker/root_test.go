// SPDX-License-Identifier: Apache-2.0

package worker

import "testing"

// An action with a root file system never runs with the host's.
func TestRootIsNotIgnored(t *testing.T) {
	b := newBench(t, compiles)
	action := b.action(nil)
	_, err := b.Execute(t.Context(), &Task{Action: action, Root: action}, nil)
	wantFault(t, "an action with a root file system", err, FaultUnmet)
}
