// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// roots are the ways in which a process can be rooted: as this one, by chroot, in its own mount namespace.
var roots = []string{"plain", "chroot", "pivot"}

// A process has installed its filter and waits.
type process struct {
	cmd      *exec.Cmd
	out, err bytes.Buffer
	control  int
	listener int // for Start; -1 without a filter
	base     string
	view     Config
}

// start starts a process that performs a test action in its own namespaces.
func start(t testing.TB, root, action string) *process {
	t.Helper()
	dir := t.TempDir()
	p := &process{listener: -1}
	if root == "plain" {
		p.base = dir
	}
	p.view = layout(t, dir, p.base)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must.Succeed(t, err)
	p.control = pair[0]
	t.Cleanup(func() { unix.Close(pair[0]) })
	theirs := os.NewFile(uintptr(pair[1]), "control")
	defer theirs.Close()
	p.cmd = exec.CommandContext(t.Context(), "/proc/self/exe")
	p.cmd.Env = []string{envRoot + "=" + root, envBase + "=" + dir, envAction + "=" + action}
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.ExtraFiles = &p.out, &p.err, []*os.File{theirs}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if root == "pivot" {
		p.cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNS
	}
	if err := p.cmd.Start(); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	if action == "cost alone" {
		return p
	}
	b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(p.control, b, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		theirs.Close()
		t.Fatalf("no listener: %v; %v: %s", err, p.cmd.Wait(), p.err.String())
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	must.Succeed(t, err)
	fds, err := unix.ParseUnixRights(&messages[0])
	must.Succeed(t, err)
	p.listener = fds[0]
	return p
}

// proceed lets the process perform its action.
func (p *process) proceed(t testing.TB) {
	t.Helper()
	must.Get(unix.Write(p.control, []byte("g")))(t)
}

// end waits for the process and returns what it printed.
func (p *process) end(t testing.TB) string {
	t.Helper()
	if err := p.cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, p.err.String())
	}
	return p.out.String()
}

// lines returns events as text, one on each line, with paths relative to base.
func lines(events []sandbox.Event, base string) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "%s %s %s", e.Kind, strings.TrimPrefix(e.Subject, base), e.Syscall)
		if e.Count > 1 {
			fmt.Fprintf(&b, " %d", e.Count)
		}
		if e.Detail != "" {
			fmt.Fprintf(&b, ", %s", e.Detail)
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// wantEvents monitors a process to its end and compares the events.
func wantEvents(t *testing.T, p *process, want string) (out string, opened []string) {
	t.Helper()
	r := Start(p.listener, p.view)
	p.proceed(t)
	out = p.end(t)
	events, unrecorded, opened := r.Events()
	if got := lines(events, p.base); got != want || unrecorded != 0 {
		t.Errorf("%d unrecorded, got:\n%s\nwant:\n%s\nthe process saw:\n%s", unrecorded, got, want, out)
	}
	for _, e := range events {
		expect.That(t, e.Process == "exe", "%s: process %q, want exe", e.Subject, e.Process)
	}
	return out, opened
}

func everyRoot(t *testing.T, test func(t *testing.T, root string)) {
	for _, root := range roots {
		t.Run(root, func(t *testing.T) { test(t, root) })
	}
}

// TestWriteNamesTheResolvedFile: whatever a path goes through, the event names the file.
func TestWriteNamesTheResolvedFile(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		out, _ := wantEvents(t, start(t, root, "write"), `write /in/absent/below-absent openat
write /in/absolute openat
write /in/by-descriptor openat
write /in/by-openat2 openat2
write /in/dangling openat
write /in/new\nline openat
write /in/relative openat
write /in/through-absolute openat
write /in/through-descriptor openat
write /in/through-proc openat
write /in/through-relative openat
write /in/up openat
write /out/in/deeper openat
`)
		expect.Text(t, out, "create absolute: \n", "a reported call does not continue")
	})
}

