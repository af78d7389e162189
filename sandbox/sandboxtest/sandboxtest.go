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
	"strconv"
	"strings"
	"sync"
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
		{"FullTemporaryDirectoryIsTold", fullTemp},
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
	// Not t.Setenv: the contract may run in parallel with other tests, which the variable does not affect.
	if err := os.Setenv("CLOISTER_LEAK", "yes"); err != nil {
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

func undeclared(t *testing.T, b sandbox.Backend) {
	secret := filepath.Join(public(t), "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{secret, filepath.Dir(secret), "/home", "/var", "/sys", "/run", "/etc/shadow", "/etc/hostname", "/proc/1/root", "/proc/sys", "/proc/meminfo", "/.host", "/.workspace", "/dev/kmsg"} {
		r := Run{Script: "test -e " + p + " || test -L " + p}
		r.Do(t, b)
		if r.Result.ExitCode != 1 {
			t.Errorf("%s exists in the sandbox", p)
		}
	}
}

func inputs(t *testing.T, b sandbox.Backend) {
	dir := public(t)
	file := filepath.Join(dir, "host-file")
	if err := os.WriteFile(file, []byte("original"), 0o666); err != nil {
		t.Fatal(err)
	}
	// Everybody may write to it: only the mount protects it.
	if err := os.Chmod(file, 0o666); err != nil {
		t.Fatal(err)
	}
	r := Run{
		Script: attack("/in/file") + attack("/in/dir/sub") + attack("/in/host"),
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "original", 0o666)
			if err := ws.Mkdir("in-dir", 0o777); err != nil {
				t.Fatal(err)
			}
			if err := ws.Chmod("in-dir", 0o777); err != nil {
				t.Fatal(err)
			}
			write(t, ws, "in-dir/sub", "original", 0o666)
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs,
				sandbox.Input{Target: "/in/file", Content: "x", Source: "in-file"},
				sandbox.Input{Target: "/in/dir", Content: "x", Source: "in-dir"},
				sandbox.Input{Target: "/in/host", Content: "x", Source: file})
		},
	}
	r.Do(t, b)
	if strings.Contains(r.Stdout, "CHANGED") || strings.Count(r.Stdout, "held\n") != 3 {
		t.Errorf("inputs were changed:\n%s%s", r.Stdout, r.Stderr)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "original" {
		t.Errorf("the host's file holds %q (%v)", got, err)
	}
}

// attack returns a script that tries every way to change a file that contains "original", and prints "held" or
// "CHANGED".
func attack(file string) string {
	return fmt.Sprintf(`
f=%s
try() { if "$@" 2>/dev/null; then echo "CHANGED by $*"; fi; }
try sh -c "echo x >> $f"
try sh -c ": > $f"
try chmod 777 $f
try chmod u+w $f
try touch -d 1999-01-01 $f
try rm -f $f
try mv $f $f.moved
try mv -f /usr/bin/true $f
try cp -f /usr/bin/true $f
try dd if=/dev/zero of=$f conv=notrunc bs=1 count=1
try mount -o remount,rw $f
try umount $f
ln $f /build/hard$$ 2>/dev/null && echo x >> /build/hard$$
ln -s $f /build/soft$$ && { echo x >> /build/soft$$; } 2>/dev/null
rm -f /build/soft$$
case $(cat $f) in original) echo held;; *) echo "CHANGED content";; esac
`, file)
}

func inputInOutput(t *testing.T, b sandbox.Backend) {
	r := Run{
		Script: attack("/build/file") + attack("/build/dir/sub"),
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "original", 0o444)
			write(t, ws, "out/file", "", 0o444)
			for _, d := range []string{"in-dir", "out/dir"} {
				if err := ws.Mkdir(d, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			write(t, ws, "in-dir/sub", "original", 0o444)
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs,
				sandbox.Input{Target: "/build/file", Content: "x", Source: "in-file"},
				sandbox.Input{Target: "/build/dir", Content: "x", Source: "in-dir"})
		},
	}
	r.Do(t, b)
	if strings.Contains(r.Stdout, "CHANGED") || strings.Count(r.Stdout, "held\n") != 2 {
		t.Errorf("inputs were changed:\n%s%s", r.Stdout, r.Stderr)
	}
}

func writable(t *testing.T, b sandbox.Backend) {
	for _, dir := range []string{"/", "/usr", "/usr/bin", "/bin", "/etc", "/dev", "/proc", "/lib"} {
		r := Run{Script: "touch " + dir + "/new || mkdir " + dir + "/newdir"}
		r.Do(t, b)
		if r.Result.ExitCode == 0 {
			t.Errorf("%s is writable", dir)
		}
	}
	for _, dir := range []string{"/build", "/tmp", "/dev/shm"} {
		shell(t, b, "touch "+dir+"/new && mkdir "+dir+"/newdir && mv "+dir+"/new "+dir+"/newdir/")
	}
	for _, script := range []string{"mknod /build/null c 1 3", "mknod /tmp/null c 1 3"} {
		r := Run{Script: script}
		r.Do(t, b)
		if r.Result.ExitCode == 0 {
			t.Errorf("%s succeeded", script)
		}
	}
}

