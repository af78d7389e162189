// SPDX-License-Identifier: Apache-2.0

package reapi_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// TestPersistentWorkers executes actions with a tool that counts its requests, and that is marked as Bazel marks it or
// has a key as other clients give it. Where the policy permits it, one process serves all of them, and otherwise each
// has its own. The process ends with the server, even if that is killed.
func TestPersistentWorkers(t *testing.T) {
	canKeepTools(t)
	tool := fmt.Sprintf("compiler%x.py", fresh(8))
	for _, row := range []struct{ permitted, byKey bool }{{false, false}, {true, false}, {false, true}, {true, true}} {
		c := servePolicy(t, row.permitted)
		for n := 1; n <= 3; n++ {
			want := "count 0\n"
			if row.permitted {
				want = fmt.Sprintf("count %d\n", n)
			}
			r := c.run(c.compile(tool, "count\n", row.byKey))
			expect.Equal(t, c.file(r.GetResult(), "out/result"), want, "%+v, action %d", row, n)
		}
		want := 0
		if row.permitted {
			want = 1
		}
		must.Be(t, idle(t, tool) == want, "%+v: %d idle tools, want %d", row, idle(t, tool), want)
		*c.ended = true
		c.server.Kill()
		must.Hold(t, "gone", func() bool { return idle(t, tool) == 0 })
	}
}

// TestWarmDifferenceIsFound: --repro-sample compares the result of a persistent worker with that of a process of its
// own, and names the worker as the cause if the tool has kept something from an earlier request.
func TestWarmDifferenceIsFound(t *testing.T) {
	canKeepTools(t)
	tool := fmt.Sprintf("compiler%x.py", fresh(8))
	c := servePolicy(t, true, "--repro-sample=100%")
	first := c.run(c.compile(tool, "define one\n", false))
	second := c.prepare(c.compile(tool, "define two\n", false))
	r := c.wantResult("second", c.request(second, nil))
	got := c.file(first.GetResult(), "out/result") + c.file(r.GetResult(), "out/result")
	must.Be(t, got == "define one\ndefine one two\n", "got %q: the tool has kept nothing", got)
	must.Hold(t, "a verdict on the second action", func() bool {
		r = c.wantResult("second, again", c.request(second, nil))
		return r.GetMessage() != ""
	})
	expect.That(t, r.GetCachedResult() && strings.Contains(r.GetMessage(), "not reproducible: out/result differs (persistent worker)"),
		"got cached %t, message %q", r.GetCachedResult(), r.GetMessage())
}

func canKeepTools(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "persistent workers need it")
	}
	confined(t)
	sandboxtest.Tool(t, "python3")
}

// servePolicy starts a server whose policy permits persistent workers or not.
func servePolicy(t *testing.T, permitted bool, args ...string) *client {
	t.Helper()
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	text := fmt.Sprintf("version: 1\nprofiles: {build: {persistent_workers: %t, audit: attempts}}\n", permitted)
	must.Succeed(t, os.WriteFile(policy, []byte(text), 0o644))
	return serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(dir, "store"), Args: append(args, "--policy="+policy)})
}

// compile returns an action of the compiler of worker/testdata, under the name tool, with a source. The tool is marked,
// or the action has a key.
func (c *client) compile(tool, source string, byKey bool) job {
	c.Helper()
	text := must.Get(os.ReadFile("../../worker/testdata/compiler.py"))(c)
	mark := &repb.NodeProperties{Properties: []*repb.NodeProperty{{Name: "bazel_tool_input"}}}
	var key *repb.Platform
	if byKey {
		mark, key = nil, c.platform(&repb.Platform_Property{Name: "persistentWorkerKey", Value: "compiler"})
	}
	return job{
		root: c.putProto(&repb.Directory{Files: []*repb.FileNode{
			{Name: tool, Digest: c.put(text), NodeProperties: mark},
			{Name: "flags", Digest: c.put([]byte("main\nout/result\n"))},
			{Name: "main", Digest: c.put([]byte(source))},
		}}),
		command: &repb.Command{Arguments: []string{"/usr/bin/python3", "-B", tool, "@flags"}, Platform: key},
		outputs: []string{"out/result"},
	}
}

// idle returns the number of processes of a tool on this machine that wait for requests.
func idle(t *testing.T, tool string) int {
	return len(sandboxtest.Running(t, tool+"\x00--persistent_worker"))
}
