// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
)

// cannotRun is the exit code of cloister check where a sandbox cannot run.
const cannotRun = 3

// slowly is a flag for tests on an emulated processor.
const slowly = "--test_timeout=3600"

// TestExampleBuildsUnderOtherKernels builds and tests a package of the example, or with -all all of it, with actions that
// have a kernel of their own: in gVisor, and on an emulated processor. They make the same files as in namespaces.
func TestExampleBuildsUnderOtherKernels(t *testing.T) {
	guestkernel.Use()
	r := newRig(t, nil)
	targets := "//examples/hash/..."
	if *all {
		targets = "//examples/..."
	}
	namespaces := r.files(t, targets)
	for _, backend := range []struct {
		tier, requirement, env, file string
		args                         []string
	}{
		{"gvisor", "gvisor", "RUNSC_PATH", must.Get(filepath.Abs("../../bin/runsc"))(t), []string{targets}},
		{"qemu-tcg", "qemu", "CLOISTER_GUEST_KERNEL", "", []string{slowly, targets}},
	} {
		t.Run(backend.tier, func(t *testing.T) {
			if backend.requirement == "qemu" {
				if why := guestkernel.Missing(); why != "" {
					sandboxtest.Unavailable(t, "qemu", why)
				}
			}
			if _, err := os.Stat(backend.file); err == nil && os.Getenv(backend.env) == "" { // what make gvisor builds
				t.Setenv(backend.env, backend.file)
			}
			check := exec.CommandContext(t.Context(), r.config.Binary, "check", "--sandbox", backend.tier)
			out, err := check.CombinedOutput()
			if check.ProcessState.ExitCode() == cannotRun {
				sandboxtest.Unavailable(t, backend.requirement, string(out))
			}
			must.Be(t, err == nil, "cloister check: %v\n%s", err, out)
			r.restart(t, func() {
				r.config.Dir += "-" + backend.tier // without the results of others
				r.config.Args = []string{"--sandbox", backend.tier}
				r.config.Env = []string{backend.env + "=" + os.Getenv(backend.env)}
			})
			r.clean(t)
			for name, sum := range r.files(t, backend.args...) {
				expect.Equal(t, sum, namespaces[name], "%s", name)
			}
			seen := map[string]bool{}
			for action, ran := range r.executed(t) {
				if !seen[ran.Mnemonic] {
					seen[ran.Mnemonic] = true
					expect.Equal(t, r.manifest(t, action).Sandbox, backend.tier, "the sandbox of %s of %s", ran.Mnemonic, ran.Target)
				}
			}
			expect.That(t, len(seen) >= 4, "got actions of the kinds %v, want compilers, linkers, genrules and tests", seen)
		})
	}
}

// files builds and tests targets, whose actions must all be executed remotely, and returns the SHA-256 of the files that
// they made by name.
func (r *rig) files(t *testing.T, args ...string) map[string]string {
	t.Helper()
	build := r.bazel(t, "test", args...)
	wantAll(t, build, "remote")
	t.Logf("%d actions", build.Processes()["remote"])
	bins := must.Get(filepath.Glob(filepath.Join(r.Root, "base/execroot/*/bazel-out/*/bin/examples")))(t)
	sums := map[string]string{}
	for _, bin := range bins {
		must.Succeed(t, filepath.WalkDir(bin, func(name string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			text, err := os.ReadFile(name)
			sums[strings.TrimPrefix(name, r.Root)] = fmt.Sprintf("%x", sha256.Sum256(text))
			return err
		}))
	}
	must.Be(t, len(sums) > 40, "got %d files below %q", len(sums), bins)
	return sums
}
