// SPDX-License-Identifier: Apache-2.0

package bazel_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// A ran is an executed action in a server's history.
type ran struct {
	Action, How, Target, Mnemonic string
	StableHash                    string `json:"stable_hash"`
}

// cloister runs the program with the server's address and returns its output.
func (r *rig) cloister(t *testing.T, args ...string) []byte {
	t.Helper()
	var out, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), r.config.Binary, append(args, "--cas", "grpc://"+r.Endpoint)...)
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("cloister %v: %v\n%s%s", args, err, &stderr, &out)
	}
	return out.Bytes()
}

// executed returns the executed actions in the server's history by digest.
func (r *rig) executed(t *testing.T) map[string]ran {
	t.Helper()
	var rows []ran
	must.Succeed(t, json.Unmarshal(r.cloister(t, "action", "ls", "--all", "--limit", "10000", "--json"), &rows))
	executed := map[string]ran{}
	for _, row := range rows {
		if row.How == "executed" {
			executed[row.Action] = row
		}
	}
	return executed
}

// manifest returns the manifest of an action's run.
func (r *rig) manifest(t *testing.T, action string) *manifest.Manifest {
	t.Helper()
	return must.Get(manifest.Parse(r.cloister(t, "action", "show", action, "--manifest")))(t)
}

// wantEqualRuns checks that each action executed by second has the same stable hash at first, which may have executed
// more.
func wantEqualRuns(t *testing.T, first, second *rig, atFirst, atSecond map[string]ran) {
	t.Helper()
	equal, alone := 0, 0
	for digest, there := range atSecond {
		here, known := atFirst[digest]
		switch {
		case !known && there.Mnemonic == "TestRunner":
			// Bazel writes a test's duration into the action that makes its test.xml.
			alone++
		case !known:
			t.Errorf("action %s (%s of %s) is missing in the other build", digest, there.Mnemonic, there.Target)
		case there.StableHash == "" || here.StableHash != there.StableHash:
			t.Errorf("action %s (%s of %s): got stable hashes %q and %q, want equal ones: %+v", digest, there.Mnemonic, there.Target,
				here.StableHash, there.StableHash, manifest.Diff(first.manifest(t, digest), second.manifest(t, digest)))
		default:
			equal++
		}
	}
	expect.That(t, equal >= 50, "got %d equal stable hashes, want at least 50", equal)
	t.Logf("two servers of two users: %d actions compared, %d stable hashes equal, %d actions in one build only",
		len(atSecond)-alone, equal, alone)
}

// wantReproducible checks that one action per mnemonic is the same in two runs.
func (r *rig) wantReproducible(t *testing.T, executed map[string]ran) {
	t.Helper()
	sample := map[string]string{} // by mnemonic
	for digest, row := range executed {
		if known, ok := sample[row.Mnemonic]; !ok || digest < known {
			sample[row.Mnemonic] = digest
		}
	}
	digests := slices.Collect(maps.Values(sample))
	var report, elsewhere repro.Report
	must.Succeed(t, json.Unmarshal(r.cloister(t, append([]string{"repro", "-n", "2", "--json"}, digests...)...), &report))
	if *all {
		digests = slices.Collect(maps.Keys(executed))
	}
	must.Succeed(t, json.Unmarshal(r.cloister(t, append([]string{
		"repro", "-n", "2", "--vary", "none", "--on", "local,remote",
		"--json",
	}, digests...)...), &elsewhere))
	expect.That(t, len(elsewhere) == len(digests),
		"%d of %d actions ran here and on the server", len(elsewhere), len(digests))
	equal := 0
	for _, v := range elsewhere {
		for _, run := range v.Runs {
			if run.StableHash == executed[v.Action].StableHash {
				equal++
			}
			if want := executed[v.Action].StableHash; run.StableHash != want {
				t.Errorf("%s: got stable hash %q by repro on %s, want %q", v.Title(), run.StableHash, run.On, want)
				if there, err := manifest.Parse(r.cloister(t, "cas", "cat", run.Manifest)); err == nil { // else it is the local one
					t.Errorf("%+v", manifest.Diff(r.manifest(t, v.Action), there))
				}
			}
		}
	}
	t.Logf("%d of %d runs by repro, here and on the server, have the stable hash of serve", equal, 2*len(digests))
	var judged []string
	for _, v := range report {
		row := executed[v.Action]
		judged = append(judged, row.Mnemonic)
		expect.That(t, v.Result == repro.Same && len(v.Factors) >= 10,
			"%s of %s, varied in %v: %s", row.Mnemonic, row.Target, v.Factors, v.Result)
	}
	slices.Sort(judged)
	expect.Equal(t, strings.Join(judged, " "), "CppCompile CppLink Genrule Pages TestRunner", "verdicts")
}

// TestBuildsThatOnlyUseTheCacheAreExplained checks that builds can be compared by lookups and uploads, without
// execution. Bazel uploads no inputs then, so changed inputs are reported only as a whole.
func TestBuildsThatOnlyUseTheCacheAreExplained(t *testing.T) {
	t.Parallel()
	r := newRig(t, nil)
	write := func(name, text string) {
		t.Helper()
		name = filepath.Join(r.Workspace, "pair", name)
		must.Succeed(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)))
	}
	write("BUILD", `
genrule(name = "first", srcs = ["source"], outs = ["one"], cmd = "cat $< > $@")
genrule(name = "second", srcs = ["one"], outs = ["two"], cmd = "cat $< $< > $@")
genrule(name = "other", outs = ["three"], cmd = "echo three > $@")
`)
	builds := 0
	// build builds everything and returns the invocation id.
	build := func(flags ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), bazelTime)
		defer cancel()
		must.Succeed(t, r.Clean(ctx))
		builds++
		id := fmt.Sprintf("00000000-0000-4000-8000-%012d", builds)
		flags = append(flags, "--remote_executor=", "--remote_cache=grpc://"+r.Endpoint, "--remote_upload_local_results",
			"--spawn_strategy=local", "--invocation_id="+id, "//pair:all")
		if b := r.bazel(t, "build", flags...); b.ExitCode != 0 {
			t.Fatalf("bazel: got exit %d, want 0", b.ExitCode)
		}
		return id
	}
	// want checks the output of diff for two builds.
	want := func(a, b string, code int, texts ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), r.config.Binary, "diff", "--invocation", a, b, "--cas", "grpc://"+r.Endpoint)
		out, err := cmd.CombinedOutput()
		expect.Equal(t, cmd.ProcessState.ExitCode(), code, "exit code, %v", err)
		expect.Texts(t, string(out), texts)
	}
	write("source", "a\n")
	first := build()
	again := build()
	want(first, again, 0)
	write("source", "b\n")
	source := build()
	want(again, source, 1, "actions: 1 same, 2 changed\n", "\nchanged: Genrule //pair:first\n", "\n    input root\n", " absent\n", "\nchanged: Genrule //pair:second\n")
	variable := build("--action_env=LEVEL=3")
	want(source, variable, 1, "actions: 3 changed\n", "\nchanged: Genrule //pair:other\n", "\n    environment LEVEL\n      + 3\n")

	var rows []ran
	must.Succeed(t, json.Unmarshal(r.cloister(t, "action", "ls", "--all", "--json"), &rows))
	counts := map[string]int{}
	for _, row := range rows {
		counts[row.How]++
	}
	expect.That(t, fmt.Sprint(counts) == "map[absent:8 found:4 uploaded:8]", "got history %v", counts)
}
