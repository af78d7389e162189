// SPDX-License-Identifier: Apache-2.0

package gvisor_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/gvisor"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/must"
)

// holdVariable makes the test binary a worker that only holds a run, for a test that kills it.
const holdVariable = "CLOISTER_TEST_HOLD"

// spec returns the spec of a run of a script without a workspace.
func spec(script string) *sandbox.Spec {
	s := &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", script}, Dir: "/usr", Env: []string{"PATH=/usr/bin:/bin"},
		Limits: sandboxtest.Limits(), Audit: sandbox.AuditOff,
	}
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	return s
}

// hold performs a run that would outlive its worker if it could.
func hold(mark string) {
	_, err := gvisor.New().Run(context.Background(), spec("trap '' TERM HUP; echo started; sleep "+mark), sandbox.Stdio{Stdout: os.Stdout})
	fmt.Println("ended:", err)
}

// backend returns a backend that can run.
func backend(t *testing.T) sandbox.Backend {
	t.Helper()
	needStatic(t)
	b := gvisor.New()
	t.Cleanup(func() { b.Close() })
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "gvisor", err)
	}
	return b
}

// TestNothingOutlivesAKilledWorker: after kill -9 of a worker no process of its run is left, no mount and no file.
func TestNothingOutlivesAKilledWorker(t *testing.T) {
	backend(t)
	temp := t.TempDir()
	mark := fmt.Sprintf("4%d.5", os.Getpid())
	mounts := must.Get(os.ReadFile("/proc/self/mountinfo"))(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), holdVariable+"="+mark, "TMPDIR="+temp)
	stdout, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("the run did not start: %q, %v", line, err)
	}
	family := descendants(t, cmd.Process.Pid)
	if len(family) < 4 { // the launcher, runsc, the gofer and the sandbox
		t.Fatalf("got processes %v, want at least 4", family)
	}
	must.Succeed(t, cmd.Process.Kill())
	_ = cmd.Wait() // reports the kill
	must.Hold(t, "every process of the run ends with its worker", func() bool {
		return !slices.ContainsFunc(family, func(p string) bool { _, err := os.Stat("/proc/" + p); return err == nil })
	})
	if after := must.Get(os.ReadFile("/proc/self/mountinfo"))(t); string(after) != string(mounts) {
		t.Errorf("the mounts changed from\n%s\nto\n%s", mounts, after)
	}
	if left := must.Get(os.ReadDir(temp))(t); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}
}

// descendants returns the process IDs of the descendants of a process.
func descendants(t *testing.T, pid int) []string {
	t.Helper()
	children := map[string][]string{}
	for _, p := range must.Get(filepath.Glob("/proc/[0-9]*/stat"))(t) {
		text, err := os.ReadFile(p)
		if err != nil {
			continue // it has ended
		}
		// The name, which may contain spaces, is in parentheses; the parent is the second field after it.
		_, rest, _ := strings.Cut(string(text), ") ")
		if f := strings.Fields(rest); len(f) > 1 {
			children[f[1]] = append(children[f[1]], strings.Split(p, "/")[2])
		}
	}
	var all []string
	for next := []string{fmt.Sprint(pid)}; len(next) > 0; next = next[1:] {
		all, next = append(all, children[next[0]]...), append(next, children[next[0]]...)
	}
	return all
}

