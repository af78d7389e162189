// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// A held action runs until it is released.
type held struct {
	operation string
	end       func() *repb.ExecuteResponse
	mark      string
}

// hold executes an action that runs until it is released.
func (r *remote) hold(t *testing.T, name string) *held {
	t.Helper()
	h := &held{mark: fmt.Sprintf("%s %s %d", t.Name(), name, os.Getpid())}
	_, h.operation, h.end = r.begin(t, "trap 'go=1' USR1; while [ -z \"$go\" ]; do sleep 0.05; done; echo let go # "+h.mark)
	return h
}

// catches matches a shell that has installed its trap.
var catches = regexp.MustCompile(`(?m)^SigCgt:\s+[0-9a-f]*[2367abef][0-9a-f]{2}$`)

// running returns the processes of the action that can be released.
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

// release releases the action when it runs, and returns its response.
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

// TestSignalDrains checks that after SIGTERM a server first reports not ready, then finishes its actions and refuses new ones, and
// answers UNAVAILABLE for those that do not end in time.
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
		t.Fatalf("before the drain: got %v, want ready", err)
	}
	if err := syscall.Kill(f.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	// It reports not ready before it refuses work.
	until(t, "it takes nothing new", func() bool { return refused() != nil })
	if err := refused(); status.Code(err) != codes.Unavailable {
		t.Errorf("request to a draining server: got %v, want UNAVAILABLE", err)
	}
	if code, text := get(t, metrics, "/ready"); code != 503 || !strings.HasPrefix(text, "draining") {
		t.Errorf("/ready: got %d, %q", code, text)
	}
	for _, service := range []string{"", casService} {
		if got := health(t, f.client, service); got != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Errorf("health of %q: got %v", service, got)
		}
	}
	for _, h := range []*held{running, waiting} {
		if response := h.release(t); response.GetStatus().GetCode() != 0 || response.GetResult().GetExitCode() != 0 {
			t.Errorf("%s: %v", h.mark, response)
		}
	}
	f.stop()
	if strings.Contains(f.log.String(), "stopped  running actions") {
		t.Errorf("got a cancelled action in the log:\n%s", f.log)
	}
}

