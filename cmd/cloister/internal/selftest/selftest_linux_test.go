// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/cmd/cloister/internal/localworker"
	"github.com/cloister-build/cloister/cmd/internal/exit"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"golang.org/x/sys/unix"
)

// TestMain lets the test binary be the program that the self-test runs in the sandbox.
func TestMain(m *testing.M) {
	namespace.Init()
	if len(os.Args) > 2 && os.Args[1] == Command {
		if err := Attempts(context.Background(), os.Args[2], os.Stdout); err != nil {
			panic(err)
		}
		return
	}
	os.Exit(m.Run())
}

// TestSelfTestNamesWhatIsBroken: each line fails if its guarantee is broken, and no other line does.
func TestSelfTestNamesWhatIsBroken(t *testing.T) {
	b := namespace.New(namespace.Config{})
	_, err := b.Probe(t.Context())
	if err := errors.Join(err, b.Close()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	without := func(layers ...namespace.Layer) func(*testing.T, *localworker.Worker) {
		return func(_ *testing.T, w *localworker.Worker) { w.BackendConfig.Without = layers }
	}
	for _, c := range []struct {
		name   string
		broken string
		change func(*testing.T, *localworker.Worker)
	}{
		{"nothing", "", nil},
		{"a network", "network off", without(namespace.NetNamespace, namespace.Landlock)},
		{"no monitor", "attempts audited", without(namespace.Monitor)},
		// Its parent has exited.
		{"a process", "no process left, no namespace left", func(t *testing.T, _ *localworker.Worker) {
			out, err := exec.CommandContext(t.Context(), "/bin/sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!").Output()
			must.Succeed(t, err)
			pid := must.Get(strconv.Atoi(strings.TrimSpace(string(out))))(t)
			t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGKILL); _, _ = unix.Wait4(pid, nil, 0, nil) })
		}},
		{"a file", "no file left", func(t *testing.T, _ *localworker.Worker) {
			name := filepath.Join(os.TempDir(), "left")
			must.Succeed(t, os.WriteFile(name, nil, 0o600))
			t.Cleanup(func() { os.Remove(name); os.Remove(filepath.Dir(name)) })
		}},
		{"a descriptor", "no namespace left", func(t *testing.T, _ *localworker.Worker) {
			f := must.Get(os.Open("/proc/self/ns/net"))(t)
			t.Cleanup(func() { f.Close() })
		}},
		{"a mount", "no mount left", func(t *testing.T, _ *localworker.Worker) {
			dir := t.TempDir()
			if err := unix.Mount("none", dir, "tmpfs", 0, "size=4k"); err != nil {
				sandboxtest.Unavailable(t, "root", err)
			}
			t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
		}},
		{"a control group", "no control group left", func(t *testing.T, _ *localworker.Worker) {
			dir := "/sys/fs/cgroup/cloister." + strconv.Itoa(os.Getpid()) + ".99999"
			if dirs, _ := filepath.Glob("/sys/fs/cgroup/pids"); len(dirs) > 0 {
				dir = filepath.Join(dirs[0], filepath.Base(dir))
			}
			if err := os.Mkdir(dir, 0o755); err != nil {
				sandboxtest.Unavailable(t, "limits", err)
			}
			f, err := os.Open(dir)
			if err == nil {
				err = unix.Flock(int(f.Fd()), unix.LOCK_EX) // otherwise it counts as that of a dead worker
			}
			must.Succeed(t, err)
			t.Cleanup(func() { f.Close(); os.Remove(dir) })
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("TMPDIR", t.TempDir())
			var out strings.Builder
			err := Run(t.Context(), &confinement.Flags{Tier: "full"}, &out, func(w *localworker.Worker) {
				if c.change != nil {
					c.change(t, w)
				}
			})
			code := 0
			if e, ok := errors.AsType[*exit.Error](err); ok {
				code = e.Code
			}
			var broken []string
			for line := range strings.Lines(out.String()) {
				if strings.HasPrefix(line, "FAIL") {
					broken = append(broken, strings.TrimSpace(line[6:30]))
				}
			}
			want := 0
			if c.broken != "" {
				want = exit.No
			}
			if c.broken != strings.Join(broken, ", ") || code != want || strings.Count(out.String(), "\n") != 9 {
				t.Errorf("got exit code %d (%v) and\n%swant %q", code, err, &out, c.broken)
			}
		})
	}
}

// TestSelfTestChecks covers results that no layer can be made to produce here.
func TestSelfTestChecks(t *testing.T) {
	in := must.Get(castest.Instances()(""))(t)
	input := must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, selfInput))(t)
	other := must.Get(cas.PutBytes(t.Context(), in.Store, cas.SHA256, []byte("changed")))(t)
	const connect, write = `{"Kind":"connect","What":"x","Error":"refused"}`, `{"Kind":"write","What":"x","Error":"refused"}`
	for _, c := range []struct {
		said, hash, broken string
		input              cas.Digest
	}{
		{connect + "," + write, "1", "", input},
		{`{"Kind":"connect","What":"x","Error":"timeout","Late":true},` + write, "1", "network off", input},
		{connect, "1", "inputs unwritable", input},
		{connect + `,{"Kind":"write","What":"x","Error":""},` + write, "1", "inputs unwritable", input},
		{connect + "," + write, "1", "inputs unwritable", other},
		{connect + "," + write, "2", "stable hash", input},
	} {
		var out strings.Builder
		s := &selftest{out: &out, input: c.input, attempts: []sandbox.Event{{Kind: sandbox.EventConnect, Subject: "tcp " + nowhere}}}
		run := func(hash string) *worker.Outcome {
			return &worker.Outcome{StableHash: hash, Result: &repb.ActionResult{StdoutRaw: []byte("[" + c.said + "]"), OutputFiles: []*repb.OutputFile{{}}}}
		}
		must.Succeed(t, s.check(t.Context(), in.Store, [2]*worker.Outcome{run("1"), run(c.hash)}))
		if (c.broken != "") != s.failed || c.broken != "" && !strings.Contains(out.String(), "FAIL  "+c.broken) || strings.Count(out.String(), "FAIL") > 1 {
			t.Errorf("%s:\n%s", c.said, &out)
		}
	}
}
