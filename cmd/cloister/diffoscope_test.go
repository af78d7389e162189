// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/tests/must"
)

// Diffoscope's output follows the differences if it is requested. If it is not installed, diff fails before it compares
// anything.
func TestDiffoscopeFlag(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	for path, text := range map[string]string{a: "one", b: "two"} {
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o644))
	}
	t.Setenv("PATH", dir)
	if out, code := runCLI(t, "diff", a, b, "--diffoscope"); code != exit.Trouble || !strings.Contains(out, "not installed") {
		t.Errorf("without diffoscope: %q, exit %d", out, code)
	}
	script := "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\necho \"asked about $2 and $3\"\nexit 1\n"
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "diffoscope"), []byte(script), 0o755))
	for _, c := range []struct {
		args  []string
		asked bool
	}{{[]string{a, b, "--diffoscope"}, true}, {[]string{a, b, "--diffoscope", "--json"}, true}, {[]string{a, b}, false}, {[]string{a, a, "--diffoscope"}, false}} {
		out, _ := runCLI(t, append([]string{"diff"}, c.args...)...)
		if asked := strings.Contains(out, "asked about "+a+" and "+b); asked != c.asked {
			t.Errorf("%q: asked: %v; printed %q", c.args, asked, out)
		}
	}
}
