// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

func exitCodes(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		signal syscall.Signal
		stderr string
	}{
		{"success", []string{"/bin/true"}, 0, 0, ""},
		{"failure", []string{"/bin/sh", "-c", "exit 42"}, 42, 0, ""},
		{"signal", []string{"/bin/sh", "-c", "kill -SEGV $$"}, 139, syscall.SIGSEGV, ""},
		{"by PATH", []string{"true"}, 0, 0, ""},
		{"not found", []string{"/no/such/program"}, 127, 0, "/no/such/program"},
		{"not found in PATH", []string{"no-such-program"}, 127, 0, "no-such-program"},
		{"not executable", []string{"/build/data"}, 126, 0, "/build/data"},
		{"a directory", []string{"/usr"}, 126, 0, "/usr"},
		{"no interpreter", []string{"/build/orphan"}, 127, 0, "interpreter"},
		{"relative to the working directory", []string{"./script"}, 7, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := run(t, b, Run{
				Spec: func(s *sandbox.Spec) { s.Args = c.args },
				Setup: func(t testing.TB, ws *os.Root) {
					write(t, ws, "out/data", "text", 0o644)
					write(t, ws, "out/orphan", "#!/no/such/interpreter\n", 0o755)
					write(t, ws, "out/script", "#!/bin/sh\nexit 7\n", 0o755)
				},
			})
			if r.Result.ExitCode != c.code || r.Result.Signal != c.signal {
				t.Errorf("got exit code %d, signal %d; want %d, %d", r.Result.ExitCode, r.Result.Signal, c.code, c.signal)
			}
			if !strings.Contains(r.Stderr, c.stderr) {
				t.Errorf("stderr %q does not name %q", r.Stderr, c.stderr)
			}
			if r.Result.Stopped || r.Result.Start.IsZero() || r.Result.End.Before(r.Result.Start) {
				t.Errorf("got stopped %v, start %v, end %v", r.Result.Stopped, r.Result.Start, r.Result.End)
			}
		})
	}
}

func environment(t *testing.T, b sandbox.Backend) {
	if err := os.Setenv("CLOISTER_LEAK", "yes"); err != nil { //nolint:usetesting // t.Setenv forbids parallel tests
		t.Fatal(err)
	}
	r := run(t, b, Run{Spec: func(s *sandbox.Spec) {
		s.Args = []string{"env"}
		s.Env = []string{"A=1", "B=x y\nz", "PATH=/usr/bin:/bin"}
	}})
	if want := "A=1\nB=x y\nz\nPATH=/usr/bin:/bin\n"; r.Stdout != want {
		t.Errorf("got %q, want %q", r.Stdout, want)
	}
}

func identity(t *testing.T, b sandbox.Backend) {
	for script, want := range map[string]string{
		"id -u; id -g; id -un":    "1000\n1000\nbuild\n",
		"uname -n":                "cloister\n",
		"pwd":                     "/build\n",
		"umask":                   "0022\n",
		"cat":                     "", // stdin is empty
		"tty || true":             "not a tty\n",
		"ulimit -c":               "0\n",
		"ls /dev":                 "fd\nfull\nnull\nrandom\nshm\nstderr\nstdin\nstdout\nurandom\nzero\n",
		"readlink /proc/self/cwd": "/build\n",
		"cd /proc/self; cat uid_map gid_map setgroups | tr -s ' '":     " 1000 0 1\n 1000 0 1\ndeny\n",
		"cat /proc/self/oom_score_adj >/dev/null && echo x >/dev/null": "",
	} {
		if strings.Contains(script, "uid_map") && features(t, b).Kernel != "" {
			continue // the user is one of the run's own kernel
		}
		if got := shell(t, b, script); got != want {
			t.Errorf("%s: got %q, want %q", script, got, want)
		}
	}
	status := shell(t, b, "cat /proc/self/status")
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		if !strings.Contains(status, set+":\t0000000000000000\n") {
			t.Errorf("a capability is held:\n%s", status)
		}
	}
	if !strings.Contains(status, "NoNewPrivs:\t1\n") {
		t.Errorf("no_new_privs is not set:\n%s", status)
	}
}

