// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A head is cloister serve that executes nothing itself. Its workers find at one port the queue and the store.
type head struct {
	server           *bazelrun.Server
	config           bazelrun.ServerConfig
	clients, workers string // HOST:PORT
	metrics          string // HOST:PORT
}

// headOf starts a head with more flags; it ends with the test.
func headOf(t *testing.T, flags ...string) *head {
	t.Helper()
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	var addrs [3]string
	for i := range addrs {
		if addrs[i], err = peers.FreeAddress(); err != nil {
			t.Fatal(err)
		}
	}
	h := &head{clients: addrs[0], workers: addrs[1], metrics: addrs[2]}
	h.config = bazelrun.ServerConfig{
		Binary: program, Dir: t.TempDir(), Home: t.TempDir(), Listen: h.clients,
		Args: append([]string{"--jobs", "0", "--worker-listen", h.workers, "--metrics", h.metrics}, flags...),
	}
	h.start(t)
	t.Cleanup(func() {
		if h.server == nil {
			return
		}
		if err := h.server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return h
}

// start starts the program, at the addresses and with the store that it had before.
func (h *head) start(t *testing.T) {
	t.Helper()
	var err error
	if h.server, err = bazelrun.StartServer(t.Context(), h.config); err != nil {
		t.Fatal(err)
	}
}

// worker starts a worker of Buildbarn that takes actions from the head, with more flags. What it runs knows its host's name as $HOST.
func (h *head) worker(t *testing.T, host string, flags ...string) *peers.Server {
	t.Helper()
	flags = append([]string{"-property", "os=linux", "-property", "tool=cc", "-id", "host=" + host, "-env", "HOST=" + host}, flags...)
	return worker(t, peers.Options{Scheduler: h.workers, Store: h.workers, Args: flags})
}

// gauged matches a line of Prometheus' text format of one of the head's numbers of actions.
var gauged = regexp.MustCompile(`(?m)^cloister_actions_(queued|running) (\S+)$`)

// wantActions waits until so many actions are queued and running, as the head says.
func (h *head) wantActions(t *testing.T, queued, running string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		n := map[string]string{}
		for _, m := range gauged.FindAllStringSubmatch(string(scrape(t, h.metrics)), -1) {
			n[m[1]] = m[2]
		}
		if n["queued"] == queued && n["running"] == running {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("actions are %v, want that %s are queued and %s running", n, queued, running)
		}
	}
}

// An asked is an action that somebody waits for.
type asked struct {
	response *repb.ExecuteResponse
	err      error
	ended    chan struct{} // closed once the rest is known
}

// ask has an action executed at an address.
func ask(ctx context.Context, addr string, action *repb.Digest) *asked {
	a := &asked{ended: make(chan struct{})}
	go func() {
		defer close(a.ended)
		a.response, a.err = execute(ctx, addr, "", action)
	}()
	return a
}

// want fails the test unless the action has a result with exit code 0, and returns that.
func (a *asked) want(t *testing.T) *repb.ActionResult {
	t.Helper()
	<-a.ended
	if a.err != nil || a.response.GetStatus().GetCode() != 0 || a.response.GetResult().GetExitCode() != 0 {
		t.Fatalf("response is %v, %v, want a result with exit code 0", a.response, a.err)
	}
	return a.response.GetResult()
}

// A gate holds back actions until it opens. Those who come to it leave a line.
type gate struct{ dir string }

func newGate(t *testing.T) gate {
	t.Helper()
	dir, err := os.MkdirTemp("", "cloister-gate-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return gate{dir}
}

// script leaves a line at the gate, as echo writes it, and waits.
func (g gate) script(line string) string {
	return fmt.Sprintf("echo %s >> %s/came; until test -e %s/open; do sleep 0.05; done", line, g.dir, g.dir)
}

func (g gate) open(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(g.dir, "open"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

// came waits until there are n lines, and returns them.
func (g gate) came(t *testing.T, n int) []string {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(g.dir, "came"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		if lines = lines[:len(lines)-1]; len(lines) >= n {
			return lines
		}
		if time.Now().After(deadline) {
			t.Fatalf("to the gate came %q, want %d", lines, n)
		}
	}
}

// wantGone waits until a process has ended.
func wantGone(t *testing.T, pid string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if errors.Is(err, os.ErrNotExist) || bytes.Contains(stat, []byte(") Z ")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s has not ended: %s, %v", pid, stat, err)
		}
	}
}

// ranOn returns the host of the worker that a result names.
func ranOn(t *testing.T, r *repb.ActionResult) string {
	t.Helper()
	id := map[string]string{}
	if err := json.Unmarshal([]byte(r.GetExecutionMetadata().GetWorker()), &id); err != nil {
		t.Fatalf("worker is %q: %v", r.GetExecutionMetadata().GetWorker(), err)
	}
	return id["host"]
}

// TestHeadHasBuildbarnsWorker: a worker of Buildbarn takes actions from cloister serve, reads their inputs there,
// writes what they made, and records their results, for all instances below the one that it names.
func TestHeadHasBuildbarnsWorker(t *testing.T) {
	h := headOf(t)
	h.worker(t, "one", "-threads", "2")
	wantExecutes(t, h.clients, "")
	wantExecutes(t, h.clients, "team/project")
	team := headOf(t)
	team.worker(t, "one", "-instance", "team")
	wantExecutes(t, team.clients, "team/project")
}

// What a client says of itself in the tests of that: who it is, and of which trace it is a part.
const (
	trace  = "0af7651916cd43dd8448eb211c80319c"
	target = "//some:target"
)

// sayWho returns a context with which a client says who it is.
func sayWho(t *testing.T) context.Context {
	t.Helper()
	who, err := proto.Marshal(&repb.RequestMetadata{
		TargetId: target, ActionMnemonic: "Some", ToolInvocationId: "an-invocation", CorrelatedInvocationsId: "a-correlated",
	})
	if err != nil {
		t.Fatal(err)
	}
	return metadata.AppendToOutgoingContext(t.Context(),
		"build.bazel.remote.execution.v2.requestmetadata-bin", string(who), "traceparent", "00-"+trace+"-b7ad6b7169203331-01")
}

// wantWho fails the test unless a result has what sayWho says, and what of some kind the worker has added.
func wantWho(t *testing.T, r *repb.ActionResult, added proto.Message) {
	t.Helper()
	who, found := &repb.RequestMetadata{}, false
	for _, m := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		if m.MessageIs(who) {
			if err := m.UnmarshalTo(who); err != nil {
				t.Fatal(err)
			}
		}
		found = found || m.MessageIs(added)
	}
	if who.TargetId != target || who.ActionMnemonic != "Some" || who.ToolInvocationId != "an-invocation" || who.CorrelatedInvocationsId != "a-correlated" {
		t.Errorf("the result is of %v, want what the client said of itself", who)
	}
	if !found {
		t.Errorf("the result has no %T", added)
	}
}

// TestHeadSaysWhoAsks: a worker of Buildbarn is told who asks for an action, which is in the result, and of which trace
// that is a part, which its own calls take up.
func TestHeadSaysWhoAsks(t *testing.T) {
	h := headOf(t)
	r := relayTo(t, h.workers)
	worker(t, peers.Options{Scheduler: h.workers, Store: r.addr, Args: []string{"-property", "os=linux", "-id", "host=one"}})
	d := action(t, dialAt(t, h.clients, ""), "cp in/name out/copy", time.Minute)
	wantWho(t, ask(sayWho(t), h.clients, d).want(t), &resourceusagepb.POSIXResourceUsage{})
	const read, wrote = "/google.bytestream.ByteStream/Read", "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult"
	if methods := r.methods(trace); !slices.Contains(methods, read) || !slices.Contains(methods, wrote) {
		t.Errorf("parts of the trace are %q, want %s and %s", methods, read, wrote)
	}
}

// TestHeadKnowsThreadsOfBuildbarnsWorker: each thread of a worker of Buildbarn is a slot, so that two actions run at
// once, and not three.
func TestHeadKnowsThreadsOfBuildbarnsWorker(t *testing.T) {
	h, g := headOf(t), newGate(t)
	h.worker(t, "one", "-threads", "2")
	store := dialAt(t, h.clients, "")
	var all []*asked
	for i := range 3 {
		all = append(all, ask(t.Context(), h.clients, action(t, store, g.script(strconv.Itoa(i)), time.Minute)))
	}
	g.came(t, 2)
	h.wantActions(t, "1", "2")
	g.open(t)
	var workers []string
	for _, a := range all {
		workers = append(workers, a.want(t).GetExecutionMetadata().GetWorker())
	}
	slices.Sort(workers)
	if want := []string{`{"host":"one","thread":"0"}`, `{"host":"one","thread":"1"}`}; !slices.Equal(slices.Compact(workers), want) {
		t.Errorf("workers are %q, want %q", workers, want)
	}
}

// TestHeadCancelsAtBuildbarnsWorker: when a client does not want an action any more, its process at a worker of
// Buildbarn ends, and the worker takes the next action.
func TestHeadCancelsAtBuildbarnsWorker(t *testing.T) {
	// A worker is told when it calls the next time, which is after a third of this.
	h, g := headOf(t, "--worker-timeout", "3s"), newGate(t)
	h.worker(t, "one")
	store := dialAt(t, h.clients, "")
	conn, err := grpc.NewClient(h.clients, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	d := action(t, store, g.script("$$"), time.Hour)
	stream, err := repb.NewExecutionClient(conn).Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d, SkipCacheLookup: true})
	if err != nil {
		t.Fatal(err)
	}
	op, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	pid := g.came(t, 1)[0]
	if _, err := longrunningpb.NewOperationsClient(conn).CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: op.Name}); err != nil {
		t.Fatal(err)
	}
	for !op.Done && err == nil {
		op, err = stream.Recv()
	}
	response := &repb.ExecuteResponse{}
	if err == nil {
		err = op.GetResponse().UnmarshalTo(response)
	}
	if err != nil || codes.Code(response.GetStatus().GetCode()) != codes.Canceled {
		t.Errorf("response is %v, %v, want that it is cancelled", response, err)
	}
	wantGone(t, pid)
	ask(t.Context(), h.clients, action(t, store, "true", time.Minute)).want(t)
}

