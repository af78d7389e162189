// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/bazelbuild/remote-apis-sdks/go/pkg/client"
	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/worker/repro"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
)

// TestRepro checks that the factors of a command's outputs are found and reported, and no others.
func TestRepro(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	page, data, kept := filepath.Join(dir, "r.html"), filepath.Join(dir, "r.json"), filepath.Join(dir, "kept")
	script := []string{"--", "/bin/sh", "-c", "pwd > x; echo same > y"}
	args := append([]string{"repro", "--out", "x", "--out", "y", "--bisect", "--vary", "path,environment", "-n", "2", "--keep", kept}, script...)
	s := wantOutput(t, 1, append([]string{args[0], "--report", page}, args[1:]...), "x  DIFFERS  2 digests in 2 runs  (1 of 2 outputs)",
		"depends on path", "cause: path", "found by varying: path", "/build", "not reproducible: path")
	if strings.Contains(s.out, "  y  DIFFERS") {
		t.Errorf("got equal outputs reported as different:\n%s", s.out)
	}
	for name, want := range map[string]string{"run1/x": "/build\n", "run2/x": "/b/x/build\n", "run2/y": "same\n"} {
		if got, err := os.ReadFile(filepath.Join(kept, name)); string(got) != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "/b/x/build") {
		t.Errorf("got a page of %d bytes, %v", len(html), err)
	}

	statement := filepath.Join(dir, "s.json")
	same := append([]string{"repro", "--out", "x", "--json", "--report", data, "--attest", statement, "-n", "2", "--", "/bin/sh", "-c"}, "cat /etc/services > x; exit 3")
	s = wantOutput(t, 0, same)
	wantOutput(t, 0, []string{"attest", "verify", statement, "--unsigned", "--reproducible"}, "same")
	text, err := os.ReadFile(data)
	if err != nil || string(text) != s.out {
		t.Errorf("the report differs from the output of --json: %v", err)
	}
	var r repro.Report
	if err := json.Unmarshal(text, &r); err != nil || len(r) != 1 || r[0].Result != repro.Same || r[0].Runs[1].ExitCode != 3 || len(r[0].Factors) < 8 {
		t.Errorf("got %s, %v", text, err)
	}
	for _, args := range [][]string{
		{},
		{"-n", "1", "--", "true"},
		{"--vary", "moon", "--", "true"},
		{"--report", "x.pdf", "--", "true"},
		{"--in", ".", "abc"},
		{"--on", "elsewhere", "--", "true"},
		{"--failed", "--", "true"},
		{"--env", "A", "--", "true"},
	} {
		wantOutput(t, 2, append([]string{"repro"}, args...))
	}
}

// TestReproOfAServer checks actions of a server locally and remotely, by digest, by ^1 and by --failed.
func TestReproOfAServer(t *testing.T) {
	r := serving(t, "main")
	at := func(args ...string) []string {
		return append(append([]string{"repro", "-n", "2"}, args...), "--cas", r.cas, "--instance", "main")
	}
	digest, _ := r.execute(t, "hostname > out; exit 1")
	r.execute(t, "exit 3")
	s := wantOutput(t, 0, at("^1"), "SAME  2 runs: local")
	if !strings.Contains(s.out, "exit 3") {
		t.Errorf("got no exit codes of the runs:\n%s", s.out)
	}
	wantOutput(t, 0, at("--failed", "--vary", "environment"), "2 actions: 2 same, 0 differ")
	wantOutput(t, 0, at(digest[:8], "--on", "local,remote", "--vary", "none"), "SAME  2 runs: local, remote", "as action ")
	wantOutput(t, 2, at("^9"))
	wantOutput(t, 2, at(digest, "--on", "grpc://127.0.0.1:1"), "--on grpc://127.0.0.1:1: ")
}

// TestServeRunsActionsAgain checks that the gate records only reproducible results and that samples are reported later.
func TestServeRunsActionsAgain(t *testing.T) {
	r := serving(t, "main", "--repro-gate")
	odd, said := r.execute(t, "pwd > out")
	if !strings.Contains(said.Message, "not cached: not reproducible: out differs (path); see: cloister repro "+odd) {
		t.Errorf("got message %q", said.Message)
	}
	if _, again := r.execute(t, "pwd > out"); again.CachedResult {
		t.Error("got a cached result of an irreproducible action")
	}
	r.execute(t, "echo same > out")
	if _, again := r.execute(t, "echo same > out"); !again.CachedResult || again.Message != "" {
		t.Errorf("reproducible action: got message %q, want a cached result without one", again.Message)
	}

	r = serving(t, "main", "--repro-sample", "100%")
	r.execute(t, "pwd > out")
	until(t, "the action was run again", func() bool {
		_, again := r.execute(t, "pwd > out")
		return again.CachedResult && strings.Contains(again.Message, "cloister: not reproducible: out differs (path)")
	})
}

