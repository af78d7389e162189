// SPDX-License-Identifier: Apache-2.0

package farm_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"cloud.google.com/go/longrunning/autogen/longrunningpb"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/history"
)

// cut enables a test that takes two minutes and this duration.
var cut = flag.Duration("cut", 0, "lose workers during a build, and disconnect one for this time; the head gives it up after two thirds of it")

// sleeper is a command that does not end.
const sleeper = "sleep 86399"

// buildTime limits a build.
const buildTime = 10 * time.Minute

// An executedAction is an entry of a server's history with its result.
type executedAction struct {
	Action, How, Target, Mnemonic string
	result                        *repb.ActionResult
}

// TestBuildSurvivesTheLossOfWorkers power-cycles one of three workers, disconnects one for a while and stops one, each
// while it executes. The build must pass without retries, with the results of a single server; no slot may execute two
// actions at once, and no process may outlive its worker.
func TestBuildSurvivesTheLossOfWorkers(t *testing.T) {
	if *cut == 0 {
		t.Skip("takes minutes: make farm, or -args -cut=90s")
	}
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	f := newFarm(t, "--worker-timeout", (*cut * 2 / 3).String())
	bazel := f.bazel(t)

	want := f.buildOnOneServer(t, bazel)
	c := dial(t, f.head.Addr)
	cutOff, lost, drained := f.join(t, "cutoff", 2), f.join(t, "lost", 2), f.join(t, "drained", 2)
	for _, w := range f.workers {
		w.awaitJoin(t, c)
	}
	forever := cutOff.begin(t, c, sleeper)
	bazel.Endpoint = f.head.Addr
	ended := start(t, bazel)
	// After some actions, so that it holds results that no other worker has.
	cutOff.awaitProgress(t, ended, 10)
	cutOff.machine.unplug(t)
	back := time.Now().Add(*cut)
	t.Logf("%s is disconnected", cutOff.name)

	lost.awaitProgress(t, ended, 10)
	lost.machine.unplug(t)
	lost.process.wantAllEnd(t, lost.process.kill)
	t.Logf("%s has lost power", lost.name)
	lost.machine.plug(t)
	lost.boot(t)
	lost.awaitProgress(t, ended, 1)
	t.Logf("%s executes again", lost.name)

	drained.awaitProgress(t, ended, 1)
	last := drained.begin(t, c, "sleep 2.5")
	t.Logf("%s is stopped", drained.name)
	drained.stop(t)
	expect.Error(t, <-last.ended, nil, "action that only %s may execute, stopped while it ran", drained.name)
	t.Logf("%s has ended", drained.name)

	time.Sleep(time.Until(back))
	cutOff.machine.plug(t)
	t.Logf("%s is connected again; the build had ended: %v", cutOff.name, len(ended) > 0)
	// It still executes an action that the head has given up, and must kill it before it reuses the slot.
	var again processID
	until(t, time.Minute, "the action of "+cutOff.name+" runs again", func() bool {
		now := cutOff.executing(sleeper)
		if len(now) != 1 {
			return false
		}
		again = now[0]
		return again != forever.process
	})
	select {
	case err := <-forever.ended:
		t.Errorf("an endless action ended: %v", err)
	default:
	}
	must.Get(c.cancels.CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: <-forever.operation}))(t)
	until(t, time.Minute, "a cancelled action ends", func() bool { return !again.alive() })
	wantPassed(t, <-ended)

	for _, w := range []*farmWorker{cutOff, lost} {
		w.wantExecutes(t, c, "echo again")
	}
	got := f.history(t, f.head.Addr)
	wantEqual(t, got, want)
	wantWithinSlots(t, got, f.workers)
	f.watch.wantOnePerSlot(t)
	for _, w := range []*farmWorker{cutOff, lost} {
		w.stop(t)
	}
}

