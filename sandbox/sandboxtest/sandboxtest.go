// SPDX-License-Identifier: Apache-2.0

// Package sandboxtest is the contract of sandbox.Backend as tests: what every backend must do, and what a program in
// its sandbox must not be able to do. Only test files import it.
package sandboxtest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// TestBackend runs the contract against backends that new creates and the test closes. The host must have a POSIX shell
// and the usual tools in /usr and /bin.
func TestBackend(t *testing.T, new func() sandbox.Backend) {
	b := new()
	t.Cleanup(func() { b.Close() })
	if _, err := b.Probe(t.Context()); err != nil {
		Unavailable(t, "namespaces", err)
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T, sandbox.Backend)
	}{
		{"ProbeSaysFull", probe},
		{"ExitCodes", exitCodes},
		{"EnvironmentIsExact", environment},
		{"IdentityIsFixed", identity},
		{"NothingIsInherited", inherited},
		{"UndeclaredPathsAreAbsent", undeclared},
		{"InputsCannotBeChanged", inputs},
		{"InputInsideWritableDirectoryCannotBeChanged", inputInOutput},
		{"OnlyOutputsAndTempAreWritable", writable},
		{"OutputsOutliveTheRun", outputs},
		{"TempIsPrivateToARun", temp},
		{"HostNetworkIsUnreachable", hostNetwork},
		{"LoopbackOnlyIfDeclared", loopback},
		{"NoProcessOutlivesTheRun", processes},
		{"OtherRunsAreInvisible", otherRuns},
		{"StopTermsThenKills", stop},
		{"StopAtAnyMomentEndsSoon", stopAnytime},
		{"TimeoutCountsExecutionOnly", timeout},
		{"PidOneCannotBeSignalled", pidOne},
		{"OutputCanBeOpenedAgain", reopen},
		{"NetworkIsNewForEachRun", freshNetwork},
		{"KeysAreNotShared", keys},
		{"LinksInTargetsAreNotFollowed", linkedTarget},
		{"InvalidSpecIsRefused", invalid},
		{"ManyRunsAtOnce", many},
		{"LimitsAreEnforced", limitsEnforced},
		{"LimitsOfOneRunDoNotOutliveIt", func(t *testing.T, _ sandbox.Backend) {
			// A new backend has one slot, which every run reuses.
			b := new()
			defer b.Close()
			limitsReset(t, b)
		}},
		{"UsageIsOfTheWholeRun", usage},
		{"ViolationsAreRecorded", violations},
		{"ManyViolationsHideNoOther", flood},
		{"SharedCountersAreBounded", shared},
		{"FullTemporaryDirectoryIsReported", fullTemp},
		{"HostCannotBeAskedForItsFiles", oracle},
		{"OrdinaryActionsAreNoViolations", ordinary},
		{"AuditFullNamesWhatIsMissing", auditFull},
		{"AuditOffRecordsNothing", auditOff},
		{"EndpointsAreReachedAndNothingElse", endpoints},
		{"ListenIsForbiddenUnlessPermitted", listen},
		{"TerminalIsTheRuns", terminal},
		{"ConditionsAreOfOneRun", conditions},
		{"ConditionsTogether", conditionsTogether},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, b) })
	}
}

// Requirements are the words for what a test may need of the host. CONTRIBUTING.md explains them.
var Requirements = []string{
	"namespaces", "unprivileged", "limits", "conditions", "timens", "monitor",
	"bazel", "git", "python", "node", "tools", "networks", "root", "tmpfs", "interop", "packaging",
	"disk", "ia32", "address", "diffoscope",
}

// Unavailable skips the test because the host lacks what, or fails it if CLOISTER_REQUIRE names what: a skipped
// guarantee must not look like a kept one.
func Unavailable(t testing.TB, requirement string, reason any) {
	t.Helper()
	required := strings.Split(os.Getenv("CLOISTER_REQUIRE"), ",")
	for _, word := range append(required, requirement) {
		if word != "" && !slices.Contains(Requirements, word) {
			t.Fatalf("unknown requirement %q: see sandboxtest.Requirements", word)
		}
	}
	if slices.Contains(required, requirement) {
		t.Fatalf("CLOISTER_REQUIRE requires %s, which this host lacks: %v", requirement, reason)
	}
	t.Skipf("needs %s: %v", requirement, reason)
}

// Tool skips the test, as Unavailable does, if a program is missing. CLOISTER_REQUIRE calls python3 python, git and
// node by their names, and all others tools.
func Tool(t testing.TB, program string) {
	t.Helper()
	_, err := exec.LookPath(program)
	if err == nil {
		return
	}
	switch name := filepath.Base(program); name {
	case "git", "node":
		Unavailable(t, name, err)
	case "python3":
		Unavailable(t, "python", err)
	default:
		Unavailable(t, "tools", err)
	}
}

