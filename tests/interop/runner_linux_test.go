// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
)

// runner starts cloister runner for a build directory and returns its address; it ends with the test.
func runner(t *testing.T, build string) string {
	t.Helper()
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), program, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	socket := filepath.Join(t.TempDir(), "runner")
	var said bytes.Buffer
	cmd := exec.Command(program, "runner", "--socket", socket, "--build-dir", build, "--jobs", "2")
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // the only error is that it has ended
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("cloister runner: %v\n%s", err, &said)
			}
		case <-time.After(20 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
			t.Errorf("cloister runner does not end\n%s", &said)
		}
	})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("unix", socket); err == nil {
			conn.Close()
			return "unix:" + socket
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("cloister runner ended: %v", err)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("cloister runner does not listen on %s", socket)
		}
	}
}

// confined is a worker of Buildbarn in the farm whose commands cloister runner runs.
func (b *buildbarn) confined(t *testing.T, flags ...string) {
	t.Helper()
	build := t.TempDir()
	worker(t, peers.Options{
		Scheduler: b.scheduler.Addr, Store: b.store.Addr, Build: build, Runner: runner(t, build), Args: flags,
	})
}

// TestRunnerTakesThePlaceOfBuildbarns: with cloister runner for bb_runner and nothing else changed, Buildbarn's worker
// executes as before.
func TestRunnerTakesThePlaceOfBuildbarns(t *testing.T) {
	b := farm(t)
	b.confined(t, "-property", "os=linux", "-id", "host=one", "-threads", "2")
	wantExecutes(t, b.scheduler.Addr)
}

// TestRunnerConfinesForBuildbarn: the same action that finds a file of the host with bb_runner finds none with cloister
// runner, changes no input, and its output arrives.
func TestRunnerConfinesForBuildbarn(t *testing.T) {
	host := filepath.Join(t.TempDir(), "host")
	if err := os.WriteFile(host, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	const sees, changes = 10, 11
	script := fmt.Sprintf(`if test -e %s; then exit %d; fi
if echo other > in/name; then exit %d; fi
cp in/name out/copy`, host, sees, changes)
	for _, c := range []struct {
		name   string
		worker func(b *buildbarn, t *testing.T)
		exit   int32
	}{
		{"bb_runner", func(b *buildbarn, t *testing.T) { b.worker(t, "-property", "os=linux") }, sees},
		{"cloister", func(b *buildbarn, t *testing.T) { b.confined(t, "-property", "os=linux") }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := farm(t)
			c.worker(b, t)
			store := dial(t, b.scheduler, "")
			response, err := execute(t.Context(), b.scheduler.Addr, action(t, store, script, time.Minute))
			if err != nil || response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != c.exit {
				t.Fatalf("response is %v, %v, want the exit code %d", response, err, c.exit)
			}
			if c.exit != 0 {
				return
			}
			if files := response.GetResult().GetOutputFiles(); len(files) != 1 || content(t, store, files[0].Digest) != "an input\n" {
				t.Errorf("outputs are %v, want a copy of the input", files)
			}
		})
	}
}

// TestBazelBuildsWithRunner: what Bazel builds with Buildbarn it builds in the sandbox, too.
func TestBazelBuildsWithRunner(t *testing.T) {
	b := farm(t)
	b.confined(t, "-threads", "2")
	wantBazel(t, b.scheduler.Addr)
}