// TestSignalDrainsInTime checks that an action that outlives --drain-timeout ends with UNAVAILABLE and leaves no process.
func TestSignalDrainsInTime(t *testing.T) {
	f := farming(t, "--drain-timeout", "300ms")
	r := &remote{Client: f.client, dir: f.dir}
	h := r.hold(t, "endless")
	until(t, "it runs", func() bool { return len(h.running(t)) > 0 })
	if err := syscall.Kill(f.server.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	response := h.end()
	if code := codes.Code(response.GetStatus().GetCode()); code != codes.Unavailable || response.Result != nil || !strings.Contains(response.Message, "the server is shutting down; retry") {
		t.Errorf("got response %v, want UNAVAILABLE", response)
	}
	f.stop()
	if left := sandboxtest.Running(t, "# "+h.mark); len(left) > 0 {
		t.Errorf("left behind %v, want nothing", left)
	}
}

// A fleetStatus has the parts of status --json used here.
type fleetStatus struct {
	Ready           bool
	Queued, Running int
	Workers         []struct {
		Name, State, Reason string
		Slots, Busy         int
		Running             []struct{ Action, Stage string }
	}
}

// fleet returns the output of status --json.
func fleet(t *testing.T, args ...string) (s fleetStatus) {
	t.Helper()
	said := cloister(t, "", append([]string{"status", "--json"}, args...)...)
	if err := json.Unmarshal([]byte(said.out), &s); err != nil {
		t.Fatalf("status: got %+v, %v", said, err)
	}
	if want := map[bool]int{true: 0, false: 1}[s.Ready]; said.code != want {
		t.Errorf("got ready %t and exit code %d, want them to agree", s.Ready, said.code)
	}
	return s
}

// TestDrainOfAServer checks that a server's own slots can be drained like a worker, and that it is then not ready.
func TestDrainOfAServer(t *testing.T) {
	metrics := unused(t)
	r := serving(t, "main", "--jobs", "1", "--metrics", metrics)
	at := []string{"--cas", r.cas}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	first := r.hold(t, "first")
	until(t, "it runs", func() bool { return len(first.running(t)) > 0 })
	s := fleet(t, at...)
	if !s.Ready || s.Running != 1 || len(s.Workers) != 1 || s.Workers[0].Name != name || s.Workers[0].State != "working" || s.Workers[0].Busy != 1 || len(s.Workers[0].Running) != 1 {
		t.Fatalf("while an action runs: got %+v", s)
	}
	wantOutput(t, 0, append([]string{"status"}, at...), "  ready\n", "1 running on 1 slots", name+"  ", s.Workers[0].Running[0].Action, " run ")
	wantOutput(t, 0, append([]string{"top", "-n", "2", "--interval", "100ms"}, at...), "Z  ready; 0 waiting, 1 running on 1 slots", "workers: 1 working; 0.0/s\n")

	wantOutput(t, 4, append([]string{"drain", "nobody"}, at...), name)
	wantOutput(t, 6, append([]string{"drain", name, "--reason", "new kernel", "--wait", "--timeout", "200ms"}, at...), "1 actions still run on "+name)
	second := r.hold(t, "second")
	if s := fleet(t, at...); s.Ready || s.Workers[0].State != "draining" || s.Workers[0].Reason != "new kernel" {
		t.Errorf("drained: got %+v", s)
	}
	if code, text := get(t, metrics, "/ready"); code != 503 || !whole(`every worker is drained since \S+Z: new kernel; end it with cloister undrain\n`, text) {
		t.Errorf("/ready: got %d, %q", code, text)
	}
	until(t, "the health says so", func() bool { return health(t, r.Client, "") == healthpb.HealthCheckResponse_NOT_SERVING })
	if response := first.release(t); response.GetResult().GetExitCode() != 0 {
		t.Errorf("running action: got %v, want success", response)
	}
	wantOutput(t, 0, append([]string{"drain", "--wait"}, at...), "drained "+name+"; 0 actions run there\nidle    "+name+"\n")
	if s := fleet(t, at...); s.Queued != 1 || s.Running != 0 || s.Workers[0].State != "drained" {
		t.Errorf("idle: got %+v", s)
	}
	wantOutput(t, 1, append([]string{"status"}, at...), "NOT READY\n", "1 for any worker: worker "+name+" is drained")
	wantOutput(t, 0, append([]string{"undrain"}, at...), "undrained "+name+"\n")
	if response := second.release(t); response.GetResult().GetExitCode() != 0 {
		t.Errorf("waiting action: got %v, want success", response)
	}
	if s := fleet(t, at...); !s.Ready || s.Workers[0].State != "working" {
		t.Errorf("undrained: got %+v", s)
	}
}

// TestDrainOfAWorker checks that a drained worker finishes its action and that the other worker gets everything else.
func TestDrainOfAWorker(t *testing.T) {
	port := unused(t)
	metrics := unused(t)
	r := serving(t, "main", "--jobs", "0", "--worker-listen", port, "--metrics", metrics)
	at := []string{"--cas", r.cas}
	joining(t, port, "first")
	running := r.hold(t, "running")
	until(t, "it runs", func() bool { return len(running.running(t)) > 0 })
	joining(t, port, "second")
	until(t, "both have joined", func() bool { return len(fleet(t, at...).Workers) == 2 })
	// Metrics for autoscalers include actions on workers.
	_, text := get(t, metrics, "/metrics")
	for _, want := range []string{"cloister_actions_running 1", "cloister_actions_queued 0", `cloister_workers{state="working"} 2`, "cloister_slots 4"} {
		if !strings.Contains(text, "\n"+want+"\n") {
			t.Errorf("got\n%s\nwant %s in it", text, want)
		}
	}
	wantOutput(t, 0, append([]string{"drain", "first", "--reason", "new kernel"}, at...), "drained first; 1 actions run there\n")
	for i := range 4 {
		_, response := r.execute(t, fmt.Sprintf("echo %d >out", i))
		if got := response.GetResult().GetExecutionMetadata().GetWorker(); got != "second" {
			t.Errorf("action %d: got worker %q, %v", i, got, response)
		}
	}
	s := fleet(t, at...)
	if !s.Ready || s.Workers[0].Name != "first" || s.Workers[0].State != "draining" || s.Workers[0].Busy != 1 || s.Workers[1].State != "working" {
		t.Errorf("got status %+v", s)
	}
	if response := running.release(t); response.GetResult().GetExecutionMetadata().GetWorker() != "first" {
		t.Errorf("running action: got %v, want success", response)
	}
	wantOutput(t, 0, append([]string{"drain", "first", "--wait"}, at...), "idle    first\n")
	wantOutput(t, 0, append([]string{"undrain", "first"}, at...), "undrained first\n")
	if s := fleet(t, at...); s.Workers[0].State != "working" {
		t.Errorf("got status %+v", s)
	}
}

// TestDrainOutlastsTheHead checks that a drain and its reason survive a restart of the head until the worker is undrained.
func TestDrainOutlastsTheHead(t *testing.T) {
	dir := t.TempDir()
	for _, step := range []struct{ state, then string }{{"working", "drain"}, {"drained", ""}, {"drained", "undrain"}, {"working", ""}} {
		log := &shared{}
		s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
			Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", MaxSize: "1GiB", Log: log,
			Args: []string{"--jobs", "0", "--worker-listen", "127.0.0.1:0"},
		})
		if err != nil {
			t.Fatal(err)
		}
		at := []string{"--cas", "grpc://" + s.Addr}
		if _, err := (&hand{plain(t, workersAt.FindStringSubmatch(log.String())[1]), "anvil"}).synchronize(nil, nil, true); err != nil {
			t.Error(err)
		}
		f := fleet(t, at...)
		if len(f.Workers) != 1 || f.Workers[0].State != step.state || (step.state == "drained") != (f.Workers[0].Reason == "new kernel") {
			t.Errorf("got workers %+v, want anvil %s", f.Workers, step.state)
		}
		switch step.then {
		case "drain":
			wantOutput(t, 0, append([]string{"drain", "anvil", "--reason", "new kernel"}, at...), "drained anvil")
		case "undrain":
			wantOutput(t, 0, append([]string{"undrain", "anvil"}, at...), "undrained anvil")
		}
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestOperatorsOfAServerWithCallers checks that execute shows the status without others' names, and that operate may drain.
func TestOperatorsOfAServerWithCallers(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "auth.yaml")
	text := "version: 1\ncallers:\n"
	tokens := map[string]string{}
	for name, rights := range map[string]string{"builder": "read, write, execute", "other": "{execute: other}", "reader": "read", "operator": "operate"} {
		tokens[name] = filepath.Join(dir, name)
		if err := os.WriteFile(tokens[name], []byte(name+"-token\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		text += fmt.Sprintf("- {name: %s, token_sha256: %x, rights: [%s]}\n", name, sha256.Sum256([]byte(name+"-token")), rights)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, _ := start(t, "--auth", file, "--jobs", "1", "--drain-timeout", "100ms")
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	by := func(name string, args ...string) []string {
		return append(slices.Clone(args), "--cas", "grpc://"+s.Addr, "--token-file", tokens[name])
	}
	g := plain(t, s.Addr)
	g.ctx = metadata.AppendToOutgoingContext(g.ctx, "authorization", "Bearer builder-token")
	// It waits until a worker joins, and then runs as long as the test.
	wantOutput(t, 0, by("operator", "drain", "--reason", "try me"), "drained ")
	wantOutput(t, 1, by("builder", "status"), "try me (by operator)")
	wantOutput(t, 0, by("operator", "undrain"), "undrained ")
	mark := fmt.Sprint("87", os.Getpid())
	command := must(g.put("main", &repb.Command{Arguments: []string{"/bin/sleep", mark}}))
	action := must(g.put("main", &repb.Action{CommandDigest: command, InputRootDigest: must(g.put("main", &repb.Directory{}))}))
	if _, err := repb.NewExecutionClient(g).Execute(g.ctx, &repb.ExecuteRequest{InstanceName: "main", ActionDigest: action}); err != nil {
		t.Fatal(err)
	}
	until(t, "it runs", func() bool { return len(sandboxtest.Running(t, mark)) > 0 })
	wantOutput(t, 0, by("builder", "status"), action.Hash)
	wantOutput(t, 0, by("operator", "status"), action.Hash)
	if said := wantOutput(t, 0, by("other", "status"), "1 running"); strings.Contains(said.out, action.Hash) || strings.Contains(said.out, "main") {
		t.Errorf("caller of another instance: got\n%s\nwant no names", said.out)
	}
	for _, name := range []string{"builder", "other", "reader"} {
		wantOutput(t, 1, by(name, "drain"), "operate")
		wantOutput(t, 1, by(name, "undrain"), "operate")
	}
	wantOutput(t, 1, by("reader", "status"), "execute or operate")
}
