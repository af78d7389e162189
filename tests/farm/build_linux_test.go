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
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/history"
)

// cut is not zero for whoever has two minutes, and so long more.
var cut = flag.Duration("cut", 0, "have workers get lost during a build, and cut one off the network for so long; the head takes it for lost after two thirds of that")

// sleeper is a command that never ends.
const sleeper = "sleep 86399"

// buildTime bounds a build that hangs.
const buildTime = 5 * time.Minute

// An executed is an action that a server has executed, as its history and its action cache have it.
type executed struct {
	Action, How, Target, Mnemonic string
	result                        *repb.ActionResult
}

// TestBuildSurvivesTheLossOfWorkers: of three workers one loses power and boots again, one is cut off and comes back, and
// one is stopped, each while it executes. The build does not notice but by its time, its results are those of one serve,
// no slot executes two actions at once, and nothing of a worker outlives it.
func TestBuildSurvivesTheLossOfWorkers(t *testing.T) {
	if *cut == 0 {
		t.Skip("takes minutes: make farm, or -args -cut=90s")
	}
	if err := bazelrun.Find(); err != nil {
		sandboxtest.Unavailable(t, "bazel", err)
	}
	f := newFarm(t, "--worker-timeout", (*cut * 2 / 3).String())
	bazel := f.bazel(t)

	want := f.alone(t, bazel)
	c := dial(t, f.head.Addr)
	cutOff, lost, drained := f.join(t, "cutoff", 2), f.join(t, "lost", 2), f.join(t, "drained", 2)
	for _, w := range f.workers {
		w.joined(t, c)
	}
	forever := cutOff.begins(t, c, sleeper)
	bazel.Endpoint = f.head.Addr
	ended := start(t, bazel)
	// Later than others, so that some of what it knows is at no other place.
	cutOff.during(t, ended, 10)
	cutOff.machine.unplug(t)
	back := time.Now().Add(*cut)
	t.Logf("%s is cut off", cutOff.name)

	lost.during(t, ended, 10)
	lost.machine.unplug(t)
	lost.process.wantAllEnd(t, lost.process.kill)
	t.Logf("%s has lost power", lost.name)
	lost.machine.plug(t)
	lost.boot(t)
	lost.during(t, ended, 1)
	t.Logf("%s executes again", lost.name)

	drained.during(t, ended, 1)
	last := drained.begins(t, c, "sleep 2.5")
	t.Logf("%s is told to end", drained.name)
	drained.stops(t)
	if err := <-last.ended; err != nil {
		t.Errorf("what %s executed when it was told to end, and no other may: %v", drained.name, err)
	}
	t.Logf("%s has ended", drained.name)

	time.Sleep(time.Until(back))
	cutOff.machine.plug(t)
	t.Logf("%s is back; the build has ended before: %v", cutOff.name, len(ended) > 0)
	// It still executes what its head has given up, and must end that before it does anything else in that slot.
	var again identity
	until(t, time.Minute, "the action that only "+cutOff.name+" may execute runs once more", func() bool {
		now := cutOff.executing(sleeper)
		if len(now) != 1 {
			return false
		}
		again = now[0]
		return again != forever.process
	})
	if len(forever.ended) > 0 {
		t.Errorf("an action that never ends has: %v", <-forever.ended)
	}
	if _, err := c.cancels.CancelOperation(t.Context(), &longrunningpb.CancelOperationRequest{Name: <-forever.operation}); err != nil {
		t.Error(err)
	}
	until(t, time.Minute, "an action that nobody wants any more ends", func() bool { return !again.alive() })
	wantPassed(t, <-ended)

	for _, w := range []*farmWorker{cutOff, lost} {
		w.executes(t, c, "echo once more")
	}
	got := f.executed(t, f.head.Addr)
	wantEqual(t, got, want)
	wantWithinSlots(t, got, f.workers)
	f.watch.wantOnePerSlot(t)
	for _, w := range []*farmWorker{cutOff, lost} {
		w.stops(t)
	}
}

// alone returns what one serve executes of the build, which Bazel does not remember afterwards.
func (f *farm) alone(t *testing.T, bazel *bazelrun.Bazel) map[string]executed {
	t.Helper()
	config := f.config
	config.Dir, config.Args = filepath.Join(f.dir, "serve"), []string{"--source-tree", bazel.Workspace}
	config.Log = &lines{t: t, name: "serve"}
	bazel.Endpoint = f.serve(t, config).Addr
	wantPassed(t, <-start(t, bazel))
	if err := bazel.Clean(t.Context()); err != nil {
		t.Fatal(err)
	}
	return f.executed(t, bazel.Endpoint)
}

