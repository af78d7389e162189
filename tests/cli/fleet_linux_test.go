// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"io"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// A held action runs until it is let go.
type held struct {
	operation string
	end       func() *repb.ExecuteResponse
	mark      string
}

// hold has the server execute an action that runs until it is let go.
func (r *remote) hold(t *testing.T, name string) *held {
	t.Helper()
	h := &held{mark: fmt.Sprintf("%s %s %d", t.Name(), name, os.Getpid())}
	_, h.operation, h.end = r.begin(t, "trap 'go=1' USR1; while [ -z \"$go\" ]; do sleep 0.05; done; echo let go # "+h.mark)
	return h
}

// catches is a shell that has its trap.
var catches = regexp.MustCompile(`(?m)^SigCgt:\s+[0-9a-f]*[2367abef][0-9a-f]{2}$`)

// running returns the processes of the action that can be let go.
func (h *held) running(t *testing.T) []int {
	t.Helper()
	var pids []int
	for _, p := range sandboxtest.Running(t, "# "+h.mark) {
		pid, err := strconv.Atoi(strings.Split(p, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)); err == nil && catches.Match(text) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// release lets the action go once it runs, and returns what became of it.
func (h *held) release(t *testing.T) *repb.ExecuteResponse {
	t.Helper()
	until(t, h.mark+" runs", func() bool { return len(h.running(t)) > 0 })
	for _, pid := range h.running(t) {
		if err := syscall.Kill(pid, syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
	}
	return h.end()
}

// TestSignalDrains: a server that is told to end says first that it is not ready, then lets what it has been given end
// while it takes nothing new, and answers UNAVAILABLE for what does not end in time, so that clients ask another one.
func TestSignalDrains(t *testing.T) {
	metrics := unused(t)
	f := farming(t, "--metrics", metrics, "--jobs", "1")
	r := &remote{Client: f.client, dir: f.dir}
	running, waiting := r.hold(t, "running"), r.hold(t, "waiting")
	until(t, "one runs and one waits", func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "\ncloister_actions_running 1\n") && strings.Contains(text, "\ncloister_actions_queued 1\n")
	})
	refused := func() error {
		t.Helper()
		s, err := r.Execute(t.Context(), &repb.ExecuteRequest{InstanceName: r.InstanceName, ActionDigest: &repb.Digest{Hash: strings.Repeat("0", 64)}})
		if err == nil {
			for err == nil {
				_, err = s.Recv()
			}
		}
		if err == io.EOF {
			return nil
		}
		return err
	}
	if err := refused(); err != nil {
		t.Fatalf("before it drains: %v", err)
	}
	if err := syscall.Kill(f.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	// Whenever it refuses work it has said before that it is not ready.
	until(t, "it takes nothing new", func() bool { return refused() != nil })
	if err := refused(); status.Code(err) != codes.Unavailable {
		t.Errorf("what is asked of a server that drains: %v", err)
	}
	if code, text := get(t, metrics, "/ready"); code != 503 || !strings.HasPrefix(text, "draining") {
		t.Errorf("/ready: %d, %q", code, text)
	}
	for _, service := range []string{"", casService} {
		if got := health(t, f.client, service); got != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Errorf("the health of %q is %v", service, got)
		}
	}
	for _, h := range []*held{running, waiting} {
		if response := h.release(t); response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != 0 {
			t.Errorf("%s: %v", h.mark, response)
		}
	}
	f.stop()
	if strings.Contains(f.log.String(), "stopped  running actions") {
		t.Errorf("it says that it cancelled something:\n%s", f.log)
	}
}

// TestSignalDrainsInTime: what outlives --drain-timeout ends with UNAVAILABLE, and no process of it is left.
func TestSignalDrainsInTime(t *testing.T) {
	f := farming(t, "--drain-timeout", "300ms")
	r := &remote{Client: f.client, dir: f.dir}
	h := r.hold(t, "endless")
	until(t, "it runs", func() bool { return len(h.running(t)) > 0 })
	if err := syscall.Kill(f.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	response := h.end()
	if code := codes.Code(response.GetStatus().GetCode()); code != codes.Unavailable || response.Result != nil || !strings.Contains(response.Message, "shutting down") {
		t.Errorf("%v", response)
	}
	f.stop()
	if left := sandboxtest.Running(t, "# "+h.mark); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
