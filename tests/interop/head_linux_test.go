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
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/grpctest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A head is a cloister serve without slots. Workers reach its queue and store at one port.
type head struct {
	server           *bazelrun.Server
	config           bazelrun.ServerConfig
	clients, workers string // HOST:PORT
	metrics          string // HOST:PORT
}

// newHead starts a head with further flags.
func newHead(t *testing.T, flags ...string) *head {
	t.Helper()
	program := must.Get(cloister())(t)
	var addrs [3]string
	for i := range addrs {
		addrs[i] = must.Get(loopback.Address())(t)
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
		must.Succeed(t, h.server.Stop())
	})
	return h
}

// start starts or restarts the program at its addresses and with its store.
func (h *head) start(t *testing.T) {
	t.Helper()
	h.server = must.Get(bazelrun.StartServer(t.Context(), h.config))(t)
}

// worker starts a Buildbarn worker for the head, with further flags. Its commands find the name of the host in $HOST.
func (h *head) worker(t *testing.T, host string, flags ...string) *peers.Server {
	t.Helper()
	flags = append([]string{"-property", "os=linux", "-property", "tool=cc", "-id", "host=" + host, "-env", "HOST=" + host}, flags...)
	return worker(t, peers.Options{Scheduler: h.workers, Store: h.workers, Args: flags})
}

// gauged matches the head's action gauges in Prometheus text format.
var gauged = regexp.MustCompile(`(?m)^cloister_actions_(queued|running) (\S+)$`)

// wantActions waits until the head reports these numbers of queued and running actions.
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
		must.Be(t, !time.Now().After(deadline), "actions are %v, want %s queued and %s running", n, queued, running)
	}
}

// A pendingAction is an action that was requested.
type pendingAction struct {
	response *repb.ExecuteResponse
	err      error
	ended    chan struct{} // closed when the other fields are set
}

// request starts to execute an action.
func request(ctx context.Context, addr string, action *repb.Digest) *pendingAction {
	a := &pendingAction{ended: make(chan struct{})}
	go func() {
		defer close(a.ended)
		a.response, a.err = execute(ctx, addr, "", action)
	}()
	return a
}

// want waits for the result, which must have exit code 0.
func (a *pendingAction) want(t *testing.T) *repb.ActionResult {
	t.Helper()
	<-a.ended
	must.Be(t, a.err == nil && a.response.GetStatus().GetCode() == 0 && a.response.GetResult().GetExitCode() == 0,
		"response is %v, %v, want exit code 0", a.response, a.err)
	return a.response.GetResult()
}

// A barrier holds actions until it opens. Each action that arrives writes a line.
type barrier struct{ dir string }

func newBarrier(t *testing.T) barrier {
	t.Helper()
	dir := must.Get(os.MkdirTemp("", "cloister-barrier-"))(t)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(dir)) })
	return barrier{dir}
}

// script returns a script that writes a line and waits.
func (b barrier) script(line string) string {
	return fmt.Sprintf("echo %s >> %s/arrived; until test -e %s/open; do sleep 0.05; done", line, b.dir, b.dir)
}

func (b barrier) open(t *testing.T) {
	t.Helper()
	must.Succeed(t, os.WriteFile(filepath.Join(b.dir, "open"), nil, 0o644))
}

