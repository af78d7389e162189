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

// CachesModule reports whether e is about the directory in which Python caches modules.
func CachesModule(e sandbox.Event) bool { return strings.Contains("/"+e.Subject, "/__pycache__") }

// NeedMonitor reports whether only the syscall monitor finds violations of one of these kinds: limits need none.
func NeedMonitor(kinds []sandbox.EventKind) bool {
	return slices.ContainsFunc(kinds, func(k sandbox.EventKind) bool { return k != sandbox.EventLimit })
}
