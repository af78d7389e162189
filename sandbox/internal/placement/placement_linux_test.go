// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"os"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestDeepTreesAreRemoved: neither the depth of a tree nor its modes keep a workspace, and removing it leaves the worker
// enough descriptors.
func TestDeepTreesAreRemoved(t *testing.T) {
	const depth, descriptors = 5000, 128
	h := NewHost()
	t.Cleanup(func() { must.Succeed(t, h.Close()) })
	ws := must.Get(h.Workspace(t.Context(), 1, 1))(t)
	dir := must.Get(ws.Root().OpenRoot("."))(t)
	for i := range depth {
		must.Succeed(t, dir.Mkdir("d", 0o700))
		inner := must.Get(dir.OpenRoot("d"))(t)
		must.Succeed(t, inner.WriteFile("f", nil, 0o400))
		if i%100 == 99 {
			must.Succeed(t, dir.Chmod(".", 0o500))
		}
		must.Succeed(t, dir.Close())
		dir = inner
	}
	must.Succeed(t, dir.Close())

	var old syscall.Rlimit
	must.Succeed(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: descriptors, Max: old.Max}))
	err := ws.Close()
	must.Succeed(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old))
	must.Succeed(t, err)
	_, err = os.Lstat(ws.Name())
	expect.Error(t, err, os.ErrNotExist, "the workspace")
}
