// SPDX-License-Identifier: Apache-2.0

// Package buildinfo identifies the running program: its release and the revision that it was built from.
package buildinfo

import (
	"runtime/debug"
)

// Version is the release. The revision comes from the build.
const Version = "0.1.0"

// Revision returns the revision that the Go toolchain recorded, or "unknown".
func Revision() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	rev, dirty := "unknown", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			rev = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = " (modified)"
		}
	}
	return rev + dirty
}
