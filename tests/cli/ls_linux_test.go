// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"strings"
	"testing"
)

// It checks that executions are listed, newest first, with their results.
func TestActionLs(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string { return append(args, "--cas", r.cas, "--instance", "main") }
	if s := wantSaid(t, 0, at("action", "ls")); s.out != "" {
		t.Errorf("before anything was executed: %q", s.out)
	}
	good, _ := r.execute(t, "echo good > out")
	bad, _ := r.execute(t, "exit 3")
	r.execute(t, "echo good > out")

	s := wantSaid(t, 0, at("action", "ls"))
	lines := strings.Split(strings.TrimSpace(s.out), "\n")
	if len(lines) != 3 {
		t.Fatalf("action ls printed\n%s", s.out)
	}
	for i, want := range [][]string{{"exit 0", "cached", good}, {"exit 3", bad}, {"exit 0", good}} {
		for _, text := range want {
			if !strings.Contains(lines[i], text) {
				t.Errorf("line %d is %q, without %q", i+1, lines[i], text)
			}
		}
	}
	wantSaid(t, 0, at("action", "ls", "-n", "1"), good)
	if s := wantSaid(t, 0, at("action", "ls", "--failed"), bad); strings.Contains(s.out, good) {
		t.Errorf("--failed printed\n%s", s.out)
	}
	if s := wantSaid(t, 0, at("action", "ls", "--stage", "EXECUTING")); s.out != "" {
		t.Errorf("nothing runs, and --stage EXECUTING printed\n%s", s.out)
	}
	if s := wantSaid(t, 0, at("action", "ls", "--target", "//none/*")); s.out != "" {
		t.Errorf("--target of nothing printed\n%s", s.out)
	}
	var rows []struct {
		Operation, Action, Stage, Status, Worker, Queued string
		ExitCode                                         *int `json:"exit_code"`
		Cached                                           bool
	}
	s = wantSaid(t, 0, at("action", "ls", "--json"))
	if err := json.Unmarshal([]byte(s.out), &rows); err != nil || len(rows) != 3 {
		t.Fatalf("--json printed %s: %v", s.out, err)
	}
	if e := rows[1]; e.Action != bad || e.Stage != "COMPLETED" || e.Status != "OK" || e.ExitCode == nil || *e.ExitCode != 3 || e.Worker == "" || e.Queued == "" {
		t.Errorf("the failed one is %+v", e)
	}
	// Other commands find the listed actions.
	wantSaid(t, 0, at("action", "show", rows[1].Action), "exit 3")
	wantSaid(t, 0, at("action", "log", rows[0].Operation))

	wantSaid(t, 0, []string{"action", "ls", "--cas", r.cas, "--instance", "other"})
	wantSaid(t, 2, at("action", "ls", "--stage", "DONE"), "DONE")
	wantSaid(t, 2, at("action", "ls", "-n", "0"))
}
