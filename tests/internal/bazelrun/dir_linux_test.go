// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

func TestMountIsFoundAtOrBelowADirectory(t *testing.T) {
	const mounts = "22 1 0:20 / /proc rw - proc proc rw\n99 22 0:45 / /tmp/demo/store/x rw - tmpfs none rw\n"
	for dir, want := range map[string]string{
		"/tmp/demo":         "/tmp/demo/store/x",
		"/tmp/demo/store/x": "/tmp/demo/store/x",
		"/tmp/dem":          "",
		"/tmp/demo/store/y": "",
	} {
		if got := mountIn(dir, mounts); got != want {
			t.Errorf("mountIn(%q) = %q, want %q", dir, got, want)
		}
	}
}

func TestRemoveHandlesReadOnlyDirectories(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tree")
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	must.Succeed(t, os.Chmod(filepath.Join(dir, "a"), 0o555))
	must.Succeed(t, Remove(dir))
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after Remove: got %v, want it not to exist", err)
	}
}