func outputs(t *testing.T, b sandbox.Backend) {
	r := Run{
		Script: "mkdir -p a/b && echo result > a/b/c && ln -s nowhere a/link && chmod 000 a/b/c",
		Check: func(t testing.TB, out *os.Root, _ string) {
			if err := out.Chmod("a/b/c", 0o400); err != nil {
				t.Fatal(err)
			}
			if got, err := out.ReadFile("a/b/c"); err != nil || string(got) != "result\n" {
				t.Errorf("a/b/c: got %q, %v", got, err)
			}
			if got, err := out.Readlink("a/link"); err != nil || got != "nowhere" {
				t.Errorf("a/link: got %q, %v", got, err)
			}
		},
	}
	r.Do(t, b)
}

func temp(t *testing.T, b sandbox.Backend) {
	shell(t, b, "echo state > /tmp/left; echo state > /dev/shm/left")
	if got := shell(t, b, "ls -A /tmp /dev/shm /build"); strings.Contains(got, "left") {
		t.Errorf("a run left something for the next: %s", got)
	}
	r := Run{Script: "head -c 20000000 /dev/zero > /tmp/big"}
	r.Do(t, b)
	if r.Result.ExitCode == 0 {
		t.Error("/tmp took more than its 16 MiB")
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

func processes(t *testing.T, b sandbox.Backend) {
	mark := fmt.Sprintf("3%d.%d", os.Getpid(), time.Now().UnixNano()%1e9)
	r := Run{Script: fmt.Sprintf(`
setsid sleep %[1]s &
(trap '' TERM HUP INT; setsid setsid sleep %[1]s) &
(sleep %[1]s & ) &
sleep 0.1
`, mark)}
	began := time.Now()
	r.Do(t, b)
	if r.Result.ExitCode != 0 {
		t.Fatalf("exit code %d: %s", r.Result.ExitCode, r.Stderr)
	}
	if d := time.Since(began); d > time.Minute {
		t.Errorf("Run waited %v for background processes", d)
	}
	if alive := Running(t, mark); len(alive) > 0 {
		t.Errorf("still alive: %v", alive)
	}
}

// Running returns the processes of this host whose command line contains mark.
func Running(t testing.TB, mark string) []string {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(lines) == 0 {
		t.Fatalf("cannot list the host's processes: %v", err)
	}
	var found []string
	for _, p := range lines {
		if text, err := os.ReadFile(p); err == nil && bytes.Contains(text, []byte(mark)) {
			found = append(found, fmt.Sprintf("%s: %q", p, text))
		}
	}
	return found
}

// Signal sends sig to the processes of this host whose command line contains mark and that handle it, and returns their
// number. A shell's child that has not yet executed its program has the shell's command line and no handler; it would
// die.
func Signal(t testing.TB, mark string, sig syscall.Signal) int {
	t.Helper()
	sent := 0
	for _, p := range Running(t, mark) {
		pid, err := strconv.Atoi(strings.Split(p, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			continue // it has ended
		}
		_, caught, _ := strings.Cut(string(status), "\nSigCgt:")
		caught, _, _ = strings.Cut(caught, "\n")
		mask, err := strconv.ParseUint(strings.TrimSpace(caught), 16, 64)
		if err != nil {
			t.Fatalf("%s: caught signals: %v", p, err)
		}
		if mask&(1<<(sig-1)) == 0 {
			continue
		}
		if err := syscall.Kill(pid, sig); err != nil {
			t.Fatal(err)
		}
		sent++
	}
	return sent
}

func otherRuns(t *testing.T, b sandbox.Backend) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var other sync.WaitGroup
	other.Go(func() {
		r := Run{Script: "echo started; sleep 60"}
		_ = r.Try(ctx, t, b) // ended by cancel
	})
	for range 3 {
		if got := shell(t, b, "ls /proc | grep -c '^[0-9]'"); got != "3\n" && got != "2\n" {
			t.Errorf("processes in sight: got %q, want the shell's own pipeline", got)
		}
		r := Run{Script: "kill -9 -1; true"}
		r.Do(t, b)
	}
	cancel()
	other.Wait()
}

func stop(t *testing.T, b sandbox.Backend) {
	for _, c := range []struct {
		name, script string
		grace        time.Duration
		stdout       string
	}{
		{"a handler runs", `trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done`, time.Minute, "ready\nbye\n"},
		{"one that ignores is killed", `trap '' TERM; echo ready; while :; do sleep 0.05; done`, 200 * time.Millisecond, "ready\n"},
		{"without grace at once", `trap 'echo bye' TERM; echo ready; while :; do sleep 0.05; done`, 0, "ready\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r := Run{Script: c.script, Spec: func(s *sandbox.Spec) { s.Grace = c.grace }}
			// The script prints when its trap is set.
			stdout := &signalled{want: "ready\n", then: cancel}
			res, err := r.with(ctx, t, b, stdout)
			if err != nil {
				t.Fatal(err)
			}
			if !res.Stopped {
				t.Error("the result is not Stopped")
			}
			if got := stdout.text.String(); got != c.stdout {
				t.Errorf("got output %q, want %q", got, c.stdout)
			}
		})
	}
}

// stopAnytime: a run that is stopped before, while or after its command starts ends at once and does not wait for its
// grace period.
func stopAnytime(t *testing.T, b sandbox.Backend) {
	for i := range 40 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*500*time.Microsecond)
		r := Run{Script: "exec sleep 300", Spec: func(s *sandbox.Spec) { s.Grace = time.Hour }}
		// A run that ends before it begins returns an error.
		if err := r.Try(ctx, t, b); err == nil && !r.Result.Stopped {
			t.Errorf("stopped after %d half milliseconds: got %+v", i, r.Result)
		}
		cancel()
	}
}

