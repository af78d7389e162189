// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/google/go-cmp/cmp"
)

// git runs git in dir without any user configuration.
func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_AUTHOR_DATE=1700000000 +0100",
		"GIT_COMMITTER_NAME=C", "GIT_COMMITTER_EMAIL=c@example.com", "GIT_COMMITTER_DATE=1700000001 +0100",
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// commit makes a repository of the files in dir and returns its commit.
func commit(t *testing.T, dir string) string {
	t.Helper()
	if _, err := exec.LookPath("git"); err != nil {
		sandboxtest.Unavailable(t, "git", err)
	}
	git(t, dir, "init", "-q", "-b", "main")
	git(t, dir, "add", "-A")
	git(t, dir, "commit", "-q", "-m", "x")
	return git(t, dir, "rev-parse", "HEAD")
}

// lay writes files below dir.
func lay(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
}

// measured has the parts of a metrics file used here.
type measured struct {
	Format, Revision string
	InputFiles       int64 `json:"input_files"`
	Equal            bool
	StableHashes     int `json:"stable_hashes"`
	Runs             []map[string]any
}

func TestRunOfARevision(t *testing.T) {
	confined(t)
	repo, dir := t.TempDir(), t.TempDir()
	lay(t, repo, map[string]string{"a/file": "first\n", "run": "#!/bin/sh\ncat a/file; echo x > a/file || echo refused; echo made > out\n"})
	name := commit(t, repo)
	lay(t, repo, map[string]string{"a/file": "changed and not committed\n", "other": "x"})

	s := cloister(t, dir, "run", "--git", repo+"@main", "--seed", "4294967303", "-n", "3", "--out", "out", "--manifest", "m.txt", "--metrics", "m.json", "--", "./run")
	if want := strings.Repeat("first\nrefused\n", 3); s.code != 0 || s.out != want || strings.Contains(s.err, "not equal") {
		t.Errorf("got %+v, want %q", s, want)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "out")); err != nil || string(got) != "made\n" {
		t.Errorf("got output %q, %v", got, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "m.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"\nrevision \"" + name + "\"\n", "\nseed 4294967303\n", "\nspec env \"CLOISTER_SEED=4294967303\"\n",
		"\nspec env \"PYTHONHASHSEED=7\"\n", "\nspec env \"SOURCE_DATE_EPOCH=1700000001\"\n",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("got manifest\n%s\nwant %q in it", text, want)
		}
	}
	m := readMetrics(t, filepath.Join(dir, "m.json"))
	if m.Format != "cloister-run-metrics v1" || m.Revision != name || !m.Equal || m.StableHashes != 1 || len(m.Runs) != 3 || m.InputFiles != 2 {
		t.Errorf("got manifest %+v", m)
	}
	stable, _, _ := bytes.Cut(text, []byte("\nvolatile\n"))
	hash := fmt.Sprintf("%x", sha256.Sum256(append(stable, '\n')))
	for _, r := range m.Runs {
		if r["stable_hash"] != hash || r["set_up_ns"].(float64) <= 0 || r["run_ns"].(float64) <= 0 || r["clean_up_ns"].(float64) <= 0 || r["output_bytes"] != 5.0 {
			t.Errorf("got %+v, want the stable hash %s", r, hash)
		}
	}

	hashOf := func(args ...string) string {
		t.Helper()
		if s := cloister(t, dir, append([]string{"run", "--metrics", "m.json"}, args...)...); s.code != 0 {
			t.Fatalf("%v: got %+v", args, s)
		}
		return readMetrics(t, filepath.Join(dir, "m.json")).Runs[0]["stable_hash"].(string)
	}
	seed := func(n string) string { return hashOf("--git", repo, "--seed", n, "--", "true") }
	if a, b, c := seed("1"), seed("1"), seed("2"); a != b || a == c {
		t.Errorf("got stable hashes %s, %s and %s for seeds 1, 1 and 2, want only the last to differ", a, b, c)
	}
	if a, b := hashOf("--seed", "1", "--", "true"), hashOf("--seed", "1", "--", "true"); a != b {
		t.Errorf("without --git: got stable hashes %s and %s", a, b)
	}
	// The seed also determines the kernel's random numbers where the host supports that.
	random := cloister(t, dir, "run", "--seed", "0", "-n", "2", "--", "/bin/sh", "-c", "head -c 8 /dev/urandom | od -x; mktemp -u")
	if held := !strings.Contains(random.err, "cannot be seeded here"); random.code != 0 || held == strings.Contains(random.err, "not equal") {
		t.Errorf("two runs with one seed: got %+v", random)
	}
	// And memory addresses.
	b := namespace.New(namespace.Config{})
	features, err := b.Probe(t.Context())
	if err := errors.Join(err, b.Close()); err != nil {
		t.Fatal(err)
	}
	s = cloister(t, dir, "run", "--seed", "0", "-n", "2", "--", "/bin/sh", "-c", "head -1 /proc/self/maps")
	if fixed := slices.Contains(features.Conditions, sandbox.ConditionFixedLayout); s.code != 0 || s.out == "" || fixed == strings.Contains(s.err, "not equal") {
		t.Errorf("layout of two runs with one seed: got %+v", s)
	}
	if s := cloister(t, dir, "run", "-n", "2", "--", "/bin/sh", "-c", "date +%N; exit 3"); s.code != 3 || !strings.Contains(s.err, "the 2 runs differ: they have 2 stable hashes") {
		t.Errorf("two different runs: got %+v", s)
	}
}

