// SPDX-License-Identifier: Apache-2.0

package microvm_test

import (
	"bufio"
	"context"
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

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/microvm"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// holdVariable makes the test binary a worker that only holds a run, for a test that kills it.
const holdVariable = "CLOISTER_TEST_HOLD"

func TestMain(m *testing.M) {
	namespace.Init()
	guestkernel.Use()
	if os.Getenv(microvm.BootVariable) != "" {
		fmt.Println("ended:", microvm.Boot())
		return
	}
	if os.Getenv(holdVariable) != "" {
		_, err := microvm.NewQEMU(emulated).Run(context.Background(), spec("trap '' TERM HUP; echo started; sleep 600"), sandbox.Stdio{Stdout: os.Stdout})
		fmt.Println("ended:", err)
		return
	}
	os.Exit(m.Run())
}

// emulated needs no KVM. What is tested does not depend on it, except for the boundary.
const emulated = true

func TestBackend(t *testing.T) {
	microvm.NeedMachines(t)
	sandboxtest.TestBackend(t, func() sandbox.Backend { return microvm.NewQEMU(emulated) })
}

// TestBackendWithKVM tests the contract with KVM, whose machines alone are a security boundary.
func TestBackendWithKVM(t *testing.T) {
	microvm.NeedMachines(t)
	b := microvm.NewQEMU(!emulated)
	_, err := b.Probe(t.Context())
	must.Succeed(t, b.Close())
	if err != nil {
		t.Skip("no usable KVM: ", err)
	}
	sandboxtest.TestBackend(t, func() sandbox.Backend { return microvm.NewQEMU(!emulated) })
}

// backend returns a backend that can run.
func backend(t testing.TB) sandbox.Backend {
	t.Helper()
	microvm.NeedMachines(t)
	b := microvm.NewQEMU(emulated)
	t.Cleanup(func() { b.Close() })
	if _, err := b.Probe(t.Context()); err != nil {
		sandboxtest.Unavailable(t, "qemu", err)
	}
	return b
}

// spec returns the spec of a run of a script without a workspace.
func spec(script string) *sandbox.Spec {
	s := &sandbox.Spec{
		Args: []string{"/bin/sh", "-c", script}, Dir: "/usr", Env: []string{"PATH=/usr/bin:/bin"}, Limits: sandboxtest.Limits(),
	}
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	return s
}

// output runs a script, which must succeed.
func output(t testing.TB, b sandbox.Backend, s *sandbox.Spec) string {
	t.Helper()
	var out, stderr strings.Builder
	res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: &out, Stderr: &stderr})
	if err != nil || res.ExitCode != 0 {
		t.Fatalf("%q: got %+v, %v\n%s", s.Args, res, err, &stderr)
	}
	return out.String()
}

// TestKernelIsTheMachines: the run sees another kernel than this host's.
func TestKernelIsTheMachines(t *testing.T) {
	b := backend(t)
	version := output(t, b, spec("uname -rv"))
	var own unix.Utsname
	must.Succeed(t, unix.Uname(&own))
	if host := unix.ByteSliceToString(own.Release[:]) + " " + unix.ByteSliceToString(own.Version[:]) + "\n"; version == host {
		t.Errorf("the kernel is this host's: %s", version)
	}
}

// TestMachinesServeTheSourcesOfTheirRun: a machine that is kept serves the directories of its current run.
func TestMachinesServeTheSourcesOfTheirRun(t *testing.T) {
	b := backend(t)
	machines := children(t, os.Getpid())
	for _, text := range []string{"", "one\n", "two\n", ""} {
		s := spec("cat /in/file 2>/dev/null; exit 0")
		if text != "" {
			dir := must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "file"), []byte(text), 0o644))
			s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in", Content: "host", Source: dir})
		}
		if got := output(t, b, s); got != text {
			t.Errorf("got %q, want %q", got, text)
		}
	}
	if after := children(t, os.Getpid()); !slices.Equal(after, machines) {
		t.Errorf("got machines %v, want the same as before: %v", after, machines)
	}
}

// children returns the process IDs of the machines that a process started.
func children(t *testing.T, pid int) []string { return microvm.Children(t, pid, "qemu-system-") }

// TestNothingOutlivesAKilledWorker: after kill -9 of a worker no machine is left, no mount and no file.
func TestNothingOutlivesAKilledWorker(t *testing.T) {
	backend(t)
	temp := t.TempDir()
	mounts := must.Get(os.ReadFile("/proc/self/mountinfo"))(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), holdVariable+"=1", "TMPDIR="+temp)
	stdout, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil || line != "started\n" {
		t.Fatalf("the run did not start: %q, %v", line, err)
	}
	machines := children(t, cmd.Process.Pid)
	if len(machines) != 1 {
		t.Fatalf("got machines %v, want one", machines)
	}
	must.Succeed(t, cmd.Process.Kill())
	_ = cmd.Wait() // reports the kill
	must.Hold(t, "the machine ends with its worker", func() bool {
		_, err := os.Stat("/proc/" + machines[0])
		return err != nil
	})
	if after := must.Get(os.ReadFile("/proc/self/mountinfo"))(t); string(after) != string(mounts) {
		t.Errorf("the mounts changed from\n%s\nto\n%s", mounts, after)
	}
	if left := must.Get(os.ReadDir(temp))(t); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}
}