// arrived waits for n lines and returns them.
func (b barrier) arrived(t *testing.T, n int) []string {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		text, err := os.ReadFile(filepath.Join(b.dir, "arrived"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		lines := strings.Split(string(text), "\n")
		if lines = lines[:len(lines)-1]; len(lines) >= n {
			return lines
		}
		must.Be(t, !time.Now().After(deadline), "lines are %q, want %d", lines, n)
	}
}

// wantGone waits until a process has ended.
func wantGone(t *testing.T, pid string) {
	t.Helper()
	must.Hold(t, "process "+pid+" ends", func() bool {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		return errors.Is(err, os.ErrNotExist) || bytes.Contains(stat, []byte(") Z "))
	})
}

// ranOn returns the host in a result's worker name.
func ranOn(t *testing.T, r *repb.ActionResult) string {
	t.Helper()
	id := map[string]string{}
	if err := json.Unmarshal([]byte(r.GetExecutionMetadata().GetWorker()), &id); err != nil {
		t.Fatalf("worker is %q: %v", r.GetExecutionMetadata().GetWorker(), err)
	}
	return id["host"]
}

// TestHeadServesBuildbarnsWorker with actions and as store and action cache, for all instances below the worker's.
func TestHeadServesBuildbarnsWorker(t *testing.T) {
	h := newHead(t)
	h.worker(t, "one", "-threads", "2")
	wantExecutes(t, h.clients, "")
	wantExecutes(t, h.clients, "team/project")
	team := newHead(t)
	team.worker(t, "one", "-instance", "team")
	wantExecutes(t, team.clients, "team/project")
}

// Parts of the metadata of withMetadata.
const (
	trace  = "0af7651916cd43dd8448eb211c80319c"
	target = "//some:target"
)

// withMetadata returns a context with request metadata and a trace.
func withMetadata(t *testing.T) context.Context {
	t.Helper()
	md, err := proto.Marshal(&repb.RequestMetadata{
		TargetId: target, ActionMnemonic: "Some", ToolInvocationId: "an-invocation", CorrelatedInvocationsId: "a-correlated",
	})
	must.Succeed(t, err)
	return metadata.AppendToOutgoingContext(t.Context(),
		"build.bazel.remote.execution.v2.requestmetadata-bin", string(md), "traceparent", "00-"+trace+"-b7ad6b7169203331-01")
}

// wantMetadata checks that a result has the metadata of withMetadata and a message added by the worker.
func wantMetadata(t *testing.T, r *repb.ActionResult, added proto.Message) {
	t.Helper()
	md, found := &repb.RequestMetadata{}, false
	for _, m := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		if m.MessageIs(md) {
			must.Succeed(t, m.UnmarshalTo(md))
		}
		found = found || m.MessageIs(added)
	}
	if md.TargetId != target || md.ActionMnemonic != "Some" || md.ToolInvocationId != "an-invocation" || md.CorrelatedInvocationsId != "a-correlated" {
		t.Errorf("request metadata of the result are %v, want the client's", md)
	}
	expect.That(t, found, "the result has no %T", added)
}

// TestHeadPropagatesMetadataAndTrace to Buildbarn's worker.
func TestHeadPropagatesMetadataAndTrace(t *testing.T) {
	h := newHead(t)
	r := relayTo(t, h.workers)
	worker(t, peers.Options{Scheduler: h.workers, Store: r.addr, Args: []string{"-property", "os=linux", "-id", "host=one"}})
	d := action(t, dialAt(t, h.clients, ""), "cp in/name out/copy", time.Minute)
	wantMetadata(t, request(withMetadata(t), h.clients, d).want(t), &resourceusagepb.POSIXResourceUsage{})
	const read, wrote = "/google.bytestream.ByteStream/Read", "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult"
	if methods := r.methods(trace); !slices.Contains(methods, read) || !slices.Contains(methods, wrote) {
		t.Errorf("calls in the trace are %q, want %s and %s", methods, read, wrote)
	}
}

// TestThreadsOfBuildbarnsWorkerAreSlots so that two of three actions run at once.
func TestThreadsOfBuildbarnsWorkerAreSlots(t *testing.T) {
	h, g := newHead(t), newBarrier(t)
	h.worker(t, "one", "-threads", "2")
	store := dialAt(t, h.clients, "")
	var all []*pendingAction
	for i := range 3 {
		all = append(all, request(t.Context(), h.clients, action(t, store, g.script(strconv.Itoa(i)), time.Minute)))
	}
	g.arrived(t, 2)
	h.wantActions(t, "1", "2")
	g.open(t)
	var workers []string
	for _, a := range all {
		workers = append(workers, a.want(t).GetExecutionMetadata().GetWorker())
	}
	slices.Sort(workers)
	expect.Slices(t, slices.Compact(workers), []string{`{"host":"one","thread":"0"}`, `{"host":"one","thread":"1"}`}, "workers")
}

