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

// ReadHost returns what every run sees of this machine. What the machine does not say is "".
func ReadHost() manifest.Host {
	h := manifest.Host{Architecture: runtime.GOARCH}
	// os-release(5): the second where the first is not.
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		release, _ = os.ReadFile("/usr/lib/os-release")
	}
	h.OS, h.Version = osRelease(string(release))
	h.Kernel = cmp.Or(readLine("/proc/sys/kernel/ostype"), runtime.GOOS)
	h.Release = readLine("/proc/sys/kernel/osrelease")
	return h
}

// readLine returns a file of one line, "" if there is none.
func readLine(name string) string {
	b, _ := os.ReadFile(name)
	return strings.TrimSuffix(string(b), "\n")
}

// osRelease returns ID and VERSION_ID. They are assignments of a shell, whose values need no quotes but may have them.
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
