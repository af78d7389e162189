// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	remoteworkerpb "github.com/cloister-build/cloister/proto/buildbarn/remoteworker"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
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

var workersAt = regexp.MustCompile(`(?m)^workers  cloister join grpcs?://(\S+)$`)

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

// plain connects to an address.
func plain(t *testing.T, address string) *guest {
	t.Helper()
	conn := must(grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials())))
	t.Cleanup(func() { conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return &guest{conn, ctx}
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

// synchronize reports the worker's state: idle if action is nil, else executing it, or completed if response is not nil.
func (w *hand) synchronize(action *repb.Digest, end *repb.ExecuteResponse, leaving bool) (*remoteworkerpb.DesiredState, error) {
	state := &remoteworkerpb.CurrentState{WorkerState: &remoteworkerpb.CurrentState_Idle{Idle: &emptypb.Empty{}}}
	if action != nil {
		e := &remoteworkerpb.CurrentState_Executing{ActionDigest: action, ExecutionState: &remoteworkerpb.CurrentState_Executing_Running{Running: &emptypb.Empty{}}}
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
	if _, err := repb.NewActionCacheClient(w).UpdateActionResult(w.ctx, &repb.UpdateActionResultRequest{ActionDigest: action, ActionResult: r}); err != nil {
		t.Fatal(err)
	}
	if s, err := w.synchronize(action, &repb.ExecuteResponse{Result: r, Status: &statuspb.Status{}}, true); err != nil || s.GetIdle() == nil {
		t.Errorf("report of the end: got %v, %v", s, err)
	}
}

// executed is the result of an execution.
type executed struct {
	response *repb.ExecuteResponse
	err      error
}

// begin executes an action in the background.
func (g *guest) begin(action *repb.Digest) <-chan executed {
	c := make(chan executed, 1)
	go func() {
		_, r, err := g.execute("", action)
		c <- executed{r, err}
	}()
	return c
}

// TestHead checks that a server without slots gives actions to joined workers, runs lost actions on another worker, explains
// actions that no worker can take, and drains.
func TestHead(t *testing.T) {
	s, at, log := startHead(t, "--worker-timeout", "3s")
	client, anvil, bellows := plain(t, s.Addr), &hand{plain(t, at), "anvil"}, &hand{plain(t, at), "bellows"}

	first := client.putAction(t, "first", &repb.Platform_Property{Name: "OSFamily", Value: "linux"}, &repb.Platform_Property{Name: "cloister-memory", Value: "8TiB"})
	result := client.begin(first)
	task := anvil.take(t)
	if task.ActionDigest.Hash != first.Hash || task.Action.GetTimeout().AsDuration() != 24*time.Hour {
		t.Errorf("got task %v for the worker", task)
	}
	anvil.end(t, first)
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "anvil" || got.response.CachedResult {
		t.Errorf("got response %v, %v, want success", got.response, got.err)
	}
	if got := <-client.begin(first); got.err != nil || !got.response.GetCachedResult() {
		t.Errorf("second execution: got %v, %v", got.response, got.err)
	}

	second := client.putAction(t, "second")
	result = client.begin(second)
	anvil.take(t) // and stays silent
	bellows.take(t)
	bellows.end(t, second)
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "bellows" {
		t.Errorf("after the loss of a worker: got %v, %v", got.response, got.err)
	}

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
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "bellows" {
		t.Errorf("while the server drains: got %v, %v, want success", got.response, got.err)
	}
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

// TestHeadNeedsNoSandbox checks that without a sandbox only a server that executes nothing starts.
func TestHeadNeedsNoSandbox(t *testing.T) {
	sandboxtest.Tool(t, "unshare")
	run := func(flags string) (string, int) {
		t.Helper()
		// In a user namespace that permits no further ones.
		script := "echo 0 > /proc/sys/user/max_user_namespaces || exit 99\nexec timeout 5 " + built.Path(t) +
			" serve --listen 127.0.0.1:0 --max-size 1GiB --dir " + t.TempDir() + " " + flags
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "unshare", "--user", "--map-root-user", "/bin/sh", "-c", script)
		cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
		out, _ := cmd.CombinedOutput() // the exit code is checked below
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, code := run("--jobs 1"); code != 3 || !strings.Contains(out, "this host cannot sandbox actions") {
		if code == 1 || code == 99 {
			sandboxtest.Unavailable(t, "unprivileged", out)
		}
		t.Fatalf("with slots: got exit code %d, want 3:\n%s", code, out)
	}
	if out, code := run("--jobs 0 --worker-listen 127.0.0.1:0"); code != 124 || !strings.Contains(out, "workers  cloister join") {
		t.Errorf("without slots: got exit code %d, want 124 of timeout:\n%s", code, out)
	}
}

// TestWorkersAreCallers checks that the right work permits only the workers' port, and no other right permits it.
func TestWorkersAreCallers(t *testing.T) {
	a := newAuthority(t)
	a.sign(t, "server")
	callers := "version: 1\ncallers:\n"
	for name, rights := range map[string]string{"worker": "[work]", "other": "[work]", "client": "[read, write, execute, cache]"} {
		callers += fmt.Sprintf("  - {name: %s, token_sha256: %x, rights: %s}\n", name, sha256.Sum256([]byte(name+"-token")), rights)
	}
	s, at, _ := startHead(t, "--tls-cert", a.file("server.pem"), "--tls-key", a.file("server.key"), "--auth", a.text(t, "auth.yaml", callers))
	defer s.Stop()
	client := a.guest(t, s.Addr, "", "client-token")
	action := client.putAction(t, "a")
	for token, want := range map[string]codes.Code{"": codes.Unauthenticated, "client-token": codes.PermissionDenied, "worker": codes.Unauthenticated} {
		if _, err := (&hand{a.guest(t, at, "", token), "x"}).synchronize(nil, nil, true); status.Code(err) != want {
			t.Errorf("work for %q: got %v, want %v", token, err, want)
		}
	}
	if _, _, err := a.guest(t, s.Addr, "", "worker-token").execute("", action); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Execute of a worker: got %v, want PERMISSION_DENIED", err)
	}
	worker := &hand{a.guest(t, at, "", "worker-token"), "anvil"}
	result := client.begin(action)
	worker.take(t)
	if _, err := (&hand{a.guest(t, at, "", "other-token"), "anvil"}).synchronize(nil, nil, true); status.Code(err) != codes.PermissionDenied {
		t.Errorf("Synchronize for another worker: got %v, want PERMISSION_DENIED", err)
	}
	worker.end(t, action)
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "anvil" {
		t.Errorf("got response %v, %v, want success", got.response, got.err)
	}
}

// TestHeadWithoutItsUpstream checks that a head gives workers nothing while its upstream does not answer, and resumes afterwards.
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
	ready := func(code int, text string) {
		t.Helper()
		until(t, text, func() bool {
			got, said := get(t, metrics, "/ready")
			return got == code && strings.Contains(said, text)
		})
	}
	far := upstream()
	s, at, log := startHead(t, "--cas", "grpc://"+port, "--metrics", metrics)
	defer s.Stop()
	ready(200, "ready")
	client := plain(t, s.Addr)
	action := client.putAction(t, "a")
	result := client.begin(action)
	until(t, "it waits", func() bool {
		_, text := get(t, metrics, "/metrics")
		return strings.Contains(text, "\ncloister_actions_queued 1\n")
	})
	if err := far.Stop(); err != nil {
		t.Fatal(err)
	}
	ready(503, "upstream grpc://"+port+" is down")
	until(t, "it logs the consequence", func() bool { // possibly logged before the first probe
		_, since, _ := strings.Cut(log.String(), "upstream is down")
		return strings.Contains(since, "workers get no actions")
	})
	worker := plain(t, at)
	soon := *worker
	var cancel context.CancelFunc
	soon.ctx, cancel = context.WithTimeout(worker.ctx, 2*time.Second)
	defer cancel()
	if d, err := (&hand{&soon, "anvil"}).synchronize(nil, nil, false); d.GetExecuting() != nil || status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("got desired state %v, %v for the worker", d, err)
	}
	far = upstream()
	defer far.Stop()
	w := &hand{worker, "anvil"}
	if e := w.take(t); e.ActionDigest.Hash != action.Hash {
		t.Errorf("got state %v for the worker", e)
	}
	w.end(t, action)
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "anvil" {
		t.Errorf("got response %v, %v, want success", got.response, got.err)
	}
}

// TestServeWithWorkersAndSlots checks that own slots take actions that match their properties, and workers the others.
func TestServeWithWorkersAndSlots(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	log := &shared{}
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", MaxSize: "1GiB", Jobs: 1, Log: log,
		Args: []string{"--worker-listen", "127.0.0.1:0", "--property", "ISA=amd64"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	client, worker := plain(t, s.Addr), &hand{plain(t, workersAt.FindStringSubmatch(log.String())[1]), "anvil"}
	here := client.putAction(t, "here", &repb.Platform_Property{Name: "ISA", Value: "amd64"})
	if got := <-client.begin(here); got.err != nil || got.response.Result == nil || got.response.Result.ExecutionMetadata.Worker == "anvil" {
		t.Errorf("action for the server: got %v, %v", got.response, got.err)
	}
	there := client.putAction(t, "there", &repb.Platform_Property{Name: "OSFamily", Value: "linux"})
	result := client.begin(there)
	if task := worker.take(t); task.ActionDigest.Hash != there.Hash {
		t.Errorf("got task %v for the worker", task)
	}
	worker.end(t, there)
	if got := <-result; got.err != nil || got.response.Result.GetExecutionMetadata().GetWorker() != "anvil" {
		t.Errorf("action for the worker: got %v, %v", got.response, got.err)
	}
}
