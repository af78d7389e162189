// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/loopback"
	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// join starts cloister join in the farm, with further flags.
func (b *buildbarn) join(t *testing.T, host string, flags ...string) *process {
	t.Helper()
	return b.joinWith(t, b.store.Addr, host, flags...)
}

// joinWith is join with another store.
func (b *buildbarn) joinWith(t *testing.T, store, host string, flags ...string) *process {
	t.Helper()
	return confining(t, append([]string{
		"join", "grpc://" + b.scheduler.Addr, "--cas", "grpc://" + store, "--name", host, "--jobs", "1",
		"--dir", t.TempDir(), "--max-size", "1GiB",
	}, flags...)...)
}

// marked returns a script with a unique mark in the command line of its shell, and the mark.
func marked(script string) (with, mark string) {
	mark = fmt.Sprintf("cloister-mark-%d-%d", os.Getpid(), time.Now().UnixNano())
	return script + "\n: " + mark, mark
}

// wantSome waits until there are processes.
func wantSome(t *testing.T, mark string) {
	t.Helper()
	must.Hold(t, "the action runs", func() bool { return len(sandboxtest.Running(t, mark)) > 0 })
}

// wantNone waits until there are no processes.
func wantNone(t *testing.T, mark string) {
	t.Helper()
	must.Hold(t, "the action's processes end", func() bool { return len(sandboxtest.Running(t, mark)) == 0 })
}

// TestJoinReplacesBuildbarnsWorker and its runner with Buildbarn's scheduler and a foreign store.
func TestJoinReplacesBuildbarnsWorker(t *testing.T) {
	for _, c := range []struct {
		name            string
		instance        string
		scheduler, join []string // flags
	}{
		{"QueueOfItsWorkers", "", nil, nil},
		{"Instance", "team/project", nil, []string{"--instance", "team"}},
		{"SizeClass", "", []string{"-declare", "-property", "os=linux", "-size-class", "8"}, []string{"--size-class", "8"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := farm(t, c.scheduler...)
			b.join(t, "one", append([]string{"--property", "os=linux"}, c.join...)...)
			wantExecutes(t, b.scheduler.Addr, c.instance)
		})
	}
}

// TestJoinPropagatesMetadataAndTrace from Buildbarn's scheduler: the result has the request metadata and the resource
// usage for Buildbarn's browser, and calls to the store are part of the trace.
func TestJoinPropagatesMetadataAndTrace(t *testing.T) {
	b := farm(t)
	r := relayTo(t, b.store.Addr)
	b.joinWith(t, r.addr, "one", "--property", "os=linux")
	d := action(t, dial(t, b.scheduler, ""), "cp in/name out/copy", time.Minute)
	result := request(withMetadata(t), b.scheduler.Addr, d).want(t)
	wantMetadata(t, result, &resourceusagepb.POSIXResourceUsage{})
	const wrote = "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult"
	if methods := r.methods(trace); !slices.Contains(methods, wrote) || len(methods) < 3 {
		t.Errorf("calls in the trace are %q, want reads, writes and %s", methods, wrote)
	}
}

// TestJoinKillsCancelledAction at the request of Buildbarn's scheduler, and takes the next one.
func TestJoinKillsCancelledAction(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-no-waiters", "500ms", "-busy", "500ms", "-update", "500ms")
	b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	script, mark := marked("sleep 600")
	ctx, cancel := context.WithCancel(t.Context())
	a := request(ctx, b.scheduler.Addr, action(t, store, script, time.Hour))
	wantSome(t, mark)
	cancel()
	<-a.ended
	wantNone(t, mark) // before another action would end it, too
	request(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
}

// TestJoinDrainsOnSIGTERM: it finishes its action and takes no more, so that another worker takes the next.
func TestJoinDrainsOnSIGTERM(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux")
	one := b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	script, mark := marked(`trap 'go=1' USR1; while [ "$go" = "" ]; do sleep 0.05; done`)
	first := request(t.Context(), b.scheduler.Addr, action(t, store, script, time.Minute))
	wantSome(t, mark)
	second := request(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute))
	b.wantTasks(t, 1, 1)
	must.Succeed(t, one.cmd.Process.Signal(syscall.SIGTERM))
	one.wantPrinted(t, "draining", 1)
	must.Hold(t, "the first action ends", func() bool { return sandboxtest.Signal(t, mark, syscall.SIGUSR1) > 0 })
	<-one.ended
	one.stop(t)
	expect.Text(t, first.want(t).GetExecutionMetadata().GetWorker(), "one", "the first action ran on")
	b.wantTasks(t, 1, 0)
	b.join(t, "two", "--property", "os=linux")
	expect.Text(t, second.want(t).GetExecutionMetadata().GetWorker(), "two", "the second action ran on")
}