// TestHeadLosesBuildbarnsWorker: what a worker of Buildbarn executed that ends without a word runs on another, and the
// client does not notice.
func TestHeadLosesBuildbarnsWorker(t *testing.T) {
	h, g := headOf(t, "--worker-timeout", "3s"), newGate(t)
	workers := map[string]*peers.Server{"one": h.worker(t, "one"), "two": h.worker(t, "two")}
	store := dialAt(t, h.clients, "")
	a := ask(t.Context(), h.clients, action(t, store, g.script("$HOST"), time.Minute))
	lost := g.came(t, 1)[0]
	workers[lost].Kill()
	other := g.came(t, 2)[1]
	if other == lost || workers[other] == nil {
		t.Errorf("after %s it ran on %q, want the other one", lost, other)
	}
	g.open(t)
	if result := a.want(t); ranOn(t, result) != other {
		t.Errorf("worker is %s, want %s", result.GetExecutionMetadata().GetWorker(), other)
	}
}

// TestHeadDrainsWithBuildbarnsWorker: when the head is told to end, an action that a worker of Buildbarn executes
// still ends with its result. Whoever asks for more is to ask again elsewhere.
func TestHeadDrainsWithBuildbarnsWorker(t *testing.T) {
	h, g := headOf(t, "--drain-timeout", "15s"), newGate(t)
	w := h.worker(t, "one")
	store := dialAt(t, h.clients, "")
	more := action(t, store, "true", time.Minute)
	a := ask(t.Context(), h.clients, action(t, store, g.script("came"), time.Minute))
	g.came(t, 1)
	server := h.server
	h.server = nil
	ended := make(chan error, 1)
	go func() { ended <- server.Stop() }()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		response, err := executeOnce(ctx, h.clients, "", more)
		cancel()
		if err == nil {
			err = status.ErrorProto(response.GetStatus())
		}
		if status.Code(err) == codes.Unavailable {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("an action that is asked for while the head drains ends with %v, want that it is unavailable", err)
			break
		}
	}
	g.open(t)
	a.want(t)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	w.Kill() // told to end, it waits a minute for the head
}

// TestHeadComesBackToBuildbarnsWorker: after a crash of the head, a worker of Buildbarn ends what nobody waits for any
// more, and takes actions of the next one.
func TestHeadComesBackToBuildbarnsWorker(t *testing.T) {
	h, g := headOf(t, "--worker-timeout", "3s"), newGate(t)
	h.worker(t, "one")
	a := ask(t.Context(), h.clients, action(t, dialAt(t, h.clients, ""), g.script("$$"), time.Hour))
	pid := g.came(t, 1)[0]
	h.server.Kill()
	h.start(t)
	if again := g.came(t, 2)[1]; again == pid {
		t.Errorf("the process is %s both times", pid)
	}
	wantGone(t, pid) // though the gate is shut
	g.open(t)
	a.want(t)
}

// TestBazelBuildsWithHeadAndBuildbarnsWorker: Bazel builds at the head with a worker of Buildbarn.
func TestBazelBuildsWithHeadAndBuildbarnsWorker(t *testing.T) {
	h := headOf(t)
	h.worker(t, "one", "-threads", "2")
	bazel := bazelFor(t)
	bazel.Endpoint = h.clients
	wantAll(t, bazel)
}
