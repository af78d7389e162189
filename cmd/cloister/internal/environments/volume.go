// SPDX-License-Identifier: Apache-2.0

package environments

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
)

// volumes returns the inputs for the values of --volume, HOST:GUEST[:ro]. A sandbox sees a volume as the host changes it.
func volumes(values []string) ([]sandbox.Input, error) {
	if len(values) == 0 {
		return nil, nil
	}
	state, err := Dir()
	if err != nil {
		return nil, err
	}
	secret, err := protected(filepath.Dir(state))
	if err != nil {
		return nil, err
	}
	var all []sandbox.Input
	for _, value := range values {
		text := strings.TrimSuffix(value, ":ro")
		i := strings.LastIndexByte(text, ':')
		host, guest := text[:max(i, 0)], text[i+1:]
		if host == "" || !path.IsAbs(guest) || path.Clean(guest) != guest {
			return nil, fmt.Errorf("--volume %q: write HOST:GUEST[:ro], where GUEST is a clean absolute path; volumes are read-only", value)
		}
		source, err := filepath.Abs(host)
		if err == nil {
			source, err = filepath.EvalSymlinks(source)
		}
		if err != nil {
			return nil, fmt.Errorf("--volume %s: %w", value, err)
		}
		for _, dir := range secret {
			if contains(dir, source) || contains(source, dir) {
				return nil, fmt.Errorf("--volume %s: %s is protected: choose a directory that neither contains it nor lies in it", value, dir)
			}
		}
		for _, dir := range ofSandbox {
			if contains(dir, guest) || contains(guest, dir) {
				return nil, fmt.Errorf("--volume %s: the sandbox has its own %s: choose another path in it, such as /mnt/data", value, dir)
			}
		}
		all = append(all, sandbox.Input{Target: guest, Source: source, Content: "volume"})
	}
	return all, nil
}

// contains reports whether p is dir or lies below it.
func contains(dir, p string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// ofSandbox are paths of a sandbox that a volume cannot replace.
var ofSandbox = []string{"/bin", "/build", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys", "/tmp", "/usr"}

// protected returns paths of this host that no volume may show: the kernel's file systems, its configuration, sockets of
// its services, the keys of this user, and the state of sandboxes.
func protected(state string) ([]string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, fmt.Errorf("--volume: %w", err)
	}
	all := []string{"/boot", "/dev", "/etc", "/proc", "/run", "/sys", state}
	for _, name := range []string{".aws", ".azure", ".config/gcloud", ".config/gh", ".docker", ".gnupg", ".kube", ".netrc", ".ssh"} {
		all = append(all, filepath.Join(home, name))
	}
	var existing []string
	for _, p := range all {
		if p, err := filepath.EvalSymlinks(p); err == nil {
			existing = append(existing, p)
		}
	}
	return existing, nil
}