// TestWhatIsLackingIsRefused: Run refuses what Features do not promise, and never runs anything then.
func TestWhatIsLackingIsRefused(t *testing.T) {
	b := backend(t)
	for name, change := range map[string]func(*sandbox.Spec){
		"audit": func(s *sandbox.Spec) { s.Audit = sandbox.AuditViolations },
		"full":  func(s *sandbox.Spec) { s.Audit = sandbox.AuditFull },
		"endpoints": func(s *sandbox.Spec) {
			s.Network = sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{{Host: "a.example", Port: 1}}}
		},
		"kill":      func(s *sandbox.Spec) { s.Kill = []sandbox.EventKind{sandbox.EventLimit} },
		"root":      func(s *sandbox.Spec) { s.Root = &sandbox.Root{Content: "x", Image: "x", Source: "."} },
		"superuser": func(s *sandbox.Spec) { s.Superuser = true },
		"sockets": func(s *sandbox.Spec) {
			s.Workspace, s.Temp = "x", []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}
			s.Sockets = []sandbox.Input{{Target: "/tmp/s", Source: "s"}}
		},
		"clock": func(s *sandbox.Spec) { s.Conditions.FrozenClock = 1 },
		"/dev":  func(s *sandbox.Spec) { s.Temp = []sandbox.Temp{{Target: "/dev/x", Bytes: 1 << 20}} },
	} {
		s := spec("echo ran")
		change(s)
		var said strings.Builder
		if res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: &said}); !errors.Is(err, sandbox.ErrUnsupported) || said.Len() > 0 {
			t.Errorf("%s: got %+v, %v and output %q, want ErrUnsupported", name, res, err, &said)
		}
	}
}

// TestMissingRunscIsExplained: without runsc, or with one that cannot start, the error says what to do.
func TestMissingRunscIsExplained(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root and reports that first")
	}
	dir := t.TempDir()
	needStatic(t)
	crashes := filepath.Join(dir, "crashes") // static, with an entry point that is not mapped (ELF-64, e_entry)
	program := must.Get(os.ReadFile("/proc/self/exe"))(t)
	clear(program[24:32])
	must.Succeed(t, os.WriteFile(crashes, program, 0o755))
	text := filepath.Join(dir, "runsc")
	must.Succeed(t, os.WriteFile(text, []byte("#!/bin/sh\n"), 0o755))
	t.Setenv("PATH", dir) // counts only if RUNSC_PATH is empty
	for name, c := range map[string]struct{ file, want, code string }{
		"missing":     {filepath.Join(dir, "none"), "build it with make gvisor", preflight.RunscNotFound},
		"no program":  {text, "is no executable", preflight.RunscNotStarted},
		"in PATH":     {"", text + " is no executable", preflight.RunscNotStarted},
		"dynamic":     {"/bin/sh", "is dynamically linked", preflight.RunscDynamic},
		"other place": {dir, "runsc not found", preflight.RunscNotFound},
		"no gVisor":   {crashes, "gVisor did not run a probe", preflight.GVisorProbe},
	} {
		t.Setenv("RUNSC_PATH", c.file)
		b := gvisor.New()
		f, err := b.Probe(t.Context())
		if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), c.want) || preflight.Code(err) != c.code || f.Tier != "none" {
			t.Errorf("%s: got tier %q, %v; want ErrUnsupported with %q and the code %s", name, f.Tier, err, c.want, c.code)
		}
		if _, err := b.Run(t.Context(), spec("true"), sandbox.Stdio{}); err == nil {
			t.Errorf("%s: Run succeeded", name)
		}
		must.Succeed(t, b.Close())
	}
}

// TestRootIsNeeded: a worker without root runs nothing, and the error says why.
func TestRootIsNeeded(t *testing.T) {
	if os.Geteuid() == 0 {
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestRootIsNeeded$", "-test.v")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestRootIsNeeded ") {
			t.Errorf("as user 65534: %v\n%s", err, out)
		}
		return
	}
	b := gvisor.New()
	f, err := b.Probe(t.Context())
	if !errors.Is(err, sandbox.ErrUnsupported) || preflight.Code(err) != preflight.NotRoot || f.Tier != "none" {
		t.Errorf("got tier %q, %v; want ErrUnsupported with the code %s", f.Tier, err, preflight.NotRoot)
	}
	if res, err := b.Run(t.Context(), spec("true"), sandbox.Stdio{}); preflight.Code(err) != preflight.NotRoot {
		t.Errorf("Run: got %+v, %v; want the code %s", res, err, preflight.NotRoot)
	}
	must.Succeed(t, b.Close())
}

