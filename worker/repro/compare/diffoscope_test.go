// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

func TestDiffoscopeReportsDifferences(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for path, content := range map[string]string{a: "one\n", b: "two\n"} {
		must.Succeed(t, os.WriteFile(path, []byte(content), 0o600))
	}
	text, err := Diffoscope(t.Context(), a, b)
	if errors.Is(err, ErrNoDiffoscope) {
		sandboxtest.Unavailable(t, "diffoscope", err)
	}
	if err != nil || !strings.Contains(text, "two") {
		t.Errorf("got %q, %v", text, err)
	}
	if text, err := Diffoscope(t.Context(), a, a); err != nil || text != "" {
		t.Errorf("got %q, %v for equal files", text, err)
	}
	// Metadata of directories is not reported.
	for _, d := range []string{"old", "new"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(dir, d, "sub"), 0o700))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, d, "sub", "f"), []byte(d), 0o600))
	}
	text, err = Diffoscope(t.Context(), filepath.Join(dir, "old"), filepath.Join(dir, "new"))
	if err != nil || !strings.Contains(text, "-old") || strings.Contains(text, "Modify") || strings.Contains(text, `\u`) {
		t.Errorf("of directories: %q, %v", text, err)
	}
}

// Any program may be called diffoscope.
func TestDiffoscopeOutputIsLimitedAndPrintable(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs sh")
	}
	for _, row := range []struct {
		name, script string
		text, err    string
	}{
		{"equal", "exit 0", "", ""},
		{"control characters", `printf '\033[31mred\n--- a\n'; exit 1`, "\\x1b[31mred\n--- a\n", ""},
		{"lines of a frame", `printf '\342\224\234\342\224\200 +++ b\n\342\224\202 -one\n'; exit 1`, "|- +++ b\n| -one\n", ""},
		{"endless", "yes | head -c 1000000; exit 1", strings.Repeat("y\n", maxDiffoscope/2), ""},
		{"failure", "echo no such 'file' >&2; exit 2", "", "diffoscope: exit status 2: no such file"},
	} {
		t.Run(row.name, func(t *testing.T) {
			program := filepath.Join(t.TempDir(), "diffoscope")
			must.Succeed(t, os.WriteFile(program, []byte("#!/bin/sh\n"+row.script+"\n"), 0o700))
			text, err := diffoscope(t.Context(), program, "a", "b")
			if text != row.text {
				t.Errorf("got %d bytes: %.80q", len(text), text)
			}
			if (err != nil) != (row.err != "") || err != nil && err.Error() != row.err {
				t.Errorf("got the error %v, want %q", err, row.err)
			}
		})
	}
}
