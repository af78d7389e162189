// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

// self enables a test that compiles everything twice.
var self = flag.Bool("self", false, "build Cloister on Cloister")

// TestCloisterBuildsItself builds the program on the servers of two users, which must run the same actions with equal
// results.
func TestCloisterBuildsItself(t *testing.T) {
	env := goModules(t)
	build := func(user *syscall.Credential) (map[string]ran, []byte) {
		r := newSelfRig(t, user)
		wantAll(t, r.bazel(t, "build", append(env, "//cmd/cloister")...), "remote")
		r.wantNoEvents(t)
		outputs := must.Get(r.Outputs("cmd/cloister"))(t)
		return r.executed(t), must.Get(os.ReadFile(filepath.Join(outputs, "cloister")))(t)
	}
	actions, program := build(nil)
	if os.Geteuid() == 0 {
		others, other := build(unusedUser(t))
		expect.That(t, bytes.Equal(program, other), "two users built different programs of %d and %d bytes",
			len(program), len(other))
		for digest, there := range others {
			hash := actions[digest].StableHash
			expect.That(t, hash != "" && hash == there.StableHash, "%s of %s: got stable hashes %q and %q, want equal ones",
				there.Mnemonic, there.Target, hash, there.StableHash)
		}
	}
}

// TestCloisterTestsItself runs the tests of the store and the worker as actions of a server. Tests that need root or
// mounts skip themselves in its sandbox.
func TestCloisterTestsItself(t *testing.T) {
	env := goModules(t)
	r := newSelfRig(t, nil)
	build := r.bazel(t, "test", append(env, "--keep_going", "--test_output=errors", "--test_timeout=1800", "//cas/...", "//worker/...")...)
	wantAll(t, build, "remote")
}

// newSelfRig is newRig with Cloister's own sources in the workspace.
func newSelfRig(t *testing.T, user *syscall.Credential) *rig {
	t.Helper()
	r := newRig(t, user)
	must.Succeed(t, bazelrun.CopyWorkspace(r.Workspace, "../..",
		"BUILD.bazel", "cas", "cmd", "docs", "go.mod", "go.sum", "proto", "sandbox", "tests", "worker"))
	return r
}

// goModules returns the flags with which Bazel finds Go and the modules that the packages need. It skips the test unless
// self is set.
func goModules(t *testing.T) []string {
	t.Helper()
	if !*self {
		t.Skip("takes minutes: make self-build, or -args -self")
	}
	return []string{"--repo_env=GOMODCACHE=" + moduleCache(t), "--repo_env=PATH=" + os.Getenv("PATH")}
}

// moduleCache returns a module cache that every user can read, with the modules that the packages need.
func moduleCache(t *testing.T) string {
	t.Helper()
	found := must.Get(exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE", "GOPROXY").Output())(t)
	cache, proxy, _ := strings.Cut(strings.TrimSpace(string(found)), "\n")
	dir := must.Get(bazelrun.TempDir(nil))(t)
	t.Cleanup(func() { must.Succeed(t, bazelrun.Remove(dir)) })
	cmd := exec.CommandContext(t.Context(), "go", "mod", "vendor", "-o", filepath.Join(dir, "vendor"))
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(),
		"GOMODCACHE="+filepath.Join(dir, "modules"), "GOPROXY=file://"+cache+"/cache/download,"+proxy)
	out, err := cmd.CombinedOutput()
	must.Be(t, err == nil, "go mod vendor: %v\n%s", err, out)
	return filepath.Join(dir, "modules")
}