// TestPtraceScopeIsExplained: a probe that fails where Yama forbids ptrace is explained by that.
func TestPtraceScopeIsExplained(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ptrace_scope")
	for scope, want := range map[string]string{"3\n": preflight.PtraceScope, "2\n": preflight.GVisorProbe, "": preflight.GVisorProbe} {
		must.Succeed(t, os.WriteFile(file, []byte(scope), 0o644))
		err := gvisor.ExplainProbe(os.ErrDeadlineExceeded, file)
		if preflight.Code(err) != want || !errors.Is(err, sandbox.ErrUnsupported) || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("scope %q: got code %q of %v, want %s", scope, preflight.Code(err), err, want)
		}
	}
}

// TestKernelIsGVisors: the run sees gVisor's kernel, no process of this host, and a user without rights on this host
// runs it.
func TestKernelIsGVisors(t *testing.T) {
	b := backend(t)
	read, write, err := os.Pipe()
	must.Succeed(t, err)
	defer read.Close()
	defer write.Close()
	var said strings.Builder
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	users := make(chan []string, 1)
	go func() {
		line, _ := bufio.NewReader(read).ReadString('\n')
		if line == "" {
			users <- nil
			return
		}
		users <- owners(t)
		cancel()
	}()
	s := spec("cat /proc/version; sleep 600")
	_, err = b.Run(ctx, s, sandbox.Stdio{Stdout: &tee{&said, write}})
	must.Succeed(t, err)
	if !strings.Contains(said.String(), "gvisor") {
		t.Errorf("got kernel %q, want gVisor's", &said)
	}
	got := <-users
	if len(got) < 2 || slices.ContainsFunc(got, func(u string) bool { return u == "0" }) {
		t.Errorf("the processes of gVisor have the users %q, want none of root", got)
	}
}

// A tee also writes to a pipe.
type tee struct {
	text *strings.Builder
	pipe *os.File
}

func (t *tee) Write(p []byte) (int, error) {
	_, _ = t.pipe.Write(p)
	return t.text.Write(p)
}

// owners returns the effective users of the processes that this one's launchers started.
func owners(t *testing.T) []string {
	var users []string
	for _, pid := range descendants(t, os.Getpid()) {
		text, err := os.ReadFile("/proc/" + pid + "/status")
		if err != nil || strings.Contains(string(text), "cloister-launch") {
			continue
		}
		name, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if !strings.Contains(string(name), "runsc") || strings.HasPrefix(string(name), "cloister") {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > 2 && f[0] == "Uid:" {
				users = append(users, f[2])
			}
		}
	}
	return users
}

// nameRunsc is what runsc is called when it runs.
const nameRunsc = "runsc"

// Host names of runs whose hostileRunsc starts processes, prints its input, reports that the command has exited and
// nothing more, or reports nothing at all.
const (
	forks   = "forks"
	answers = "answers"
	lingers = "lingers"
	silent  = "silent"
)