// TestOnlyChangesAreEvents: calls that fail or succeed regardless of permission are no events.
func TestOnlyChangesAreEvents(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		wantEvents(t, start(t, root, "change"), `write /in/chmod fchmodat
write /in/chown lchown
write /in/link linkat
write /in/mkdir mkdirat
write /in/rename renameat
write /in/renamed renameat
write /in/rmdir unlinkat
write /in/symlink symlinkat
write /in/truncate truncate
write /in/truncating openat
write /in/unlink unlinkat
write /in/unnamed openat
write /in/utime utimensat
`)
	})
}

// TestLinksAreFollowedAsTheKernelDoes: a link in a writable directory may itself be changed.
func TestLinksAreFollowedAsTheKernelDoes(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		wantEvents(t, start(t, root, "links"), `write /in fchownat
write /in/keep openat
write /in/through-own openat
`)
	})
}

func TestMemoryMatchesTheKernel(t *testing.T) {
	out, _ := wantEvents(t, start(t, "pivot", "memory"), `write /in/crosses openat
write /in/end openat
`)
	const want = "end: \ncrosses: \nunterminated: EFAULT\ntoo long: ENAMETOOLONG\nunmapped: EFAULT\nnil: EFAULT\n"
	expect.That(t, out == want, "the process saw:\n%s\nwant:\n%s", out, want)
}

func TestThreads(t *testing.T) {
	want := ""
	for i := range 8 {
		want += fmt.Sprintf("write /in/thread%d openat 200\n", i)
	}
	wantEvents(t, start(t, "pivot", "threads"), want)
}

func TestManyPathsAreCounted(t *testing.T) {
	p := start(t, "pivot", "many")
	r := Start(p.listener, p.view)
	p.proceed(t)
	p.end(t)
	events, unrecorded, _ := r.Events()
	expect.That(t, len(events) == sandbox.MaxEvents/5 && unrecorded == 10_000-sandbox.MaxEvents/5,
		"got %d events and %d unrecorded", len(events), unrecorded)
}

// TestSearchOfAProgram: a program that is found in the end was not missing.
func TestSearchOfAProgram(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		wantEvents(t, start(t, root, "exec"), `exec /bin/never execve
exec /bin1/never execve
`)
	})
}

// TestExecutedInputsAreNamed: programs by their resolved path, and interpreters, also of programs that are no inputs.
func TestExecutedInputsAreNamed(t *testing.T) {
	p := start(t, "plain", "interpret")
	for name, text := range map[string]string{
		"bin/script": "#! " + p.base + "/bin/link -x\n", "bin/interpreter": "#!" + p.base + "/in/keep\n",
		"out/script": "#!" + p.base + "/bin/other\n", "bin/other": "", "bin/never": "",
	} {
		must.Succeed(t, os.WriteFile(filepath.Join(p.base, name), []byte(text), 0o644))
	}
	must.Succeed(t, os.Symlink("interpreter", p.base+"/bin/link"))
	r := Start(p.listener, p.view)
	p.proceed(t)
	p.end(t)
	got, all := r.Executed()
	for i := range got {
		got[i] = strings.TrimPrefix(got[i], p.base)
	}
	if want := []string{"/bin/interpreter", "/bin/other", "/bin/script", "/in/keep"}; !slices.Equal(got, want) || !all {
		t.Errorf("got %q, all %v; want %q", got, all, want)
	}
}

// TestExecutionWithoutNameIsReported: an incomplete list is not reported as complete.
func TestExecutionWithoutNameIsReported(t *testing.T) {
	p := start(t, "pivot", "descriptor")
	r := Start(p.listener, p.view)
	p.proceed(t)
	p.end(t)
	if got, all := r.Executed(); all {
		t.Errorf("got %q as a complete list", got)
	}
}

func TestRefusedCallGetsItsErrno(t *testing.T) {
	out, _ := wantEvents(t, start(t, "pivot", "refused"), `syscall mount mount
syscall socket(AF_VSOCK) socket
`)
	expect.Equal(t, out, "mount: EPERM\nvsock: EAFNOSUPPORT\n", "the process saw")
}

