// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// compiler is a tool that speaks the worker protocol. Its docstring describes it.
//
//go:embed testdata/compiler.py
var compiler []byte

// A toolBench executes actions that are requests to the compiler.
type toolBench struct {
	*confining
	property  []string
	timeout   time.Duration
	variation *Variation
	env       string
	tool      []byte
	args      []string
	unmarked  bool   // no input is marked as a tool
	runfile   string // content of a file in the tool's runfiles, or ""
	link      string // directory that has a symlink, "." or the runfiles, or ""
}

// newToolBench returns one with a policy that permits persistent workers, or one without.
func newToolBench(t testing.TB, permitted bool, properties ...string) *toolBench {
	t.Helper()
	c := newConfining(t, onDisk(t), 0)
	if c.cfg.Features.SameUser {
		sandboxtest.Unavailable(t, "root", "runs have the worker's user, which could change the files of other requests")
	}
	config := c.cfg
	if permitted {
		config.Policy = must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: {persistent_workers: true}}\n")))(t)
	}
	c.Local = newLocal(config)
	return &toolBench{
		confining: c, property: properties, tool: compiler, args: []string{"/usr/bin/python3", "-B", "compiler.py", "@flags"},
	}
}

// A compiled is what one action did.
type compiled struct {
	*Outcome
	lines   []string // of its output
	stderr  string
	request int // see manifest.Volatile
}

// runfiles is the directory of the tool's runfiles.
const runfiles = "compiler.py.runfiles"

// compiles stores an action with a source file, whose lines are commands of the compiler, and further inputs, whose
// names sort before main.
func (b *toolBench) compiles(source string, more ...string) cas.Digest {
	b.t.Helper()
	src := &repb.Directory{}
	for _, name := range more {
		src.Files = append(src.Files, &repb.FileNode{Name: name, Digest: b.blob([]byte(name))})
	}
	src.Files = append(src.Files, &repb.FileNode{Name: "main", Digest: b.blob([]byte(source))})
	var mark *repb.NodeProperties
	if !b.unmarked {
		mark = &repb.NodeProperties{Properties: []*repb.NodeProperty{{Name: "bazel_tool_input"}}}
	}
	root := &repb.Directory{
		Files: []*repb.FileNode{
			{Name: "compiler.py", Digest: b.blob(b.tool), IsExecutable: true, NodeProperties: mark},
			{Name: "flags", Digest: b.blob([]byte("src/main\nout/result\n"))},
		},
		Directories: []*repb.DirectoryNode{{Name: "src", Digest: b.message(src)}},
	}
	if b.runfile != "" {
		library := &repb.Directory{Files: []*repb.FileNode{{Name: "library", Digest: b.blob([]byte(b.runfile))}}}
		if b.link == runfiles {
			library.Symlinks = []*repb.SymlinkNode{{Name: "link", Target: "../src/main"}}
		}
		root.Directories = slices.Insert(root.Directories, 0, &repb.DirectoryNode{Name: runfiles, Digest: b.message(library)})
	}
	if b.link == "." {
		root.Symlinks = []*repb.SymlinkNode{{Name: "link", Target: "src/main"}}
	}
	return b.command(root, &repb.Command{
		Arguments: b.args, OutputPaths: []string{"out/result"}, Platform: platform(b.property...),
		EnvironmentVariables: []*repb.Command_EnvironmentVariable{{Name: "X", Value: b.env}},
	})
}

// compile executes that action.
func (b *toolBench) compile(source string, more ...string) compiled {
	b.t.Helper()
	var stderr bytes.Buffer
	c := b.execute(&Task{Action: b.compiles(source, more...), Stderr: &stderr, Timeout: b.timeout, Variation: b.variation})
	c.stderr = stderr.String()
	for _, f := range c.Result.OutputFiles {
		d := must.Get(cas.FromProto(cas.SHA256, f.Digest))(b.t)
		result := must.Get(cas.ReadAll(b.t.Context(), b.in.Store, d, 1<<20))(b.t)
		c.lines = strings.Split(strings.TrimSpace(string(result)), "\n")
	}
	return c
}