// buildOnOneServer runs the build on a single server, cleans it, and returns the executed actions.
func (f *farm) buildOnOneServer(t *testing.T, bazel *bazelrun.Bazel) map[string]executedAction {
	t.Helper()
	config := f.config
	config.Dir, config.Args = filepath.Join(f.dir, "serve"), []string{"--source-tree", bazel.Workspace}
	config.Log = &lineLogger{t: t, name: "serve"}
	bazel.Endpoint = f.serve(t, config).Addr
	wantPassed(t, <-start(t, bazel))
	must.Succeed(t, bazel.Clean(t.Context()))
	return f.history(t, bazel.Endpoint)
}

// bazel returns a Bazel with a copy of the examples, which ends with the test.
func (f *farm) bazel(t *testing.T) *bazelrun.Bazel {
	t.Helper()
	b := &bazelrun.Bazel{Workspace: filepath.Join(f.dir, "workspace"), Root: filepath.Join(f.dir, "bazel"), Log: &lineLogger{t: t, name: "bazel"}}
	must.Succeed(t, bazelrun.CopyWorkspace(b.Workspace, "../.."))
	must.Succeed(t, os.Mkdir(b.Root, 0o755))
	t.Cleanup(func() { must.Succeed(t, b.Shutdown()) })
	return b
}

// A buildResult is the result of a build.
type buildResult struct {
	*bazelrun.Build
	err error
}

// start starts to build and test the examples. The channel receives the result.
func start(t *testing.T, b *bazelrun.Bazel) <-chan buildResult {
	ended := make(chan buildResult, 1)
	ctx, cancel := context.WithTimeoutCause(t.Context(), buildTime, errors.New("it takes too long"))
	go func() {
		defer cancel()
		build, err := b.Run(ctx, "test", "//examples/...")
		ended <- buildResult{build, err}
	}()
	return ended
}

// wantPassed checks that the build and its tests passed, and that everything was executed remotely, without retries.
func wantPassed(t *testing.T, b buildResult) {
	t.Helper()
	must.Succeed(t, b.err)
	counts := b.Processes()
	must.Be(t, b.ExitCode == 0 && counts["remote"] >= 300,
		"bazel: exit %d, processes %v; want 0 and at least 300 remote", b.ExitCode, counts)
	for way := range counts {
		expect.That(t, way == "remote" || way == "internal", "processes are %v, want only remote and internal", counts)
	}
	if passed := regexp.MustCompile(`(?m)^//examples/\S+ +PASSED`).FindAllString(b.Output, -1); len(passed) < 20 {
		t.Errorf("%d tests passed, want at least 20", len(passed))
	}
	t.Logf("the build took %v: %v", b.Wall.Round(time.Second/10), counts)
}

// awaitProgress waits until the worker has executed that many more actions of the build and executes another. The build
// must not end before.
func (w *farmWorker) awaitProgress(t *testing.T, ended <-chan buildResult, more int) {
	t.Helper()
	before, _ := w.farm.watch.of(w.name)
	until(t, buildTime, w.name+" executes", func() bool {
		must.Be(t, len(ended) == 0, "the build ended before %s executed %d more actions", w.name, more)
		runs, executing := w.farm.watch.of(w.name)
		return runs >= before+more && executing > len(w.executing(sleeper))
	})
}

// A pendingAction is an action that was requested.
type pendingAction struct {
	process   processID   // the first to execute it
	operation chan string // receives its name
	ended     chan error  // receives nil if it succeeded
}

// begin requests an action that only this worker may execute, and returns when it runs.
func (w *farmWorker) begin(t *testing.T, c *client, command string) *pendingAction {
	t.Helper()
	action := must.Get(c.put(t.Context(), "exec "+command, w.name))(t)
	a := &pendingAction{operation: make(chan string, 1), ended: make(chan error, 1)}
	go func() {
		r, err := c.execute(t.Context(), action, func(name string) { a.operation <- name })
		if err == nil && (r.GetStatus().GetCode() != 0 || r.GetResult().GetExitCode() != 0) {
			err = fmt.Errorf("got %v", r)
		}
		a.ended <- err
	}()
	until(t, time.Minute, w.name+" executes "+command, func() bool {
		now := w.executing(command)
		if len(now) == 1 {
			a.process = now[0]
		}
		return len(now) == 1
	})
	return a
}

