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
	"github.com/goccy/go-yaml"
)

var update = flag.Bool("update", false, "write the report of examples/gate into its README")

// A compositeAction is the metadata of an action of GitHub, as far as it decides what the first step runs and which
// directory the others keep.
type compositeAction struct {
	Inputs map[string]struct{ Default string }
	Runs   struct {
		Steps []struct {
			Shell, Run string
			Env, With  map[string]string
		}
	}
}

// TestGateExample runs the gate on examples/gate as its composite action does: the README shows its report.
func TestGateExample(t *testing.T) {
	confined(t)
	sandboxtest.Tool(t, "python3")
	const readme = "../../examples/gate/README.md"
	dir := t.TempDir()
	must.Succeed(t, os.CopyFS(dir, os.DirFS(filepath.Dir(readme))))
	must.Succeed(t, os.Remove(filepath.Join(dir, "README.md")))
	hash := commit(t, dir)
	var action compositeAction
	must.Succeed(t, yaml.Unmarshal(must.Get(os.ReadFile(filepath.Join(dir, "action.yml")))(t), &action))
	steps := action.Runs.Steps
	must.Be(t, len(steps) == 3, "got %d steps in action.yml, want 3", len(steps))
	temp := t.TempDir()
	expand := strings.NewReplacer("${{ inputs.mode }}", action.Inputs["mode"].Default, "${{ runner.temp }}", temp).Replace
	evidence := expand(steps[0].Env["OUT"])
	for _, kept := range []string{steps[1].With["path"], steps[2].With["sarif_file"]} {
		must.Be(t, expand(kept) == evidence, "action.yml keeps %s, want %s", expand(kept), evidence)
	}
	cmd := exec.CommandContext(t.Context(), steps[0].Shell, "-c", steps[0].Run)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(built.Path(t))+":"+os.Getenv("PATH"), "GITHUB_ACTION_PATH="+dir,
		"GITHUB_STEP_SUMMARY=")
	for name, value := range steps[0].Env {
		cmd.Env = append(cmd.Env, name+"="+expand(value))
	}
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 4 || !strings.Contains(string(out), "hermetic gate: a step touched the network") {
		t.Fatalf("got exit code %d, want 4; output:\n%s", code, out)
	}
	report := must.Get(os.ReadFile(filepath.Join(evidence, hash, "report.md")))(t)
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
