// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/ca"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// A shared buffer is written by a server while a test reads it.
type shared struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *shared) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// startHead starts a server without slots and returns the address of its workers' port. The caller stops it.
func startHead(t *testing.T, flags ...string) (s *bazelrun.Server, workers string, log *shared) {
	t.Helper()
	dir := t.TempDir()
	log = &shared{}
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", MaxSize: "1GiB", Log: log,
		Args: append([]string{"--jobs", "0", "--worker-listen", "127.0.0.1:0"}, flags...),
	})
	if err != nil {
		t.Fatal(err)
	}
	m := workersAt.FindStringSubmatch(log.String())
	if m == nil {
		_ = s.Stop()
		t.Fatalf("got output without the workers' address:\n%s", log)
	}
	return s, m[1], log
}

// putAction uploads an action whose execution a simulated worker only reports.
func (g *guest) putAction(t *testing.T, salt string, properties ...*repb.Platform_Property) *repb.Digest {
	t.Helper()
	command := must(g.put("", &repb.Command{Arguments: []string{"/bin/true"}}))
	root := must(g.put("", &repb.Directory{}))
	return must(g.put("", &repb.Action{
		CommandDigest: command, InputRootDigest: root, Salt: []byte(salt), Platform: &repb.Platform{Properties: properties},
	}))
}

// A hand is a simulated worker.
type hand struct {
	*guest
	name string
}

// synchronize reports the worker's state: idle if action is nil, else executing it, or completed if response is not
// nil.
func (w *hand) synchronize(
	action *repb.Digest, end *repb.ExecuteResponse, leaving bool,
) (*remoteworkerpb.DesiredState, error) {
	state := &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Idle{Idle: &emptypb.Empty{}}}
	if action != nil {
		running := &remoteworkerpb.CurrentState_Executing_Running{Running: &emptypb.Empty{}}
		e := &remoteworkerpb.CurrentState_Executing{ActionDigest: action, ExecutionState: running}
		if end != nil {
			e.ExecutionState = &remoteworkerpb.CurrentState_Executing_Completed{Completed: end}
		}
		state.WorkerState = &remoteworkerpb.CurrentState_Executing_{Executing: e}
	}
	r, err := remoteworkerpb.NewOperationQueueClient(w).Synchronize(w.ctx, &remoteworkerpb.SynchronizeRequest{
		WorkerId: map[string]string{"worker": w.name, "slot": "0"}, CurrentState: state, PreferBeingIdle: leaving,
		Platform: &repb.Platform{Properties: []*repb.Platform_Property{{Name: "OSFamily", Value: "linux"}}},
	})
	return r.GetDesiredState(), err
}

// take waits for an action.
func (w *hand) take(t *testing.T) *remoteworkerpb.DesiredState_Executing {
	t.Helper()
	for {
		d, err := w.synchronize(nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		if e := d.GetExecuting(); e != nil {
			return e
		}
	}
}

// end completes an action with exit code 0 after recording its result, as workers do.
func (w *hand) end(t *testing.T, action *repb.Digest) {
	t.Helper()
	d := must(w.put("", &repb.Command{Arguments: []string{"output of " + w.name}}))
	r := &repb.ActionResult{
		OutputFiles:       []*repb.OutputFile{{Path: "out", Digest: d}},
		ExecutionMetadata: &repb.ExecutedActionMetadata{Worker: w.name},
	}
	record := &repb.UpdateActionResultRequest{ActionDigest: action, ActionResult: r}
	if _, err := repb.NewActionCacheClient(w).UpdateActionResult(w.ctx, record); err != nil {
		t.Fatal(err)
	}
	s, err := w.synchronize(action, &repb.ExecuteResponse{Result: r, Status: &statuspb.Status{}}, true)
	if err != nil || s.GetIdle() == nil {
		t.Errorf("report of the end: got %v, %v, want it idle", s, err)
	}
}

// begin executes an action in the background.
func (g *guest) begin(action *repb.Digest) <-chan executed {
	c := make(chan executed, 1)
	go func() { c <- g.execute(&repb.ExecuteRequest{ActionDigest: action}, nil) }()
	return c
}

// wantWorker checks that a worker has executed an action, and waits for its response.
func wantWorker(t *testing.T, result <-chan executed, worker string) {
	t.Helper()
	got := <-result
	if got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != worker || got.response.CachedResult {
		t.Errorf("got response %v, %v, want one of %s", got.response, got.err, worker)
	}
}

// property returns a platform property.
func property(name, value string) *repb.Platform_Property {
	return &repb.Platform_Property{Name: name, Value: value}
}

// TestHead checks that a server without slots gives actions to joined workers, runs lost actions on another worker,
// explains actions that no worker can take, and drains.
func TestHead(t *testing.T) {
	s, at, log := startHead(t, "--worker-timeout", "3s")
	client, anvil, bellows := plain(t, s.Addr), &hand{plain(t, at), "anvil"}, &hand{plain(t, at), "bellows"}

	first := client.putAction(t, "first", property("OSFamily", "linux"), property("cloister-memory", "8TiB"))
	result := client.begin(first)
	task := anvil.take(t)
	if task.ActionDigest.Hash != first.Hash || task.Action.GetTimeout().AsDuration() != 24*time.Hour {
		t.Errorf("got task %v for the worker", task)
	}
	anvil.end(t, first)
	wantWorker(t, result, "anvil")
	if got := <-client.begin(first); got.err != nil || !got.response.GetCachedResult() {
		t.Errorf("second execution: got %v, %v", got.response, got.err)
	}

	second := client.putAction(t, "second")
	result = client.begin(second)
	anvil.take(t) // and stays silent
	bellows.take(t)
	bellows.end(t, second)
	wantWorker(t, result, "bellows")

	third := client.putAction(t, "third")
	result = client.begin(third)
	bellows.take(t)
	stopped := make(chan error, 1)
	go func() { stopped <- s.Stop() }()
	for !strings.Contains(log.String(), "draining 1 running, 0 queued") {
		time.Sleep(10 * time.Millisecond)
		select {
		case err := <-stopped:
			t.Fatalf("the server ended before its action: %v\n%s", err, log)
		default:
		}
	}
	bellows.end(t, third)
	wantWorker(t, result, "bellows")
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	for _, want := range []string{"0 slots", "worker has joined", "worker=anvil", "worker has left", "silent for 3s"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("got log\n%s\nwant %q in it", log, want)
		}
	}
	for _, never := range []string{"sandbox  ", "inputs   ", "property is ignored"} {
		if strings.Contains(log.String(), never) {
			t.Errorf("got log\n%s\nwant no %q in it", log, never)
		}
	}
}

