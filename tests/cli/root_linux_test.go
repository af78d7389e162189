// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestRunInRoot: run --root shows a command the directory as its root and nothing of this host, and the manifest
// names it.
func TestRunInRoot(t *testing.T) {
	sandboxtest.Tool(t, "ldd")
	dir := t.TempDir()
	roots := map[string]bool{}
	for _, name := range []string{"one", "two"} {
		at := filepath.Join(dir, name)
		must.Succeed(t, os.MkdirAll(filepath.Join(at, "etc"), 0o755))
		root := must.Get(os.OpenRoot(at))(t)
		defer root.Close()
		sandboxtest.CopyPrograms(t, root, "sh", "cat", "ls")
		must.Succeed(t, root.WriteFile("etc/marker", []byte(name+"\n"), 0o644))
		cmd := exec.CommandContext(t.Context(), built.Path(t), "run", "--root", at, "--manifest", filepath.Join(dir, "manifest"),
			"--", "/bin/sh", "-c", "cat /etc/marker; ls -d /usr/share /etc/passwd /home; echo x > /etc/new")
		cmd.Dir = dir
		text, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains("\n"+string(text), "\n"+name+"\n") || strings.Contains(string(text), "\n/usr/share\n") ||
			!strings.Contains(string(text), "denied: write to /etc/new") {
			t.Errorf("got %v and\n%s", err, text)
		}
		manifest := must.Get(os.ReadFile(filepath.Join(dir, "manifest")))(t)
		for line := range strings.Lines(string(manifest)) {
			if strings.Contains(line, "root \"") {
				roots[line] = true
			}
		}
	}
	expect.Equal(t, len(roots), 2, "the manifests name the roots %v", roots)
}
