// SPDX-License-Identifier: Apache-2.0

// Package monitor is the syscall monitor of a run: it answers the system calls that the run's filter reports and
// records what they tried. A permitted call is recorded and continues; the kernel decides the outcome. Any other
// reported call is refused.
//
// A resolver beside it answers and records the run's lookups of names.
//
// In a run with its own clock, random numbers or view of files (sandbox.Conditions) it also answers the calls that read
// them.
//
// The arguments of a call are in the memory of a process that may change it at any time, so records are evidence and
// never decisions: nothing here may permit a call that the kernel would refuse.
package monitor

import (
	"maps"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// A Config is what a run may do, in absolute and clean paths inside its sandbox.
type Config struct {
	Writable []string // outputs and temporary directories, including /tmp and /dev/shm
	// Unwritable are outputs whose directory the run cannot write to.
	Unwritable []string
	Inputs     []string // if a path is in both an input and a writable directory, the longer one decides
	// Layered are the writable directories that also contain inputs: the files of other users than User, the run's user
	// as this process sees it.
	Layered  []string
	User     int
	Loopback bool
	// Allowed are the endpoints beyond loopback that may be reached.
	Allowed []netip.AddrPort
	// Resolver is a socket at port 53 of the run's loopback, for its lookups, or nil. The caller may close it.
	Resolver *os.File
	// Sockets is a netlink socket that finds the sockets of the run's network (sock_diag(7)), or nil. The caller may close
	// it.
	Sockets *os.File
	// Hosts are the addresses of the names that may be looked up.
	Hosts map[string]netip.Addr
	// Full is sandbox.AuditFull: reads are recorded as well.
	Full bool
	// Source maps directories of the sandbox to directories of the host, where Full looks up paths that the sandbox
	// lacks. Nothing there is opened.
	Source map[string]string
	// Kill, if not nil, kills the run if the event is a violation for which it must die, and reports whether it did. The
	// call that made the attempt then gets no answer, so that it never returns.
	Kill func(sandbox.Event) bool
	// Minor, if not nil, reports whether the event must leave room for others of its kind, because it never counts.
	Minor func(sandbox.Event) bool
	// Conditions are the run's own clock, random numbers and view of files.
	Conditions sandbox.Conditions
}

// Limits of what is kept for one run.
const (
	maxKind     = sandbox.MaxEvents / 5 // of each kind of violation, and of EventUnreachable
	maxOpened   = 200_000
	maxPrograms = 10_000
	maxExecuted = 10_000
	maxSubject  = 512 // bytes
)

// A Monitor monitors one run. Its methods may be called concurrently.
type Monitor struct {
	view Config
	// stop ends the monitoring and may be called again; done is closed then. The fields below belong to the session
	// until then.
	stop func()
	done chan struct{}

	events     map[identity]*entry
	kinds      map[sandbox.EventKind]int // different events
	unrecorded int
	networked  bool
	opened     map[string]bool
	programs   map[string]bool // base names of programs that were found, and ":port" of listeners
	executed   map[string]bool // see Executed
	unnamed    bool            // something without a name was executed
	lookups    lookups

	mu     sync.Mutex
	broken error // why the conditions were not met; guarded by mu
}

// An identity is what makes two events equal.
type identity struct {
	kind                      sandbox.EventKind
	subject, syscall, process string
}

// An entry is an event and, for EventExec, the base name of the path; for EventUnreachable, ":port".
type entry struct {
	event   sandbox.Event
	program string
}

// Kinds of records that are not events.
const (
	nameAsked       sandbox.EventKind = "name asked" // Detail is the type
	inputOpened     sandbox.EventKind = "input opened"
	inputExecuted   sandbox.EventKind = "input executed"
	unnamedExecuted sandbox.EventKind = "unnamed executed"
	programFound    sandbox.EventKind = "program found"
)

func newMonitor(v Config) *Monitor {
	return &Monitor{
		view: v, stop: func() {}, done: make(chan struct{}),
		events: map[identity]*entry{}, kinds: map[sandbox.EventKind]int{}, opened: map[string]bool{}, programs: map[string]bool{},
		executed: map[string]bool{},
	}
}

// Stop ends the monitoring and returns when it has ended. Waiting calls are answered first. Afterwards, calls that the
// filter reports fail with ENOSYS in processes that are still alive.
func (r *Monitor) Stop() {
	r.stop()
	<-r.done
}

// Events waits until every process of the run is gone or Stop is called. It returns the events in the order of
// Event.Compare, at most maxKind of each kind; how many were dropped; and, if Config.Full, the paths of inputs that
// were opened or executed, sorted.
//
// A failed execution is an event only if no program of that name was found elsewhere, since searching PATH tries many;
// a connection to a port of loopback where nothing listens only if nothing listens there later or at its other address.
func (r *Monitor) Events() (events []sandbox.Event, unrecorded int, opened []string) {
	<-r.done
	for _, e := range r.events {
		events = append(events, e.event)
	}
	slices.SortFunc(events, sandbox.Event.Compare)
	return events, r.unrecorded, slices.Sorted(maps.Keys(r.opened))
}

// Executed waits as Events does. It returns the paths of inputs that were executed or that interpret what was, sorted,
// and whether the list is complete: a program executed by its descriptor has no name. A program that failed to start is
// included.
func (r *Monitor) Executed() (paths []string, all bool) {
	<-r.done
	return slices.Sorted(maps.Keys(r.executed)), !r.unnamed
}

// UsedNetwork waits as Events does and reports whether the run made a socket in its network. If not, it left nothing
// there.
func (r *Monitor) UsedNetwork() bool {
	<-r.done
	return r.networked
}

// Err waits as Events does and returns why the run did not get its conditions, or nil. The affected calls failed.
func (r *Monitor) Err() error {
	<-r.done
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.broken
}

// record stores one record.
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
	case nameAsked:
		r.lookups.add(e.Subject, e.Detail, e.Process)
		return
	case unnamedExecuted:
		r.unnamed = true
		return
	case programFound:
		r.found(path.Base(e.Subject))
		return
	case sandbox.EventExec:
		if program = path.Base(e.Subject); r.programs[program] {
			return
		}
	case sandbox.EventUnreachable:
		if program = listenerName(e.Endpoint.Port); r.programs[program] {
			return
		}
	}
	e.Count = max(e.Count, 1)
	e.Subject, e.Process = printable.Tail(e.Subject, maxSubject), printable.Tail(e.Process, maxSubject)
	id := identity{e.Kind, e.Subject, e.Syscall, e.Process}
	if known := r.events[id]; known != nil {
		known.event.Count += e.Count
		return
	}
	// Each kind has its own limit, so that many of one cannot hide the first of another.
	limit := maxKind
	if r.view.Minor != nil && r.view.Minor(e) || e.Kind == sandbox.EventSyscall && !network(e.Subject) {
		limit /= 2
	}
	if r.kinds[e.Kind] >= limit {
		r.unrecorded++
		return
	}
	r.kinds[e.Kind]++
	r.events[id] = &entry{e, program}
}

