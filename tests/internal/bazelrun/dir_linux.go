// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// TempDir makes a directory owned by user, or by the current user if that is nil. The caller removes it with Remove.
func TempDir(user *syscall.Credential) (string, error) {
	dir, err := os.MkdirTemp("", "cloister-bazel-")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return dir, err
	}
	if user == nil {
		return dir, nil
	}
	return dir, os.Chown(dir, int(user.Uid), int(user.Gid))
}

// Remove removes dir and its contents. It removes nothing if something is mounted below dir, because that would remove
// the mounted files.
func Remove(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	if mount := mountIn(dir, string(mounts)); mount != "" {
		return fmt.Errorf("%s is still mounted; not removing %s", mount, dir)
	}
	// Bazel makes output directories read-only.
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return err
		}
		return os.Chmod(path, 0o700)
	})
	if err != nil {
		return err
	}
	return os.RemoveAll(dir)
}

// mountIn returns a mount point at or below dir, or "". mounts is in the format of proc_pid_mountinfo(5), whose fifth
// field is the mount point.
func mountIn(dir, mounts string) string {
	for line := range strings.SplitSeq(mounts, "\n") {
		if f := strings.Fields(line); len(f) > 4 && (f[4] == dir || strings.HasPrefix(f[4], dir+"/")) {
			return f[4]
		}
	}
	return ""
}
