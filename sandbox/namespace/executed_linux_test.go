// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"slices"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestExecutedProgramsOfTheHost: the Result lists every executed program, unless the run is not monitored.
func TestExecutedProgramsOfTheHost(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	for _, audit := range []sandbox.Audit{sandbox.AuditViolations, sandbox.AuditFull, sandbox.AuditOff} {
		r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
			s.Args, s.Audit = []string{"/bin/sh", "-c", "echo '#!/usr/bin/env true' > x && chmod +x x && ./x && cat /dev/null"}, audit
			s.Env = []string{"PATH=/usr/bin:/bin"}
		}}
		r.Do(t, b)
		got := r.Result
		must.Be(t, got.ExitCode == 0, "exit code %d: %s", got.ExitCode, r.Stderr)
		want := []string{"/usr/bin/cat", "/usr/bin/env", "/usr/bin/true"}
		if audit == sandbox.AuditOff {
			want = nil
		}
		for _, p := range want {
			expect.That(t, slices.Contains(got.Executed, p), "audit %q: %q lacks %s", audit, got.Executed, p)
		}
		// And the shell and the dynamic linker, under whatever names they have here.
		if n := len(got.Executed); n > 0 && n < len(want)+2 || got.ExecutedAll != (want != nil) || !slices.IsSorted(got.Executed) {
			t.Errorf("audit %q: got %q, all %v", audit, got.Executed, got.ExecutedAll)
		}
	}
}