func TestConnect(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		wantEvents(t, start(t, root, "connect"), `connect tcp 10.0.0.1:443 connect
connect udp 10.0.0.2:53 sendto
connect udp [fd00::1]:53 connect
connect unix /run/absent-monitor.sock connect
`)
	})
}

func TestLoopbackIsAnEventWithoutLoopback(t *testing.T) {
	p := start(t, "pivot", "connect")
	p.view.Loopback = false
	wantEvents(t, p, `connect tcp 10.0.0.1:443 connect
connect udp 10.0.0.2:53 sendto
connect udp 127.0.0.1:9 connect 2
connect udp [fd00::1]:53 connect
connect unix /run/absent-monitor.sock connect
`)
}

// TestAllowedEndpointIsNoViolation: an allowed endpoint is one address, port and protocol.
func TestAllowedEndpointIsNoViolation(t *testing.T) {
	p := start(t, "pivot", "connect")
	p.view.Allowed = []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:443"), netip.MustParseAddrPort("10.0.0.2:53")}
	wantEvents(t, p, `connect udp 10.0.0.2:53 sendto
connect udp [fd00::1]:53 connect
connect unix /run/absent-monitor.sock connect
`)
}

func TestFullRecordsReads(t *testing.T) {
	everyRoot(t, func(t *testing.T, root string) {
		p := start(t, root, "read")
		source := t.TempDir()
		must.Succeed(t, os.WriteFile(source+"/header.h", nil, 0o600))
		p.view.Full = true
		p.view.Source = map[string]string{p.base + "/out": source}
		_, opened := wantEvents(t, p, `read /out/header.h newfstatat, the source tree has it: add it to srcs, hdrs or data in BUILD
`)
		for i := range opened {
			opened[i] = strings.TrimPrefix(opened[i], p.base)
		}
		expect.Slices(t, opened, []string{"/bin/tool", "/in/keep", "/in/pipe2", "/out/in/file"}, "opened")
	})
}

func TestViolationsIgnoreReads(t *testing.T) {
	p := start(t, "pivot", "read")
	p.view.Source = map[string]string{"/out": t.TempDir()}
	if _, opened := wantEvents(t, p, ""); len(opened) > 0 {
		t.Errorf("opened: got %q", opened)
	}
}

// waiting returns once a call of the process waits.
func (p *process) waiting(t *testing.T) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(p.listener), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds, 60_000)
		if err == unix.EINTR {
			continue
		}
		if err != nil || fds[0].Revents&unix.POLLIN == 0 {
			t.Fatalf("no call waits: %v, events %x", err, fds[0].Revents)
		}
		return
	}
}

// TestStopAnswersWaitingCalls: a call that came before the end is answered; later ones may get ENOSYS from the kernel.
func TestStopAnswersWaitingCalls(t *testing.T) {
	p := start(t, "pivot", "hang")
	p.proceed(t)
	p.waiting(t)
	// Stopped before the first receive.
	r := newSession(p.listener, p.view)
	r.stop()
	r.serve()
	if out := p.end(t); !strings.HasPrefix(out, "create hang: \n") {
		t.Errorf("the process saw %q", out)
	}
	if events, _, _ := r.Events(); !strings.Contains(lines(events, ""), "write /in/hang openat\n") {
		t.Errorf("got %v", events)
	}
}

func TestStop(t *testing.T) {
	p := start(t, "pivot", "hang")
	r := Start(p.listener, p.view)
	r.Stop()
	r.Stop()
	p.proceed(t)
	expect.Equal(t, p.end(t), "create hang: ENOSYS\ncreate after: ENOSYS\n", "the process saw")
	if events, _, _ := r.Events(); len(events) > 0 {
		t.Errorf("got %v", events)
	}
}

