// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A watch polls the kernel for the processes of workers:
//
//	worker -- zygote --+-- slot -- pid 1 of a run -- its command -- ...
//	                   `-- slot -- ...
//
// A run executes if one of its processes is of a program other than cloister.
type watch struct {
	program os.FileInfo
	stop    chan struct{}
	stopped sync.WaitGroup

	mu      sync.Mutex
	workers map[string]*observation // guarded by mu, by name
}

// An observation is what a watch has seen of a worker.
type observation struct {
	pid   int
	polls int
	// slots holds the process of each slot, runs the pid 1 of each run that executed.
	slots, runs map[processID]bool
	// executing is the number of runs executing at the last poll; overlaps describes slots with several.
	executing int
	overlaps  []string
}

// A processID is a process number with the start time, since numbers are reused.
type processID struct {
	pid   int
	began uint64
}

// A processInfo describes a process.
type processInfo struct {
	processID
	parent int
	state  byte
}

// newWatch starts a watch, which ends with the test. program is the path of cloister.
func newWatch(t *testing.T, program string) *watch {
	t.Helper()
	info := must.Get(os.Stat(program))(t)
	w := &watch{program: info, stop: make(chan struct{}), workers: map[string]*observation{}}
	w.stopped.Go(func() {
		for {
			w.poll()
			select {
			case <-w.stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() {
		close(w.stop)
		w.stopped.Wait()
	})
	return w
}

// add starts to watch a worker, or its new process after a restart.
func (w *watch) add(name string, pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.workers[name]
	if s == nil {
		s = &observation{slots: map[processID]bool{}, runs: map[processID]bool{}}
		w.workers[name] = s
	}
	s.pid = pid
}

// of returns the number of a worker's runs seen so far, and of those executing now.
func (w *watch) of(name string) (runs, executing int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.workers[name]
	return len(s.runs), s.executing
}

// poll observes all workers once.
func (w *watch) poll() {
	w.mu.Lock()
	defer w.mu.Unlock()
	children := map[int][]processInfo{}
	for _, p := range processes() {
		children[p.parent] = append(children[p.parent], p)
	}
	for _, s := range w.workers {
		s.polls++
		s.executing = 0
		for _, zygote := range children[s.pid] {
			for _, slot := range children[zygote.pid] {
				s.slots[slot.processID] = true
				s.executing += w.pollSlot(s, slot, children)
			}
		}
	}
}

// pollSlot observes the descendants of a slot, and returns the number of executing runs.
func (w *watch) pollSlot(s *observation, slot processInfo, children map[int][]processInfo) int {
	executing := map[processID]processInfo{} // a process of each run, by its pid 1
	for _, first := range children[slot.pid] {
		for family := []processInfo{first}; len(family) > 0; {
			p := family[0]
			family = append(family[1:], children[p.pid]...)
			if w.executes(p) {
				executing[first.processID] = p
				s.runs[first.processID] = true
			}
		}
	}
	if len(executing) > 1 {
		// One may have ended and the next begun during the poll: they overlap only if all are still alive.
		maps.DeleteFunc(executing, func(_ processID, p processInfo) bool { return !p.alive() })
	}
	if len(executing) > 1 {
		s.overlaps = append(s.overlaps, fmt.Sprintf("slot %d at %s: %v", slot.pid, time.Now().Format(time.TimeOnly),
			slices.Collect(maps.Keys(executing))))
	}
	return len(executing)
}

// executes reports whether a process runs a program of an action.
func (w *watch) executes(p processInfo) bool {
	// The process may have ended.
	program, err := os.Stat(fmt.Sprintf("/proc/%d/exe", p.pid))
	return err == nil && !os.SameFile(program, w.program)
}

// processes returns all processes.
func processes() []processInfo {
	names, _ := filepath.Glob("/proc/[0-9]*/stat")
	var all []processInfo
	for _, name := range names {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if p, ok := readProcess(pid); ok {
			all = append(all, p)
		}
	}
	return all
}

// readProcess reads proc_pid_stat(5) of a process, unless it has ended.
func readProcess(pid int) (processInfo, bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return processInfo{}, false
	}
	// The second field is a name in parentheses that may contain any character; the others follow it.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 {
		return processInfo{}, false
	}
	p := processInfo{processID: processID{pid: pid}, state: fields[0][0]}
	p.parent, _ = strconv.Atoi(fields[1])
	p.began, _ = strconv.ParseUint(fields[19], 10, 64)
	return p, true
}

// alive reports whether the process exists and is no zombie.
func (i processID) alive() bool {
	p, ok := readProcess(i.pid)
	return ok && p.processID == i && p.state != 'Z' && p.state != 'X'
}

// tag returns the process's timer slack in nanoseconds (PR_SET_TIMERSLACK(2const)). Processes inherit it and keep it if
// they are reparented; neither the sandbox nor the actions of these tests change it. It is 0 for a process that has
// ended.
func (i processID) tag() int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/timerslack_ns", i.pid))
	tag, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return tag
}

// wantOnePerSlot checks that no slot executed two runs at once, and that runs were observed.
func (w *watch) wantOnePerSlot(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(w.workers)) {
		s := w.workers[name]
		t.Logf("%s: observed %d runs in %d slots in %d polls", name, len(s.runs), len(s.slots), s.polls)
		expect.That(t, len(s.runs) != 0, "%s: observed no run", name)
		if len(s.overlaps) > 0 {
			t.Errorf("%s: two runs at once: %s", name, strings.Join(s.overlaps, "; "))
		}
	}
}
