// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestActionLs checks that executions are listed, newest first, with their results.
func TestActionLs(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string { return append(args, "--cas", r.cas, "--instance", "main") }
	if s := wantOutput(t, 0, at("action", "ls")); s.out != "" {
		t.Errorf("before any execution: got %q, want nothing", s.out)
	}
	good, _ := r.execute(t, "echo good > out")
	bad, _ := r.execute(t, "exit 3")
	r.execute(t, "echo good > out")

	s := wantOutput(t, 0, at("action", "ls"))
	lines := strings.Split(strings.TrimSpace(s.out), "\n")
	if len(lines) != 3 {
		t.Fatalf("action ls: got\n%s\nwant three lines", s.out)
	}
	for i, want := range [][]string{{"exit 0", "cached", good}, {"exit 3", bad}, {"exit 0", good}} {
		for _, text := range want {
			if !strings.Contains(lines[i], text) {
				t.Errorf("line %d: got %q, want %q in it", i+1, lines[i], text)
			}
		}
	}
	wantOutput(t, 0, at("action", "ls", "-n", "1"), good)
	if s := wantOutput(t, 0, at("action", "ls", "--failed"), bad); strings.Contains(s.out, good) {
		t.Errorf("--failed: got\n%s\nwant only the failed action", s.out)
	}
	if s := wantOutput(t, 0, at("action", "ls", "--stage", "EXECUTING")); s.out != "" {
		t.Errorf("--stage EXECUTING: got\n%s\nwant nothing", s.out)
	}
	if s := wantOutput(t, 0, at("action", "ls", "--target", "//none/*")); s.out != "" {
		t.Errorf("--target of no action: got\n%s\nwant nothing", s.out)
	}
	var rows []struct {
		Operation, Action, Stage, Status, Worker, Queued string
		ExitCode                                         *int `json:"exit_code"`
		Cached                                           bool
	}
	s = wantOutput(t, 0, at("action", "ls", "--json"))
	if err := json.Unmarshal([]byte(s.out), &rows); err != nil || len(rows) != 3 {
		t.Fatalf("--json: got %s, %v, want three rows", s.out, err)
	}
	if e := rows[1]; e.Action != bad || e.Stage != "COMPLETED" || e.Status != "OK" || e.ExitCode == nil || *e.ExitCode != 3 || e.Worker == "" || e.Queued == "" {
		t.Errorf("failed action: got %+v", e)
	}
	// Other commands find the listed actions.
	wantOutput(t, 0, at("action", "show", rows[1].Action), "exit 3")
	wantOutput(t, 0, at("action", "log", rows[0].Operation))

	wantOutput(t, 0, []string{"action", "ls", "--cas", r.cas, "--instance", "other"})
	wantOutput(t, 2, at("action", "ls", "--stage", "DONE"), "DONE")
	wantOutput(t, 2, at("action", "ls", "-n", "0"))
}
