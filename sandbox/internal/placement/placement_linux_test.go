// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// TestDeepTreesAreRemoved: a workspace is removed whatever the depth and the modes of its tree, with few descriptors.
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

// TestMovedOutputsAreNotHidden: a process that renames the directories above a file during every measurement hides it
// from some, but not when the run has ended.
func TestMovedOutputsAreNotHidden(t *testing.T) {
	h, ws, spec := newRun(t)
	spec.Limits.OutputBytes = 1 << 20
	r := must.Get(h.Place(spec))(t)
	var moving sync.WaitGroup
	stop := make(chan struct{})
	dir := must.Get(ws.Root().OpenRoot("out"))(t)
	for range 6 {
		must.Succeed(t, dir.Mkdir("a", 0o700))
		above := dir
		dir = must.Get(dir.OpenRoot("a"))(t)
		moving.Go(func() {
			for from, to := "a", "b"; ; from, to = to, from {
				select {
				case <-stop:
					_ = above.Close()
					return
				default:
					_ = above.Rename(from, to)
				}
			}
		})
	}
	must.Succeed(t, dir.WriteFile("big", make([]byte, 2<<20), 0o600))
	missed := 0
	for range 200 {
		if r.exceeded(true) == nil {
			missed++
		}
	}
	close(stop)
	moving.Wait()
	must.Succeed(t, dir.Close())
	expect.Equal(t, missed, 0, "measurements of 200 that missed the file")
	must.Succeed(t, r.Restore())
}

// TestEndOfTheRunDecides: output that appears after the last measurement of the run counts.
func TestEndOfTheRunDecides(t *testing.T) {
	h, ws, spec := newRun(t)
	spec.Limits.OutputBytes, spec.Audit, spec.Accept = 1<<20, sandbox.AuditOff, "test"
	f := &sandbox.Features{Backend: "test", Limits: sandbox.AllLimits, Audits: []sandbox.Audit{sandbox.AuditOff}, Lower: true, SameUser: true, ListenControl: true}
	res, err := h.Run(t.Context(), f, spec, sandbox.Stdio{}, func(*Run, string, *sandbox.Result) error {
		return ws.Root().WriteFile("out/big", make([]byte, 2<<20), 0o600)
	})
	must.Succeed(t, err)
	if e := res.Exceeded; e == nil || e.Subject != string(sandbox.LimitOutputBytes) {
		t.Errorf("got %v, want the limit of output bytes", e)
	}
}

// TestClosedTempIsRemoved: a run cannot keep its temporary directory by taking away the permission to read it.
func TestClosedTempIsRemoved(t *testing.T) {
	h, _, spec := newRun(t)
	r := must.Get(h.Place(spec))(t)
	dir := r.Writable[1]
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
	must.Succeed(t, os.Chmod(dir, 0))
	must.Succeed(t, r.Restore())
	expect.Error(t, expect.Err(os.Lstat(dir)), os.ErrNotExist, "the directory")
}

// TestAttributesCount: extended attributes count towards the output bytes. A resource fork of macOS is one.
func TestAttributesCount(t *testing.T) {
	h, ws, spec := newRun(t)
	spec.Limits.OutputBytes = 1000
	input := filepath.Join(ws.Name(), "in/src/a.c")
	must.Succeed(t, os.Chmod(input, 0o600)) // ordinary users set attributes of writable files only
	err := unix.Setxattr(input, "user.big", make([]byte, 1500), 0)
	if errors.Is(err, unix.ENOTSUP) {
		sandboxtest.Unavailable(t, "tmpfs", err)
	}
	must.Succeed(t, err)
	r := must.Get(h.Place(spec))(t)
	expect.That(t, r.exceeded(true) == nil, "with attributes of an input: %v", r.exceeded(true))
	must.Succeed(t, unix.Mkfifo(filepath.Join(r.Writable[1], "pipe"), 0o600))
	expect.That(t, r.exceeded(true) == nil, "with a pipe: %v", r.exceeded(true))
	must.Succeed(t, unix.Setxattr(filepath.Join(ws.Name(), "out/src"), "user.big", make([]byte, 1500), 0))
	if e := r.exceeded(true); e == nil || e.Subject != string(sandbox.LimitOutputBytes) {
		t.Errorf("got %v, want the limit of output bytes", e)
	}
	must.Succeed(t, r.Restore())
}
