// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
)

// TestHelperThatCannotStart: if a program prevents the helper processes from starting, the error names the cause and
// does not blame the host.
func TestHelperThatCannotStart(t *testing.T) {
	program := filepath.Join(t.TempDir(), "program")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", program, "./testdata/program").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	for _, c := range []struct{ name, callsInit, want string }{
		{"main does not call Init", "no", "this program must call namespace.Init first in main"},
		{"an init function panics", "yes", "it runs the program's init functions with an empty environment"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), program)
			cmd.Env = []string{"HOME=/", "PROGRAM_CALLS_INIT=" + c.callsInit}
			out := must.Get(cmd.Output())(t)
			if got := string(out); !strings.Contains(got, c.want) || !strings.Contains(got, "unsupported: false") {
				t.Errorf("Probe got %q, want an error with %q that is not ErrUnsupported", got, c.want)
			}
		})
	}
}