// TestKillLeavesItsCallUnanswered: the process does not continue after the call for which it must die, however long
// that takes; here until Stop.
func TestKillLeavesItsCallUnanswered(t *testing.T) {
	for _, c := range []struct{ action, out, event string }{
		{"hang", "create hang: ENOSYS\n", "write /in/hang openat\n"},
		{"refused", "mount: ENOSYS\n", "syscall mount mount\n"},
	} {
		p := start(t, "pivot", c.action)
		killed := make(chan sandbox.Event, 100)
		p.view.Kill = func(e sandbox.Event) bool { killed <- e; return true }
		r := Start(p.listener, p.view)
		p.proceed(t)
		<-killed
		r.Stop()
		if out := p.end(t); !strings.HasPrefix(out, c.out) {
			t.Errorf("%s: the process saw %q, want it to begin with %q", c.action, out, c.out)
		}
		if events, _, _ := r.Events(); lines(events, "") != c.event {
			t.Errorf("%s: got %v, want %q", c.action, events, c.event)
		}
	}
}

// TestKilledBeforeReceive: a call of a dead process is no event, and the monitor ends.
func TestKilledBeforeReceive(t *testing.T) {
	p := start(t, "pivot", "hang")
	p.proceed(t)
	p.waiting(t)
	kill(t, p)
	if events, _, _ := Start(p.listener, p.view).Events(); len(events) > 0 {
		t.Errorf("got %v", events)
	}
}

// TestKilledAfterReceive: the process ID may belong to another process by then, here to the test.
func TestKilledAfterReceive(t *testing.T) {
	p := start(t, "pivot", "refused")
	p.proceed(t)
	p.waiting(t)
	w := newSession(p.listener, p.view)
	n := must.Get(w.queue.receive())(t)
	expect.That(t, w.queue.valid(n.ID), "a call that waits is not valid")
	kill(t, p)
	n.PID = uint32(os.Getpid())
	if w.openRoot(&n); w.root >= 0 {
		t.Error("openRoot opened the root of another process")
	}
	w.answer(&n)
	w.serve()
	if events, _, _ := w.Events(); len(events) > 0 {
		t.Errorf("got %v", events)
	}
}

// TestInterruptedExecutionIsNotReported: a signal interrupts the call, and the kernel reports it again.
func TestInterruptedExecutionIsNotReported(t *testing.T) {
	p := start(t, "pivot", "descriptor")
	p.proceed(t)
	w := newSession(p.listener, p.view)
	n := must.Get(w.queue.receive())(t)
	for seccomp.Name(int(n.Nr)) != "execveat" {
		w.answer(&n)
		n = must.Get(w.queue.receive())(t)
	}
	kill(t, p) // a signal, too
	w.answer(&n)
	w.serve()
	if got, all := w.Executed(); len(got) > 0 || !all {
		t.Errorf("got %v, all %v; want nothing", got, all)
	}
}

func kill(t *testing.T, p *process) {
	t.Helper()
	must.Succeed(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait() // reports the kill
}

// TestNothingStaysOpen: a monitor leaves no descriptor open.
func TestNothingStaysOpen(t *testing.T) {
	run := func() {
		p := start(t, "pivot", "hang")
		wantEvents(t, p, "write /in/after openat\nwrite /in/hang openat\n")
	}
	run() // the Go runtime keeps what it opens
	before := must.Get(os.ReadDir("/proc/self/fd"))(t)
	run()
	after := must.Get(os.ReadDir("/proc/self/fd"))(t)
	if len(after) != len(before)+1 { // the test's own socket
		t.Errorf("%d descriptors before, %d after", len(before), len(after))
	}
}

// BenchmarkOpen measures opening a file for writing with and without a monitor, in the process itself.
func BenchmarkOpen(b *testing.B) {
	for _, action := range []string{"cost alone", "cost monitored"} {
		b.Run(action, func(b *testing.B) {
			total := 0
			for range b.N {
				p := start(b, "pivot", action)
				if p.listener >= 0 {
					defer Start(p.listener, p.view).Stop()
				}
				p.proceed(b)
				ns := must.Get(strconv.Atoi(p.end(b)))(b)
				total += ns
			}
			b.ReportMetric(float64(total)/float64(b.N), "ns/open")
			b.ReportMetric(0, "ns/op")
		})
	}
}
