// SPDX-License-Identifier: Apache-2.0

// Package cli_test runs the program as a user would and checks its output.
package cli_test

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/internal/bazelrun"
	"github.com/cloister-build/cloister/tests/internal/program"
)

var built program.Program

func TestMain(m *testing.M) { os.Exit(built.Main(m)) }

// output is the result of a call of the program.
type output struct {
	out, err string
	code     int
}

// cloister runs the program in dir and returns its result.
func cloister(t *testing.T, dir string, args ...string) output {
	t.Helper()
	ctx, path := built.Within(t, time.Minute)
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = dir
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	// SIGQUIT makes Go's runtime print all goroutines. Child processes may keep the pipes open longer.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("cloister %v did not end within a minute (%v):\n%s%s", args, err, out.String(), stderr.String())
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return output{out.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// confined skips the test if the machine does not support the sandbox.
func confined(t *testing.T) {
	t.Helper()
	b := namespace.New(namespace.Config{})
	defer b.Close()
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
}

func TestHelpHasExamples(t *testing.T) {
	for _, command := range []string{
		"", "serve", "join", "runner", "status", "top", "drain", "undrain", "run", "repro", "action", "action ls", "action show", "action log", "audit", "audit ls", "audit show", "audit verify",
		"policy", "policy check", "policy explain", "check", "diff", "gc", "cas", "cas put", "cas get", "cas cat", "cas ls", "cas tree", "cas stat", "cas verify", "cache", "cache show", "cache rm", "version",
	} {
		args := append(strings.Fields(command), "--help")
		if s := cloister(t, "", args...); s.code != 0 || !strings.Contains(s.out, "Examples:\n  cloister") {
			t.Errorf("cloister %s: got exit code %d, want 0 and an example in\n%s", strings.Join(args, " "), s.code, s.out)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if s := cloister(t, "", "completion", shell); s.code != 0 || !strings.Contains(s.out, "cloister") {
			t.Errorf("completion %s: got %+v, want a script", shell, s)
		}
	}
}

func TestCheckSaysFull(t *testing.T) {
	confined(t)
	s := cloister(t, "", "check")
	if s.code != 0 || !strings.HasSuffix(s.out, "tier  full\n") || strings.Contains(s.out, "FAIL") || !strings.Contains(s.out, "ok    seccomp ") {
		t.Errorf("got exit code %d, want 0 and tier full:\n%s%s", s.code, s.out, s.err)
	}
}

func TestRun(t *testing.T) {
	confined(t)
	for _, c := range []struct {
		name string
		args []string
		want output
	}{
		{"output and exit code", []string{"--", "/bin/sh", "-c", "echo out; echo err >&2; exit 3"}, output{"out\n", "err\n", 3}},
		{"signal", []string{"--", "/bin/sh", "-c", "kill -TERM $$"}, output{"", "cloister: killed by signal 15 (terminated), exit code 143\n", 143}},
		{"not found", []string{"--", "no-such-program"}, output{"", "cloister: no-such-program: not found in the sandbox\n", 127}},
		{"environment", []string{"--env", "A=b c", "--", "env"}, output{"A=b c\nHOME=/tmp\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nTMPDIR=/tmp\n", "", 0}},
		{"bad environment", []string{"--env", "A", "--", "env"}, output{"", "cloister: --env \"A\": write KEY=VALUE\n", 2}},
		{"bad output", []string{"--out", "../x", "--", "env"}, output{"", "cloister: --out \"../x\": write a path below the working directory\n", 2}},
		{"hidden", []string{"--", "cat", "/etc/shadow"}, output{"", "cat: /etc/shadow: No such file or directory\n", 1}},
	} {
		if got := cloister(t, "", append([]string{"run"}, c.args...)...); got != c.want {
			t.Errorf("%s: got %+v, want %+v", c.name, got, c.want)
		}
	}
	if s := cloister(t, "", "run", "--timeout", "200ms", "--", "sleep", "60"); s.code == 0 || !strings.Contains(s.err, "timeout of 200ms") {
		t.Errorf("timeout: got %+v, want an error about the timeout", s)
	}
	if s := cloister(t, "", "run", "--in", "no/such/directory", "--", "true"); s.code != 2 || !strings.Contains(s.err, "no/such/directory") {
		t.Errorf("absent inputs: got %+v, want exit code 2 and the path", s)
	}
}

func TestRunCopiesInputsInAndOutputsOut(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "src/sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "src/sub/in"), []byte("input\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := cloister(t, dir, "run", "--in", "src", "--out", "result", "--out", "tree", "--", "/bin/sh", "-c",
		"cat sub/in > result; chmod +x result; mkdir -p tree/a; cp sub/in tree/a/b; echo x > undeclared; echo x >> sub/in || echo refused")
	if s.code != 0 || s.out != "refused\n" {
		t.Fatalf("got %+v, want exit code 0 and the write refused", s)
	}
	for name, want := range map[string]string{"result": "input\n", "tree/a/b": "input\n", "src/sub/in": "input\n"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "result")); err != nil || st.Mode()&0o111 == 0 {
		t.Errorf("result: got %v, %v, want it executable", st, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "undeclared")); err == nil {
		t.Error("got an undeclared output, want only declared ones")
	}
}

// start starts a server with additional flags and returns it, its store and its output.
func start(t *testing.T, flags ...string) (*bazelrun.Server, string, *bytes.Buffer) {
	t.Helper()
	confined(t)
	dir := t.TempDir()
	var log bytes.Buffer
	s, err := bazelrun.StartServer(t.Context(), bazelrun.ServerConfig{
		Binary: built.Path(t), Dir: filepath.Join(dir, "store"), Home: dir, Listen: "127.0.0.1:0", Args: flags, Log: &log,
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, filepath.Join(dir, "store"), &log
}

func TestServeSaysWhatItDoesAndEndsCalmly(t *testing.T) {
	s, dir, log := start(t)
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	if len(lines) > 5 {
		t.Errorf("got more than five lines:\n%s", log)
	}
	for _, want := range []string{"cloister 0.", "slots", dir, "sandbox  user+mount+pid+network+ipc+uts+cgroup namespaces", "seccomp", "(full)", "bazel    build --remote_executor=grpc://" + s.Addr} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("got\n%s\nwant %q in it", log, want)
		}
	}
}

func TestSecondServeNamesTheFirst(t *testing.T) {
	s, dir, _ := start(t)
	defer s.Stop()
	got := cloister(t, "", "serve", "--dir", dir, "--listen", "127.0.0.1:0", "--max-size", "1GiB")
	if got.code != 3 || !strings.Contains(got.err, fmt.Sprintf("process %d", s.PID)) || !strings.Contains(got.err, dir) {
		t.Errorf("same directory: got %+v, want exit code 3 and the process", got)
	}
	got = cloister(t, "", "serve", "--dir", t.TempDir(), "--listen", s.Addr, "--max-size", "1GiB")
	if got.code != 3 || !strings.Contains(got.err, s.Addr+" is in use") || !strings.Contains(got.err, "--listen") {
		t.Errorf("same port: got %+v, want exit code 3 and the address", got)
	}
	c, err := net.Dial("tcp", s.Addr)
	if err != nil {
		t.Fatalf("connect to the first server: %v", err)
	}
	c.Close()
}

func TestServeRefusesDirectoriesThatAreNoStore(t *testing.T) {
	confined(t)
	foreign := t.TempDir()
	if err := os.WriteFile(filepath.Join(foreign, "thesis.txt"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{foreign, "/proc/nowhere", "/dev/null/store"} {
		if got := cloister(t, "", "serve", "--dir", dir, "--listen", "127.0.0.1:0"); got.code != 3 || !strings.Contains(got.err, dir) {
			t.Errorf("--dir %s: got %+v, want exit code 3 and the directory", dir, got)
		}
	}
	if entries, err := os.ReadDir(foreign); err != nil || len(entries) != 1 {
		t.Errorf("refused directory: got %v, %v, want it unchanged", entries, err)
	}
}

// TestRunLeavesNothingBehind covers a reader that disappears, signals, and a temporary directory behind a symlink.
func TestRunLeavesNothingBehind(t *testing.T) {
	confined(t)
	dir := t.TempDir()
	in := filepath.Join(dir, "in")
	tmp, link := filepath.Join(dir, "tmp"), filepath.Join(dir, "link")
	for _, d := range []string{in, tmp} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(tmp, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(in, "large"), make([]byte, 200_000), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, script := range map[string]string{
		"a link":                 `"$0" run --in in -- cksum large`,
		"a reader that went":     `"$0" run --in in -- /bin/sh -c 'while :; do echo x; done' | head -1; true`,
		"a signal":               `"$0" run --in in -- sleep 60 & sleep 0.5; kill -TERM $!; wait $!; [ $? = 143 ]`,
		"a long output":          `[ $("$0" run -- head -c 40000000 /dev/zero | wc -c) = 40000000 ]`,
		"a command that is none": `"$0" run --in in -- no-such-command; [ $? = 127 ]`,
	} {
		ctx, path := built.Within(t, time.Minute)
		cmd := exec.CommandContext(ctx, "/bin/sh", "-c", script, path)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "TMPDIR="+link)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: got %v, want no error\n%s", name, err, out)
		}
		if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
			t.Errorf("%s: left behind %v, %v, want nothing", name, left, err)
		}
	}
}

// TestRefusesWhereItCannotConfine checks that in a user namespace that permits no further namespaces of a kind, the program names
// the kind and the remedy, and runs nothing. Creating such a user namespace needs no privilege.
func TestRefusesWhereItCannotConfine(t *testing.T) {
	confined(t)
	for _, kind := range []string{"user", "net", "pid"} {
		for command, code := range map[string]int{
			"check": 3, "serve --listen 127.0.0.1:0 --dir " + t.TempDir(): 3, "run -- /bin/echo it ran": 125,
		} {
			ctx, path := built.Within(t, time.Minute)
			cmd := exec.CommandContext(ctx, "/bin/sh", "-c",
				fmt.Sprintf("echo 0 > /proc/sys/user/max_%s_namespaces && exec %s %s", kind, path, command))
			cmd.SysProcAttr = &syscall.SysProcAttr{
				Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
				UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
				GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
			}
			out, err := cmd.CombinedOutput()
			if got := cmd.ProcessState.ExitCode(); got != code {
				t.Errorf("%s without %s namespaces: got exit code %d (%v), want %d", command, kind, got, err, code)
			}
			if want := "fix: sudo sysctl -w user.max_" + kind + "_namespaces="; !strings.Contains(string(out), want) || strings.Contains(string(out), "it ran") {
				t.Errorf("%s without %s namespaces: got\n%s\nwant %q and no run", command, kind, out, want)
			}
		}
	}
}

// TestRunAsRootOfAContainer checks that root of a user namespace with a single user can run commands.
func TestRunAsRootOfAContainer(t *testing.T) {
	confined(t)
	host := os.Getuid()
	if host == 0 {
		host = 63211 // an arbitrary user, as in a container
	}
	cmd := exec.CommandContext(t.Context(), built.Path(t), "run", "--", "id", "-u")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
		UidMappings: []syscall.SysProcIDMap{{HostID: host, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: host, Size: 1}},
	}
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "1000\n" {
		t.Errorf("got %q, %v, want the user ID 1000", out, err)
	}
}
