// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"cmp"
	"fmt"
	"strings"
)

// An Audit is the level of detail at which a run is monitored.
type Audit string

// The audit levels.
const (
	// AuditViolations records what was denied: connections, writes, executions, system calls.
	AuditViolations Audit = ""
	// AuditFull also records which inputs were opened and, if the backend knows a source tree, lookups of paths that
	// only the source tree has. It costs some fifty microseconds for each file that is opened.
	AuditFull Audit = "full"
	// AuditOff records only limits that were hit.
	AuditOff Audit = "off"
)

// String returns "attempts", "full" or "off", as in a policy.
func (a Audit) String() string {
	if a == AuditViolations {
		return "attempts"
	}
	return string(a)
}

func (a Audit) known() bool { return a == AuditViolations || a == AuditFull || a == AuditOff }

// MaxEvents is the maximum number of different events recorded for one run.
const MaxEvents = 1000

// An EventKind is the kind of an event.
type EventKind string

// The kinds of Event.
const (
	// EventConnect is a denied connection, a datagram to a peer or a lookup of a name. Subject is the protocol and the
	// peer: "tcp 10.0.0.1:443", "unix @name", "vsock"; "dns" and the name for a lookup, with the types in Detail: "A,
	// AAAA"; or "other hosts" if packets were refused and no system call shows where to.
	EventConnect EventKind = "connect"
	// EventAllowed is a connection to an allowed endpoint. Subject is the endpoint.
	EventAllowed EventKind = "allowed"
	// EventUnreachable is a permitted connection that failed: to an allowed endpoint, or to the run's own loopback where
	// nothing listens, which has a Syscall. Subject is the endpoint.
	EventUnreachable EventKind = "unreachable"
	// EventWrite is an attempt to change an input or a file outside the writable directories, or to create one in an
	// output directory that the run's user may not write to. Subject is the path.
	EventWrite EventKind = "write"
	// EventExec is an attempt to execute a missing program. Subject is the path, or Args[0] of a Spec whose inputs lack
	// the toolchain.
	EventExec EventKind = "exec"
	// EventSyscall is a denied system call. Subject is its name.
	EventSyscall EventKind = "syscall"
	// EventRead is a lookup of a path that the sandbox lacks and the backend's source tree has, with AuditFull. Subject
	// is the path. Other missing paths are not recorded: every program looks for files that exist nowhere.
	EventRead EventKind = "read"
	// EventOutput is a file left behind that is neither input nor declared output. Subject is the path.
	EventOutput EventKind = "output"
	// EventLimit is a limit that was hit. Subject is the Limit.
	EventLimit EventKind = "limit"
	// EventRefused is a requested property that was not granted, so that the action did not run. Subject is the
	// property.
	EventRefused EventKind = "refused"
)

// violations are the kinds of events that Spec.Kill may name.
var violations = []EventKind{EventConnect, EventWrite, EventRead, EventExec, EventSyscall, EventLimit}

// NeverRan stands for the exit code of an action that was refused before it ran.
const NeverRan = -1

// An Event is an attempt of a run, or a limit that it hit. Records of events, such as the audit log, contain only the
// texts, not ActualValue, LimitValue, Unit and Endpoint.
type Event struct {
	Kind    EventKind
	Subject string
	// Syscall is the name of the system call, or "".
	Syscall string
	// Process is the name of the process (comm), if known.
	Process string
	// Count is at least 1.
	Count int
	// Actual and Limit are the usage and the limit of an EventLimit: "4.0 GiB", "4.0 GiB".
	Actual, Limit string
	// Detail is additional information: where a connection led, its bytes, why something was refused, what to do.
	Detail string

	// ActualValue and LimitValue are Actual and Limit as numbers of Unit: "bytes", "ns", or "" for a count.
	ActualValue, LimitValue int64
	Unit                    string
	// Endpoint is the peer of an EventAllowed, an EventUnreachable or an EventConnect over IP, where Host may also be an
	// IPv6 address. Otherwise it is zero.
	Endpoint Endpoint
}

// Compare orders events by kind, subject, system call and process.
func (e Event) Compare(f Event) int {
	return cmp.Or(
		cmp.Compare(e.Kind, f.Kind), cmp.Compare(e.Subject, f.Subject),
		cmp.Compare(e.Syscall, f.Syscall), cmp.Compare(e.Process, f.Process))
}

// String describes the event in one line: what was denied or failed, on what, by whom, and what to do. A relative
// Subject of EventWrite is an input.
func (e Event) String() string {
	what, hint := string(e.Kind)+" "+e.Subject, e.Detail
	switch e.Kind {
	case EventConnect:
		if name, ok := strings.CutPrefix(e.Subject, "dns "); ok {
			return e.lookup(name)
		}
		what = fmt.Sprintf("denied: connection to %s (no network)", e.Subject)
		if strings.HasPrefix(e.Subject, "tcp ") || strings.HasPrefix(e.Subject, "udp ") {
			hint = cmp.Or(hint, provide)
		}
	case EventAllowed:
		what = fmt.Sprintf("allowed: connection to %s", e.Subject)
	case EventUnreachable:
		what = "failed: connection to " + e.Subject
		if e.Syscall == "" {
			what += ", which is permitted"
		}
	case EventWrite:
		object := "input " + e.Subject
		if strings.HasPrefix(e.Subject, "/") || e.Detail != "" {
			object = e.Subject
		}
		what, hint = fmt.Sprintf("denied: write to %s (%s)", object, cmp.Or(e.Detail, "read-only")), ""
	case EventExec:
		what = fmt.Sprintf("failed: execution of %s (not in the sandbox)", e.Subject)
	case EventSyscall:
		what = fmt.Sprintf("denied: system call %s", e.Subject)
	case EventRead:
		what = fmt.Sprintf("denied: read of %s (not an input)", e.Subject)
	case EventOutput:
		what = fmt.Sprintf("warning: undeclared output discarded: %s", e.Subject)
	case EventRefused:
		what = fmt.Sprintf("denied: property %s", e.Subject)
	case EventLimit:
		what = fmt.Sprintf("reached the limit of %s: %s of %s", e.Subject, e.Actual, e.Limit)
	}
	if e.Process != "" {
		what += " by " + e.Process
	}
	if e.Syscall != "" && e.Kind != EventSyscall {
		what += fmt.Sprintf(" (%s)", e.Syscall)
	}
	if e.Count > 1 {
		what += fmt.Sprintf(", %d times", e.Count)
	}
	if hint != "" {
		what += "; " + hint
	}
	return what
}

// provide is what to do if a run tries to reach another host.
const provide = "add what it needs to the inputs, or allow the endpoint in the policy"

// lookup describes a denied lookup.
func (e Event) lookup(name string) string {
	what := "denied: lookup of " + name
	if e.Process != "" {
		what += " (" + e.Process + ")"
	}
	what += ": no network access"
	if e.Count > 1 {
		what += fmt.Sprintf(", %d times", e.Count)
	}
	return what + "; " + provide
}