// execute executes a task and reads the number of its request.
func (b *toolBench) execute(task *Task) compiled {
	b.t.Helper()
	out := must.Get(b.Execute(b.t.Context(), task, func(Stage) {}))(b.t)
	text := must.Get(cas.ReadAll(b.t.Context(), b.in.Store, out.Manifest, 1<<20))(b.t)
	m := must.Get(manifest.Parse(text))(b.t)
	return compiled{Outcome: out, request: m.Volatile.WorkerRequest}
}

// good checks that an action succeeded as the given request of its worker and returns the lines of its output.
func (b *toolBench) good(c compiled, request int) []string {
	b.t.Helper()
	must.Be(b.t, c.Result.ExitCode == 0 && c.request == request && len(c.lines) > 0,
		"got exit code %d, request %d, output %q, %s, %s, want request %d", c.Result.ExitCode, c.request, c.lines, c.stderr, c.Message, request)
	return c.lines
}

// sameLines checks the lines of an output.
func sameLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	expect.Equal(t, strings.Join(got, "\n"), strings.Join(want, "\n"))
}

// TestPersistentWorker: one process serves several actions. Each finds exactly its own inputs, cannot change them, and
// its output is returned. An action that fails does not end the process.
func TestPersistentWorker(t *testing.T) {
	for name, properties := range map[string][]string{
		"proto": nil, "json": {propertyWorkerKey, "k", propertyWorkerProtocol, "json"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newToolBench(t, true, properties...)
			first := b.good(b.compile("count\nlist\ninputs\nspill\nwrite src/main\nwrite compiler.py\nremove src/main\n", "a"), 1)
			sameLines(t, first, "count 1", "list compiler.py flags out/result src/a src/main", "inputs compiler.py flags src/a src/main",
				"spill ok", "write src/main PermissionError", "write compiler.py PermissionError", "remove src/main PermissionError")
			second := b.good(b.compile("count\nlist\ninputs\ncat src/b\nmissing spilled src/spilled src/more out/spilled src/a\n", "b"), 2)
			sameLines(t, second, "count 2", "list compiler.py flags out/result src/b src/main", "inputs compiler.py flags src/b src/main",
				"cat src/b b", "missing spilled src/spilled src/more out/spilled src/a")
			failed := b.compile("fail 3\n")
			expect.That(t, failed.Result.ExitCode == 3 && failed.stderr == "error: fail 3\n" && failed.request == 3,
				"got exit code %d, request %d, %q", failed.Result.ExitCode, failed.request, failed.stderr)
			fourth := b.compile("count\nlist\n", "b")
			sameLines(t, b.good(fourth, 4), "count 4", "list compiler.py flags out/result src/b src/main")
			expect.That(t, !fourth.Uncacheable && fourth.Message == "", "got uncacheable %t, message %q", fourth.Uncacheable, fourth.Message)
		})
	}
}

// TestPersistentWorkersNeedPolicy: without a policy that permits it, without a request for it, and for a run that
// differs from the action, the command runs in a process of its own, with the same output.
func TestPersistentWorkersNeedPolicy(t *testing.T) {
	const source = "count\nlist\n"
	plain := func(b *toolBench, what string) {
		t.Helper()
		for range 2 {
			c := b.compile(source)
			expect.That(t, c.request == 0 && c.Result.ExitCode == 0 && strings.Join(c.lines, ";") == "count 0;list compiler.py flags out/result src/main",
				"%s: got request %d, exit code %d, %q, %s", what, c.request, c.Result.ExitCode, c.lines, c.stderr)
		}
	}
	plain(newToolBench(t, false), "no policy")
	plain(newToolBench(t, true, "cloister-audit", "full"), "full audit")
	b := newToolBench(t, true)
	b.variation = &Variation{Env: []string{"X=1"}}
	plain(b, "variation")
	b = newToolBench(t, true)
	b.Local.cfg.Features.Kernel = "another"
	plain(b, "a kernel that has copies of the files")
	b = newToolBench(t, true)
	b.unmarked = true
	plain(b, "neither tools nor a key")
	b = newToolBench(t, true, propertyWorkerKey, "")
	b.unmarked = true
	plain(b, "an empty key")
	b = newToolBench(t, true, propertyWorkerKey, "k")
	b.unmarked, b.args = true, []string{"/usr/bin/python3", "-Bm", "compiler", "@flags"}
	plain(b, "a key whose tool the arguments do not name: it need not change when the tool does")
	b = newToolBench(t, true, propertyWorkerKey, "k")
	b.args = []string{"/usr/bin/python3", "-B", "compiler.py", "--config=src/main", "@flags"}
	plain(b, "an argument that names an input that is no tool")
}