// hostileRunsc is a gVisor that a run has taken over. Unless its host name is silent, it reports that the command has
// started and reads no input. For a run with the host name forks, it starts at most 2000 processes, until that fails, and
// reports their number as exit code.
func hostileRunsc() {
	config, err := os.ReadFile(zygote.BundleDir + "/config.json")
	if err != nil {
		panic(err)
	}
	out := json.NewEncoder(os.NewFile(zygote.GuestOut, "out"))
	if !strings.Contains(string(config), `"`+silent+`"`) {
		_ = out.Encode(zygote.Report{Started: 1})
	}
	if strings.Contains(string(config), `"`+lingers+`"`) {
		_ = out.Encode(zygote.Report{Exited: &zygote.Exited{Code: 7}})
	}
	if strings.Contains(string(config), `"`+answers+`"`) {
		in := json.NewDecoder(os.NewFile(zygote.GuestIn, "in"))
		_ = in.Decode(&zygote.Guest{})
		for word := ""; word != zygote.WordTerm && in.Decode(&word) == nil; {
			fmt.Fprintln(os.NewFile(zygote.GuestStdout, "stdout"), word)
		}
		_ = out.Encode(zygote.Report{Exited: &zygote.Exited{}})
		_ = out.Encode(zygote.Report{Reaped: &zygote.Reaped{}})
	}
	if strings.Contains(string(config), `"`+forks+`"`) {
		n := 0
		for ; n < 2000; n++ {
			pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
			for errno == 0 && pid == 0 {
				_, _, _ = syscall.RawSyscall6(syscall.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
			}
			if errno != 0 {
				break
			}
		}
		_ = out.Encode(zygote.Report{Exited: &zygote.Exited{Code: n}})
		_ = out.Encode(zygote.Report{Reaped: &zygote.Reaped{}})
	}
	time.Sleep(time.Hour) // until it is killed
}

// TestHostProcessesAreBounded: a gVisor that a run has taken over cannot start any number of processes on this host.
func TestHostProcessesAreBounded(t *testing.T) {
	f := must.Get(backend(t).Probe(t.Context()))(t)
	if !slices.ContainsFunc(f.Layers, func(l string) bool { return strings.HasSuffix(l, " limits") }) {
		sandboxtest.Unavailable(t, "limits", f.Layers)
	}
	t.Setenv("RUNSC_PATH", must.Get(os.Executable())(t))
	b := gvisor.New()
	defer b.Close()
	s := spec("true")
	s.Conditions.Hostname, s.Limits.Processes = forks, 10
	res, err := b.Run(t.Context(), s, sandbox.Stdio{})
	if err != nil || res.ExitCode < 400 || res.ExitCode > 600 {
		t.Errorf("got %+v, %v; want an exit code, the number of processes, near 592", res, err)
	}
}

// TestCommandStartsWhenItCanBeStopped: a command starts only when the worker has noted that, so that a run that is
// stopped at its first output gets its grace period. The guest starts nothing before the first word, and takes the
// second for a stop.
func TestCommandStartsWhenItCanBeStopped(t *testing.T) {
	backend(t)
	t.Setenv("RUNSC_PATH", must.Get(os.Executable())(t))
	b := gvisor.New()
	defer b.Close()
	read, write, err := os.Pipe()
	must.Succeed(t, err)
	defer read.Close()
	defer write.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, _ = bufio.NewReader(read).ReadString('\n')
		cancel()
	}()
	s := spec("true")
	s.Conditions.Hostname, s.Timeout, s.Grace = answers, time.Minute, time.Minute
	var said strings.Builder
	res, err := b.Run(ctx, s, sandbox.Stdio{Stdout: &tee{&said, write}})
	if want := "start\nterm\n"; err != nil || !res.Stopped || said.String() != want {
		t.Errorf("got %+v, %v and %q, want a stopped run that was sent %q", res, err, &said, want)
	}
}

// TestEndWaitsForNoGuest: a run ends although its gVisor reads nothing that it is sent.
func TestEndWaitsForNoGuest(t *testing.T) {
	backend(t)
	t.Setenv("RUNSC_PATH", must.Get(os.Executable())(t))
	b := gvisor.New()
	defer b.Close()
	s := spec("true")
	s.Env = append(s.Env, "Z="+strings.Repeat("x", 1<<20)) // more than a pipe holds
	s.Timeout, s.Grace = time.Second, time.Millisecond
	res, err := b.Run(t.Context(), s, sandbox.Stdio{})
	if err != nil || !res.Stopped {
		t.Errorf("got %+v, %v; want a stopped run", res, err)
	}
}