// bazel returns a Bazel with a copy of the example, which ends with the test.
func (f *farm) bazel(t *testing.T) *bazelrun.Bazel {
	t.Helper()
	b := &bazelrun.Bazel{Workspace: filepath.Join(f.dir, "workspace"), Root: filepath.Join(f.dir, "bazel"), Log: &lines{t: t, name: "bazel"}}
	if err := bazelrun.CopyWorkspace(b.Workspace, "../.."); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(b.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// A builtExample is what became of a build.
type builtExample struct {
	*bazelrun.Build
	err error
}

// start begins to build and test the example. The channel receives the end.
func start(t *testing.T, b *bazelrun.Bazel) <-chan builtExample {
	ended := make(chan builtExample, 1)
	ctx, cancel := context.WithTimeoutCause(t.Context(), buildTime, errors.New("it takes too long"))
	go func() {
		defer cancel()
		build, err := b.Run(ctx, "test", "//examples/...")
		ended <- builtExample{build, err}
	}()
	return ended
}

// wantPassed checks that the build and its tests passed, that everything was executed remotely, and that Bazel had nothing
// to try again.
func wantPassed(t *testing.T, b builtExample) {
	t.Helper()
	if b.err != nil {
		t.Fatal(b.err)
	}
	counts := b.Processes()
	if b.ExitCode != 0 || counts["remote"] < 300 {
		t.Fatalf("bazel: exit %d, processes %v; want 0, and 300 remote at least", b.ExitCode, counts)
	}
	for way := range counts {
		if way != "remote" && way != "internal" {
			t.Errorf("processes are %v, want none but remote and internal", counts)
		}
	}
	if passed := regexp.MustCompile(`(?m)^//examples/\S+ +PASSED`).FindAllString(b.Output, -1); len(passed) < 20 {
		t.Errorf("%d tests passed, want at least 20", len(passed))
	}
	t.Logf("the build took %v: %v", b.Wall.Round(time.Second/10), counts)
}

// during waits until the worker has executed that many more actions of the build and executes one. It does so while the
// build goes on, or fails the test.
func (w *farmWorker) during(t *testing.T, ended <-chan builtExample, more int) {
	t.Helper()
	before, _ := w.farm.watch.of(w.name)
	until(t, buildTime, w.name+" executes", func() bool {
		if len(ended) > 0 {
			t.Fatalf("the build has ended before %s had executed %d actions", w.name, more)
		}
		runs, executing := w.farm.watch.of(w.name)
		return runs >= before+more && executing > len(w.executing(sleeper))
	})
}

// An asked is an action that was asked for and executes.
type asked struct {
	// process is that which executes it, at first.
	process   identity
	operation chan string // receives its name
	ended     chan error  // receives nil if it succeeded
}

// begins has the worker execute a command, in an action that no other may execute, and returns once it does.
func (w *farmWorker) begins(t *testing.T, c *client, command string) *asked {
	t.Helper()
	action, err := c.put(t.Context(), "exec "+command, w.name)
	if err != nil {
		t.Fatal(err)
	}
	a := &asked{operation: make(chan string, 1), ended: make(chan error, 1)}
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

// executing returns the processes of the worker that execute a command.
func (w *farmWorker) executing(command string) []identity {
	var found []identity
	for _, p := range processes() {
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.pid))
		if p.brand() == w.process.brand && string(cmdline) == strings.ReplaceAll(command, " ", "\x00")+"\x00" {
			found = append(found, p.identity)
		}
	}
	return found
}

// executed returns by its digest each action that the server has executed.
func (f *farm) executed(t *testing.T, address string) map[string]executed {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), built.Path(t), "action", "ls", "--all", "-n", "10000", "--json", "--cas", "grpc://"+address).Output()
	if err != nil {
		t.Fatal(err)
	}
	var rows []executed
	if err := json.Unmarshal(out, &rows); err != nil {
		t.Fatal(err)
	}
	c := dial(t, address)
	all := map[string]executed{}
	for _, row := range rows {
		if row.How != "executed" {
			continue
		}
		if row.Target == "" {
			continue // an action of the test's own
		}
		action, err := cas.ParseDigest(row.Action)
		if err != nil {
			t.Fatal(err)
		}
		if row.result, err = c.in.Actions.Lookup(t.Context(), action); err != nil {
			t.Errorf("the result of %s (%s of %s): %v", row.Action, row.Mnemonic, row.Target, err)
			continue
		}
		if _, twice := all[row.Action]; twice {
			t.Errorf("%s (%s of %s) was answered twice", row.Action, row.Mnemonic, row.Target)
		}
		all[row.Action] = row
	}
	return all
}

// wantEqual checks that both servers executed the same actions, with the same results, and the same that decided on them.
func wantEqual(t *testing.T, got, want map[string]executed) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d actions were executed, want %d", len(got), len(want))
	}
	equal, alone := 0, 0
	for digest, there := range got {
		here, known := want[digest]
		switch {
		case !known && there.Mnemonic == "TestRunner":
			// Bazel writes into the action that makes a test.xml how many seconds the test has taken.
			alone++
		case !known:
			t.Errorf("action %s (%s of %s) is not of the other build", digest, there.Mnemonic, there.Target)
		case history.Identity(there.result) != history.Identity(here.result):
			t.Errorf("action %s (%s of %s) has the result %v, want %v", digest, there.Mnemonic, there.Target, there.result, here.result)
		case stable(there.result) == "" || stable(there.result) != stable(here.result):
			t.Errorf("action %s (%s of %s) has the stable hash %q, want %q", digest, there.Mnemonic, there.Target, stable(there.result), stable(here.result))
		default:
			equal++
		}
	}
	if equal < 250 {
		t.Errorf("%d results are equal, want at least 250", equal)
	}
	t.Logf("%d results are equal, digest for digest; %d actions are of one build alone", equal, alone)
}

func stable(r *repb.ActionResult) string {
	_, hash := worker.RecordedManifest(r)
	return hash
}

// wantWithinSlots checks by what the results say of when and where they came about that no worker executed more actions at
// once than it has slots.
func wantWithinSlots(t *testing.T, executed map[string]executed, workers []*farmWorker) {
	t.Helper()
	type change struct {
		at time.Time
		by int
	}
	changes := map[string][]change{}
	for digest, e := range executed {
		m := e.result.GetExecutionMetadata()
		if !m.GetWorkerStartTimestamp().IsValid() || !m.GetWorkerCompletedTimestamp().IsValid() {
			t.Errorf("%s: the result does not say when it came about: %v", digest, m)
		}
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
			t.Errorf("%s has executed %d actions, and %d at once in %d slots", w.name, len(of)/2, most, w.jobs)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(changes)) {
		t.Errorf("%d actions were executed by %q, which is none of the workers", len(changes[name])/2, name)
	}
}
