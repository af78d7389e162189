// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// ReadHost returns the properties of this machine that every run can observe. Unknown values are "".
func ReadHost() manifest.Host {
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

// toolchainPaths are the parts of a host that compilers, interpreters and shells consist of, and nothing that belongs
// to an administrator, a user or a service.
var toolchainPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
	"/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
	"/etc/java-*", "/etc/python3*", "/etc/perl",
	"/etc/mime.types", "/etc/protocols", "/etc/services",
}

// HostToolchain returns the parts of this host that every action may read: the directories of programs and libraries,
// and the few files in /etc that these need.
func HostToolchain() ([]sandbox.Input, error) {
	var inputs []sandbox.Input
	for _, pattern := range toolchainPaths {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, target := range matches {
			source, err := filepath.EvalSymlinks(target)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			inputs = append(inputs, sandbox.Input{Target: target, Content: "host", Source: source})
		}
	}
	return inputs, nil
}
