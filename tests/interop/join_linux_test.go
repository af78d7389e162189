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
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	resourceusagepb "github.com/cloister-build/cloister/proto/buildbarn/resourceusage"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/tests/interop/peers"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// join starts a worker of ours in the farm, with more flags; it ends with the test.
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

// marked returns a script that can be found while it runs, and a function that returns the ids of its processes.
func marked(t *testing.T, script string) (string, func() []string) {
	mark := fmt.Sprintf("cloister-mark-%d-%d", os.Getpid(), time.Now().UnixNano())
	return script + "\n: " + mark, func() []string {
		t.Helper()
		names, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		var pids []string
		for _, name := range names {
			// A process may end between being listed and being read.
			if cmdline, _ := os.ReadFile(name); bytes.Contains(cmdline, []byte(mark)) {
				pids = append(pids, filepath.Base(filepath.Dir(name)))
			}
		}
		return pids
	}
}

// wantSome waits until there are processes, and wantNone until there are none.
func wantSome(t *testing.T, pids func() []string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); len(pids()) == 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the action does not run")
		}
	}
}

func wantNone(t *testing.T, pids func() []string) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); len(pids()) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("processes %v of the action are alive", pids())
		}
	}
}

// TestJoinTakesThePlaceOfBuildbarns: with cloister join for bb_worker and bb_runner, Buildbarn's scheduler and a store
// of others execute as before.
func TestJoinTakesThePlaceOfBuildbarns(t *testing.T) {
	for _, c := range []struct {
		name            string
		instance        string
		scheduler, join []string // more flags
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

// TestJoinSaysWhoAsks: what Buildbarn's scheduler says of who asks for an action is in the result, beside what
// Buildbarn's browser shows of a run, and the calls for that action take up the trace that it is a part of.
func TestJoinSaysWhoAsks(t *testing.T) {
	b := farm(t)
	r := relayTo(t, b.store.Addr)
	b.joinWith(t, r.addr, "one", "--property", "os=linux")
	d := action(t, dial(t, b.scheduler, ""), "cp in/name out/copy", time.Minute)
	result := ask(sayWho(t), b.scheduler.Addr, d).want(t)
	wantWho(t, result, &resourceusagepb.POSIXResourceUsage{})
	const wrote = "/build.bazel.remote.execution.v2.ActionCache/UpdateActionResult"
	if methods := r.methods(trace); !slices.Contains(methods, wrote) || len(methods) < 3 {
		t.Errorf("parts of the trace are %q, want those by which inputs are read and outputs written, and %s", methods, wrote)
	}
}

// TestJoinIsCancelled: when nobody waits for an action any more, Buildbarn's scheduler tells the worker to be idle. Then
// no process of the action is left, and the worker takes the next one.
func TestJoinIsCancelled(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-no-waiters", "500ms", "-busy", "500ms", "-update", "500ms")
	b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	script, pids := marked(t, "sleep 600")
	ctx, cancel := context.WithCancel(t.Context())
	a := ask(ctx, b.scheduler.Addr, action(t, store, script, time.Hour))
	wantSome(t, pids)
	cancel()
	<-a.ended
	wantNone(t, pids) // another action would end it as well
	ask(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
}

// TestJoinDrains: a worker that is told to end finishes what it executes, takes nothing more, and ends. What waits goes
// to another.
func TestJoinDrains(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux")
	one := b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	script, pids := marked(t, "sleep 3")
	first := ask(t.Context(), b.scheduler.Addr, action(t, store, script, time.Minute))
	wantSome(t, pids)
	second := ask(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute))
	b.wantTasks(t, 1, 1)
	one.stop(t)
	if w := first.want(t).GetExecutionMetadata().GetWorker(); !strings.Contains(w, "one") {
		t.Errorf("the first action ran on %q, want one", w)
	}
	b.wantTasks(t, 1, 0)
	b.join(t, "two", "--property", "os=linux")
	if w := second.want(t).GetExecutionMetadata().GetWorker(); !strings.Contains(w, "two") {
		t.Errorf("the second action ran on %q, want two", w)
	}
}

// TestJoinIsDrained: a worker that operators of Buildbarn's scheduler drain is given nothing until they end that.
func TestJoinIsDrained(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-idle", "500ms")
	b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.scheduler, "")
	ask(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	const drain = `{"sizeClassQueueName": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}, "workerIdPattern": {"worker": "one"}}`
	b.state(t, "AddDrain", drain)
	a := ask(t.Context(), b.scheduler.Addr, action(t, store, "exit 0", time.Minute))
	b.wantTasks(t, 1, 0)
	// By the time that this is answered, a worker that is not drained has long since taken it.
	if workers := b.state(t, "ListWorkers", `{"filter": {"all": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}}, "pageSize": 10}`); !strings.Contains(workers, `"one"`) {
		t.Errorf("workers are %s", workers)
	}
	b.wantTasks(t, 1, 0)
	b.state(t, "RemoveDrain", drain)
	a.want(t)
}

// TestJoinIsKilled: when a worker is killed, no process of what it executes is left, Buildbarn's scheduler tells the
// client who was lost, and the action runs on another.
func TestJoinIsKilled(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux", "-worker-timeout", "1s", "-busy", "500ms", "-update", "500ms")
	one := b.join(t, "one", "--property", "os=linux")
	d := func(script string) *repb.Digest { return action(t, dial(t, b.scheduler, ""), script, time.Hour) }
	script, pids := marked(t, "sleep 600")
	lost := ask(t.Context(), b.scheduler.Addr, d(script))
	wantSome(t, pids)
	one.kill()
	<-lost.ended
	err := lost.err
	if err == nil {
		err = status.ErrorProto(lost.response.GetStatus())
	}
	if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), `"one"`) {
		t.Errorf("execution ends with %v, want that it is unavailable and names the worker", err)
	}
	wantNone(t, pids)
	b.join(t, "two", "--property", "os=linux")
	ask(t.Context(), b.scheduler.Addr, d("true")).want(t)
}

