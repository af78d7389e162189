// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// missingOutput: a missing output directory is created, writable for the run.
func missingOutput(t *testing.T, b sandbox.Backend) {
	r := run(t, b, Run{
		Script: "echo one > /a/one && mkdir /a/b/dir",
		Spec: func(s *sandbox.Spec) {
			s.Outputs = append(s.Outputs, sandbox.Output{Target: "/a", Source: "out/new/a"}, sandbox.Output{Target: "/a/b", Source: "out/new/a/b"})
		},
		Check: func(t testing.TB, out *os.Root, _ string) {
			if got, err := out.ReadFile("new/a/one"); err != nil || string(got) != "one\n" {
				t.Errorf("new/a/one: got %q, %v", got, err)
			}
			if st, err := out.Stat("new/a/b/dir"); err != nil || !st.IsDir() {
				t.Errorf("new/a/b/dir: got %v, %v, want a directory", st, err)
			}
		},
	})
	if r.Result.ExitCode != 0 || len(r.Result.Events) > 0 {
		t.Errorf("got exit code %d, events %v, stderr %s", r.Result.ExitCode, r.Result.Events, r.Stderr)
	}
}

// unwritableOutput: an attempt to write to an output directory of another user is an event. A write to a writable
// directory inside it is not.
func unwritableOutput(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	r := run(t, b, Run{
		Script: "echo x > /shut/file; mkdir /shut/dir; echo x > /shut/open/file; echo x >> /shut/there; true",
		Setup: func(t testing.TB, ws *os.Root) {
			err := errors.Join(ws.Mkdir("shut", 0o755), ws.Chmod("shut", 0o755), ws.Mkdir("shut/open", 0o777), ws.Chmod("shut/open", 0o777))
			must.Succeed(t, err)
			write(t, ws, "shut/there", "x", 0o666)
		},
		Spec: func(s *sandbox.Spec) {
			s.Outputs = append(s.Outputs, sandbox.Output{Target: "/shut", Source: "shut"})
		},
	})
	const why = "the directory is not writable for the run's user"
	want := []sandbox.Event{
		{Kind: sandbox.EventWrite, Subject: "/shut/dir", Syscall: "mkdir", Process: "mkdir", Count: 1, Detail: why},
		{Kind: sandbox.EventWrite, Subject: "/shut/file", Syscall: "openat", Process: "sh", Count: 1, Detail: why},
	}
	if os.Geteuid() != 0 {
		want = nil // the run's user is the caller's
	}
	if !slices.Equal(r.Result.Events, want) {
		t.Errorf("got events %v, want %v, stderr %s", r.Result.Events, want, r.Stderr)
	}
}

// missingToolchain: an event says which inputs are missing if a program was not found.
func missingToolchain(t *testing.T, b sandbox.Backend) {
	needAudit(t, b, sandbox.AuditViolations)
	for name, c := range map[string]struct {
		change  func(*sandbox.Spec)
		subject string
		detail  string
	}{
		"no inputs": {func(s *sandbox.Spec) { s.Inputs = nil }, "/bin/sh", "there are no inputs: add the toolchain"},
		"no input in PATH": {
			func(s *sandbox.Spec) { s.Args, s.Env = []string{"cc"}, []string{"PATH=/opt/bin:/opt/sbin"} },
			"cc", "no input contains /opt/bin or /opt/sbin: add the toolchain",
		},
		"no PATH": {func(s *sandbox.Spec) { s.Args, s.Env = []string{"cc"}, nil }, "cc", "the environment has no PATH"},
		"no interpreter": {
			func(s *sandbox.Spec) {
				s.Inputs = slices.DeleteFunc(s.Inputs, func(in sandbox.Input) bool { return strings.HasPrefix(in.Target, "/lib") })
			},
			"the interpreter of /bin/sh", "add the toolchain to the inputs, with the directory of the dynamic linker, such as /lib64",
		},
	} {
		r := run(t, b, Run{Script: "true", Spec: c.change})
		i := slices.IndexFunc(r.Result.Events, func(e sandbox.Event) bool { return e.Kind == sandbox.EventExec && e.Subject == c.subject })
		if r.Result.ExitCode != 127 || i < 0 || r.Result.Events[i].Detail != c.detail {
			t.Errorf("%s: got exit code %d, events %v, want 127 and one about %s: %s", name, r.Result.ExitCode, r.Result.Events, c.subject, c.detail)
		}
	}
	for name, args := range map[string][]string{
		"exit code 127": {"/bin/sh", "-c", "exit 127"}, "mistyped program": {"no-such-program"},
	} {
		r := run(t, b, Run{Spec: func(s *sandbox.Spec) { s.Args = args }})
		if r.Result.ExitCode != 127 || len(r.Result.Events) > 0 {
			t.Errorf("%s: got exit code %d, events %v, want 127 and none", name, r.Result.ExitCode, r.Result.Events)
		}
	}
}

