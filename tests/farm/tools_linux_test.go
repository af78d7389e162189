// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// TestLeftoverProcessIsDetected even if it was reparented and has its own session.
func TestLeftoverProcessIsDetected(t *testing.T) {
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	p := newMachine(t, "m", 1).start(t, "/bin/sh", "-c", "setsid sleep 120 > /dev/null 2>&1 & exec sleep 120")
	until(t, time.Minute, "two processes", func() bool { return len(tagged(p.tag)) == 2 })
	p.kill()
	if left := p.left(100 * time.Millisecond); len(left) != 1 {
		t.Errorf("alive are %q, want one process", left)
	}
	p.sweep()
	if left := p.left(time.Minute); len(left) != 0 {
		t.Errorf("alive are %q, want none", left)
	}
}

// TestOverlapInOneSlotIsDetected and distinguished from two slots.
func TestOverlapInOneSlotIsDetected(t *testing.T) {
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	// Simulates a worker, its zygote, a slot, pid 1 of a run, and the command.
	const run = `sh -c "sleep 120; :"`
	for _, c := range []struct {
		name, slots    string
		runs, overlaps int
	}{
		{"one in each", `sh -c '` + run + `; :' & sh -c '` + run + `; :'; :`, 2, 0},
		{"two in one", `sh -c '` + run + ` & ` + run + `; :'; :`, 2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t, "m", 1)
			w := newWatch(t, "/bin/sh") // simulates the program cloister
			p := m.start(t, "/bin/sh", "-c", `sh -c "$0"; :`, c.slots)
			w.add("m", p.pid)
			until(t, time.Minute, "runs", func() bool {
				_, executing := w.of("m")
				return executing == c.runs
			})
			w.mu.Lock()
			defer w.mu.Unlock()
			if got := w.workers["m"].overlaps; min(len(got), 1) != c.overlaps {
				t.Errorf("overlaps are %q, want %d", got, c.overlaps)
			}
			p.sweep()
		})
	}
}