// TestJoinOutlivesScheduler: after a crash of Buildbarn's scheduler, a worker ends what nobody waits for any more, and
// takes actions of the next one.
func TestJoinOutlivesScheduler(t *testing.T) {
	b := farm(t, "-busy", "500ms")
	one := b.join(t, "one", "--property", "os=linux")
	store := dial(t, b.store, "")
	script, pids := marked(t, "sleep 600")
	d := action(t, store, script, time.Hour)
	// It is asked for again, as long as there is no scheduler, but not of the next one.
	ctx, cancel := context.WithCancel(t.Context())
	a := ask(ctx, b.scheduler.Addr, d)
	wantSome(t, pids)
	b.scheduler.Kill()
	cancel()
	<-a.ended
	b.schedule(t, b.scheduler.Addr)
	wantNone(t, pids)
	ask(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	one.stop(t) // once the scheduler has gone, it waits a minute for that
}

// TestJoinWaitsForStore: a worker without its store is not ready, and takes no actions, which therefore wait. Once
// the store is back it takes them.
func TestJoinWaitsForStore(t *testing.T) {
	b := farm(t, "-declare", "-property", "os=linux")
	r := relayTo(t, b.store.Addr)
	metrics, err := peers.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	one := b.joinWith(t, r.addr, "one", "--property", "os=linux", "--metrics", metrics)
	store := dial(t, b.scheduler, "")
	ask(t.Context(), b.scheduler.Addr, action(t, store, "true", time.Minute)).want(t)
	wantReady(t, metrics, true)
	const shut = "not ready for actions"
	before := strings.Count(one.said.String(), shut)
	r.cut.Store(true)
	wantReady(t, metrics, false)
	one.wantSaid(t, shut, before+1)
	d := action(t, store, "exit 0", time.Minute)
	a := ask(t.Context(), b.scheduler.Addr, d)
	// It may just have been given one. That ends with a failure, at which clients ask again.
	for tries := 1; b.taken(t, a); tries++ {
		<-a.ended
		if tries == 5 {
			t.Fatal("the worker goes on taking actions")
		}
		if code := codes.Code(a.response.GetStatus().GetCode()); a.err != nil || code != codes.Unavailable {
			t.Fatalf("response is %v, %v, want that it is unavailable", a.response, a.err)
		}
		a = ask(t.Context(), b.scheduler.Addr, d)
	}
	r.cut.Store(false)
	a.want(t)
	wantReady(t, metrics, true)
}

// taken reports whether a worker takes the only action that is asked for, or has ended it, within the time of a call of
// BuildQueueState.
func (b *buildbarn) taken(t *testing.T, a *asked) bool {
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
		if time.Now().After(deadline) {
			t.Fatal("the action does not wait, and does not end")
		}
	}
	b.state(t, "ListDrains", `{"sizeClassQueueName": {"platformQueueName": {"platform": {"properties": [{"name": "os", "value": "linux"}]}}}}`)
	queued, _ := b.tasks(t)
	return queued == 0
}

