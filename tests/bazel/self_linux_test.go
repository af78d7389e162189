// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/must"
)

var self = flag.String("self", "", "build Cloister on Cloister, and test a `part` of it or all")

// TestCloisterBuildsItself builds Cloister on the servers of two users, which must run the same actions with equal
// results, and tests packages on the first. Tests that need root or mounts skip themselves in its sandbox.
func TestCloisterBuildsItself(t *testing.T) {
	switch *self {
	case "":
		t.Skip("takes minutes: make self-build")
	case "part", "all":
	default:
		t.Fatalf("-self=%s: write part or all", *self)
	}
	root := strings.TrimSpace(string(must.Get(exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output())(t)))
	if !strings.HasPrefix(root, "/usr/") {
		sandboxtest.Unavailable(t, "bazel", "Go is in "+root+", which the sandbox does not show: it must be below /usr")
	}
	r := newRig(t, nil)
	tests := []string{"//cas/...", "//worker/..."}
	flags := []string{"--repo_env=GOMODCACHE=" + moduleCache(t), "--repo_env=PATH=" + os.Getenv("PATH")}
	if *self == "part" {
		tests = []string{"//cas/internal/..."}
		flags = append(flags, "--repo_env=GO_PACKAGES=./cmd/cloister ./cas/internal/...")
	}
	build := func(r *rig) (map[string]ran, []byte) {
		must.Succeed(t, bazelrun.CopyWorkspace(r.Workspace, "../..",
			"BUILD.bazel", "cas", "cmd", "docs", "go.mod", "go.sum", "proto", "sandbox", "tests", "worker"))
		wantAll(t, r.bazel(t, "build", append(flags, "//cmd/cloister")...), "remote")
		r.wantNoEvents(t)
		outputs := must.Get(r.Outputs("cmd/cloister"))(t)
		return r.executed(t), must.Get(os.ReadFile(filepath.Join(outputs, "cloister")))(t)
	}
	actions, first := build(r)
	if os.Geteuid() == 0 {
		others, other := build(newRig(t, unusedUser(t)))
		expect.That(t, len(others) > 0 && len(others) == len(actions),
			"two users ran %d and %d actions, want some, and equally many", len(actions), len(others))
		expect.That(t, bytes.Equal(first, other), "two users built different programs of %d and %d bytes", len(first), len(other))
		for digest, there := range others {
			hash := actions[digest].StableHash
			expect.That(t, hash != "" && hash == there.StableHash, "%s of %s: got stable hashes %q and %q, want equal ones",
				there.Mnemonic, there.Target, hash, there.StableHash)
		}
	}
	tests = append(tests, "--keep_going", "--test_output=errors", "--test_timeout=1800")
	wantAll(t, r.bazel(t, "test", append(flags, tests...)...), "remote")
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
