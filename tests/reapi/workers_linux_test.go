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

// TestPersistentWorkers executes actions with a tool that counts its requests and that is marked as Bazel marks it.
// Where the policy permits it, one process serves all of them, and otherwise each has its own. The process ends with
// the server, even if that is killed.
func TestPersistentWorkers(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "persistent workers need it")
	}
	confined(t)
	sandboxtest.Tool(t, "python3")
	tool := fmt.Sprintf("compiler%x.py", fresh(8))
	for _, permitted := range []bool{false, true} {
		dir := t.TempDir()
		policy := filepath.Join(dir, "policy.yaml")
		text := fmt.Sprintf("version: 1\nprofiles: {build: {persistent_workers: %t, audit: attempts}}\n", permitted)
		must.Succeed(t, os.WriteFile(policy, []byte(text), 0o644))
		c := serveAs(t, bazelrun.ServerConfig{Dir: filepath.Join(dir, "store"), Args: []string{"--policy=" + policy}})
		for n := 1; n <= 3; n++ {
			want := "count 0\n"
			if permitted {
				want = fmt.Sprintf("count %d\n", n)
			}
			r := c.run(c.compile(tool))
			expect.Equal(t, c.file(r.GetResult(), "out/result"), want, "permitted: %t, action %d", permitted, n)
		}
		want := 0
		if permitted {
			want = 1
		}
		must.Be(t, idle(t, tool) == want, "%d idle tools, want %d", idle(t, tool), want)
		*c.ended = true
		c.server.Kill()
		must.Hold(t, "gone", func() bool { return idle(t, tool) == 0 })
	}
}

// compile returns an action of the compiler of worker/testdata, under the name tool.
func (c *client) compile(tool string) job {
	c.Helper()
	text := must.Get(os.ReadFile("../../worker/testdata/compiler.py"))(c)
	mark := &repb.NodeProperties{Properties: []*repb.NodeProperty{{Name: "bazel_tool_input"}}}
	return job{
		root: c.putProto(&repb.Directory{Files: []*repb.FileNode{
			{Name: tool, Digest: c.put(text), NodeProperties: mark},
			{Name: "flags", Digest: c.put([]byte("main\nout/result\n"))},
			{Name: "main", Digest: c.put([]byte("count\n"))},
		}}),
		command: &repb.Command{Arguments: []string{"/usr/bin/python3", "-B", tool, "@flags"}},
		outputs: []string{"out/result"},
	}
}

// idle returns the number of processes of a tool on this machine that wait for requests.
func idle(t *testing.T, tool string) (n int) {
	t.Helper()
	for _, file := range must.Get(filepath.Glob("/proc/[0-9]*/cmdline"))(t) {
		text, _ := os.ReadFile(file) // it may be gone
		if strings.Contains(string(text), tool+"\x00--persistent_worker") {
			n++
		}
	}
	return n
}