// Limits returns limits that every backend enforces: the defaults without those that need control groups.
func Limits() sandbox.Limits {
	l := sandbox.DefaultLimits()
	l.Memory, l.CPU = sandbox.Unlimited, sandbox.Unlimited
	return l
}

// A Run is one run of a shell script and its results.
type Run struct {
	Script string
	Spec   func(*sandbox.Spec)                // changes the spec, if not nil
	Bytes  int64                              // limit of the workspace; 0 is unlimited
	Files  int64                              // likewise
	Setup  func(testing.TB, *os.Root)         // fills the workspace, if not nil
	Result *sandbox.Result                    // how it ended
	Stdout string                             // what it wrote
	Stderr string                             //
	Check  func(testing.TB, *os.Root, string) // sees the output directory before it vanishes, if not nil
}

// Do executes the run in a sandbox with the host's programs, a writable directory /build and /tmp.
func (r *Run) Do(t testing.TB, b sandbox.Backend) {
	t.Helper()
	if err := r.Try(t.Context(), t, b); err != nil {
		t.Fatalf("run %q: %v", r.Script, err)
	}
}

// Try is Do for runs that may fail to start.
func (r *Run) Try(ctx context.Context, t testing.TB, b sandbox.Backend) error {
	t.Helper()
	w, err := b.Workspace(ctx, cmp.Or(r.Bytes, sandbox.Unlimited), cmp.Or(r.Files, sandbox.Unlimited))
	if err != nil {
		return err
	}
	defer w.Close()
	if err := w.Root().Mkdir("out", 0o777); err != nil {
		return err
	}
	if err := w.Root().Chmod("out", 0o777|os.ModeSticky); err != nil {
		return err
	}
	if r.Setup != nil {
		r.Setup(t, w.Root())
	}
	spec := &sandbox.Spec{
		Args:      []string{"/bin/sh", "-c", r.Script},
		Dir:       "/build",
		Env:       []string{"PATH=/usr/bin:/bin"},
		Inputs:    host(t),
		Outputs:   []sandbox.Output{{Target: "/build", Source: "out"}},
		Temp:      []sandbox.Temp{{Target: "/tmp", Bytes: 16 << 20}},
		Network:   sandbox.Network{Loopback: true, Listen: true},
		Limits:    Limits(),
		Workspace: w.Name(),
	}
	if r.Spec != nil {
		r.Spec(spec)
	}
	var stdout, stderr bytes.Buffer
	r.Result, err = b.Run(ctx, spec, sandbox.Stdio{Stdout: &stdout, Stderr: &stderr})
	r.Stdout, r.Stderr = stdout.String(), stderr.String()
	if err == nil && r.Check != nil {
		out, err := w.Root().OpenRoot("out")
		if err != nil {
			return err
		}
		defer out.Close()
		r.Check(t, out, r.Stdout)
	}
	return err
}

// host returns the directories of a shell and its tools.
func host(t testing.TB) []sandbox.Input {
	var ins []sandbox.Input
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64", "/etc/alternatives"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			ins = append(ins, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	if len(ins) == 0 {
		t.Fatal("this host has none of the usual directories")
	}
	return ins
}

// shell runs a script, which must succeed, and returns its output.
func shell(t *testing.T, b sandbox.Backend, script string) string {
	t.Helper()
	r := Run{Script: script}
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("script %q: exit code %d\n%s", script, r.Result.ExitCode, r.Stderr)
	}
	return r.Stdout
}

func probe(t *testing.T, b sandbox.Backend) {
	f, err := b.Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if f.Tier != "full" || f.Backend == "" || len(f.Layers) == 0 {
		t.Errorf("got backend %q, tier %q, layers %v", f.Backend, f.Tier, f.Layers)
	}
}

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
			r := Run{
				Spec: func(s *sandbox.Spec) { s.Args = c.args },
				Setup: func(t testing.TB, ws *os.Root) {
					write(t, ws, "out/data", "text", 0o644)
					write(t, ws, "out/orphan", "#!/no/such/interpreter\n", 0o755)
					write(t, ws, "out/script", "#!/bin/sh\nexit 7\n", 0o755)
				},
			}
			r.Do(t, b)
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
	r := Run{Spec: func(s *sandbox.Spec) {
		s.Args = []string{"env"}
		s.Env = []string{"A=1", "B=x y\nz", "PATH=/usr/bin:/bin"}
	}}
	r.Do(t, b)
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
		"cat /proc/self/oom_score_adj >/dev/null && echo x >/dev/null": "",
	} {
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
	for _, field := range []string{"SigIgn", "SigBlk"} {
		got := shell(t, b, "grep "+field+" /proc/self/status")
		if strings.Trim(strings.TrimPrefix(got, field+":"), "\t\n0") != "" {
			t.Errorf("signals are ignored or blocked: %s", got)
		}
	}
}