// TestPersistentWorkerProperties: the properties do not restrict which worker takes an action, and are not reported as
// ignored.
func TestPersistentWorkerProperties(t *testing.T) {
	b := newToolBench(t, true, "OSFamily", "linux", propertyWorkerKey, "k", propertyWorkerProtocol, "proto")
	b.Local.cfg.StrictProperties = true
	a := must.Get(b.Admit(t.Context(), &Task{Action: b.compiles("count\n")}))(t)
	expect.That(t, len(a.Demands) == 1 && a.Demands[0].Name == "OSFamily", "got demands %v", a.Demands)
	c := b.compile("count\n")
	b.good(c, 1)
	expect.Equal(t, c.Message, "")
}

// TestPersistentWorkerKey: actions share a process only if they have the same command, environment, tools and
// properties.
func TestPersistentWorkerKey(t *testing.T) {
	b := newToolBench(t, true)
	b.persistent.MaxIdle = 10
	b.good(b.compile("count\n"), 1)
	for what, change := range map[string]func(*toolBench){
		"environment": func(b *toolBench) { b.env = "changed" },
		"tool":        func(b *toolBench) { b.tool = append(slices.Clone(compiler), '\n') },
		"property":    func(b *toolBench) { b.property = []string{"cloister-memory", "1GiB"} },
		"startup":     func(b *toolBench) { b.args = []string{"/usr/bin/python3", "-B", "-s", "compiler.py", "@flags"} },
	} {
		other := *b
		change(&other)
		expect.Equal(t, other.compile("count\n").request, 1, "%s", what)
		expect.Equal(t, other.compile("count\n").request, 2, "%s, again", what)
	}
	b.good(b.compile("count\n"), 2)
}

// TestPersistentWorkerByKey: with a key and without marks, the tools are the inputs that the arguments name and their
// runfiles. The process ends when one of them changes, although the key stays.
func TestPersistentWorkerByKey(t *testing.T) {
	b := newToolBench(t, true, propertyWorkerKey, "k")
	b.unmarked, b.runfile = true, "library"
	b.persistent.MaxIdle = 10
	sameLines(t, b.good(b.compile("count\nlist\n", "a"), 1), "count 1", "list compiler.py compiler.py.runfiles/library flags out/result src/a src/main")
	sameLines(t, b.good(b.compile("count\nlist\n", "b"), 2), "count 2", "list compiler.py compiler.py.runfiles/library flags out/result src/b src/main")
	for what, change := range map[string]func(*toolBench){
		"tool":    func(b *toolBench) { b.tool = append(slices.Clone(compiler), '\n') },
		"runfile": func(b *toolBench) { b.runfile = "another" },
		"key":     func(b *toolBench) { b.property = []string{propertyWorkerKey, "l"} },
	} {
		other := *b
		change(&other)
		expect.Equal(t, other.compile("count\n").request, 1, "%s", what)
		expect.Equal(t, other.compile("count\n").request, 2, "%s, again", what)
	}
	for _, argument := range []string{"--root=src", "--module=src/main"} {
		sources := *b
		sources.args = []string{"/usr/bin/python3", "-B", "compiler.py", argument, "@flags"}
		expect.Equal(t, sources.compile("count\n", "a").request, 1, "%s, a directory of tools", argument)
		expect.Equal(t, sources.compile("count\n", "b").request, 1, "%s, a directory of tools that has changed", argument)
	}
	for what, cold := range map[string]struct{ argument, link string }{
		"a link is named":                {"--config=link", "."},
		"a link is among the runfiles":   {"-v", runfiles},
		"the name is absolute":           {"--config=" + ExecRoot + "/compiler.py", ""},
		"the working directory is named": {"--path=.", ""},
		"the argument is a script":       {"cat compiler.py", ""},
	} {
		other := *b
		other.args, other.link = []string{"/usr/bin/python3", "-B", "compiler.py", cold.argument, "@flags"}, cold.link
		expect.Equal(t, other.compile("count\n").request, 0, "%s", what)
	}
	b.good(b.compile("count\n"), 3)
}