// TestWorkersAreCallers checks that the right work permits only the workers' port, and no other right permits it.
func TestWorkersAreCallers(t *testing.T) {
	a := ca.New(t, t.TempDir())
	a.Sign("server")
	callers := "version: 1\ncallers:\n"
	for name, rights := range map[string]string{
		"worker": "[work]", "other": "[work]", "client": "[read, write, execute, cache]",
	} {
		token := sha256.Sum256([]byte(name + "-token"))
		callers += fmt.Sprintf("  - {name: %s, token_sha256: %x, rights: %s}\n", name, token, rights)
	}
	s, at, _ := startHead(t, "--tls-cert", a.File("server.pem"), "--tls-key", a.File("server.key"),
		"--auth", a.Write("auth.yaml", []byte(callers)))
	defer s.Stop()
	with := func(token, address string) *guest { return &guest{a.Dial(address, "", token), t.Context()} }
	client := with("client-token", s.Addr)
	action := client.putAction(t, "a")
	for token, want := range map[string]codes.Code{
		"": codes.Unauthenticated, "client-token": codes.PermissionDenied, "worker": codes.Unauthenticated,
	} {
		if _, err := (&hand{with(token, at), "x"}).synchronize(nil, nil, true); status.Code(err) != want {
			t.Errorf("work for %q: got %v, want %v", token, err, want)
		}
	}
	if got := <-with("worker-token", s.Addr).begin(action); status.Code(got.err) != codes.PermissionDenied {
		t.Errorf("Execute of a worker: got %v, want PERMISSION_DENIED", got.err)
	}
	worker := &hand{with("worker-token", at), "anvil"}
	result := client.begin(action)
	worker.take(t)
	_, err := (&hand{with("other-token", at), "anvil"}).synchronize(nil, nil, true)
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("Synchronize for another worker: got %v, want PERMISSION_DENIED", err)
	}
	worker.end(t, action)
	wantWorker(t, result, "anvil")
}

// TestHeadWithoutItsUpstream checks that a head gives workers nothing while its upstream does not answer, and resumes
// afterwards.
func TestHeadWithoutItsUpstream(t *testing.T) {
	dir, port, metrics := t.TempDir(), unused(t), unused(t)
	upstream := func() *bazelrun.Server {
		t.Helper()
		s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
			Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: port, MaxSize: "1GiB", Log: &shared{},
			Args: []string{"--jobs", "0", "--worker-listen", "127.0.0.1:0"},
		})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	until := func(what string, done func() bool) {
		t.Helper()
		if err := await(what, done); err != nil {
			t.Fatal(err)
		}
	}
	sees := func(path, text string) {
		t.Helper()
		until(text, func() bool {
			got, err := get(metrics + path)
			return err == nil && strings.Contains(got, text)
		})
	}
	far := upstream()
	s, at, log := startHead(t, "--cas", "grpc://"+port, "--metrics", metrics)
	defer s.Stop()
	sees("/ready", "200\nready")
	client := plain(t, s.Addr)
	action := client.putAction(t, "a")
	result := client.begin(action)
	sees("/metrics", "\ncloister_actions_queued 1\n")
	if err := far.Stop(); err != nil {
		t.Fatal(err)
	}
	sees("/ready", "503\nupstream grpc://"+port+" is down")
	until("it logs the consequence", func() bool { // possibly logged before the first probe
		_, since, _ := strings.Cut(log.String(), "upstream is down")
		return strings.Contains(since, "workers get no actions")
	})
	worker := plain(t, at)
	soon := *worker
	var cancel context.CancelFunc
	soon.ctx, cancel = context.WithTimeout(worker.ctx, 2*time.Second)
	defer cancel()
	d, err := (&hand{&soon, "anvil"}).synchronize(nil, nil, false)
	if d.GetExecuting() != nil || status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got desired state %v, %v for the worker, want none", d, err)
	}
	far = upstream()
	defer far.Stop()
	w := &hand{worker, "anvil"}
	if e := w.take(t); e.ActionDigest.Hash != action.Hash {
		t.Errorf("got state %v for the worker", e)
	}
	w.end(t, action)
	wantWorker(t, result, "anvil")
}