// TestRunWithoutReportsEnds: a gVisor that a run has taken over cannot keep its cell by not reporting a start or an
// end, even if the run can no longer be stopped.
func TestRunWithoutReportsEnds(t *testing.T) {
	backend(t)
	t.Setenv("RUNSC_PATH", must.Get(os.Executable())(t))
	hostile := func(host string, start, reap time.Duration) (*sandbox.Result, error) {
		b := gvisor.New()
		defer b.Close()
		defer time.AfterFunc(time.Minute, func() { b.Close() }).Stop() // it fails the run
		gvisor.SetTimes(b, start, reap)
		s := spec("true")
		s.Conditions.Hostname = host
		return b.Run(t.Context(), s, sandbox.Stdio{})
	}
	if res, err := hostile(lingers, time.Hour, time.Millisecond); err != nil || res.ExitCode != 7 || res.Stopped {
		t.Errorf("without a report of the end: got %+v, %v; want the exit code 7", res, err)
	}
	if res, err := hostile(silent, time.Millisecond, time.Hour); err == nil || !strings.Contains(err.Error(), "did not report within 1ms") {
		t.Errorf("without a report of the start: got %+v, %v; want an error about it", res, err)
	}
}

// TestUsersOfALostRunAreNotReused: after a run whose end was not seen, the next run has other users and another control
// group.
func TestUsersOfALostRunAreNotReused(t *testing.T) {
	b := backend(t)
	run := func(kill string) (users []string, err error) {
		read, write, err := os.Pipe()
		must.Succeed(t, err)
		defer read.Close()
		defer write.Close()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		found := make(chan []string, 1)
		go func() {
			_, _ = bufio.NewReader(read).ReadString('\n')
			found <- owners(t)
			killAll(t, kill)
			cancel()
		}()
		_, err = b.Run(ctx, spec("echo started; sleep 600"), sandbox.Stdio{Stdout: &tee{&strings.Builder{}, write}})
		write.Close()
		return <-found, err
	}
	first, err := run("")
	must.Succeed(t, err)
	second, err := run("cloister-launcher")
	if err == nil || !strings.Contains(err.Error(), "are not used again") {
		t.Errorf("got %v, want an error that says what is not used again", err)
	}
	third, err := run("")
	must.Succeed(t, err)
	if !slices.Equal(first, second) {
		t.Errorf("the second run has the users %q, want %q of the first, which had ended", second, first)
	}
	if slices.ContainsFunc(third, func(u string) bool { return slices.Contains(second, u) }) {
		t.Errorf("the third run has the users %q, and the second, whose end was not seen, %q", third, second)
	}
}

// killAll kills the descendants of this process with a command line that begins with a name, if it is not "".
func killAll(t *testing.T, name string) {
	for _, pid := range descendants(t, os.Getpid()) {
		text, _ := os.ReadFile("/proc/" + pid + "/cmdline")
		if n, err := strconv.Atoi(pid); err == nil && name != "" && strings.HasPrefix(string(text), name+"\x00") {
			_ = syscall.Kill(n, syscall.SIGKILL)
		}
	}
}

// TestKilledProcessesFailTheRun: a run whose launcher or gVisor is killed is an error, and the next run works.
func TestKilledProcessesFailTheRun(t *testing.T) {
	b := backend(t)
	for _, who := range []string{"cloister-launcher", "runsc"} {
		t.Run(who, func(t *testing.T) {
			var said strings.Builder
			read, write, err := os.Pipe()
			must.Succeed(t, err)
			defer read.Close()
			defer write.Close()
			go func() {
				if line, _ := bufio.NewReader(read).ReadString('\n'); line == "" {
					return
				}
				killAll(t, who)
			}()
			res, err := b.Run(t.Context(), spec("echo started; sleep 600"), sandbox.Stdio{Stdout: &tee{&said, write}})
			if err == nil || errors.Is(err, sandbox.ErrUnsupported) {
				t.Errorf("got %+v, %v, want an error", res, err)
			}
			if res, err := b.Run(t.Context(), spec("exit 3"), sandbox.Stdio{}); err != nil || res.ExitCode != 3 {
				t.Errorf("the next run: got %+v, %v, want exit code 3", res, err)
			}
		})
	}
}