// wantReady waits until a process says at /ready of an address that it is ready, or that it is not.
func wantReady(t *testing.T, addr string, want bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		r, err := http.Get("http://" + addr + "/ready")
		if err == nil {
			r.Body.Close()
			if (r.StatusCode == http.StatusOK) == want {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("ready is %v, %v, want %v", r, err, want)
		}
	}
}

// TestExampleWithBuildbarnsScheduler: Bazel builds and tests all of the example with Buildbarn's scheduler, a store of
// others and three workers of ours. Each result is that of cloister serve, digest for digest, and so is the stable
// hash of each run.
func TestExampleWithBuildbarnsScheduler(t *testing.T) {
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
		d, err := cas.ParseDigest(row.Action)
		if err != nil {
			t.Fatal(err)
		}
		here, err := served.Lookup(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		there, err := farmed.Lookup(t.Context(), d)
		switch {
		case errors.Is(err, cas.ErrNotFound) && row.Mnemonic == "TestRunner":
			// Bazel writes into the action that makes a test.xml how many seconds the test has taken.
			timed++
			continue
		case err != nil:
			t.Errorf("%s of %s: %v", row.Mnemonic, row.Target, err)
			continue
		}
		workers[there.GetExecutionMetadata().GetWorker()]++
		if hash := stableHash(t, there); hash == "" || hash != row.StableHash {
			t.Errorf("%s of %s has the stable hash %q, and at serve %q; its record is\n%s, and at serve\n%s", row.Mnemonic, row.Target,
				hash, row.StableHash, manifestOf(t, b.scheduler.Addr, row.Action), manifestOf(t, alone, row.Action))
			continue
		}
		here.ExecutionMetadata, there.ExecutionMetadata = nil, nil
		if !proto.Equal(here, there) {
			t.Errorf("%s of %s is %v, and at serve %v", row.Mnemonic, row.Target, there, here)
			continue
		}
		equal++
	}
	if equal < 200 {
		t.Errorf("%d results are equal, want at least 200", equal)
	}
	if len(workers) != 3 {
		t.Errorf("of workers are so many results: %v, want some of all three", workers)
	}
	t.Logf("%d results are equal, %d of one build alone, by worker %v", equal, timed, workers)
}

// A ran is an action that a server has executed.
type ran struct {
	Action, How, Target, Mnemonic string
	StableHash                    string `json:"stable_hash"`
}

// executed returns the actions that cloister serve at an address has executed.
func executed(t *testing.T, addr string) []ran {
	t.Helper()
	var rows []ran
	if err := json.Unmarshal(call(t, addr, "action", "ls", "--all", "-n", "10000", "--json"), &rows); err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(rows, func(r ran) bool { return r.How != "executed" })
}

// stableHash returns what a result says of its run, "" if it says nothing.
func stableHash(t *testing.T, r *repb.ActionResult) string {
	t.Helper()
	said := &cloisterpb.Execution{}
	for _, m := range r.GetExecutionMetadata().GetAuxiliaryMetadata() {
		if !m.MessageIs(said) {
			continue
		}
		if err := m.UnmarshalTo(said); err != nil {
			t.Fatal(err)
		}
	}
	return said.StableHash
}

// manifestOf returns the record of the run of an action that has a result at an address.
func manifestOf(t *testing.T, addr, action string) []byte {
	t.Helper()
	return call(t, addr, "action", "show", action, "--manifest")
}

// call calls cloister with the address of a server and returns what it prints.
func call(t *testing.T, addr string, args ...string) []byte {
	t.Helper()
	program, err := cloister()
	if err != nil {
		t.Fatal(err)
	}
	var out, said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, append(args, "--cas", "grpc://"+addr)...)
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Errorf("cloister %v: %v\n%s%s", args, err, &said, &out)
	}
	return out.Bytes()
}
