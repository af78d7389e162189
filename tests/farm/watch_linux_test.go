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
)

// A watch looks at the processes of workers, as the kernel has them, again and again:
//
//	worker -- zygote --+-- slot -- pid 1 of a run -- its command -- ...
//	                   `-- slot -- ...
//
// A run in which is a process of another program than cloister executes.
type watch struct {
	program os.FileInfo
	stop    chan struct{}
	stopped sync.WaitGroup

	mu      sync.Mutex
	workers map[string]*sighting // guarded by mu, by name
}

// A sighting is what was seen of a worker.
type sighting struct {
	pid   int
	looks int
	// slots is every process of a slot that was seen, and runs every pid 1 of a run that executed.
	slots, runs map[identity]bool
	// executing is how many runs executed when it was looked last; twice says of which slots two did at once.
	executing int
	twice     []string
}

// An identity is a process number, and when the process began: numbers are used again.
type identity struct {
	pid   int
	began uint64
}

// A seen is what the kernel says of a process.
type seen struct {
	identity
	parent int
	state  byte
}

// newWatch watches until the test ends. Program is the path of cloister.
func newWatch(t *testing.T, program string) *watch {
	t.Helper()
	info, err := os.Stat(program)
	if err != nil {
		t.Fatal(err)
	}
	w := &watch{program: info, stop: make(chan struct{}), workers: map[string]*sighting{}}
	w.stopped.Go(func() {
		for {
			w.look()
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

// add watches a worker from now on. One that is watched already was started again.
func (w *watch) add(name string, pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.workers[name]
	if s == nil {
		s = &sighting{slots: map[identity]bool{}, runs: map[identity]bool{}}
		w.workers[name] = s
	}
	s.pid = pid
}

// of returns how many runs of a worker were seen, and how many execute now.
func (w *watch) of(name string) (runs, executing int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.workers[name]
	return len(s.runs), s.executing
}

// look looks at all workers once.
func (w *watch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	children := map[int][]seen{}
	for _, p := range processes() {
		children[p.parent] = append(children[p.parent], p)
	}
	for _, s := range w.workers {
		s.looks++
		s.executing = 0
		for _, zygote := range children[s.pid] {
			for _, slot := range children[zygote.pid] {
				s.slots[slot.identity] = true
				s.executing += w.lookAtSlot(s, slot, children)
			}
		}
	}
}

// lookAtSlot looks at what is below a slot, and returns how many runs execute there.
func (w *watch) lookAtSlot(s *sighting, slot seen, children map[int][]seen) int {
	executing := map[identity]seen{} // a process of each run, by its pid 1
	for _, first := range children[slot.pid] {
		for family := []seen{first}; len(family) > 0; {
			p := family[0]
			family = append(family[1:], children[p.pid]...)
			if w.executes(p) {
				executing[first.identity] = p
				s.runs[first.identity] = true
			}
		}
	}
	if len(executing) > 1 {
		// One may have ended, and the next begun, while we were looking: they execute at once if all do still that were
		// seen to.
		maps.DeleteFunc(executing, func(_ identity, p seen) bool { return !p.alive() })
	}
	if len(executing) > 1 {
		s.twice = append(s.twice, fmt.Sprintf("slot %d at %s: %v", slot.pid, time.Now().Format(time.TimeOnly), slices.Collect(maps.Keys(executing))))
	}
	return len(executing)
}

// executes reports whether a process executes a program of an action.
func (w *watch) executes(p seen) bool {
	// One that has ended has none.
	program, err := os.Stat(fmt.Sprintf("/proc/%d/exe", p.pid))
	return err == nil && !os.SameFile(program, w.program)
}

// processes returns all processes.
func processes() []seen {
	names, _ := filepath.Glob("/proc/[0-9]*/stat")
	var all []seen
	for _, name := range names {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if p, ok := look(pid); ok {
			all = append(all, p)
		}
	}
	return all
}

// look reads what proc_pid_stat(5) says of a process; it may have ended.
func look(pid int) (seen, bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return seen{}, false
	}
	// The second field is a name in parentheses, which may contain anything.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // from the third on
	if len(fields) < 20 {
		return seen{}, false
	}
	p := seen{identity: identity{pid: pid}, state: fields[0][0]}
	p.parent, _ = strconv.Atoi(fields[1])
	p.began, _ = strconv.ParseUint(fields[19], 10, 64)
	return p, true
}

// alive reports whether the process is still there, and more than an entry that waits for its parent.
func (i identity) alive() bool {
	p, ok := look(i.pid)
	return ok && p.identity == i && p.state != 'Z' && p.state != 'X'
}

// brand returns the value of oom_score_adj, which processes inherit, whoever their parent is later. Nothing that is executed
// here changes its own. It is 0 for one that has ended.
func (i identity) brand() int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", i.pid))
	brand, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return brand
}

// wantOnePerSlot checks that no slot was seen with two runs at once, and that it was looked well enough to tell.
func (w *watch) wantOnePerSlot(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(w.workers)) {
		s := w.workers[name]
		t.Logf("%s: %d runs were seen in %d slots, in %d looks", name, len(s.runs), len(s.slots), s.looks)
		if len(s.runs) == 0 {
			t.Errorf("%s: no run was seen", name)
		}
		if len(s.twice) > 0 {
			t.Errorf("%s: two runs at once: %s", name, strings.Join(s.twice, "; "))
		}
	}
}
