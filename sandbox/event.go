// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"cmp"
	"fmt"
	"strings"
)

// An Audit is how closely a run is monitored.
type Audit string

// The audit levels.
const (
	// AuditViolations records what was denied: connections, writes, executions, system calls.
	AuditViolations Audit = ""
	// AuditFull also records lookups of missing paths and which inputs were opened. It costs some microseconds for each
	// file that is opened.
	AuditFull Audit = "full"
	// AuditOff records only limits that were hit.
	AuditOff Audit = "off"
)

func (a Audit) known() bool { return a == AuditViolations || a == AuditFull || a == AuditOff }

// MaxEvents is the maximum number of different events recorded for one run.
const MaxEvents = 1000

// An EventKind is the kind of an event.
type EventKind string

// The kinds of Event.
const (
	// EventConnect is a denied connection, or a datagram to a peer. Subject is the protocol and the peer: "tcp
	// 10.0.0.1:443", "unix @name", "vsock".
	EventConnect EventKind = "connect"
	// EventAllowed is a connection to an allowed endpoint. Subject is the endpoint.
	EventAllowed EventKind = "allowed"
	// EventWrite is an attempt to change something outside the writable directories. Subject is the path.
	EventWrite EventKind = "write"
	// EventExec is an attempt to execute a missing program. Subject is the path.
	EventExec EventKind = "exec"
	// EventSyscall is a denied system call. Subject is its name.
	EventSyscall EventKind = "syscall"
	// EventRead is a lookup of a path that the sandbox lacks. Subject is the path.
	EventRead EventKind = "read"
	// EventOutput is a file left behind that is neither input nor declared output. Subject is the path.
	EventOutput EventKind = "output"
	// EventLimit is a limit that was hit. Subject is the Limit.
	EventLimit EventKind = "limit"
	// EventRefused is a requested property that was not granted, so that the action did not run. Subject is the
	// property.
	EventRefused EventKind = "refused"
)

// NeverRan stands for the exit code of an action that was refused before it ran.
const NeverRan = -1

// An Event is something that a run attempted, or a limit that it hit.
type Event struct {
	Kind    EventKind
	Subject string
	// Syscall is the name of the system call, or "".
	Syscall string
	// Process is the name of the process (comm), if known.
	Process string
	// Count is at least 1.
	Count int
	// Actual and Limit are the usage and the limit: "4.0 GiB", "4.0 GiB".
	Actual, Limit string
	// Detail is additional information: where a connection led, its bytes, why something was refused, what to do.
	Detail string
}

// Compare orders events by kind, subject, system call and process.
func (e Event) Compare(f Event) int {
	return cmp.Or(
		cmp.Compare(e.Kind, f.Kind), cmp.Compare(e.Subject, f.Subject),
		cmp.Compare(e.Syscall, f.Syscall), cmp.Compare(e.Process, f.Process))
}

// String describes the event in one line.
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
	var by []string
	if e.Process != "" {
		by = append(by, e.Process)
	}
	if e.Syscall != "" && e.Kind != EventSyscall {
		by = append(by, e.Syscall)
	}
	if e.Count > 1 {
		by = append(by, fmt.Sprintf("%d times", e.Count))
	}
	if len(by) > 0 {
		fmt.Fprintf(&b, " (%s)", strings.Join(by, ", "))
	}
	return b.String()
}