// TestPersistentWorkerFailures: if a worker violates the protocol, the request fails with the reason, and the next one
// gets a new process.
func TestPersistentWorkerFailures(t *testing.T) {
	b := newToolBench(t, true)
	for source, want := range map[string]struct {
		exit    int32
		status  Status
		message string
	}{
		"exit 7\n":    {7, StatusOK, "it exited with code 7 before it responded"},
		"exit 0\n":    {1, StatusOK, "it exited with code 0 before it responded"},
		"garbage\n":   {1, StatusOK, `it wrote something other than a WorkResponse to stdout: "Hello, world`},
		"sleep 600\n": {137, StatusTimedOut, "exceeded"},
		// Not all of it can be locked, so the worker must end before its outputs are read.
		"nest 1100\n": {1, StatusOK, "the run left more than 1000 nested directories"},
	} {
		b.timeout = 0
		warm := b.compile("count\n").request
		if strings.HasPrefix(source, "sleep") {
			b.timeout = time.Second
		}
		got := b.compile(source)
		expect.That(t, got.Result.ExitCode == want.exit && got.Status == want.status && strings.Contains(got.Message, want.message),
			"%q: got exit code %d, %v, %q", source, got.Result.ExitCode, got.Status, got.Message)
		if strings.HasPrefix(source, "exit") {
			expect.Equal(t, got.stderr, "about to exit\n", "stderr of %q", source)
		}
		expect.That(t, warm == 1 && got.request == 2, "%q: got requests %d and %d, want 1 and 2", source, warm, got.request)
	}
	b.timeout = 0
	b.good(b.compile("count\n"), 1)
}

// TestPersistentWorkerMemory: a worker that exceeds its memory limit is killed, and the request names the limit.
func TestPersistentWorkerMemory(t *testing.T) {
	b := newToolBench(t, true, "cloister-memory", "64MiB")
	if !slices.Contains(b.cfg.Features.Limits, sandbox.LimitMemory) {
		sandboxtest.Unavailable(t, "limits", "no control group limits memory")
	}
	b.good(b.compile("count\n"), 1)
	got := b.compile("eat 400000000\n")
	expect.That(t, got.Result.ExitCode == 137 && got.Exceeded == sandbox.LimitMemory && got.request == 2 &&
		strings.Contains(got.Message, "exceeded the 64 MiB memory limit"),
		"got exit code %d, limit %q, request %d, %q", got.Result.ExitCode, got.Exceeded, got.request, got.Message)
	b.good(b.compile("count\n"), 1)
}

// TestPersistentWorkerEnds: a cancelled action ends its worker, and closing the backend an idle one.
func TestPersistentWorkerEnds(t *testing.T) {
	b := newToolBench(t, true)
	b.good(b.compile("count\n"), 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err := b.Execute(ctx, &Task{Action: b.compiles("sleep 600\n")}, func(s Stage) {
		if s == StageRun {
			cancel()
		}
	})
	wantFault(t, "cancelled action", err, FaultCancelled)
	b.good(b.compile("count\n"), 1)
	b.good(b.compile("count\n"), 2)
	must.Succeed(t, b.cfg.Backend.Close())
	_, err = b.Execute(t.Context(), &Task{Action: b.compiles("count\n")}, nil)
	expect.Error(t, err, sandbox.ErrClosed)
}

// BenchmarkPersistentWorker compares an action that starts its tool with a request to a tool that runs.
func BenchmarkPersistentWorker(b *testing.B) {
	for name, permitted := range map[string]bool{"warm": true, "cold": false} {
		b.Run(name, func(b *testing.B) {
			bench := newToolBench(b, permitted)
			for n := range b.N {
				if c := bench.compile(fmt.Sprintf("count\ncat src/a%d\n", n), fmt.Sprintf("a%d", n)); c.Result.ExitCode != 0 {
					b.Fatal(c.stderr)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "requests/s")
		})
	}
}
