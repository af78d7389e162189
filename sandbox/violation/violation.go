// SPDX-License-Identifier: Apache-2.0

// Package violation decides which events of a run count against it, for the backend that kills the run and for the
// worker that makes it fail.
package violation

import (
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// Counts reports whether e is a violation of one of these kinds. Attempts to cache Python modules never count: Python
// tries this for each module that it imports, and continues when it cannot.
func Counts(e sandbox.Event, kinds []sandbox.EventKind) bool {
	return slices.Contains(kinds, e.Kind) && !CachesModule(e)
}

// CachesModule reports whether e is about the directory in which Python caches modules. Names of hosts, sockets and
// programs may contain that text, too.
func CachesModule(e sandbox.Event) bool {
	switch e.Kind {
	case sandbox.EventConnect, sandbox.EventAllowed, sandbox.EventExec:
		return false
	}
	return strings.Contains("/"+e.Subject, "/__pycache__")
}

// What the violations of a run did to it.
const (
	Failed = "fail" // it ran to its end and counts as failed
	Killed = "kill" // it was killed
)

// ExitCode is the exit code of a command that exited with 0 and counts as failed.
const ExitCode = 4

// Apply returns what the violations of these kinds did to a run, or "" if it has none, and sets the exit code of r if
// it was 0. Kinds that kill may have been noticed only after the run's end; then it counts as failed.
func Apply(r *sandbox.Result, fail, kill []sandbox.EventKind) string {
	counts := func(e sandbox.Event) bool { return Counts(e, fail) || Counts(e, kill) }
	did := Failed
	switch {
	case r.KilledForViolation:
		did = Killed
	case !slices.ContainsFunc(r.Events, counts) && (r.Exceeded == nil || !counts(*r.Exceeded)):
		return ""
	}
	if r.ExitCode == 0 {
		r.ExitCode = ExitCode
	}
	return did
}

// NeedMonitor reports whether only the syscall monitor finds violations of one of these kinds: limits need none.
func NeedMonitor(kinds []sandbox.EventKind) bool {
	return slices.ContainsFunc(kinds, func(k sandbox.EventKind) bool { return k != sandbox.EventLimit })
}