// with is Try with another writer for stdout.
func (r *Run) with(ctx context.Context, t *testing.T, b sandbox.Backend, stdout *signalled) (*sandbox.Result, error) {
	w, err := b.Workspace(ctx, sandbox.Unlimited, sandbox.Unlimited)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	spec := &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", r.Script}, Dir: "/tmp", Env: []string{"PATH=/usr/bin:/bin"},
		Inputs: host(t), Temp: []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}, Limits: Limits(),
	}
	r.Spec(spec)
	return b.Run(ctx, spec, sandbox.Stdio{Stdout: stdout})
}

// A signalled is a buffer that calls then once it contains want.
type signalled struct {
	text strings.Builder
	want string
	then func()
}

func (s *signalled) Write(p []byte) (int, error) {
	s.text.Write(p)
	if strings.Contains(s.text.String(), s.want) {
		s.then()
	}
	return len(p), nil
}

func timeout(t *testing.T, b sandbox.Backend) {
	r := Run{Script: "echo begun; sleep 60", Spec: func(s *sandbox.Spec) { s.Timeout = 1500 * time.Millisecond }}
	r.Do(t, b)
	if !r.Result.Stopped || r.Stdout != "begun\n" || r.Result.End.Sub(r.Result.Start) < 1500*time.Millisecond {
		t.Errorf("got %+v, output %q", r.Result, r.Stdout)
	}
	r = Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Timeout = time.Minute }}
	r.Do(t, b)
	if r.Result.Stopped {
		t.Error("a run that ended in time was stopped")
	}
}

func pidOne(t *testing.T, b sandbox.Backend) {
	r := Run{Script: "for s in TERM QUIT ABRT INT HUP SEGV USR1 STOP KILL; do kill -$s 1 2>/dev/null; done; sleep 0.1; echo alive; exit 7"}
	r.Do(t, b)
	if r.Result.ExitCode != 7 || r.Stdout != "alive\n" || r.Stderr != "" {
		t.Errorf("got exit code %d, stdout %q, stderr %q", r.Result.ExitCode, r.Stdout, r.Stderr)
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

func linkedTarget(t *testing.T, b sandbox.Backend) {
	r := Run{
		Script: "true",
		Setup: func(t testing.TB, ws *os.Root) {
			write(t, ws, "in-file", "x", 0o444)
			if err := ws.Symlink("/usr", "out/link"); err != nil {
				t.Fatal(err)
			}
		},
		Spec: func(s *sandbox.Spec) {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/build/link/sub/file", Content: "x", Source: "in-file"})
		},
	}
	if err := r.Try(t.Context(), t, b); err == nil {
		t.Error("an input was mounted through a link in the tree")
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

func many(t *testing.T, b sandbox.Backend) {
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 5 {
				r := Run{Script: fmt.Sprintf("echo %d > /tmp/mine; cat /tmp/mine; exit %d", i, j)}
				if err := r.Try(t.Context(), t, b); err != nil {
					t.Errorf("run %d of %d: %v", j, i, err)
					return
				}
				if r.Stdout != fmt.Sprintln(i) || r.Result.ExitCode != j {
					t.Errorf("run %d of %d: got %q, exit code %d", j, i, r.Stdout, r.Result.ExitCode)
				}
			}
		})
	}
	all.Wait()
}

// public returns a temporary directory that an unprivileged user could reach if it were visible.
func public(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// write writes a file with exactly this mode.
func write(t testing.TB, root *os.Root, name, text string, mode os.FileMode) {
	t.Helper()
	if err := root.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := root.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
}