// TestChecksAreCounted checks that samples cover every completed action, the gate only cacheable ones, and that each check is counted once.
func TestChecksAreCounted(t *testing.T) {
	// counts returns the metric of checks by result.
	counts := func(t *testing.T, metrics string) string {
		t.Helper()
		_, text := get(t, metrics, "/metrics")
		all := map[string]string{}
		for _, m := range regexp.MustCompile(`(?m)^cloister_repro_checks_total\{result="(\w+)"\} (\d+)$`).FindAllStringSubmatch(text, -1) {
			all[m[1]] = m[2]
		}
		return fmt.Sprint(all)
	}
	for _, c := range []struct {
		flags []string
		want  string
	}{
		{[]string{"--repro-sample", "100%"}, "map[differs:2 flaky_exit:1 same:2]"},
		{[]string{"--repro-gate"}, "map[differs:1 flaky_exit:1 same:1]"},
	} {
		t.Run(c.flags[0], func(t *testing.T) {
			metrics := unused(t)
			r := serving(t, "main", append(c.flags, "--metrics", metrics)...)
			if _, said := r.submit(t, "sleep 60", &repb.Action{Timeout: durationpb.New(200 * time.Millisecond)}); said.Status.GetCode() != int32(codes.DeadlineExceeded) {
				t.Errorf("action with a timeout: got %v", said)
			}
			r.execute(t, "exit 3")
			r.submit(t, "pwd > out", &repb.Action{DoNotCache: true})
			r.execute(t, "echo same > out")
			r.execute(t, "test $(pwd) = /build")
			large, _ := r.execute(t, "head -c 50000000 /dev/urandom > out")
			until(t, "all are checked", func() bool { return counts(t, metrics) == c.want })
			want := strings.Count(c.want, ":") + strings.Count(c.want, ":2")
			until(t, fmt.Sprintf("the history has %d checks", want), func() bool { // written after the metrics change
				s := wantOutput(t, 0, []string{"action", "ls", "--all", "--json", "--cas", r.cas, "--instance", "main"})
				return strings.Count(s.out, `"how": "checked"`) == want
			})
			if _, said := r.execute(t, "head -c 50000000 /dev/urandom > out"); !strings.Contains(said.Message, "not reproducible: out differs") || !strings.Contains(said.Message, large) {
				t.Errorf("action with a large output: got message %q", said.Message)
			}
		})
	}
}

// TestVerdictsOutliveAServer checks that a verdict survives kill -9 of the server, and that a gate withholds results recorded by a server without one.
func TestVerdictsOutliveAServer(t *testing.T) {
	confined(t)
	home := t.TempDir()
	store := filepath.Join(home, "store")
	// begin starts a server of the directory and returns a client and a function that kills the server.
	begin := func(flags ...string) (*remote, func()) {
		t.Helper()
		var log bytes.Buffer
		s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
			Binary: built.Path(t), Dir: store, Home: home, Listen: "127.0.0.1:0", Args: flags, Log: &log,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Kill)
		c, err := client.NewClient(t.Context(), "main", client.DialParams{Service: s.Addr, NoSecurity: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return &remote{c, "grpc://" + s.Addr, store, &log}, s.Kill
	}
	const odd, later = "pwd > out", "pwd > out; true"
	const differs, again = "not reproducible: out differs (path); see: cloister repro ", " --instance main"

	r, kill := begin("--repro-sample", "100%")
	r.execute(t, odd)
	until(t, "the action was run again", func() bool {
		_, told := r.execute(t, odd)
		return strings.Contains(told.Message, differs)
	})
	kill()

	r, kill = begin("--repro-sample", "1%")
	action, told := r.execute(t, odd)
	if want := "cloister: " + differs + action + " --cas " + r.cas + again; !told.CachedResult || told.Message != want {
		t.Errorf("next server: got message %q, cached %v, want %q", told.Message, told.CachedResult, want)
	}
	kill()

	// A gate whose sample does not select the action.
	r, kill = begin("--repro-gate", "--repro-sample", "0.000001%")
	if _, told := r.execute(t, odd); told.CachedResult || !strings.Contains(told.Message, "cloister: not cached: "+differs+action) {
		t.Errorf("gate with a known verdict: got cached %v, message %q", told.CachedResult, told.Message)
	}
	wantOutput(t, 4, []string{"cache", "show", action, "--cas", r.cas, "--instance", "main"}, "not found")
	kill()
	r, kill = begin("--repro-gate")
	r.execute(t, later)
	kill() // at once
	r, kill = begin("--repro-gate", "--repro-sample", "0.000001%")
	if _, told := r.execute(t, later); told.CachedResult || !strings.Contains(told.Message, "cloister: not cached: "+differs) {
		t.Errorf("next gate: got cached %v, message %q", told.CachedResult, told.Message)
	}
	kill()

	// A torn line is reported and costs only itself.
	path := filepath.Join(store, repro.VerdictsFile)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text[:len(text)-20], 0o600); err != nil {
		t.Fatal(err)
	}
	r, kill = begin("--repro-sample", "1%")
	if _, told := r.execute(t, odd); !strings.Contains(told.Message, differs) {
		t.Errorf("got message %q", told.Message)
	}
	if n := strings.Count(r.log.String(), "damaged verdicts"); n != 1 {
		t.Errorf("got log\n%s", r.log)
	}
	kill()
}
