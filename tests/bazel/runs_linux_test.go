// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/worker/manifest"
	"github.com/cloister-build/cloister/worker/repro"
)

// A ran is an action that a server has executed.
type ran struct {
	Action, How, Target, Mnemonic string
	StableHash                    string `json:"stable_hash"`
}

// cloister calls the program with the server's address and returns what it prints.
func (r *rig) cloister(t *testing.T, args ...string) []byte {
	t.Helper()
	var out, said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), r.config.Binary, append(args, "--cas", "grpc://"+r.Endpoint)...)
	cmd.Stdout, cmd.Stderr = &out, &said
	if err := cmd.Run(); err != nil {
		t.Errorf("cloister %v: %v\n%s%s", args, err, &said, &out)
	}
	return out.Bytes()
}

// executed returns by its digest each action that the server has executed, as its history has it.
func (r *rig) executed(t *testing.T) map[string]ran {
	t.Helper()
	var rows []ran
	if err := json.Unmarshal(r.cloister(t, "action", "ls", "--all", "-n", "10000", "--json"), &rows); err != nil {
		t.Fatal(err)
	}
	executed := map[string]ran{}
	for _, row := range rows {
		if row.How == "executed" {
			executed[row.Action] = row
		}
	}
	return executed
}

// manifest returns the record of the run of an action.
func (r *rig) manifest(t *testing.T, action string) *manifest.Manifest {
	t.Helper()
	m, err := manifest.Parse(r.cloister(t, "action", "show", action, "--manifest"))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// wantEqualRuns checks that each action that second has executed has the stable hash that it has at first. first executed
// these, and perhaps more.
func wantEqualRuns(t *testing.T, first, second *rig, atFirst, atSecond map[string]ran) {
	t.Helper()
	equal, alone := 0, 0
	for digest, there := range atSecond {
		here, known := atFirst[digest]
		switch {
		case !known && there.Mnemonic == "TestRunner":
			// Bazel writes into the action that makes a test.xml how many seconds the test has taken.
			alone++
		case !known:
			t.Errorf("action %s (%s of %s) is not of the other build", digest, there.Mnemonic, there.Target)
		case there.StableHash == "" || here.StableHash != there.StableHash:
			t.Errorf("action %s (%s of %s) has the stable hashes %q and %q: %+v", digest, there.Mnemonic, there.Target,
				here.StableHash, there.StableHash, manifest.Diff(first.manifest(t, digest), second.manifest(t, digest)))
		default:
			equal++
		}
	}
	if equal < 50 {
		t.Errorf("%d stable hashes are equal, want at least 50", equal)
	}
	t.Logf("two servers of two users: %d actions compared, %d stable hashes equal, %d actions of one build alone",
		len(atSecond)-alone, equal, alone)
}

// wantReproducible checks that an action of each kind that the server has executed is the same in two runs.
func (r *rig) wantReproducible(t *testing.T, executed map[string]ran) {
	t.Helper()
	sample := map[string]string{} // by mnemonic
	for digest, row := range executed {
		if known, ok := sample[row.Mnemonic]; !ok || digest < known {
			sample[row.Mnemonic] = digest
		}
	}
	args := []string{"repro", "-n", "2", "--json"}
	for _, digest := range sample {
		args = append(args, digest)
	}
	var report repro.Report
	if err := json.Unmarshal(r.cloister(t, args...), &report); err != nil {
		t.Fatal(err)
	}
	var judged []string
	for _, v := range report {
		row := executed[v.Action]
		judged = append(judged, row.Mnemonic)
		if v.Result != repro.Same || len(v.Factors) < 10 {
			t.Errorf("%s of %s, varied in %v: %s", row.Mnemonic, row.Target, v.Factors, v.Result)
		}
	}
	slices.Sort(judged)
	if got := strings.Join(judged, " "); got != "CppCompile CppLink Genrule Pages TestRunner" {
		t.Errorf("judged were %s", got)
	}
}
