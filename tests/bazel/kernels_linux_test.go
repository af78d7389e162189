// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
)

// generated maps targets of the example to their outputs. They compile, link and run a program, and run a shell script.
var generated = map[string]string{
	"//examples/hash:make_table":  "examples/hash/crc32_table.cc",
	"//examples/units:make_table": "examples/units/unit_factors.inc",
}

// cannotRun is the exit code of cloister check where a sandbox cannot run.
const cannotRun = 3

// TestExampleBuildsUnderOtherKernels: actions that have a kernel of their own make the same files as in namespaces.
func TestExampleBuildsUnderOtherKernels(t *testing.T) {
	guestkernel.Use()
	r := newRig(t, nil)
	namespaces := r.generate(t)
	for _, backend := range []struct{ tier, requirement, env, file string }{
		{"gvisor", "gvisor", "RUNSC_PATH", must.Get(filepath.Abs("../../bin/runsc"))(t)},
		{"qemu-tcg", "qemu", "CLOISTER_GUEST_KERNEL", ""},
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
			for name, text := range r.generate(t) {
				expect.Equal(t, text, namespaces[name], "%s", name)
			}
			for action, ran := range r.executed(t) {
				expect.Equal(t, r.manifest(t, action).Sandbox, backend.tier, "the sandbox of %s of %s", ran.Mnemonic, ran.Target)
			}
		})
	}
}

// generate builds the targets, which must all be executed remotely, and returns the files by target.
func (r *rig) generate(t *testing.T) map[string]string {
	t.Helper()
	args, files := []string{}, map[string]string{}
	for target := range generated {
		args = append(args, target)
	}
	wantAll(t, r.bazel(t, "build", args...), "remote")
	for target, file := range generated {
		made := must.Get(filepath.Glob(filepath.Join(r.Root, "base/execroot/*/bazel-out/*/bin", file)))(t)
		must.Be(t, len(made) == 1, "got the outputs %q of %s, want one", made, target)
		files[target] = string(must.Get(os.ReadFile(made[0]))(t))
	}
	return files
}