// TestHeadCancelsActionOfBuildbarnsWorker, whose process ends, and which takes the next action.
func TestHeadCancelsActionOfBuildbarnsWorker(t *testing.T) {
	// A worker calls after a third of this time.
	h, g := newHead(t, "--worker-timeout", "10s"), newBarrier(t)
	h.worker(t, "one")
	store := dialAt(t, h.clients, "")
	conn := grpctest.Dial(t, h.clients)
	d := action(t, store, g.script("$$"), time.Hour)
	stream, err := repb.NewExecutionClient(conn).Execute(t.Context(), &repb.ExecuteRequest{ActionDigest: d, SkipCacheLookup: true})
	must.Succeed(t, err)
	op := must.Get(stream.Recv())(t)
	pid := g.arrived(t, 1)[0]
	must.Get(longrunningpb.NewOperationsClient(conn).CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: op.Name}))(t)
	for !op.Done && err == nil {
		op, err = stream.Recv()
	}
	response := &repb.ExecuteResponse{}
	if err == nil {
		err = op.GetResponse().UnmarshalTo(response)
	}
	expect.That(t, err == nil && codes.Code(response.GetStatus().GetCode()) == codes.Canceled,
		"response is %v, %v, want CANCELED", response, err)
	wantGone(t, pid)
	request(t.Context(), h.clients, action(t, store, "true", time.Minute)).want(t)
}

// TestActionOfALostBuildbarnWorkerRunsElsewhere unnoticed by its client.
func TestActionOfALostBuildbarnWorkerRunsElsewhere(t *testing.T) {
	h, g := newHead(t, "--worker-timeout", "10s"), newBarrier(t)
	workers := map[string]*peers.Server{"one": h.worker(t, "one"), "two": h.worker(t, "two")}
	store := dialAt(t, h.clients, "")
	a := request(t.Context(), h.clients, action(t, store, g.script("$HOST"), time.Minute))
	lost := g.arrived(t, 1)[0]
	workers[lost].Kill()
	other := g.arrived(t, 2)[1]
	expect.That(t, other != lost && workers[other] != nil, "after %s it ran on %q, want the other worker", lost, other)
	g.open(t)
	if result := a.want(t); ranOn(t, result) != other {
		t.Errorf("worker is %s, want %s", result.GetExecutionMetadata().GetWorker(), other)
	}
}

// TestHeadDrainsActionsOfBuildbarnsWorker on SIGTERM, and refuses new ones as UNAVAILABLE.
func TestHeadDrainsActionsOfBuildbarnsWorker(t *testing.T) {
	h, g := newHead(t, "--drain-timeout", "15s"), newBarrier(t)
	w := h.worker(t, "one")
	store := dialAt(t, h.clients, "")
	more := action(t, store, "true", time.Minute)
	a := request(t.Context(), h.clients, action(t, store, g.script("arrived"), time.Minute))
	g.arrived(t, 1)
	server := h.server
	h.server = nil
	ended := make(chan error, 1)
	go func() { ended <- server.Stop() }()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
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
			t.Errorf("action requested while the head drains: %v, want UNAVAILABLE", err)
			break
		}
	}
	g.open(t)
	a.want(t)
	must.Succeed(t, <-ended)
	w.Kill() // on SIGTERM it would wait a minute for the head
}

// TestBuildbarnsWorkerSurvivesHeadCrash: it kills the abandoned action and takes actions from the restarted head.
func TestBuildbarnsWorkerSurvivesHeadCrash(t *testing.T) {
	h, g := newHead(t, "--worker-timeout", "10s"), newBarrier(t)
	h.worker(t, "one")
	a := request(t.Context(), h.clients, action(t, dialAt(t, h.clients, ""), g.script("$$"), time.Hour))
	pid := g.arrived(t, 1)[0]
	h.server.Kill()
	h.start(t)
	expect.That(t, g.arrived(t, 2)[1] != pid, "the process is %s again, want another", pid)
	wantGone(t, pid) // the barrier is closed
	g.open(t)
	a.want(t)
}

func TestBazelBuildsWithHeadAndBuildbarnsWorker(t *testing.T) {
	t.Parallel()
	h := newHead(t)
	h.worker(t, "one", "-threads", "2")
	bazel := bazelFor(t)
	bazel.Endpoint = h.clients
	wantAll(t, bazel)
}
