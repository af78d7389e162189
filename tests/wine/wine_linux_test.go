// SPDX-License-Identifier: Apache-2.0

// Package wine runs the Windows programs of this repository under Wine, as far as Wine implements what they use.
package wine

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/checkpage"
	"github.com/cloister-build/cloister/tests/must"
)

// limit is how long one program may run under Wine.
const limit = 3 * time.Minute

// contain returns a command whose processes all end with it, with ctx, or with this process: they are in a pid namespace
// of which it is the first process, and Wine's own servers are among them. The calling goroutine keeps its thread until
// the command has ended.
func contain(ctx context.Context, args ...string) *exec.Cmd {
	flags := []string{"--pid", "--fork", "--kill-child=KILL", "--mount-proc"}
	if os.Geteuid() != 0 {
		flags = append(flags, "--user", "--map-root-user")
	}
	c := exec.CommandContext(ctx, "unshare", append(append(flags, "--"), args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c.WaitDelay = 10 * time.Second
	return c
}

// TestNothingIsLeftRunning: neither a time limit nor the death of a test leaves processes of Wine.
func TestNothingIsLeftRunning(t *testing.T) {
	runtime.LockOSThread() // Pdeathsig follows the thread
	defer runtime.UnlockOSThread()
	if _, err := exec.LookPath("unshare"); err != nil {
		sandboxtest.Unavailable(t, "tools", err)
	}
	if out, err := contain(t.Context(), "true").CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("%v: %s", err, out))
	}
	for _, end := range []string{"limit", "death"} {
		// A daemon of another session, which writes its process ID in this namespace by the name of a lock.
		pipe := filepath.Join(t.TempDir(), "alive")
		must.Succeed(t, syscall.Mkfifo(pipe, 0o600))
		ctx, cancel := context.WithCancel(t.Context())
		c := contain(ctx, "sh", "-c", "setsid sh -c 'exec 3>\"$0\"; echo started >&3; exec sleep 1000' \"$0\" & sleep 1000", pipe)
		must.Succeed(t, c.Start())
		r := must.Get(os.Open(pipe))(t)
		line := make([]byte, len("started\n"))
		_ = must.Get(r.Read(line))(t)
		if end == "limit" {
			cancel()
		} else {
			must.Succeed(t, c.Process.Kill()) // as the kernel does when this process dies
		}
		n, err := r.Read(line) // ends when the last process that has the pipe does
		expect.That(t, n == 0 && err != nil, "%s: got %d bytes and %v, want the end", end, n, err)
		_ = c.Wait() // it was killed
		must.Succeed(t, r.Close())
		cancel()
	}
}

// TestWindowsPrograms runs the tests of job objects, and cloister's check and run.
func TestWindowsPrograms(t *testing.T) {
	runtime.LockOSThread() // Pdeathsig follows the thread
	defer runtime.UnlockOSThread()
	loader, err := exec.LookPath("wine64")
	if err != nil {
		loader, err = exec.LookPath("/usr/lib/wine/wine64") // Debian's
	}
	if err != nil {
		sandboxtest.Unavailable(t, "wine", err)
	}
	dir := t.TempDir()
	build := func(args ...string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), "go", args...)
		c.Env = append(os.Environ(), "GOOS=windows", "GOARCH=amd64", "CGO_ENABLED=0")
		out, err := c.CombinedOutput()
		must.Be(t, err == nil, "go %q: %v\n%s", args, err, out)
	}
	job, cloister := filepath.Join(dir, "job.exe"), filepath.Join(dir, "cloister.exe")
	build("test", "-c", "-o", job, "github.com/cloister-build/cloister/sandbox/jobobject")
	build("build", "-o", cloister, "github.com/cloister-build/cloister/cmd/cloister")
	prefix := filepath.Join(dir, "prefix")
	t.Cleanup(func() { must.Succeed(t, removeServer(prefix)) })
	program := func(ctx context.Context, args ...string) *exec.Cmd {
		c := contain(ctx, append([]string{loader}, args...)...)
		c.Dir = dir
		c.Env = append(os.Environ(), "WINEPREFIX="+prefix, "WINEDEBUG=-all", "DISPLAY=")
		return c
	}
	wine := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		out, err := program(ctx, args...).CombinedOutput()
		return strings.ReplaceAll(string(out), "\r", ""), errors.Join(err, ctx.Err())
	}
	if out, err := contain(t.Context(), "true").CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", fmt.Sprintf("%v: %s", err, out))
	}
	out, err := wine("cmd", "/c", "exit")
	must.Be(t, err == nil, "%v: %s", err, out)
	// Go programs need a library that Wine 8 lacks.
	system := filepath.Join(prefix, "drive_c/windows/system32/bcryptprimitives.dll")
	if _, err := os.Stat(system); err != nil {
		must.Succeed(t, os.WriteFile(system, forwarder("bcryptprimitives.dll", "ProcessPrng", "advapi32.SystemFunction036"), 0o644))
	}

	out, err = wine(job, "-test.v", "-test.timeout=2m")
	expect.That(t, err == nil && strings.Contains(out, "--- PASS: TestNoProcessOutlivesTheWorker"), "job objects: %v\n%s", err, out)
	out, err = wine(cloister, "check", "--sandbox", "jobobject")
	expect.That(t, err == nil, "check: %v\n%s", err, out)
	page, _, err := checkpage.Documented("../../docs/backends.md", "cloister check --sandbox jobobject")
	must.Succeed(t, errors.Join(err, checkpage.Compare(out, page)))
	expect.Texts(t, out, []string{"ok    job object", "off   files", "off   network", "off   worker", "tier  unconfined"}, "check")
	out, err = wine(cloister, "check")
	expect.That(t, err != nil, "the default sandbox works")
	expect.Texts(t, out, []string{"FAIL  Linux namespaces", "ok    backend jobobject"}, "check of the default")
	out, err = wine(cloister, "run", "--sandbox", "jobobject", "--", "cmd", "/c", "echo in the job")
	// Wine 8 cannot remove files by descriptor, so the command succeeds but its directories remain.
	expect.That(t, err == nil || strings.Contains(out, "unlinkat") && strings.Contains(out, "Invalid function"), "run: %v\n%s", err, out)
	expect.Text(t, out, "in the job\n", "run")
	out, err = wine(cloister, "run", "--", "cmd", "/c", "echo in the job")
	expect.That(t, err != nil && !strings.Contains(out, "in the job\n"), "run without a sandbox: %v\n%s", err, out)

	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	serve := program(ctx, cloister, "serve", "--sandbox", "jobobject", "--dir", "store", "--max-size", "1073741824", "--listen", "127.0.0.1:0", "--web=")
	var banner, stderr strings.Builder
	lines := bufio.NewScanner(must.Get(serve.StdoutPipe())(t))
	serve.Stderr = &stderr
	must.Succeed(t, serve.Start())
	ready := false
	for !ready && lines.Scan() {
		banner.WriteString(lines.Text() + "\n")
		ready = lines.Text() == "ready"
	}
	cancel()
	_ = serve.Wait() // it was killed
	expect.That(t, ready, "serve did not print \"ready\"; it printed\n%s%s", &banner, &stderr)
	expect.Texts(t, banner.String(), []string{"job object", "unconfined", "not enforced: files, network, worker"}, "serve")
}

// removeServer removes the directory of the server of a prefix, which Wine puts into /tmp by the number of the prefix.
func removeServer(prefix string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(prefix, &st); err != nil {
		return err
	}
	return os.RemoveAll(fmt.Sprintf("/tmp/.wine-%d/server-%x-%x", os.Geteuid(), st.Dev, st.Ino))
}
