// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestSwallowedViolationTurnsTheBuildRed: a test that tries to reach the network and ignores the error passes by
// default. If the action or the policy makes violations count, Bazel reports a failed test and the reason, each time.
func TestSwallowedViolationTurnsTheBuildRed(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	const target, byProperty = "//examples/hostile:swallows_test", "--remote_default_exec_properties=cloister-on-violation="
	passes := func(t *testing.T, flags ...string) {
		t.Helper()
		if build := r.bazel(t, "test", append(flags, target)...); build.ExitCode != 0 || !strings.Contains(build.Output, "PASSED") {
			t.Errorf("bazel: exit %d, want a test that passes", build.ExitCode)
		}
	}
	fails := func(t *testing.T, line string, flags ...string) {
		t.Helper()
		build := r.bazel(t, "test", append(flags, "--test_output=errors", target)...)
		expect.That(t, build.ExitCode == 3 && regexp.MustCompile(`(?m)^`+target+` +FAILED`).MatchString(build.Output),
			"bazel: exit %d, want 3 and a failed test", build.ExitCode)
		expect.That(t, !strings.Contains(build.Output, "cached"), "bazel reports a cached result")
		for _, want := range []string{"cloister: " + line + "\n", "cloister: denied: connection to tcp 192.0.2.1:443 (no network) by "} {
			expect.Text(t, build.Output, want, "the console")
		}
	}
	const failed, code = "failed for its violations, by ", ": exit code 4 instead of 0"
	passes(t)
	for range 2 {
		fails(t, failed+"property cloister-on-violation"+code, byProperty+"network:fail")
	}
	fails(t, "killed at its first violation, by property cloister-on-violation", byProperty+"kill")
	passes(t, byProperty+"write:fail,exec:fail,syscall:kill")

	file := filepath.Join(filepath.Dir(r.Workspace), "policy.yaml")
	must.Succeed(t, os.WriteFile(file, []byte("version: 1\nprofiles: {test: {on_violation: {network: fail}}}\n"), 0o644))
	must.Succeed(t, r.server.Stop())
	r.config.Args = append(r.config.Args, "--policy", file)
	r.serve(t)
	for range 2 {
		fails(t, failed+`on_violation of profile "test"`+code, "--noremote_accept_cached") // the default's result is in the cache
	}
	build := r.bazel(t, "test", byProperty+"report", target)
	if want := `rule "default" requires at least network: fail (profile test, `; build.ExitCode == 0 || !strings.Contains(build.Output, want) {
		t.Errorf("bazel: exit %d, want a failure that says %q", build.ExitCode, want)
	}
	if got := r.audit(t, "ls", "--json", "--kind", "connect"); strings.Count(got, `"on_violation":"fail"`) != 4 ||
		strings.Count(got, `"on_violation":"kill"`) != 1 || strings.Count(got, "\n") != 7 {
		t.Errorf("got audit log\n%s\nwant two passed, four failed and one killed test", got)
	}
}
