// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

var update = flag.Bool("update", false, "write the report of examples/gate into its README")

// TestGateExample runs the gate on examples/gate with its CI recipe: the README shows its report.
func TestGateExample(t *testing.T) {
	confined(t)
	sandboxtest.Tool(t, "python3")
	const readme = "../../examples/gate/README.md"
	dir := t.TempDir()
	must.Succeed(t, os.CopyFS(dir, os.DirFS(filepath.Dir(readme))))
	must.Succeed(t, os.Remove(filepath.Join(dir, "README.md")))
	hash := commit(t, dir)
	cmd := exec.CommandContext(t.Context(), "sh", "ci.sh")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(built.Path(t))+":"+os.Getenv("PATH"), "OUT=evidence", "GITHUB_STEP_SUMMARY=")
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 4 || !strings.Contains(string(out), "hermetic gate: a step touched the network") {
		t.Fatalf("got exit code %d, want 4; output:\n%s", code, out)
	}
	report := must.Get(os.ReadFile(filepath.Join(dir, "evidence", hash, "report.md")))(t)
	// What this machine lacks is not part of the example.
	got := regexp.MustCompile(`(?m)^\| not enforced .*\n`).ReplaceAllString(string(report), "")
	got = regexp.MustCompile(`(?m)^\| sandbox \| \w+;`).ReplaceAllString(got, "| sandbox | full;")
	text := must.Get(os.ReadFile(readme))(t)
	shown := regexp.MustCompile("(?s)(\n```markdown\n)(.*)(```\n)$").FindSubmatchIndex(text)
	must.Be(t, shown != nil, "%s has no report", readme)
	if string(text[shown[4]:shown[5]]) == got {
		return
	}
	must.Be(t, *update, "%s does not show the report; run make gate-example. The report is\n%s", readme, got)
	must.Succeed(t, os.WriteFile(readme, []byte(string(text[:shown[4]])+got+string(text[shown[5]:])), 0o644))
}
