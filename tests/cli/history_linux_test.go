// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"path/filepath"
	"strings"
	"testing"
)

// TestActionsByHistory checks that past requests are found by digest prefix and by age.
func TestActionsByHistory(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string { return append(args, "--cas", r.cas, "--instance", "main") }
	wantOutput(t, 4, at("action", "show", "^1"), "0 actions")
	good, _ := r.execute(t, "echo good | tee out")
	bad, _ := r.execute(t, "exit 3")
	r.execute(t, "exit 3")

	wantOutput(t, 0, at("action", "show", "^1"), bad)
	statement := filepath.Join(t.TempDir(), "made")
	wantOutput(t, 0, at("attest", "provenance", "^2", "--attest", statement))
	wantOutput(t, 0, []string{"attest", "verify", statement, "--unsigned", "--action", good})
	wantOutput(t, 0, at("action", "show", "^2"), good)
	wantOutput(t, 0, at("action", "show", good[:8]), good)
	wantOutput(t, 0, at("action", "show", "^1"), bad) // lookups are not recorded
	wantOutput(t, 4, at("action", "show", "^3"), "2 actions")
	wantOutput(t, 4, at("action", "show", "00000000"), "no action")
	wantOutput(t, 2, at("action", "show", good[:7]), "HASH/SIZE")
	if s := wantOutput(t, 0, at("action", "log", "^2")); s.out != "good\n" {
		t.Errorf("action log ^2: got %q, want %q", s.out, "good\n")
	}
	wantOutput(t, 3, append([]string{"run", "--action", "^1"}, at()...))
	wantOutput(t, 4, []string{"action", "show", "^1", "--cas", r.cas, "--instance", "other"})

	// The history lists the requested entries, newest first.
	s := wantOutput(t, 0, at("action", "ls", "--all"))
	lines := strings.Split(strings.TrimSpace(s.out), "\n")
	if len(lines) != 3 || !strings.Contains(lines[0], "exit 3") || !strings.Contains(lines[2], good) || strings.Contains(s.out, "operations/") {
		t.Errorf("action ls --all: got\n%s\nwant three entries, newest first", s.out)
	}
	if s := wantOutput(t, 0, at("action", "ls", "--failed"), bad); strings.Contains(s.out, good) || strings.Contains(s.out, "operations/") {
		t.Errorf("action ls --failed: got\n%s\nwant only the failed action", s.out)
	}
	if s := wantOutput(t, 0, at("action", "ls", "--target", "//none")); s.out != "" {
		t.Errorf("action ls of an unknown target: got\n%s\nwant nothing", s.out)
	}
	wantOutput(t, 0, at("action", "ls", "--all", "--json", "-n", "1"), `"how": "executed"`, `"stable_hash"`)

	off := serving(t, "main", "--history-size", "0")
	off.execute(t, "true")
	wantOutput(t, 1, []string{"action", "show", "^1", "--cas", off.cas, "--instance", "main"}, "keeps no history", "HASH/SIZE")
	wantOutput(t, 0, []string{"action", "ls", "--all", "--cas", off.cas, "--instance", "main"}, "operations/")
	if strings.Contains(r.log.String(), "history") {
		t.Errorf("got log\n%s\nwant nothing about the history", r.log)
	}
}
