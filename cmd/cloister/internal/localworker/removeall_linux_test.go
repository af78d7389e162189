// SPDX-License-Identifier: Apache-2.0

package localworker

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestReadOnlyDirectoriesAreRemoved: by an ordinary user, and nothing to which links lead.
func TestReadOnlyDirectoriesAreRemoved(t *testing.T) {
	runtime.LockOSThread() // until it ends, since a part of it is another user's
	const nobody = 65534
	if os.Geteuid() == 0 {
		must.Get(unix.SetfsuidRetUid(nobody))(t)
	}
	dir := must.Get(os.MkdirTemp("", "removed"))(t)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(dir)) })
	kept, removed := filepath.Join(dir, "kept"), filepath.Join(dir, "removed")
	must.Succeed(t, errors.Join(os.MkdirAll(filepath.Join(removed, "a", "b"), 0o755), os.Mkdir(kept, 0o500)))
	must.Succeed(t, errors.Join(os.Symlink(kept, filepath.Join(removed, "link")), os.Chmod(filepath.Join(removed, "a"), 0)))
	must.Succeed(t, RemoveAll(removed))
	expect.Error(t, expect.Err(os.Lstat(removed)), fs.ErrNotExist)
	if fi := must.Get(os.Stat(kept))(t); fi.Mode().Perm() != 0o500 {
		t.Errorf("got mode %v of a directory behind a link, want it unchanged", fi.Mode())
	}
}
