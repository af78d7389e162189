// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"cmp"
	"fmt"
	"strings"
)

// An Audit is how closely a run is watched.
type Audit string

// The degrees of watching.
const (
	// AuditViolations records what was refused: connections, writes, executions, system calls.
	AuditViolations Audit = ""
	// AuditFull also records what was looked for and is not there, and which inputs were opened. It
	// costs some microseconds for each file that is opened.
	AuditFull Audit = "full"
	// AuditOff records limits alone.
	AuditOff Audit = "off"
)

func (a Audit) known() bool { return a == AuditViolations || a == AuditFull || a == AuditOff }

// MaxEvents is how many different events of one run are recorded.
const MaxEvents = 1000

// An EventKind says what an event is.
type EventKind string

// The kinds of Event.
const (
	// EventConnect is a connection, or a datagram to a peer, that was refused. Subject is the protocol and
	// the peer: "tcp 10.0.0.1:443", "unix @name", "vsock".
	EventConnect EventKind = "connect"
	// EventAllowed is a connection that an exception of the network permits. Subject is the endpoint.
	EventAllowed EventKind = "allowed"
	// EventWrite is a change of something outside the writable directories. Subject is the path.
	EventWrite EventKind = "write"
	// EventExec is the execution of a program that is not there. Subject is the path.
	EventExec EventKind = "exec"
	// EventSyscall is a system call that no action needs. Subject is its name.
	EventSyscall EventKind = "syscall"
	// EventRead is a path that was looked for and is not in the sandbox. Subject is the path.
	EventRead EventKind = "read"
	// EventOutput is a file left behind that is neither input nor declared output. Subject is the path.
	EventOutput EventKind = "output"
	// EventLimit is a limit that was met. Subject is the Limit.
	EventLimit EventKind = "limit"
	// EventRefused is what an action asked for and is not granted, so that it did not run. Subject is the property.
	EventRefused EventKind = "refused"
)

// NeverRan stands for an exit code where there was no run, since something was refused before.
const NeverRan = -1

// An Event is something that a run tried, or a limit that it met.
type Event struct {
	Kind    EventKind
	Subject string
	// Syscall is the name of the system call, or "".
	Syscall string
	// Process is the name of the process (comm), as far as it is known.
	Process string
	// Count is how often; at least 1.
	Count int
	// Actual and Limit say by how much a limit was exceeded: "4.0 GiB", "4.0 GiB".
	Actual, Limit string
	// Detail is what more is known: where a connection led, how many bytes it carried, why something was
	// refused, what to do.
	Detail string
}

// Compare orders events by kind, subject, system call and process.
func (e Event) Compare(f Event) int {
	return cmp.Or(
		cmp.Compare(e.Kind, f.Kind), cmp.Compare(e.Subject, f.Subject),
		cmp.Compare(e.Syscall, f.Syscall), cmp.Compare(e.Process, f.Process))
}

// String says to a person what happened, in one line.
func (e Event) String() string {
	var b strings.Builder
	switch e.Kind {
	case EventConnect:
		fmt.Fprintf(&b, "tried to connect to %s: there is no network", e.Subject)
	case EventAllowed:
		fmt.Fprintf(&b, "connected to %s, as permitted", e.Subject)
	case EventWrite:
		fmt.Fprintf(&b, "tried to write %s: not an output", e.Subject)
	case EventExec:
		fmt.Fprintf(&b, "tried to execute %s: not in the sandbox", e.Subject)
	case EventSyscall:
		fmt.Fprintf(&b, "tried the system call %s: not permitted", e.Subject)
	case EventRead:
		fmt.Fprintf(&b, "tried to read %s: not an input", e.Subject)
	case EventOutput:
		fmt.Fprintf(&b, "left %s: not a declared output", e.Subject)
	case EventRefused:
		fmt.Fprintf(&b, "asked for %s: not run", e.Subject)
	case EventLimit:
		fmt.Fprintf(&b, "%s %s of %s", e.Subject, e.Actual, e.Limit)
	default:
		fmt.Fprintf(&b, "%s %s", e.Kind, e.Subject)
	}
	if e.Detail != "" {
		fmt.Fprintf(&b, ", %s", e.Detail)
	}
	var who []string
	if e.Process != "" {
		who = append(who, e.Process)
	}
	if e.Syscall != "" && e.Kind != EventSyscall {
		who = append(who, e.Syscall)
	}
	if e.Count > 1 {
		who = append(who, fmt.Sprintf("%d times", e.Count))
	}
	if len(who) > 0 {
		fmt.Fprintf(&b, " (%s)", strings.Join(who, ", "))
	}
	return b.String()
}
