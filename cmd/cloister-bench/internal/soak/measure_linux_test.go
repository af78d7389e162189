// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestMeasureSeesGrowth takes this process for a server: whatever it adds must be counted.
func TestMeasureSeesGrowth(t *testing.T) {
	dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
	routines := 10
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "# TYPE go_goroutines gauge\ngo_goroutines %d\n", routines)
	}))
	defer server.Close()
	p := Process{PID: os.Getpid(), Dir: filepath.Join(dir, "store"), Log: filepath.Join(dir, "log"), Metrics: server.URL}
	must.Succeed(t, os.MkdirAll(filepath.Join(p.Dir, "history"), 0o700))
	write := func(path string, size int) {
		t.Helper()
		must.Succeed(t, os.WriteFile(path, make([]byte, size), 0o600))
	}
	before := must.Get(p.measure(t.Context()))(t)
	child := exec.Command("sleep", "1000")
	must.Succeed(t, child.Start())
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	write(filepath.Join(p.Dir, "blob"), mib)
	write(filepath.Join(p.Dir, "removed"), 2*mib)
	held := must.Get(os.Open(filepath.Join(p.Dir, "removed")))(t)
	defer held.Close()
	must.Succeed(t, os.Remove(held.Name()))
	write(filepath.Join(p.Dir, "history", "1.log"), mib)
	write(p.Log, mib)
	routines++
	after := must.Get(p.measure(t.Context()))(t)
	for name, want := range map[string]float64{
		descriptors: 1, goroutines: 1, processes: 1, stored: 3 * mib, logs: 2 * mib, helpers: 4 << 10,
	} {
		if got := after[name] - before[name]; got < want {
			t.Errorf("%s: got growth of %v, want at least %v", name, got, want)
		}
	}
	expect.That(t, after[memory] >= mib && after[mounts] >= 1,
		"got %v bytes of memory and %v mounts, want those of this process", after[memory], after[mounts])
	expect.Equal(t, len(p.Leftovers()), 1, "leftovers (the open file)")
}

// TestMeasureSeesMountsAndGroups takes this process for a server whose slot has a mount namespace and a control group.
func TestMeasureSeesMountsAndGroups(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "go_goroutines 1")
	}))
	defer server.Close()
	p := Process{PID: os.Getpid(), Dir: t.TempDir(), Log: os.DevNull, Metrics: server.URL}
	before := must.Get(p.measure(t.Context()))(t)
	group := filepath.Join("/sys/fs/cgroup/pids", fmt.Sprintf("cloister.%d.1", p.PID))
	if _, err := os.Stat(filepath.Dir(group)); err != nil {
		group = filepath.Join("/sys/fs/cgroup", filepath.Base(group))
	}
	if err := os.Mkdir(group, 0o700); err != nil {
		sandboxtest.Unavailable(t, "limits", err)
	}
	defer os.Remove(group)
	child := exec.Command("sleep", "1000")
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if err := child.Start(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	defer func() {
		_ = child.Process.Kill()
		_ = child.Wait()
	}()
	after := must.Get(p.measure(t.Context()))(t)
	if got := after[mounts] - before[mounts]; got < 1 || after[groups] != before[groups]+1 {
		t.Errorf("got %v more mounts and %v control groups, want those of another namespace and %v",
			got, after[groups], before[groups]+1)
	}
	expect.Slices(t, p.Leftovers(), []string{"control group " + group}, "leftovers")
}
