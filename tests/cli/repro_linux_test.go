// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/worker/repro"
)

// What a command's outputs depend on is found, named and kept; what they do not depend on is no alarm.
func TestRepro(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	page, data, kept := filepath.Join(dir, "r.html"), filepath.Join(dir, "r.json"), filepath.Join(dir, "kept")
	script := []string{"--", "/bin/sh", "-c", "pwd > x; echo same > y"}
	args := append([]string{"repro", "--out", "x", "--out", "y", "--bisect", "--vary", "path,environment", "-n", "2", "--keep", kept}, script...)
	s := wantSaid(t, 1, append([]string{args[0], "--report", page}, args[1:]...), "x  DIFFERS  2 digests in 2 runs  (1 of 2 outputs)",
		"depends on path", "cause: path", "found by varying: path", "/build", "not reproducible: path")
	if strings.Contains(s.out, "  y  DIFFERS") {
		t.Errorf("what is the same is said to differ:\n%s", s.out)
	}
	for name, want := range map[string]string{"run1/x": "/build\n", "run2/x": "/b/x/build\n", "run2/y": "same\n"} {
		if got, err := os.ReadFile(filepath.Join(kept, name)); string(got) != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "/b/x/build") {
		t.Errorf("the page is of %d bytes, %v", len(html), err)
	}

	statement := filepath.Join(dir, "s.json")
	same := append([]string{"repro", "--out", "x", "--json", "--report", data, "--attest", statement, "-n", "2", "--", "/bin/sh", "-c"}, "cat /etc/services > x; exit 3")
	s = wantSaid(t, 0, same)
	wantSaid(t, 0, []string{"attest", "verify", statement, "--unsigned", "--reproducible"}, "same")
	text, err := os.ReadFile(data)
	if err != nil || string(text) != s.out {
		t.Errorf("the report is another text than --json prints: %v", err)
	}
	var r repro.Report
	if err := json.Unmarshal(text, &r); err != nil || len(r) != 1 || r[0].Result != repro.Same || r[0].Runs[1].ExitCode != 3 || len(r[0].Factors) < 8 {
		t.Errorf("got %s, %v", text, err)
	}
	for _, args := range [][]string{
		{}, {"-n", "1", "--", "true"}, {"--vary", "moon", "--", "true"}, {"--report", "x.pdf", "--", "true"}, {"--in", ".", "abc"},
		{"--on", "elsewhere", "--", "true"}, {"--failed", "--", "true"}, {"--env", "A", "--", "true"},
	} {
		wantSaid(t, 2, append([]string{"repro"}, args...))
	}
}

// Actions of a server are judged here and there, by digest, by ^1 and all that failed.
func TestReproOfAServer(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string {
		return append(append([]string{"repro", "-n", "2"}, args...), "--cas", r.cas, "--instance", "main")
	}
	digest, _ := r.execute(t, "hostname > out; exit 1")
	r.execute(t, "exit 3")
	s := wantSaid(t, 0, at("^1"), "SAME  2 runs: local")
	if !strings.Contains(s.out, "exit 3") {
		t.Errorf("it is not said how the runs ended:\n%s", s.out)
	}
	wantSaid(t, 0, at("--failed", "--vary", "environment"), "2 actions: 2 same, 0 differ")
	wantSaid(t, 0, at(digest[:8], "--on", "local,remote", "--vary", "none"), "SAME  2 runs: local, remote", "as action ")
	wantSaid(t, 2, at("^9"))
	wantSaid(t, 2, at(digest, "--on", "grpc://127.0.0.1:1"), "--on grpc://127.0.0.1:1: ")
}

// The gate records what is the same, and tells the client of what is not; samples are told of later.
func TestServeRunsActionsAgain(t *testing.T) {
	r := serving(t, "main", "--repro-gate")
	odd, said := r.execute(t, "pwd > out")
	if !strings.Contains(said.Message, "not cached: not reproducible: out differs (path); see: cloister repro "+odd) {
		t.Errorf("message %q", said.Message)
	}
	if _, again := r.execute(t, "pwd > out"); again.CachedResult {
		t.Error("what differs was cached")
	}
	r.execute(t, "echo same > out")
	if _, again := r.execute(t, "echo same > out"); !again.CachedResult || again.Message != "" {
		t.Errorf("what is the same was not cached, or %q is said of it", again.Message)
	}

	r = serving(t, "main", "--repro-sample", "100%")
	r.execute(t, "pwd > out")
	until(t, "the action was run again", func() bool {
		_, again := r.execute(t, "pwd > out")
		return again.CachedResult && strings.Contains(again.Message, "cloister: not reproducible: out differs (path)")
	})
}
