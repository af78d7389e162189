// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// filteredVariable makes the test binary filter itself and perform a test; see filtered.
const filteredVariable = "CLOISTER_TEST_FILTERED"

// cannotFilter is the exit code on hosts without filters.
const cannotFilter = 75

func TestMain(m *testing.M) {
	if what := os.Getenv(filteredVariable); what != "" {
		filtered(what)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// install filters every thread of this process.
func install(program []unix.SockFilter) error {
	return filter(program, unix.SECCOMP_FILTER_FLAG_TSYNC)
}

func filter(program []unix.SockFilter, flags uintptr) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}

// filtered is the filtered process. It prints what it found wrong.
func filtered(what string) {
	runtime.LockOSThread()
	what, rest, _ := strings.Cut(what, " ")
	conf := Config{Listen: what == "listen"}
	if what == "connect" {
		i, _ := strconv.Atoi(rest)
		conf = configs()[i]
	}
	if err := install(Program(conf)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(cannotFilter)
	}
	switch what {
	case "numbers":
		tryNumbers()
	case "calls":
		tryCalls(false)
	case "listen":
		tryCalls(true)
	case "connect":
		tryConnect(conf.Monitor)
	case "exec":
		environment := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, filteredVariable) })
		fmt.Println(unix.Exec("/bin/sh", []string{"sh", "-c", rest}, environment))
	}
}

// start runs this test binary as a filtered process.
func start(t *testing.T, what string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), filteredVariable+"="+what)
	cmd.Dir = t.TempDir()
	// A wrong filter may keep the process from exiting; it ends with this thread at the latest.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: unix.SIGKILL}
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == cannotFilter {
		sandboxtest.Unavailable(t, "namespaces", "filters of system calls: "+string(out))
	}
	return string(out), err
}

func silently(t *testing.T, what string) {
	t.Helper()
	if out, err := start(t, what); err != nil || out != "" {
		t.Errorf("%s: %v\n%s", what, err, out)
	}
}

// nonsense is an argument that no call accepts: no address, descriptor or valid flags.
const nonsense = ^uintptr(0)

// TestKernelRefusesNumbers makes every call that no argument makes permitted, and many that do not exist.
func TestKernelRefusesNumbers(t *testing.T) { silently(t, "numbers") }

func tryNumbers() {
	numbers := []int{1 << 20, 1 << 30, 1<<30 | unix.SYS_GETPID, 1<<30 | unix.SYS_EXECVE}
	for nr := range 1024 {
		numbers = append(numbers, nr)
	}
	for _, nr := range numbers {
		if r := of(nr); r != nil && (len(r.cases) > 0 || r.otherwise != refuse && r.otherwise != absent && r.otherwise != omit) {
			continue
		}
		_, _, errno := unix.RawSyscall6(uintptr(nr), nonsense, nonsense, nonsense, nonsense, nonsense, nonsense)
		if errno != Errno(nr) {
			fmt.Printf("%s: got %v, want %v\n", Name(nr), errno, Errno(nr))
		}
	}
}

// TestKernelChecksArguments makes calls that always fail, with an errno that shows who refused them.
func TestKernelChecksArguments(t *testing.T) {
	silently(t, "calls")
	silently(t, "listen")
}