func readMetrics(t *testing.T, name string) measured {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var m measured
	if err := json.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestRunOfARevisionPassesNothingElse(t *testing.T) {
	confined(t)
	repo := t.TempDir()
	lay(t, repo, map[string]string{"a": "x"})
	commit(t, repo)
	t.Setenv("GIT_DIR", "/nowhere") // as in a hook
	t.Setenv("PASSED", "here")
	t.Setenv("LEAKED", "secret")
	const path = "HOME=/tmp\nPASSED=here\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--pass-env", "PASSED"}, path + "SOURCE_DATE_EPOCH=1700000001\nTMPDIR=/tmp\n"},
		{[]string{"--pass-env", "PASSED", "--env", "SOURCE_DATE_EPOCH=5"}, path + "SOURCE_DATE_EPOCH=5\nTMPDIR=/tmp\n"},
	} {
		s := cloister(t, "", append(append([]string{"run", "--git", repo}, c.args...), "--", "/usr/bin/env")...)
		got := strings.Split(strings.TrimSuffix(s.out, "\n"), "\n")
		if diff := cmp.Diff(strings.Split(strings.TrimSuffix(c.want, "\n"), "\n"), got); diff != "" {
			t.Errorf("%v: got %+v\nwant (-) got (+)\n%s", c.args, s, diff)
		}
	}
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--git", repo + "@nosuch"}, 125, `"nosuch" is not a commit of the repository`},
		{[]string{"--git", t.TempDir()}, 125, "not a Git repository"},
		{[]string{"--manifest", "/nowhere/m", "--out-dir", t.TempDir()}, 125, "/nowhere/m"},
	} {
		if s := cloister(t, "", append(append([]string{"run"}, c.args...), "--", "true")...); s.code != c.code || !strings.Contains(s.err, c.want) {
			t.Errorf("%v: got %+v, want %d and %q", c.args, s, c.code, c.want)
		}
	}
}

// surroundings is the state of this host in which a run could leave something.
func surroundings(t *testing.T, repo, tmp, mark string) map[string]string {
	t.Helper()
	all := map[string]string{"worktrees": git(t, repo, "worktree", "list")}
	for _, dir := range []string{repo, tmp} {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			st, err := e.Info()
			if err != nil {
				return err
			}
			var text []byte
			if st.Mode().IsRegular() {
				text, err = os.ReadFile(path)
			}
			if path == tmp {
				return nil // files were created in it and removed
			}
			all[path] = fmt.Sprintf("%v %d %d %x", st.Mode(), st.Size(), st.ModTime().UnixNano(), sha256.Sum256(text))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	all["mounts"] = string(mounts)
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		program, _ := os.Readlink(l)
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(l), "cmdline"))
		if program == built.Path(t) || bytes.Contains(line, []byte(mark)) {
			all[l] = fmt.Sprintf("%s: %q", program, line)
		}
	}
	return all
}

