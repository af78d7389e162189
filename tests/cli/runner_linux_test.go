// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runnerpb "github.com/cloister-build/cloister/proto/buildbarn/runner"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A runnerProcess is a cloister runner and its client.
type runnerProcess struct {
	runnerpb.RunnerClient
	cmd    *exec.Cmd
	socket string
	build  string
	stderr *bytes.Buffer
	banner string
}

// startRunner starts a runner in a directory with a name short enough for a socket. The caller waits for its end.
func startRunner(t *testing.T, dir string) *runnerProcess {
	t.Helper()
	r := &runnerProcess{socket: filepath.Join(dir, "sock"), build: filepath.Join(dir, "build"), stderr: &bytes.Buffer{}}
	must.Succeed(t, os.MkdirAll(r.build, 0o755))
	r.cmd = exec.Command(built.Path(t), "runner", "--socket", r.socket, "--build-dir", r.build, "--socket-mode", "0660")
	r.cmd.Stderr = r.stderr
	stdout := must.Get(r.cmd.StdoutPipe())(t)
	must.Succeed(t, r.cmd.Start())
	t.Cleanup(func() {
		if r.cmd.ProcessState == nil {
			_ = r.cmd.Process.Kill()
			_ = r.cmd.Wait()
		}
	})
	for lines := bufio.NewReader(stdout); !strings.Contains(r.banner, "\nrunner "); {
		line, err := lines.ReadString('\n')
		if r.banner += line; err != nil {
			t.Fatalf("the runner did not start: %s%s", r.banner, r.stderr)
		}
	}
	conn := grpctest.Dial(t, "unix://"+r.socket)
	r.RunnerClient = runnerpb.NewRunnerClient(conn)
	return r
}

// begin starts a script and returns when it has printed "ready", with a function that waits for its end.
func (r *runnerProcess) begin(t *testing.T, name, script string) <-chan error {
	t.Helper()
	must.Succeed(t, os.MkdirAll(filepath.Join(r.build, name, "root"), 0o777))
	done := make(chan error, 1)
	go func() {
		resp, err := r.Run(context.WithoutCancel(t.Context()), &runnerpb.RunRequest{
			Arguments:            []string{"/bin/sh", "-c", "echo ready; " + script},
			EnvironmentVariables: map[string]string{"PATH": "/usr/bin:/bin"},
			InputRootDirectory:   name + "/root", StdoutPath: name + "/stdout", StderrPath: name + "/stderr",
		})
		if err == nil && resp.ExitCode != 0 {
			err = errors.New(resp.String())
		}
		done <- err
	}()
	for {
		if b, _ := os.ReadFile(filepath.Join(r.build, name, "stdout")); string(b) == "ready\n" {
			return done
		}
		select {
		case err := <-done:
			t.Fatalf("the command ended early: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "cl-"))(t)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestRunnerDrains checks that a running command finishes after SIGTERM while the socket is gone, and that a second
// signal does not wait.
func TestRunnerDrains(t *testing.T) {
	confined(t)
	dir := shortDir(t)
	r := startRunner(t, dir)
	expect.Equal(t, must.Get(os.Stat(r.socket))(t).Mode().Perm(), 0o660, "socket")
	expect.That(t, strings.Contains(r.banner, "sandbox  ") && strings.Contains(r.banner, "build directory "+r.build),
		"got banner %q", r.banner)
	done := r.begin(t, "first", "sleep 1; echo x >out")
	must.Succeed(t, r.cmd.Process.Signal(syscall.SIGTERM))
	for { // until it reacts
		if _, err := os.Lstat(r.socket); errors.Is(err, fs.ErrNotExist) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := net.Dial("unix", r.socket); err == nil {
		t.Error("connected to a draining runner, want its socket gone")
	}
	must.Succeed(t, <-done)
	if b, err := os.ReadFile(filepath.Join(r.build, "first/root/out")); string(b) != "x\n" {
		t.Errorf("output: got %q, %v", b, err)
	}
	if err := r.cmd.Wait(); err != nil {
		t.Errorf("runner: got %v at its end: %s", err, r.stderr)
	}

	r = startRunner(t, dir)
	done = r.begin(t, "second", "echo x >out; sleep 600")
	for range 2 {
		must.Succeed(t, r.cmd.Process.Signal(syscall.SIGTERM))
		for { // simultaneous signals may merge
			if _, err := os.Lstat(r.socket); errors.Is(err, fs.ErrNotExist) {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	if err := <-done; status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled {
		t.Errorf("stopped command: got %v, want Unavailable or Canceled", err)
	}
	if err := r.cmd.Wait(); err != nil {
		t.Errorf("runner: got %v at its end: %s", err, r.stderr)
	}
	expect.Equal(t, len(must.Get(os.ReadDir(filepath.Join(r.build, "second/root")))(t)), 0,
		"stopped command: left behind")
}