func tryCalls(listening bool) {
	ofListen := unix.EPERM
	if listening {
		ofListen = unix.EBADF
	}
	for i, x := range []struct {
		nr   uintptr
		args [3]uintptr
		want unix.Errno
	}{
		// Signal handlers cannot be shared without memory: the kernel's EINVAL.
		{unix.SYS_CLONE, [3]uintptr{unix.CLONE_SIGHAND}, unix.EINVAL},
		{unix.SYS_CLONE, [3]uintptr{unix.CLONE_SIGHAND | unix.CLONE_NEWUSER}, unix.EPERM},
		{unix.SYS_CLONE, [3]uintptr{unix.CLONE_SIGHAND | unix.CLONE_NEWNET | high}, unix.EPERM},
		{unix.SYS_CLONE3, [3]uintptr{}, unix.ENOSYS},
		{unix.SYS_UNSHARE, [3]uintptr{unix.CLONE_FS}, 0},
		{unix.SYS_UNSHARE, [3]uintptr{unix.CLONE_NEWUSER}, unix.EPERM},
		{unix.SYS_UNSHARE, [3]uintptr{unix.CLONE_NEWTIME}, unix.EPERM},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_VSOCK, unix.SOCK_STREAM}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{high | unix.AF_VSOCK, unix.SOCK_STREAM}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_PACKET, unix.SOCK_RAW}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_ALG, unix.SOCK_SEQPACKET}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_INET, unix.SOCK_PACKET}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, unix.EAFNOSUPPORT},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, 0},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_CLOEXEC}, 0},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_INET, unix.SOCK_DGRAM}, 0},
		{unix.SYS_SOCKET, [3]uintptr{unix.AF_UNIX, unix.SOCK_DGRAM}, 0},
		{unix.SYS_LISTEN, [3]uintptr{nonsense}, ofListen},
		{unix.SYS_IOCTL, [3]uintptr{nonsense, unix.TCGETS}, unix.EBADF},
		{unix.SYS_IOCTL, [3]uintptr{nonsense, unix.TIOCSTI}, unix.EPERM},
		{unix.SYS_IOCTL, [3]uintptr{nonsense, high | unix.TIOCSTI}, unix.EPERM},
		{unix.SYS_FCNTL, [3]uintptr{nonsense, unix.F_GETLEASE}, unix.EBADF},
		{unix.SYS_FCNTL, [3]uintptr{nonsense, unix.F_SETLEASE}, unix.EPERM},
		{unix.SYS_FCNTL, [3]uintptr{nonsense, unix.F_NOTIFY}, unix.EPERM},
		{unix.SYS_PRCTL, [3]uintptr{unix.PR_GET_NO_NEW_PRIVS, 1}, unix.EINVAL},
		{unix.SYS_PRCTL, [3]uintptr{unix.PR_SET_MM, nonsense, nonsense}, unix.EPERM},
		{unix.SYS_PERSONALITY, [3]uintptr{0xffffffff}, 0},
		{unix.SYS_PERSONALITY, [3]uintptr{8}, unix.EPERM},
		{unix.SYS_MKNODAT, [3]uintptr{nonsense, 0, unix.S_IFIFO}, unix.EFAULT},
		{unix.SYS_MKNODAT, [3]uintptr{nonsense, 0, unix.S_IFCHR}, unix.EPERM},
		{unix.SYS_SECCOMP, [3]uintptr{unix.SECCOMP_SET_MODE_FILTER, 0, 0}, unix.EFAULT},
		{unix.SYS_SECCOMP, [3]uintptr{unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, 0}, unix.EPERM},
	} {
		_, _, errno := unix.RawSyscall(x.nr, x.args[0], x.args[1], x.args[2])
		if errno != x.want {
			fmt.Printf("%d: %s(%#x): got %v, want %v\n", i, Name(int(x.nr)), x.args, errno, x.want)
		}
	}
}

// TestKernelAcceptsPrograms installs every program; without a monitor, reported calls fail.
func TestKernelAcceptsPrograms(t *testing.T) {
	for i := range configs() {
		silently(t, fmt.Sprint("connect ", i))
	}
}

func tryConnect(level Level) {
	want := unix.EBADF
	if level != MonitorOff {
		want = unix.ENOSYS
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_CONNECT, nonsense, 0, 0); errno != want {
		fmt.Printf("connect: got %v, want %v\n", errno, want)
	}
}

// foreign returns a program for i386, which amd64 executes; it exits with 42.
func foreign() []byte {
	code := []byte{
		0xb8, 1, 0, 0, 0, // mov eax, 1 (exit)
		0xbb, 42, 0, 0, 0, // mov ebx, 42
		0xcd, 0x80, // int 0x80
		0x0f, 0x0b, // ud2
	}
	const base, header = 0x10000, 52 + 32
	var b bytes.Buffer
	b.WriteString("\x7fELF\x01\x01\x01")
	b.Write(make([]byte, 9))
	put := func(values ...any) {
		for _, v := range values {
			_ = binary.Write(&b, binary.LittleEndian, v) // into memory
		}
	}
	put(uint16(2), uint16(3), uint32(1), uint32(base+header), uint32(52), uint32(0), uint32(0))
	put(uint16(52), uint16(32), uint16(1), uint16(0), uint16(0), uint16(0))
	size := uint32(header + len(code))
	put(uint32(1), uint32(0), uint32(base), uint32(base), size, size, uint32(5), uint32(0x1000))
	return append(b.Bytes(), code...)
}

func TestOtherArchitecturesGetSIGSYS(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("needs amd64: the test has no program for other architectures")
	}
	program := filepath.Join(t.TempDir(), "i386")
	must.Succeed(t, os.WriteFile(program, foreign(), 0o700))
	var exit *exec.ExitError
	if err := exec.CommandContext(t.Context(), program).Run(); !errors.As(err, &exit) || exit.ExitCode() != 42 {
		sandboxtest.Unavailable(t, "ia32", fmt.Sprintf("this kernel executes no 32-bit programs: %v", err))
	}
	out, err := start(t, "exec ulimit -c 0; "+program+"; echo $?")
	expect.That(t, err == nil && strings.HasSuffix(strings.TrimSpace(out), fmt.Sprint(128+int(unix.SIGSYS))),
		"got %v\n%s\nwant exit code %d", err, out, 128+int(unix.SIGSYS))
}

