// SPDX-License-Identifier: Apache-2.0

// Package monitor answers the system calls of one run that its filter notifies, and records what they
// tried. A watched call is recorded and goes on; what becomes of it is the kernel's decision. Any other
// call that is notified is refused.
//
// In a run that has a clock or random numbers of its own (sandbox.Conditions) it also answers who asks for them.
//
// What a call names is read from the memory of a process that may change it at any time, so a record is
// evidence and never a decision: nothing here may permit a call that the kernel would refuse.
package monitor

import (
	"maps"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/sandbox"
)

// A Config is what a run may do, in paths inside its sandbox: absolute and clean.
type Config struct {
	Writable []string // outputs and temporary directories, /tmp and /dev/shm among them
	Inputs   []string // of an input and a writable directory around a path, the longer decides
	Loopback bool
	// Allowed are the endpoints beyond loopback that may be reached.
	Allowed []netip.AddrPort
	// Full is sandbox.AuditFull: reads are recorded, too.
	Full bool
	// Source maps directories of the sandbox to directories of the host where Full looks for a path that the
	// sandbox lacks. Nothing there is opened; what is elsewhere on the host is nobody's business.
	Source map[string]string
	// Conditions are what the run is told of time and random numbers, if that is not the usual.
	Conditions sandbox.Conditions
}

// Bounds of what is remembered of one run.
const (
	maxKind     = sandbox.MaxEvents / 5 // there are five kinds of events here
	maxOpened   = 200_000
	maxPrograms = 10_000
	maxExecuted = 10_000
	maxSubject  = 512 // bytes
)

// A Monitor is the watch over one run. Its methods may be called concurrently.
type Monitor struct {
	view Config
	// stop asks for the end of the watch and may be called again; done is closed at the end. What is
	// below belongs to the watch until then.
	stop func()
	done chan struct{}

	events     map[identity]*entry
	kinds      map[sandbox.EventKind]int // different events
	unrecorded int
	networked  bool
	opened     map[string]bool
	programs   map[string]bool // the last element of each program that was found
	executed   map[string]bool // see Executed
	unnamed    bool            // something else was executed as well

	mu     sync.Mutex
	broken error // why the conditions did not hold; guarded by mu
}

// An identity is what makes two events the same.
type identity struct {
	kind                      sandbox.EventKind
	subject, syscall, process string
}

// An entry is an event and, of EventExec, the last element of the path.
type entry struct {
	event   sandbox.Event
	program string
}

// Kinds of what is remembered without being an event.
const (
	inputOpened   sandbox.EventKind = "input opened"
	inputExecuted sandbox.EventKind = "input executed"
	programFound  sandbox.EventKind = "program found"
)

func newMonitor(v Config) *Monitor {
	return &Monitor{
		view: v, stop: func() {}, done: make(chan struct{}),
		events: map[identity]*entry{}, kinds: map[sandbox.EventKind]int{}, opened: map[string]bool{}, programs: map[string]bool{},
		executed: map[string]bool{},
	}
}

// Stop ends the watch and returns when it has ended. Calls that wait are answered first. In a process of
// the run that is still alive, calls that the filter notifies fail with ENOSYS from then on.
func (r *Monitor) Stop() {
	r.stop()
	<-r.done
}

// Events waits until every process of the run is gone or Stop is called, and returns what was recorded: the
// events in the order of Event.Compare, at most sandbox.MaxEvents; how many more there were, each counted
// as often as it happened; and, if Config.Full, the paths of inputs that were opened or executed, sorted.
//
// An execution that failed is an event only if no program of that name was found elsewhere: a search in
// PATH tries many.
func (r *Monitor) Events() (events []sandbox.Event, unrecorded int, opened []string) {
	<-r.done
	for _, e := range r.events {
		events = append(events, e.event)
	}
	slices.SortFunc(events, sandbox.Event.Compare)
	return events, r.unrecorded, slices.Sorted(maps.Keys(r.opened))
}

// Executed waits as Events does, and returns the paths of inputs that were executed or interpret what was, sorted, and whether
// these are all. What was opened and then executed by its descriptor has no name, and so they are not. Of a program that
// fails to start, it is still said that it was executed.
func (r *Monitor) Executed() (paths []string, all bool) {
	<-r.done
	return slices.Sorted(maps.Keys(r.executed)), !r.unnamed
}

