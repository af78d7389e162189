// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// until waits for done, a bounded time.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for range 1000 {
		if done() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("after 10 s: not %s", what)
}

func TestRule129_HealthIsServing(t *testing.T) {
	c := serve(t)
	for _, service := range []string{"", "build.bazel.remote.execution.v2.Execution", "google.bytestream.ByteStream"} {
		r, err := healthpb.NewHealthClient(c.conn).Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || r.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("%q: %v, %v", service, r, err)
		}
	}
}

// TestRule130_DrainLetsRunningActionsEnd: after SIGTERM what runs ends with its result, and what comes is
// told to come back.
func TestRule130_DrainLetsRunningActionsEnd(t *testing.T) {
	c := serve(t)
	running := make(chan *repb.ExecuteResponse, 1)
	d := c.upload(action{script: "sleep 1.5; echo done > out", outputs: []string{"out"}})
	go func() { running <- c.execute(d, false) }()
	until(t, "running", func() bool { return len(sandboxtest.Running(t, "echo done > out")) > 0 })

	if err := syscall.Kill(c.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	health := healthpb.NewHealthClient(c.conn)
	until(t, "draining", func() bool {
		r, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
		return err == nil && r.Status == healthpb.HealthCheckResponse_NOT_SERVING
	})
	s, err := c.exec.Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d, SkipCacheLookup: true, ExecutionPolicy: &repb.ExecutionPolicy{Priority: 1}})
	if err == nil {
		_, err = last(s)
	}
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a new action while draining: got %v, want UNAVAILABLE", err)
	}
	if r := <-running; code(r) != codes.OK || r.Result.GetExitCode() != 0 || len(r.Result.OutputFiles) != 1 {
		t.Errorf("the running action: got %v", r)
	} else if d := r.Result.OutputFiles[0].Digest; d.Hash != cas.SHA256.Sum([]byte("done\n")).Hash() {
		t.Errorf("its output: got %v", d)
	}
}

// TestRule130_SecondSignalStopsAtOnce: nobody waits for an action that takes an hour.
func TestRule130_SecondSignalStopsAtOnce(t *testing.T) {
	c := serve(t)
	mark := fmt.Sprintf("8%d.5", os.Getpid())
	ended := make(chan error, 1)
	d := c.upload(action{script: "sleep " + mark})
	go func() {
		s, err := c.exec.Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d})
		if err == nil {
			op, err2 := last(s)
			var r repb.ExecuteResponse
			if err = err2; err == nil {
				if err = op.GetResponse().UnmarshalTo(&r); err == nil {
					err = status.ErrorProto(r.Status)
				}
			}
		}
		ended <- err
	}()
	alive := func() bool { return len(sandboxtest.Running(t, "sleep\x00"+mark)) > 0 }
	until(t, "running", alive)
	for range 2 {
		if err := syscall.Kill(c.server.PID, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	if err := <-ended; status.Code(err) != codes.Unavailable {
		t.Errorf("the action: got %v, want UNAVAILABLE, so that its client asks again", err)
	}
	until(t, "ended with the server", func() bool { return !alive() })
}

// TestKilledServerLeavesNothingRunningAndNothingBroken is kill -9 in the middle of an action; the clean-up
// of serve checks the store.
func TestKilledServerLeavesNothingRunningAndNothingBroken(t *testing.T) {
	c := serve(t)
	mark := fmt.Sprintf("9%d.5", os.Getpid())
	d := c.upload(action{script: "head -c 1000000 /dev/urandom > out; sleep " + mark, outputs: []string{"out"}})
	go func() {
		if s, err := c.exec.Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d}); err == nil {
			_, _ = last(s) // breaks off with the server
		}
	}()
	alive := func() bool { return len(sandboxtest.Running(t, "sleep\x00"+mark)) > 0 }
	until(t, "running", alive)
	c.server.Kill()
	until(t, "ended with the server", func() bool { return !alive() })
}