// TestKilledMachineFailsTheRun: a run whose machine dies is an error, never a result, and the next run works.
func TestKilledMachineFailsTheRun(t *testing.T) {
	b := backend(t)
	started := &trigger{act: func() { signal(t, syscall.SIGKILL) }}
	res, err := b.Run(t.Context(), spec("echo started; sleep 600"), sandbox.Stdio{Stdout: started})
	if err == nil || errors.Is(err, sandbox.ErrUnsupported) || res != nil {
		t.Errorf("got %+v, %v, want an error", res, err)
	}
	if res, err := b.Run(t.Context(), spec("exit 3"), sandbox.Stdio{}); err != nil || res.ExitCode != 3 {
		t.Errorf("the next run: got %+v, %v, want exit code 3", res, err)
	}
}

// TestStoppedMachineEndsWithItsBackend: Close ends a run whose QEMU does nothing any more.
func TestStoppedMachineEndsWithItsBackend(t *testing.T) {
	b := backend(t)
	closed := make(chan error, 1)
	started := &trigger{act: func() {
		signal(t, syscall.SIGSTOP)
		go func() { closed <- b.Close() }()
	}}
	res, err := b.Run(t.Context(), spec("echo started; sleep 600"), sandbox.Stdio{Stdout: started})
	if !errors.Is(err, sandbox.ErrClosed) || res != nil {
		t.Errorf("got %+v, %v, want ErrClosed", res, err)
	}
	must.Succeed(t, <-closed)
}

// signal sends a signal to each machine.
func signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	for _, pid := range children(t, os.Getpid()) {
		if n, err := strconv.Atoi(pid); err == nil {
			_ = syscall.Kill(n, s) // the machine may have ended
		}
	}
}

// A trigger acts at the first write.
type trigger struct{ act func() }

func (w *trigger) Write(p []byte) (int, error) {
	if w.act != nil {
		w.act()
		w.act = nil
	}
	return len(p), nil
}

// TestMachinesHaveNoRights: QEMU runs as a user of its own, in its own namespaces, behind a system call filter.
func TestMachinesHaveNoRights(t *testing.T) {
	b := backend(t)
	output(t, b, spec("true"))
	machines := children(t, os.Getpid())
	if len(machines) == 0 {
		t.Fatal("no machine is kept")
	}
	for _, pid := range machines {
		status := string(must.Get(os.ReadFile("/proc/" + pid + "/status"))(t))
		for _, want := range []string{"\nCapEff:\t0000000000000000\n", "\nSeccomp:\t2\n", "\nNoNewPrivs:\t1\n"} {
			if !strings.Contains(status, want) {
				t.Errorf("QEMU lacks %q:\n%s", want, status)
			}
		}
		if strings.Contains(status, "\nUid:\t0\t") {
			t.Errorf("QEMU is root:\n%s", status)
		}
		for _, kind := range []string{"mnt", "net", "pid", "ipc", "uts"} {
			if theirs, ours := must.Get(os.Readlink("/proc/"+pid+"/ns/"+kind))(t), must.Get(os.Readlink("/proc/self/ns/"+kind))(t); theirs == ours {
				t.Errorf("QEMU is in this process's %s namespace", kind)
			}
		}
		checkFiles(t, pid)
	}
}

// TestMachinesOfOtherWorkersAreOutOfReach: machines of different workers have the same users. What escapes from one can
// read its own QEMU's environment, but neither that of another nor, by the same rules, its memory.
func TestMachinesOfOtherWorkersAreOutOfReach(t *testing.T) {
	backend(t)
	backend(t)
	machines := children(t, os.Getpid())
	if len(machines) != 2 {
		t.Fatalf("got machines %v, want two", machines)
	}
	for _, pid := range machines {
		var st unix.Stat_t
		must.Succeed(t, unix.Stat("/proc/"+pid, &st))
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c",
			`for p in /proc/[0-9]*; do if (: <$p/environ) 2>/dev/null; then tr '\0' '\n' <$p/cmdline | head -n 1; fi; done`)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: "/proc/" + pid + "/root", Credential: &syscall.Credential{Uid: st.Uid, Gid: st.Gid}}
		out := string(must.Get(cmd.CombinedOutput())(t))
		if got := strings.Count(out, "qemu-system-x86_64\n"); got != 1 {
			t.Errorf("user %d of machine %s can read %d QEMUs, want its own:\n%s", st.Uid, pid, got, out)
		}
	}
}