// UsedNetwork waits as Events does, and reports whether the run made a socket in its network. Where it made none it left
// nothing there.
func (r *Monitor) UsedNetwork() bool {
	<-r.done
	return r.networked
}

// Err waits as Events does, and returns why the run was not under the conditions that it was to have, or nil. It was told
// nothing then instead of the usual.
func (r *Monitor) Err() error {
	<-r.done
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.broken
}

// record remembers one thing that was seen.
func (r *Monitor) record(e sandbox.Event) {
	program := ""
	switch e.Kind {
	case inputOpened:
		if len(r.opened) < maxOpened {
			r.opened[e.Subject] = true
		}
		return
	case inputExecuted:
		if r.executed[e.Subject] || len(r.executed) < maxExecuted {
			r.executed[e.Subject] = true
		} else {
			r.unnamed = true
		}
		return
	case programFound:
		r.found(path.Base(e.Subject))
		return
	case sandbox.EventExec:
		if program = path.Base(e.Subject); r.programs[program] {
			return
		}
	}
	e.Subject, e.Process = printable(e.Subject), printable(e.Process)
	id := identity{e.Kind, e.Subject, e.Syscall, e.Process}
	if known := r.events[id]; known != nil {
		known.event.Count++
		return
	}
	// Each kind has its share, so that many of one cannot hide the first of another.
	if r.kinds[e.Kind] == maxKind {
		r.unrecorded++
		return
	}
	r.kinds[e.Kind]++
	e.Count = 1
	r.events[id] = &entry{e, program}
}

// found remembers that a program exists, and forgets where else it was looked for.
func (r *Monitor) found(program string) {
	if r.programs[program] || len(r.programs) == maxPrograms {
		return
	}
	r.programs[program] = true
	maps.DeleteFunc(r.events, func(_ identity, e *entry) bool {
		if e.program == program {
			r.kinds[e.event.Kind]--
		}
		return e.program == program
	})
}

// printable returns s as ASCII on one line, its end if it is long.
func printable(s string) string {
	s = strconv.QuoteToASCII(s)
	s = s[1 : len(s)-1]
	if len(s) > maxSubject {
		s = "..." + s[len(s)-maxSubject:]
	}
	return s
}

// writable reports whether the run may change what lies at p.
func (v *Config) writable(p string) bool { return longest(v.Writable, p) > longest(v.Inputs, p) }

// input reports whether an input lies at p.
func (v *Config) input(p string) bool { return longest(v.Inputs, p) > longest(v.Writable, p) }

// longest returns the length of the longest of dirs that is p or has it below, or 0.
func longest(dirs []string, p string) int {
	n := 0
	for _, d := range dirs {
		if len(d) > n && within(p, d) {
			n = len(d)
		}
	}
	return n
}

// within reports whether p is dir or lies below it.
func within(p, dir string) bool {
	rest, ok := strings.CutPrefix(p, strings.TrimSuffix(dir, "/"))
	return ok && (rest == "" || rest[0] == '/')
}

// quiet reports whether p is a device or a file of the process itself, which anybody may use or look for.
func quiet(p string) bool {
	switch p {
	case "/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/stdin", "/dev/stdout", "/dev/stderr":
		return true
	}
	rest, ok := strings.CutPrefix(p, "/dev/fd/")
	if ok {
		return !strings.Contains(rest, "/")
	}
	rest, ok = strings.CutPrefix(p, "/proc/")
	process, file, _ := strings.Cut(rest, "/")
	_, err := strconv.ParseUint(process, 10, 32)
	if !ok || process != "self" && process != "thread-self" && err != nil {
		return false
	}
	// A thread of it has the same files.
	if task, ok := strings.CutPrefix(file, "task/"); ok {
		thread, rest, _ := strings.Cut(task, "/")
		if _, err := strconv.ParseUint(thread, 10, 32); err == nil {
			file = rest
		}
	}
	// Beyond these links is something else.
	return !strings.Contains(file, "root/") && !strings.Contains(file, "cwd/") && strings.Count(file, "/") < 2
}
