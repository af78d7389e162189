// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
)

// TestWhatOutlivesAWorkerIsSeen: the tests here would notice a process that a worker leaves behind, though it is nobody's
// child, in a session of its own.
func TestWhatOutlivesAWorkerIsSeen(t *testing.T) {
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	p := newMachine(t, "m", 1).start(t, "/bin/sh", "-c", "setsid sleep 120 > /dev/null 2>&1 & exec sleep 120")
	until(t, time.Minute, "two processes", func() bool { return len(marked(p.brand)) == 2 })
	p.kill()
	if left := p.left(100 * time.Millisecond); len(left) != 1 {
		t.Errorf("alive are %q, want one", left)
	}
	p.sweep()
	if left := p.left(time.Minute); len(left) != 0 {
		t.Errorf("alive are %q, want none", left)
	}
}

// TestTwoRunsOfOneSlotAreSeen: the tests here would notice a slot that executes twice at once, and take two slots for two.
func TestTwoRunsOfOneSlotAreSeen(t *testing.T) {
	if noNetwork != nil {
		sandboxtest.Unavailable(t, "networks", noNetwork)
	}
	// A worker, its zygote, a slot, pid 1 of a run, and the command.
	const run = `sh -c "sleep 120; :"`
	for _, c := range []struct {
		name, slots string
		runs, twice int
	}{
		{"one in each", `sh -c '` + run + `; :' & sh -c '` + run + `; :'; :`, 2, 0},
		{"two in one", `sh -c '` + run + ` & ` + run + `; :'; :`, 2, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine(t, "m", 1)
			w := newWatch(t, "/bin/sh") // which is no action's program here
			p := m.start(t, "/bin/sh", "-c", `sh -c "$0"; :`, c.slots)
			w.add("m", p.pid)
			until(t, time.Minute, "runs", func() bool {
				_, executing := w.of("m")
				return executing == c.runs
			})
			w.mu.Lock()
			defer w.mu.Unlock()
			if twice := w.workers["m"].twice; min(len(twice), 1) != c.twice {
				t.Errorf("executing twice were %q, want %d", twice, c.twice)
			}
			p.sweep()
		})
	}
}
