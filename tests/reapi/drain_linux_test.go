// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
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
	c.put([]byte("a blob"))
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
	d := c.upload(action{script: "sleep 4; echo done > out", outputs: []string{"out"}})
	go func() { running <- c.execute(d, false) }()
	until(t, "running", func() bool { return len(sandboxtest.Running(t, "echo done > out")) > 0 })

	stopped := c.stop()
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
	if err := <-stopped; err != nil {
		t.Errorf("after draining: %v", err)
	}
}

// stop tells the server to end and returns what will say how it did.
func (c *client) stop() <-chan error {
	*c.ended = true
	stopped := make(chan error, 1)
	go func() { stopped <- c.server.Stop() }()
	return stopped
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
	stopped := c.stop()
	health := healthpb.NewHealthClient(c.conn)
	until(t, "draining", func() bool {
		r, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
		return err == nil && r.Status == healthpb.HealthCheckResponse_NOT_SERVING
	})
	if err := syscall.Kill(c.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; status.Code(err) != codes.Unavailable {
		t.Errorf("the action: got %v, want UNAVAILABLE, so that its client asks again", err)
	}
	until(t, "ended with the server", func() bool { return !alive() })
	if err := <-stopped; err != nil {
		t.Errorf("after the second signal: %v", err)
	}
}

// TestKilledServerLosesNothingThatItAcknowledged is kill -9 while actions run and outputs are stored, and
// a new life on the same directory.
func TestKilledServerLosesNothingThatItAcknowledged(t *testing.T) {
	c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(t.TempDir(), "store"), Jobs: 2})
	mark := fmt.Sprintf("9%d.5", os.Getpid())
	one := func(i int) action {
		return action{script: fmt.Sprintf("for i in 1 2 3 4 5 6 7 8; do head -c 300000 /dev/urandom > d/$i; done; echo %d", i),
			files: map[string]file{"d/": {}}, outputs: []string{"d"}}
	}
	const actions = 24
	todo := map[int]*repb.Digest{}
	for i := range actions {
		todo[i] = c.upload(one(i))
	}
	sleeper := c.upload(action{script: "sleep " + mark})
	type done struct {
		i int
		r *repb.ExecuteResponse
	}
	acknowledged := map[int]*repb.ActionResult{}
	results := make(chan done, actions+1)
	start := func(i int, d *repb.Digest) {
		go func() {
			s, err := c.exec.Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d})
			if err != nil {
				results <- done{i, nil}
				return
			}
			op, err := last(s)
			var r repb.ExecuteResponse
			if err == nil && op.GetResponse().UnmarshalTo(&r) == nil {
				results <- done{i, &r}
				return
			}
			results <- done{i, nil}
		}()
	}
	start(-1, sleeper)
	alive := func() bool { return len(sandboxtest.Running(t, "sleep\x00"+mark)) > 0 }
	until(t, "running", alive)
	for i, d := range todo {
		start(i, d)
	}
	killed := false
	for range actions + 1 {
		d := <-results
		if d.r != nil && code(d.r) == codes.OK && d.r.Result.GetExitCode() == 0 {
			acknowledged[d.i] = d.r.Result
		}
		if len(acknowledged) == 5 && !killed {
			*c.ended, killed = true, true
			c.server.Kill()
		}
	}
	if !killed {
		t.Fatal("too few actions succeeded")
	}
	until(t, "ended with the server", func() bool { return !alive() })
	if n := len(acknowledged); n == actions {
		t.Fatal("the server was killed too late to tell anything")
	}

	again := serveAs(t, bazelrun.ServerConfig{Dir: c.dir, Jobs: 2})
	for i, want := range acknowledged {
		got, err := again.ac.GetActionResult(t.Context(), &repb.GetActionResultRequest{ActionDigest: todo[i]})
		if err != nil || !proto.Equal(got.OutputDirectories[0], want.OutputDirectories[0]) {
			t.Errorf("action %d was acknowledged and is now %v, %v", i, got, err)
			continue
		}
		var tree repb.Tree
		if err := proto.Unmarshal([]byte(again.get(got.OutputDirectories[0].TreeDigest)), &tree); err != nil || len(tree.Root.Files) != 8 {
			t.Errorf("action %d: tree %v, %v", i, &tree, err)
		}
		for _, f := range tree.Root.Files {
			again.get(f.Digest)
		}
	}
	for _, d := range todo {
		if r := again.execute(d, false); code(r) != codes.OK || r.Result.GetExitCode() != 0 {
			t.Errorf("after the restart: %v", r)
		}
	}
}