func hostNetwork(t *testing.T, b sandbox.Backend) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	abstract := fmt.Sprintf("@cloister-test-%d-%d", os.Getpid(), time.Now().UnixNano())
	u, err := net.Listen("unix", abstract)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	bash := func(script string) Run {
		return Run{Spec: func(s *sandbox.Spec) { s.Args = []string{"/bin/bash", "-c", script} }}
	}
	r := bash("exec 3<>/dev/tcp/127.0.0.1/" + port)
	r.Do(t, b)
	if r.Result.ExitCode == 0 {
		t.Error("a listener of the host's loopback was reached")
	}
	if !strings.Contains(r.Stderr, "refused") {
		t.Errorf("the host's loopback: got %q, want a refused connection on the run's own loopback", r.Stderr)
	}
	if got := shell(t, b, "cat /proc/net/unix /proc/self/net/unix 2>/dev/null; true"); strings.Contains(got, abstract) {
		t.Errorf("an abstract socket of the host is visible:\n%s", got)
	}
	if got := shell(t, b, "cat /proc/self/net/dev | grep -c :"); got != "1\n" {
		t.Errorf("network interfaces: got %q, want loopback alone", got)
	}
	if got := shell(t, b, "cat /proc/self/net/route | wc -l"); got != "1\n" {
		t.Errorf("routes: got %q lines, want the heading alone", got)
	}
}

func loopback(t *testing.T, b sandbox.Backend) {
	for _, up := range []bool{true, false, true} {
		r := Run{
			// Nobody listens: "refused" if the interface is up, otherwise "unreachable".
			Spec: func(s *sandbox.Spec) {
				s.Args = []string{"/bin/bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9"}
				s.Network = sandbox.Network{Loopback: up}
			},
		}
		r.Do(t, b)
		if got := strings.Contains(r.Stderr, "refused"); got != up {
			t.Errorf("loopback %v: got %q", up, r.Stderr)
		}
	}
}

func reopen(t *testing.T, b sandbox.Backend) {
	r := Run{Script: "echo out > /dev/stdout; echo err > /dev/stderr; echo both | tee /dev/stderr"}
	r.Do(t, b)
	if r.Stdout != "out\nboth\n" || r.Stderr != "err\nboth\n" {
		t.Errorf("got stdout %q, stderr %q", r.Stdout, r.Stderr)
	}
}

// freshNetwork: traffic of one run is invisible to the next, even in counters.
func freshNetwork(t *testing.T, b sandbox.Backend) {
	for range 3 {
		r := Run{Spec: func(s *sandbox.Spec) {
			s.Args = []string{"/bin/bash", "-c", "cat /proc/self/net/dev | grep lo:; exec 3<>/dev/tcp/127.0.0.1/9; true"}
		}}
		r.Do(t, b)
		if f := strings.Fields(r.Stdout); len(f) < 3 || f[1] != "0" {
			t.Errorf("loopback was used before: %q", r.Stdout)
		}
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
		r := Run{Spec: func(s *sandbox.Spec) { s.Args = []string{"/usr/bin/python3", "-c", script} }}
		r.Do(t, b)
		if r.Stdout != "none\n" {
			t.Errorf("a run found another run's key: %q %s", r.Stdout, r.Stderr)
		}
	}
}

func invalid(t *testing.T, b sandbox.Backend) {
	for name, change := range map[string]func(*sandbox.Spec){
		"no program": func(s *sandbox.Spec) { s.Args = nil },
		"absent input": func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/x", Source: "/no/such/file"})
		},
		"absent working directory":  func(s *sandbox.Spec) { s.Dir = "/no/such/dir" },
		"input that is an output":   func(s *sandbox.Spec) { s.Inputs = append(s.Inputs, sandbox.Input{Target: "/x", Source: "out"}) },
		"input outside a workspace": func(s *sandbox.Spec) { s.Inputs = append(s.Inputs, sandbox.Input{Target: "/x", Source: "../x"}) },
	} {
		r := Run{Script: "echo ran", Spec: change}
		if err := r.Try(t.Context(), t, b); err == nil {
			t.Errorf("%s: the run was executed", name)
		}
		if r.Stdout != "" {
			t.Errorf("%s: the command was started", name)
		}
	}
	// The backend still works.
	shell(t, b, "true")
}