// checkFiles checks that a process can change no regular file that it has open.
func checkFiles(t *testing.T, pid string) {
	t.Helper()
	sealed := 0
	for _, name := range must.Get(filepath.Glob("/proc/" + pid + "/fd/*"))(t) {
		var st unix.Stat_t
		if unix.Stat(name, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			continue
		}
		f := must.Get(os.Open(name))(t)
		seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
		f.Close()
		info := string(must.Get(os.ReadFile(strings.Replace(name, "/fd/", "/fdinfo/", 1)))(t))
		_, flags, _ := strings.Cut(info, "flags:\t")
		mode := must.Get(strconv.ParseUint(strings.Fields(flags)[0], 8, 32))(t) & unix.O_ACCMODE
		switch {
		case err == nil && seals&unix.F_SEAL_WRITE != 0:
			sealed++
		case mode != unix.O_RDONLY:
			t.Errorf("QEMU can write to %s: seals %#x, %v; %s", must.Get(os.Readlink(name))(t), seals, err, info)
		}
	}
	if sealed != 2 {
		t.Errorf("got %d sealed files, want kernel and initial root", sealed)
	}
}

// TestWhatIsLackingIsRefused: Run refuses what Features do not promise, and never runs anything then.
func TestWhatIsLackingIsRefused(t *testing.T) {
	b := backend(t)
	for name, change := range map[string]func(*sandbox.Spec){
		"endpoints": func(s *sandbox.Spec) {
			s.Network = sandbox.Network{Loopback: true, Allow: []sandbox.Endpoint{{Host: "a.example", Port: 1}}}
		},
		"full":      func(s *sandbox.Spec) { s.Audit = sandbox.AuditFull },
		"root":      func(s *sandbox.Spec) { s.Root = &sandbox.Root{Content: "x", Image: "x", Source: "."} },
		"superuser": func(s *sandbox.Spec) { s.Superuser = true },
		"sockets": func(s *sandbox.Spec) {
			s.Workspace, s.Temp = "x", []sandbox.Temp{{Target: "/tmp", Bytes: 1 << 20}}
			s.Sockets = []sandbox.Input{{Target: "/tmp/s", Source: "s"}}
		},
	} {
		s := spec("echo ran")
		change(s)
		var said strings.Builder
		if res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdout: &said}); !errors.Is(err, sandbox.ErrUnsupported) || said.Len() > 0 {
			t.Errorf("%s: got %+v, %v and output %q, want ErrUnsupported", name, res, err, &said)
		}
	}
}

// TestEmulationIsNamed: an emulated backend has another name, and its features say that it is no boundary.
func TestEmulationIsNamed(t *testing.T) {
	f, err := backend(t).Probe(t.Context())
	must.Succeed(t, err)
	if f.Backend != "qemu-tcg" || f.Tier != "partial" || !strings.Contains(f.Layers[0], "no security boundary") || f.Checks[0].OK {
		t.Errorf("got backend %q, tier %q, layers %q, checks %+v", f.Backend, f.Tier, f.Layers, f.Checks)
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
	for name, b := range map[string]sandbox.Backend{
		"qemu": microvm.NewQEMU(!emulated), "qemu-tcg": microvm.NewQEMU(emulated), "microvm": microvm.NewMSB(),
	} {
		f, err := b.Probe(t.Context())
		if !errors.Is(err, sandbox.ErrUnsupported) || preflight.Code(err) != preflight.NotRoot || f.Tier != "none" {
			t.Errorf("%s: got tier %q, %v; want ErrUnsupported with the code %s", name, f.Tier, err, preflight.NotRoot)
		}
		if res, err := b.Run(t.Context(), spec("true"), sandbox.Stdio{}); preflight.Code(err) != preflight.NotRoot {
			t.Errorf("%s: Run: got %+v, %v; want the code %s", name, res, err, preflight.NotRoot)
		}
		must.Succeed(t, b.Close())
	}
}

// TestMissingProgramsAreExplained: without QEMU, a kernel or a guest that boots, the error has a code.
func TestMissingProgramsAreExplained(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root and reports that first")
	}
	microvm.NeedMachines(t)
	kernel := os.Getenv("CLOISTER_GUEST_KERNEL")
	for name, c := range map[string]struct{ qemu, kernel, want string }{
		"no QEMU":   {filepath.Join(t.TempDir(), "none"), kernel, "(qemu_not_found)"},
		"no kernel": {"/bin/false", t.TempDir(), "(kernel_not_found)"},
		"no boot":   {"/bin/false", kernel, "(vm_probe_failed)"},
	} {
		t.Setenv("QEMU_PATH", c.qemu)
		t.Setenv("CLOISTER_GUEST_KERNEL", c.kernel)
		b := microvm.NewQEMU(emulated)
		f, err := b.Probe(t.Context())
		if !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), c.want) || f.Tier != "none" || len(f.Checks) != 1 ||
			!strings.Contains(f.Checks[0].Detail, c.want) {
			t.Errorf("%s: got features %+v, %v; want ErrUnsupported with %q", name, f, err, c.want)
		}
		if _, err := b.Run(t.Context(), spec("true"), sandbox.Stdio{}); !errors.Is(err, sandbox.ErrUnsupported) {
			t.Errorf("%s: Run: got %v, want ErrUnsupported", name, err)
		}
		must.Succeed(t, b.Close())
	}
}