func TestJoinIsDrainedByBuildbarnsScheduler(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-idle", "500ms")
	b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	request(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	const drain = `{"sizeClassQueueName": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}, "workerIdPattern": {"worker": "one"}}`
	b.state(t, "AddDrain", drain)
	a := request(t.Context(), b.scheduler.Addr, action(t, store, "exit 0", time.Minute))
	b.wantTasks(t, 1, 0)
	// A worker that is not drained would have taken it before this is answered.
	if workers := b.state(t, "ListWorkers", `{"filter": {"all": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}}, "pageSize": 10}`); !strings.Contains(workers, `"one"`) {
		t.Errorf("workers are %s, want one", workers)
	}
	b.wantTasks(t, 1, 0)
	b.state(t, "RemoveDrain", drain)
	a.want(t)
}

// TestKilledJoinLeavesNoProcess, its client learns the worker's name, and another worker executes.
func TestKilledJoinLeavesNoProcess(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-worker-timeout", "1s", "-busy", "500ms", "-update", "500ms")
	one := b.join(t, "one", "--property", "os=linux")
	d := func(script string) *repb.Digest { return action(t, dial(t, b.scheduler, ""), script, time.Hour) }
	script, mark := marked("sleep 600")
	lost := request(t.Context(), b.scheduler.Addr, d(script))
	wantSome(t, mark)
	one.kill()
	<-lost.ended
	err := lost.err
	if err == nil {
		err = status.ErrorProto(lost.response.GetStatus())
	}
	expect.That(t, status.Code(err) == codes.Unavailable && strings.Contains(err.Error(), `"one"`),
		"execution: %v, want UNAVAILABLE with the worker's name", err)
	wantNone(t, mark)
	b.join(t, "two", "--property", "os=linux")
	request(t.Context(), b.scheduler.Addr, d("true")).want(t)
}

// TestJoinSurvivesSchedulerCrash: it kills the abandoned action and takes actions from the next scheduler.
func TestJoinSurvivesSchedulerCrash(t *testing.T) {
	b := farm(t, "-busy", "500ms")
	one := b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.store, "")
	script, mark := marked("sleep 600")
	d := action(t, store, script, time.Hour)
	// Retry while there is no scheduler, but not with the next one.
	ctx, cancel := context.WithCancel(t.Context())
	a := request(ctx, b.scheduler.Addr, d)
	wantSome(t, mark)
	b.scheduler.Kill()
	cancel()
	<-a.ended
	b.schedule(t, b.scheduler.Addr)
	wantNone(t, mark)
	request(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	one.stop(t) // before the scheduler ends, for which it would wait a minute
}

// TestJoinTakesNoActionsWithoutStore and reports that it is not ready.
func TestJoinTakesNoActionsWithoutStore(t *testing.T) {
	t.Parallel()
	b := farm(t, "-declare", "-property", "os=linux")
	r := relayTo(t, b.store.Addr)
	metrics := must.Get(loopback.Address())(t)
	one := b.joinWith(t, r.addr, "one", "--property", "os=linux", "--metrics", metrics)
	store := dial(t, b.scheduler, "")
	request(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	wantReady(t, metrics, true)
	const notReady = "not ready for actions"
	before := strings.Count(one.out.String(), notReady)
	r.cut.Store(true)
	wantReady(t, metrics, false)
	one.wantPrinted(t, notReady, before+1)
	d := action(t, store, "exit 0", time.Minute)
	a := request(t.Context(), b.scheduler.Addr, d)
	// It may just have got one, which fails so that clients retry.
	for tries := 1; b.taken(t, a); tries++ {
		<-a.ended
		must.Be(t, tries != 5, "the worker keeps taking actions")
		if code := codes.Code(a.response.GetStatus().GetCode()); a.err != nil || code != codes.Unavailable {
			t.Fatalf("response is %v, %v, want UNAVAILABLE", a.response, a.err)
		}
		a = request(t.Context(), b.scheduler.Addr, d)
	}
	r.cut.Store(false)
	a.want(t)
	wantReady(t, metrics, true)
}

// taken reports whether a worker takes or has ended the only action, by the end of a call of BuildQueueState.
func (b *buildbarn) taken(t *testing.T, a *pendingAction) bool {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		select {
		case <-a.ended:
			return true
		default:
		}
		if queued, _ := b.tasks(t); queued == 1 {
			break
		}
		must.Be(t, !time.Now().After(deadline), "the action is neither queued nor ended")
	}
	b.state(t, "ListDrains", `{"sizeClassQueueName": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}}`)
	queued, _ := b.tasks(t)
	return queued == 0
}

// wantReady waits until /ready of a process has this answer.
func wantReady(t *testing.T, addr string, want bool) {
	t.Helper()
	must.Hold(t, fmt.Sprintf("/ready is %v", want), func() bool {
		r, err := http.Get("http://" + addr + "/ready")
		if err != nil {
			return false
		}
		r.Body.Close()
		return (r.StatusCode == http.StatusOK) == want
	})
}

// TestExamplesWithBuildbarnsScheduler builds and tests all examples with Buildbarn's scheduler, a foreign store and
// three cloister join. Results and stable hashes must equal those of cloister serve.
func TestExamplesWithBuildbarnsScheduler(t *testing.T) {
	t.Parallel()
	b := farm(t)
	for _, host := range []string{"one", "two", "three"} {
		b.join(t, host)
	}
	alone := listen(t)
	bazel := bazelFor(t)
	for _, bazel.Endpoint = range []string{b.scheduler.Addr, alone} {
		wantAll(t, bazel)
	}
	farmed, served := dial(t, b.scheduler, ""), dialAt(t, alone, "")
	equal, timed, workers := 0, 0, map[string]int{}
	for _, row := range executed(t, alone) {
		d := must.Get(cas.ParseDigest(row.Action))(t)
		here := must.Get(served.Lookup(t.Context(), d))(t)
		there, err := farmed.Lookup(t.Context(), d)
		switch {
		case errors.Is(err, cas.ErrNotFound) && row.Mnemonic == "TestRunner":
			// The action that makes a test.xml contains the duration of the test.
			timed++
			continue
		case err != nil:
			t.Errorf("%s of %s: %v", row.Mnemonic, row.Target, err)
			continue
		}
		workers[there.GetExecutionMetadata().GetWorker()]++
		if hash := stableHash(t, there); hash == "" || hash != row.StableHash {
			t.Errorf("%s of %s has stable hash %q, with serve %q; manifest is\n%s, with serve\n%s", row.Mnemonic, row.Target,
				hash, row.StableHash, manifestOf(t, b.scheduler.Addr, row.Action), manifestOf(t, alone, row.Action))
			continue
		}
		here.ExecutionMetadata, there.ExecutionMetadata = nil, nil
		if !proto.Equal(here, there) {
			t.Errorf("%s of %s: result is %v, with serve %v", row.Mnemonic, row.Target, there, here)
			continue
		}
		equal++
	}
	expect.That(t, equal >= 200, "%d results are equal, want at least 200", equal)
	expect.Equal(t, len(workers), 3, "results by worker are %v", workers)
	t.Logf("%d results are equal, %d in one build only, by worker %v", equal, timed, workers)
}

// An executedAction is an entry of a server's history.
type executedAction struct {
	Action, How, Target, Mnemonic string
	StableHash                    string `json:"stable_hash"`
}

// executed returns the actions that a cloister serve has executed.
func executed(t *testing.T, addr string) []executedAction {
	t.Helper()
	var rows []executedAction
	must.Succeed(t, json.Unmarshal(call(t, addr, "action", "ls", "--all", "--limit", "10000", "--json"), &rows))
	return slices.DeleteFunc(rows, func(r executedAction) bool { return r.How != "executed" })
}

// stableHash returns the stable hash in a result, or "".
func stableHash(t *testing.T, r *repb.ActionResult) string {
	t.Helper()
	execution := &cloisterpb.Execution{}
	for _, m := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		if !m.MessageIs(execution) {
			continue
		}
		must.Succeed(t, m.UnmarshalTo(execution))
	}
	return execution.StableHash
}

// manifestOf returns the manifest of an action's run.
func manifestOf(t *testing.T, addr, action string) []byte {
	t.Helper()
	return call(t, addr, "action", "show", action, "--manifest")
}

// call runs cloister with the address of a server and returns its output.
func call(t *testing.T, addr string, args ...string) []byte {
	t.Helper()
	program := must.Get(cloister())(t)
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, append(args, "--cas", "grpc://"+addr)...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		t.Errorf("cloister %v: %v\n%s%s", args, err, &errs, &out)
	}
	return out.Bytes()
}