func inherited(t *testing.T, b sandbox.Backend) {
	// The shell's own listing has descriptor 3 open on the directory.
	if got := shell(t, b, "ls /proc/self/fd"); got != "0\n1\n2\n3\n" {
		t.Errorf("open descriptors: got %q", got)
	}
	if features(t, b).Kernel != "" { // which may not show them in /proc; Perl ignores SIGFPE itself
		if got := shell(t, b, `perl -e 'print grep { ($SIG{$_} // "") eq "IGNORE" && $_ ne "FPE" } keys %SIG'`); got != "" {
			t.Errorf("signals are ignored: %s", got)
		}
		return
	}
	for _, field := range []string{"SigIgn", "SigBlk"} {
		got := shell(t, b, "grep "+field+" /proc/self/status")
		if strings.Trim(strings.TrimPrefix(got, field+":"), "\t\n0") != "" {
			t.Errorf("signals are ignored or blocked: %s", got)
		}
	}
}

func reopen(t *testing.T, b sandbox.Backend) {
	r := run(t, b, Run{Script: "echo out > /dev/stdout; echo err > /dev/stderr; echo both | tee /dev/stderr"})
	if r.Stdout != "out\nboth\n" || r.Stderr != "err\nboth\n" {
		t.Errorf("got stdout %q, stderr %q", r.Stdout, r.Stderr)
	}
}

func keys(t *testing.T, b sandbox.Backend) {
	if _, err := os.Stat("/usr/bin/python3"); err != nil {
		Unavailable(t, "namespaces", "the test makes system calls with python3")
	}
	// Add a key to the session keyring, then search for it: only the run that added it finds it.
	script := `
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
ADD_KEY, KEYCTL, SEARCH, SESSION = 248, 250, 10, -3
found = libc.syscall(KEYCTL, SEARCH, SESSION, b"user", b"cloister-test", 0)
print("found" if found > 0 else "none")
libc.syscall(ADD_KEY, b"user", b"cloister-test", b"secret", 6, SESSION)
`
	for range 2 {
		r := run(t, b, Run{Spec: func(s *sandbox.Spec) { s.Args = []string{"/usr/bin/python3", "-c", script} }})
		if r.Stdout != "none\n" {
			t.Errorf("a run found another run's key: %q %s", r.Stdout, r.Stderr)
		}
	}
}

func invalid(t *testing.T, b sandbox.Backend) {
	input := func(source string) func(*sandbox.Spec) {
		return func(s *sandbox.Spec) { s.Inputs = append(s.Inputs, sandbox.Input{Target: "/x", Source: source}) }
	}
	link := filepath.Join(public(t), "link")
	must.Succeed(t, os.Symlink("/usr", link))
	for name, c := range map[string]struct {
		change func(*sandbox.Spec)
		want   error
		names  string // what the error names
	}{
		"no program":                {func(s *sandbox.Spec) { s.Args = nil }, sandbox.ErrSpec, "program"},
		"absent input":              {input("/no/such/file"), fs.ErrNotExist, "/no/such/file"},
		"absent workspace input":    {input("absent"), fs.ErrNotExist, "absent"},
		"linked input":              {input(link), sandbox.ErrSpec, "to /usr"},
		"input behind a link":       {input(link + "/bin"), sandbox.ErrSpec, "to /usr/bin"},
		"absent working directory":  {func(s *sandbox.Spec) { s.Dir = "/no/such/dir" }, nil, "/no/such/dir"},
		"input that is an output":   {input("out"), sandbox.ErrSpec, "/x"},
		"input outside a workspace": {input("../x"), sandbox.ErrSpec, "../x"},
		"output without workspace":  {func(s *sandbox.Spec) { s.Workspace = "" }, sandbox.ErrSpec, "Backend.Workspace"},
	} {
		r := Run{Script: "echo ran", Spec: c.change}
		err := r.Try(t.Context(), t, b)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: got error %v, want %v that names %s", name, err, c.want, c.names)
		}
		if r.Stdout != "" {
			t.Errorf("%s: the command was started", name)
		}
	}
	if _, err := b.Workspace(t.Context(), 0, 0); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("workspace without a size: got error %v, want ErrSpec", err)
	}
	if _, err := b.Run(t.Context(), nil, sandbox.Stdio{}); !errors.Is(err, sandbox.ErrSpec) {
		t.Errorf("nil Spec: got error %v, want ErrSpec", err)
	}
	// The backend still works.
	shell(t, b, "true")
}