// profileRuns: a command runs with only the tools and inputs that its profile lists.
func profileRuns(t *testing.T, b sandbox.Backend) {
	in := public(t)
	must.Succeed(t, os.WriteFile(in+"/text", []byte("text"), 0o644))
	must.Succeed(t, os.Chmod(in, 0o755))
	tools := must.Get(sandbox.HostToolchain())(t)
	for name, profile := range map[string]func(sandbox.Profile) (*sandbox.Spec, error){"build": sandbox.ForBuild, "test": sandbox.ForTest} {
		spec, err := profile(sandbox.Profile{
			Args: []string{"sh", "-c", "tr a-z A-Z < /in/text > out"}, Tools: tools,
			Inputs: []sandbox.Input{{Target: "/in", Source: in}}, Outputs: []string{"/out/here"},
		})
		must.Succeed(t, err)
		for _, l := range sandbox.AllLimits {
			if !slices.Contains(features(t, b).Limits, l) {
				spec.Limits.Set(l, sandbox.Unlimited)
			}
		}
		w := must.Get(b.Workspace(t.Context(), spec.Limits.OutputBytes, spec.Limits.OutputFiles))(t)
		defer w.Close()
		spec.Workspace = w.Name()
		var stderr strings.Builder
		res, err := perform(t.Context(), b, spec, sandbox.Stdio{Stderr: &stderr})
		if err != nil || res.ExitCode != 0 || len(res.Events) > 0 {
			t.Fatalf("profile %s: got %+v, %v, %s", name, res, err, &stderr)
		}
		if got, err := w.Root().ReadFile("out/here/out"); err != nil || string(got) != "TEXT" {
			t.Errorf("profile %s: got output %q, %v", name, got, err)
		}
	}
}

// closedBackend: every method of a closed backend, and every run in it, returns ErrClosed.
func closedBackend(t *testing.T, b sandbox.Backend) {
	started, stdout := io.Pipe()
	ended := make(chan error)
	go func() {
		_, err := perform(context.Background(), b, &sandbox.Spec{
			Args: []string{"/bin/sh", "-c", "echo started; sleep 60"}, Dir: "/", Env: []string{"PATH=/usr/bin:/bin"},
			Inputs: host(t), Limits: Limits(),
		}, sandbox.Stdio{Stdout: stdout})
		ended <- err
	}()
	must.Get(started.Read(make([]byte, 1)))(t)
	go io.Copy(io.Discard, started)
	must.Succeed(t, b.Close())
	if err := <-ended; !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("run during Close: got error %v, want ErrClosed", err)
	}
	spec := &sandbox.Spec{Args: []string{"/bin/true"}, Dir: "/", Limits: Limits()}
	for name, call := range map[string]func() error{
		"Probe":     func() error { _, err := b.Probe(t.Context()); return err },
		"Run":       func() error { _, err := b.Run(t.Context(), spec, sandbox.Stdio{}); return err },
		"Workspace": func() error { _, err := b.Workspace(t.Context(), 1<<20, 10); return err },
	} {
		if err := call(); !errors.Is(err, sandbox.ErrClosed) {
			t.Errorf("%s after Close: got error %v, want ErrClosed", name, err)
		}
	}
}