// executing returns the worker's processes that execute a command.
func (w *farmWorker) executing(command string) []processID {
	var found []processID
	for _, p := range processes() {
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
		if p.tag() == w.process.tag && string(cmdline) == strings.ReplaceAll(command, " ", "\x00")+"\x00" {
			found = append(found, p.processID)
		}
	}
	return found
}

// history returns the actions that a server has executed, by digest.
func (f *farm) history(t *testing.T, address string) map[string]executedAction {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), built.Path(t), "action", "ls", "--all", "--limit", "10000", "--json", "--cas", "grpc://"+address).Output()
	must.Succeed(t, err)
	var rows []executedAction
	must.Succeed(t, json.Unmarshal(out, &rows))
	c := dial(t, address)
	all := map[string]executedAction{}
	for _, row := range rows {
		if row.How != "executed" {
			continue
		}
		if row.Target == "" {
			continue // requested by the test
		}
		action := must.Get(cas.ParseDigest(row.Action))(t)
		if row.result, err = c.in.Actions.Lookup(t.Context(), action); err != nil {
			t.Errorf("result of %s (%s of %s): %v", row.Action, row.Mnemonic, row.Target, err)
			continue
		}
		if _, twice := all[row.Action]; twice {
			t.Errorf("%s (%s of %s) was answered twice", row.Action, row.Mnemonic, row.Target)
		}
		all[row.Action] = row
	}
	return all
}

// wantEqual checks that both servers executed the same actions with equal results and stable hashes.
func wantEqual(t *testing.T, got, want map[string]executedAction) {
	t.Helper()
	expect.Equal(t, len(got), len(want), "actions were executed")
	equal, alone := 0, 0
	for digest, there := range got {
		here, known := want[digest]
		switch {
		case !known && there.Mnemonic == "TestRunner":
			// The action that makes a test.xml contains the duration of the test.
			alone++
		case !known:
			t.Errorf("action %s (%s of %s) is not in the other build", digest, there.Mnemonic, there.Target)
		case history.Identity(there.result) != history.Identity(here.result):
			t.Errorf("action %s (%s of %s) has the result %v, want %v", digest, there.Mnemonic, there.Target, there.result, here.result)
		case stable(there.result) == "" || stable(there.result) != stable(here.result):
			t.Errorf("action %s (%s of %s) has the stable hash %q, want %q", digest, there.Mnemonic, there.Target, stable(there.result), stable(here.result))
		default:
			equal++
		}
	}
	expect.That(t, equal >= 250, "%d results are equal, want at least 250", equal)
	t.Logf("%d results are equal; %d actions are in one build only", equal, alone)
}

func stable(r *repb.ActionResult) string {
	_, hash := worker.RecordedManifest(r)
	return hash
}

// wantWithinSlots checks with the metadata of results that no worker executed more actions at once than it has slots.
func wantWithinSlots(t *testing.T, executed map[string]executedAction, workers []*farmWorker) {
	t.Helper()
	type change struct {
		at time.Time
		by int
	}
	changes := map[string][]change{}
	for digest, e := range executed {
		m := e.result.GetExecutionMetadata()
		expect.That(t, m.GetWorkerStartTimestamp().IsValid() && m.GetWorkerCompletedTimestamp().IsValid(),
			"%s: metadata %v lack the times of the worker", digest, m)
		name := workerOf(e.result)
		changes[name] = append(changes[name], change{m.GetWorkerStartTimestamp().AsTime(), 1}, change{m.GetWorkerCompletedTimestamp().AsTime(), -1})
	}
	for _, w := range workers {
		of := changes[w.name]
		delete(changes, w.name)
		slices.SortFunc(of, func(a, b change) int { return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.by, b.by)) })
		busy, most := 0, 0
		for _, c := range of {
			busy += c.by
			most = max(most, busy)
		}
		t.Logf("%s: %d actions, at most %d at once in %d slots", w.name, len(of)/2, most, w.jobs)
		if len(of) == 0 || most > w.jobs {
			t.Errorf("%s executed %d actions, at most %d at once; want some, at most %d at once", w.name, len(of)/2, most, w.jobs)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		t.Errorf("%d actions were executed by unknown worker %q", len(changes[name])/2, name)
	}
}
