// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const compilerRule = `
def _compile(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".txt")
    flags = ctx.actions.declare_file(ctx.label.name + ".flags")
    ctx.actions.write(flags, ctx.file.src.path + "\n" + out.path + "\n")
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = ["-B", ctx.file._tool.path, "@" + flags.path],
        inputs = [ctx.file.src, flags],
        tools = [ctx.file._tool],
        execution_requirements = {"supports-workers": "1"},
        outputs = [out],
        mnemonic = "Compile",
    )
    return [DefaultInfo(files = depset([out]))]

compile = rule(_compile, attrs = {
    "src": attr.label(allow_single_file = True),
    "_tool": attr.label(default = ":compiler.py", allow_single_file = True),
})
`

// TestPersistentWorkers builds targets with a tool that counts its requests. Where the policy permits it, one process
// serves all of them, and otherwise each has its own. The process ends with the server, even if that is killed.
func TestPersistentWorkers(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "persistent workers need it")
	}
	const targets = 6
	r := newRig(t, nil)
	pkg := filepath.Join(r.Workspace, "warm")
	must.Succeed(t, os.Mkdir(pkg, 0o755))
	text := `load(":compile.bzl", "compile")` + "\n"
	for i := range targets {
		text += fmt.Sprintf("compile(name = \"t%d\", src = \"t%d.src\")\n", i, i)
		must.Succeed(t, os.WriteFile(filepath.Join(pkg, fmt.Sprintf("t%d.src", i)), fmt.Appendf(nil, "count\ncat warm/t%d.src\n", (i+1)%targets), 0o644))
	}
	compiler := must.Get(os.ReadFile("../../worker/testdata/compiler.py"))(t)
	policy := filepath.Join(r.config.Home, "policy.yaml")
	for name, content := range map[string]string{
		filepath.Join(pkg, "BUILD.bazel"): text, filepath.Join(pkg, "compile.bzl"): compilerRule, filepath.Join(pkg, "compiler.py"): string(compiler),
		policy: "version: 1\nprofiles: {build: {persistent_workers: true, audit: attempts}}\n",
	} {
		must.Succeed(t, os.WriteFile(name, []byte(content), 0o644))
	}
	want := []string{"count 0"}
	for _, permitted := range []bool{false, true} {
		if permitted {
			r.restart(t, func() { r.config.Args = append(r.config.Args, "--policy="+policy) })
			want = []string{"count 1", "count 2", "count 3", "count 4", "count 5", "count 6"}
		}
		r.clean(t)
		build := r.bazel(t, "build", "--jobs=1", "--noremote_accept_cached", "--experimental_remote_mark_tool_inputs", "//warm:all")
		must.Be(t, build.ExitCode == 0, "exit %d\n%s", build.ExitCode, build.Output)
		outputs := must.Get(r.Outputs("warm"))(t)
		var counts []string
		for i := range targets {
			b := must.Get(os.ReadFile(filepath.Join(outputs, fmt.Sprintf("t%d.txt", i))))(t)
			first, rest, _ := strings.Cut(string(b), "\n")
			counts = append(counts, first)
			expect.Equal(t, rest, fmt.Sprintf("cat warm/t%d.src FileNotFoundError\n", (i+1)%targets), "the source of another target")
		}
		slices.Sort(counts)
		expect.Equal(t, strings.Join(slices.Compact(counts), ", "), strings.Join(want, ", "), "permitted: %t", permitted)
	}
	n := compilers(t)
	must.Be(t, n == 1, "%d idle compilers, want 1", n)
	r.server.Kill()
	for deadline := time.Now().Add(time.Minute); n > 0; n = compilers(t) {
		must.Be(t, time.Now().Before(deadline), "the compiler has survived the server")
	}
	r.serve(t)
}

// compilers returns the number of compilers on this machine that wait for requests.
func compilers(t *testing.T) (n int) {
	t.Helper()
	for _, file := range must.Get(filepath.Glob("/proc/[0-9]*/cmdline"))(t) {
		text, _ := os.ReadFile(file) // it may be gone
		if strings.Contains(string(text), "warm/compiler.py\x00--persistent_worker") {
			n++
		}
	}
	return n
}
