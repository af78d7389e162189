// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/google/go-cmp/cmp"
)

// git runs git in dir without any user configuration.
func git(t testing.TB, dir string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_CONFIG_GLOBAL=/dev/null",
		"GIT_AUTHOR_NAME=A", "GIT_AUTHOR_EMAIL=a@example.com", "GIT_AUTHOR_DATE=1700000000 +0100",
		"GIT_COMMITTER_NAME=C", "GIT_COMMITTER_EMAIL=c@example.com", "GIT_COMMITTER_DATE=1700000001 +0100",
	}
	out, err := cmd.CombinedOutput()
	must.Be(t, err == nil, "git %v: %v\n%s", args, err, out)
	return strings.TrimSpace(string(out))
}

// commit makes a repository of the files in dir and returns its commit.
func commit(t testing.TB, dir string) string {
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
		must.Succeed(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)))
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
		must.Succeed(t, err)
	}
	mounts := must.Get(os.ReadFile("/proc/self/mountinfo"))(t)
	all["mounts"] = string(mounts)
	links := must.Get(filepath.Glob("/proc/[0-9]*/exe"))(t)
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
		{"SIGTERM", []string{
			"--", "/bin/sh", "-c", "trap '' TERM; setsid sleep 60 & echo ready; while :; do sleep 1; done",
		}, syscall.SIGTERM, 143},
		{"SIGKILL, and then another run", []string{
			"--", "/bin/sh", "-c", "setsid sleep 60 & echo ready; sleep 60",
		}, syscall.SIGKILL, -1},
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
			for end := time.Now().Add(time.Minute); !maps.Equal(before, after) && time.Now().Before(end); {
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
