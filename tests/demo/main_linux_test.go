// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
)

// Where there is no Bazel the demonstration must still show the same: executed once, then cached, and
// what is forbidden refused.
func TestDemoWithoutBazelExecutesThenHitsThenRefuses(t *testing.T) {
	if _, err := exec.LookPath("/usr/bin/gcc"); err != nil {
		sandboxtest.Unavailable(t, "bazel", err) // which brings the compiler along
	}
	cloister := filepath.Join(t.TempDir(), "cloister")
	if err := bazelrun.BuildCloister(cloister); err != nil {
		t.Fatal(err)
	}
	if err := bazelrun.Confines(t.Context(), cloister, nil); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	t.Chdir("../..")
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	var out strings.Builder
	if err := run([]string{"-sdk", "-cloister", cloister}, &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for _, want := range []string{
		`(?m)^first build +40 +40 +0 `,
		`(?m)^after clean +40 +0 +40 `,
		`(?m)^worker: what it saw of that\n  cloister: tried to write /build/victim\.txt: not an output \(bash, openat\)\n  cloister: tried to write /usr/bin/\S*gcc\S*: not an output `,
		`(?m)^sandbox +5 attempts, 5 refused$`,
	} {
		if !regexp.MustCompile(want).MatchString(out.String()) {
			t.Errorf("output does not match %q:\n%s", want, out.String())
		}
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A line that arrives in pieces is one line.
func TestIndentMovesWholeLines(t *testing.T) {
	var out strings.Builder
	w := &indent{w: &out}
	for _, piece := range []string{"a", "b\n\nc", "d\nrest"} {
		if n, err := w.Write([]byte(piece)); n != len(piece) || err != nil {
			t.Fatalf("Write(%q) = %d, %v", piece, n, err)
		}
	}
	if got, want := out.String(), "  ab\n  \n  cd\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
