// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// readHost returns the properties of this machine that every run can observe. Unknown values are "".
func readHost() manifest.Host {
	h := manifest.Host{Architecture: runtime.GOARCH}
	release, err := os.ReadFile("/etc/os-release")
	if err != nil { // os-release(5) names this fallback
		release, _ = os.ReadFile("/usr/lib/os-release")
	}
	h.OS, h.Version = osRelease(string(release))
	h.Kernel = cmp.Or(readLine("/proc/sys/kernel/ostype"), runtime.GOOS)
	h.Release = readLine("/proc/sys/kernel/osrelease")
	return h
}

// readLine returns the content of a file with one line, or "" if it cannot be read.
func readLine(name string) string {
	b, _ := os.ReadFile(name)
	return strings.TrimSuffix(string(b), "\n")
}

// osRelease returns ID and VERSION_ID, which are shell assignments with optional quotes.
func osRelease(text string) (id, version string) {
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		if q, err := strconv.Unquote(value); err == nil {
			value = q
		} else {
			value = strings.Trim(value, "'")
		}
		switch key {
		case "ID":
			id = value
		case "VERSION_ID":
			version = value
		}
	}
	return id, version
}