// TestRunOfARevisionLeavesNothing checks that no file, mount, process or worktree entry remains, however the run ends.
func TestRunOfARevisionLeavesNothing(t *testing.T) {
	confined(t)
	repo, tmp := t.TempDir(), t.TempDir()
	lay(t, repo, map[string]string{"a/b/c": "text\n", "large": strings.Repeat("x", 2<<20)})
	commit(t, repo)
	git(t, repo, "status") // may write the index, so that nothing else does
	mark := fmt.Sprintf("mark-%d", os.Getpid())
	before := surroundings(t, repo, tmp, mark)
	for _, c := range []struct {
		name   string
		args   []string
		signal os.Signal // sent when the command runs
		code   int
	}{
		{"success", []string{"-n", "2", "--", "/bin/sh", "-c", "cat a/b/c; wc -c large"}, nil, 0},
		{"failure", []string{"--", "/bin/sh", "-c", "exit 7"}, nil, 7},
		{"timeout", []string{"--timeout", "300ms", "--", "sleep", "60"}, nil, 143},
		{"no such revision", []string{"--git", repo + "@nosuch", "--", "true"}, nil, 125},
		{"SIGINT", []string{"--", "/bin/sh", "-c", "echo ready; sleep 60; :"}, os.Interrupt, 130},
		{"SIGTERM", []string{"--", "/bin/sh", "-c", "trap '' TERM; setsid sleep 60 & echo ready; while :; do sleep 1; done"}, syscall.SIGTERM, 143},
		{"SIGKILL, and then another run", []string{"--", "/bin/sh", "-c", "setsid sleep 60 & echo ready; sleep 60"}, syscall.SIGKILL, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{"run", "--env", "MARK=" + mark, "--out-dir", tmp, "--git", repo}, c.args...)
			cmd := exec.CommandContext(t.Context(), built.Path(t), args...)
			cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "HOME="+tmp)
			out := &ready{then: func() { _ = cmd.Process.Signal(c.signal) }, on: c.signal != nil}
			var stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = out, &stderr
			err := cmd.Run()
			if got := cmd.ProcessState.ExitCode(); got != c.code {
				t.Errorf("got exit code %d (%v), want %d; %s", got, err, c.code, &stderr)
			}
			if c.signal == syscall.SIGKILL {
				next := exec.CommandContext(t.Context(), built.Path(t), "run", "--", "/bin/true")
				next.Env = cmd.Env
				if out, err := next.CombinedOutput(); err != nil {
					t.Errorf("%v: %s", err, out)
				}
			}
			after := surroundings(t, repo, tmp, mark)
			for end := time.Now().Add(2 * time.Second); !maps.Equal(before, after) && time.Now().Before(end); {
				time.Sleep(20 * time.Millisecond) // killed processes disappear with a delay
				after = surroundings(t, repo, tmp, mark)
			}
			if diff := cmp.Diff(before, after); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// ready calls then when "ready" is written.
type ready struct {
	on   bool
	then func()
}

func (r *ready) Write(p []byte) (int, error) {
	if r.on && bytes.Contains(p, []byte("ready")) {
		r.on = false
		r.then()
	}
	return len(p), nil
}

// TestPythonExample runs the project of examples/python and its connection attempt.
func TestPythonExample(t *testing.T) {
	confined(t)
	if out, err := exec.CommandContext(t.Context(), "/usr/bin/python3", "-c", "import venv").CombinedOutput(); err != nil {
		sandboxtest.Unavailable(t, "python", fmt.Sprintf("%v: %s", err, out))
	}
	repo, dir := t.TempDir(), t.TempDir()
	if err := os.CopyFS(filepath.Join(repo, "examples/python"), os.DirFS("../../examples/python")); err != nil {
		t.Fatal(err)
	}
	commit(t, repo)
	s := cloister(t, dir, "run", "--git", repo, "--seed", "7", "-n", "2", "--out", "report.json", "--metrics", "m.json", "--", "sh", "examples/python/run.sh")
	if s.code != 0 {
		t.Fatalf("%+v", s)
	}
	var report struct {
		Files  []string
		Sample []string
		Dated  int64
	}
	b, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if err == nil {
		err = json.Unmarshal(b, &report)
	}
	if err != nil || report.Dated != 1700000001 || len(report.Sample) != 3 || len(report.Files) != 2 {
		t.Errorf("%s: %v", b, err)
	}
	if m := readMetrics(t, filepath.Join(dir, "m.json")); !m.Equal {
		t.Errorf("two runs with one seed: got %+v, want equal ones", m.Runs)
	}
	want := output{"", "cannot fetch http://192.0.2.1/: [Errno 101] Network is unreachable\n" +
		"cloister: tried to connect to tcp 192.0.2.1:80: there is no network (python3, connect)\n", 1}
	if got := cloister(t, dir, "run", "--git", repo, "--", "/usr/bin/python3", "examples/python/connect.py"); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestCheckSelfTest(t *testing.T) {
	confined(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	s := cloister(t, "", "check", "--selftest")
	for _, want := range []string{"network off", "attempts audited", "inputs unwritable", "stable hash", "no process left", "no mount left", "no namespace left", "no control group left", "no file left"} {
		if !strings.Contains(s.out, "\nok    "+want+" ") {
			t.Errorf("got\n%s\nwant %q in it", s.out, want)
		}
	}
	if s.code != 0 || t.Failed() {
		t.Errorf("got %+v, want exit code 0", s)
	}
	if s := cloister(t, "", "check", "--selftest", "--sandbox", "namespaces"); s.code != 1 || !strings.Contains(s.out, "\nFAIL  attempts audited ") || strings.Count(s.out, "FAIL") != 1 {
		t.Errorf("without the syscall monitor: got %+v, want exactly one FAIL", s)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind %v, %v, want nothing", left, err)
	}
}
