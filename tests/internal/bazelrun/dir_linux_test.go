// SPDX-License-Identifier: Apache-2.0

package bazelrun

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
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
		expect.Equal(t, mountIn(dir, mounts), want, "mountIn(%q)", dir)
	}
}

func TestRemoveHandlesReadOnlyDirectories(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "tree")
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755))
	must.Succeed(t, os.Chmod(filepath.Join(dir, "a"), 0o555))
	must.Succeed(t, Remove(dir))
	expect.Error(t, expect.Err(os.Lstat(dir)), fs.ErrNotExist, "after Remove")
}