// TestToolsWork runs common tools as far as they are installed.
func TestToolsWork(t *testing.T) {
	for _, x := range []struct{ tool, script string }{
		{"sh", `set -e; mkdir d; echo a >d/a; ln d/a d/b; ln -s a d/c; mv d/b d/e; cat d/c | tr a b | grep -q b
			mkfifo f; (echo x >f) & read x <f; wait; chmod 600 d/a; touch -d 2020-01-01 d/a; cp -a d g; rm -r d g; kill -0 $$`},
		{"bash", "bash <<'END'\n" + `set -e -o pipefail; diff <(echo a) <(echo a); ulimit -n 64
			(exec -a x true); sleep 9 & kill %1; wait %1 || true` + "\nEND\n"},
		{"gcc", `set -e; printf '#include <stdio.h>\nint main(){puts("hello");return 0;}\n' >a.c
			gcc -O1 -o a a.c; test "$(./a)" = hello`},
		{"perl", `perl -e 'open(F,">","f") or die; print F "x"; close F; $p=fork; exit 0 unless $p; waitpid($p,0); exit $?'`},
		{"python3", `python3 -c '
import os, socket, subprocess, tempfile, threading, multiprocessing, select
t = threading.Thread(target=lambda: None); t.start(); t.join()
a, b = socket.socketpair(); a.send(b"x"); assert b.recv(1) == b"x"
assert subprocess.check_output(["echo", "x"]) == b"x\n"
with tempfile.TemporaryDirectory() as d: open(d + "/f", "w").write("x")
p = multiprocessing.get_context("fork").Process(target=lambda: None); p.start(); p.join(); assert p.exitcode == 0
multiprocessing.Lock(); select.epoll().close(); os.memfd_create("m"); os.sched_getaffinity(0)'`},
		{"node", `node -e 'require("fs").writeFileSync("f","x");require("child_process").execSync("true");
			require("fs").promises.readFile("f").then(()=>setTimeout(()=>process.exit(0),1))'`},
		{"javac", `set -e; echo 'class H { public static void main(String[] a) throws Exception {
			Thread t = new Thread(() -> System.out.println("hello")); t.start(); t.join();
			new ProcessBuilder("true").start().waitFor(); } }' >H.java
			javac H.java; test "$(java -Xshare:auto -cp . H)" = hello`},
		{"go", `set -e; go version; printf 'package main\nfunc main(){println("hello")}\n' >a.go; go run a.go`},
	} {
		t.Run(x.tool, func(t *testing.T) {
			sandboxtest.Tool(t, x.tool)
			if out, err := start(t, "exec "+x.script); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// BenchmarkInstall measures installing a filter, each in a thread of its own.
func BenchmarkInstall(b *testing.B) {
	programs := map[string][]unix.SockFilter{
		"off": Program(Config{}), "violations": Program(Config{Monitor: MonitorViolations}),
		"full": Program(Config{Monitor: MonitorFull}), "init": InitFilter(),
	}
	for name, program := range programs {
		b.Run(name, func(b *testing.B) {
			var spent time.Duration
			for b.Loop() {
				done := make(chan error)
				go func() {
					runtime.LockOSThread()
					begin := time.Now()
					err := filter(program, 0)
					spent += time.Since(begin)
					done <- err
				}()
				must.Succeed(b, <-done)
			}
			b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "ns/install")
		})
	}
}

// BenchmarkCall measures a call that is always allowed and one with checked arguments.
func BenchmarkCall(b *testing.B) {
	for _, filtering := range []bool{false, true} {
		for name, nr := range map[string]uintptr{"getppid": unix.SYS_GETPPID, "fcntl": unix.SYS_FCNTL} {
			b.Run(fmt.Sprintf("%s/filter=%t", name, filtering), func(b *testing.B) {
				done := make(chan error)
				go func() {
					runtime.LockOSThread()
					var err error
					if filtering {
						err = filter(Program(Config{}), 0)
					}
					for b.Loop() {
						_, _, _ = unix.RawSyscall(nr, 0, unix.F_GETFD, 0)
					}
					done <- err
				}()
				must.Succeed(b, <-done)
			})
		}
	}
}