// network reports whether a refused call, by its subject, would have reached other hosts or let them connect. Events of
// other calls leave room for these.
func network(subject string) bool {
	name, of, _ := strings.Cut(subject, "(")
	switch name {
	case "listen", "bind":
		return of != "unix)"
	case "socket":
		return !strings.HasPrefix(of, "AF_NETLINK") && !strings.HasPrefix(of, "AF_ALG")
	}
	return false
}

// listenerName stands for a listener among the programs that were found.
func listenerName(port uint16) string { return ":" + strconv.Itoa(int(port)) }

// found records that a program or listener exists and removes its failed lookups.
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

// writable reports whether the run may change p.
func (v *Config) writable(p string) bool { return longest(v.Writable, p) > longest(v.Inputs, p) }

// input reports whether p is part of an input.
func (v *Config) input(p string) bool { return longest(v.Inputs, p) > longest(v.Writable, p) }

// longest returns the length of the longest of dirs that contains p, or 0.
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

// ignored reports whether p is a device or a file of the process itself, which any process may use.
func ignored(p string) bool {
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
	// Its threads have the same files.
	if task, ok := strings.CutPrefix(file, "task/"); ok {
		thread, rest, _ := strings.Cut(task, "/")
		if _, err := strconv.ParseUint(thread, 10, 32); err == nil {
			file = rest
		}
	}
	// These links lead elsewhere.
	return !strings.Contains(file, "root/") && !strings.Contains(file, "cwd/") && strings.Count(file, "/") < 2
}
