// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/wire"
	"github.com/cloister-build/cloister/sandbox/microvm/initramfs"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/guestkernel"
	"github.com/cloister-build/cloister/tests/must"
	"golang.org/x/sys/unix"
)

// NeedMachines skips the test if no kernel was chosen, or if this program cannot be the first process of a machine.
func NeedMachines(t testing.TB) {
	t.Helper()
	if why := guestkernel.Missing(); why != "" {
		sandboxtest.Unavailable(t, "qemu", why)
	}
	needStatic(t)
}

// needStatic skips the test if this program is dynamically linked.
func needStatic(t testing.TB) {
	t.Helper()
	info, ok := debug.ReadBuildInfo()
	if ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("programs with the race detector are dynamically linked")
	}
}

// The fake msb is this program under another name. It has the options and exit codes of msb and boots its machines with
// QEMU, which emulates the processor.
const (
	fakeInit    = "/fake-init"
	fakeCommand = "/fake-command"
	fakePort    = "fake.msb"
)

func init() {
	switch {
	case os.Args[0] == fakeInit:
		fmt.Println("fake msb:", fakeInitMain())
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	case filepath.Base(os.Args[0]) == msbProgram:
		os.Exit(fakeMain(os.Args[1:]))
	}
}

// A fakeConfig is what the fake finds beside its program, since the driver passes no variables.
type fakeConfig struct{ QEMU, Kernel, Modules string }

// A fakeSandbox is the state of a sandbox that was created.
type fakeSandbox struct{ Name, CPUs, Memory, Root string }

// fakeMain performs one command of msb and returns its exit code.
func fakeMain(args []string) int {
	usage := func() int {
		fmt.Fprintf(os.Stderr, "error: unexpected argument in %q\n", args)
		return 2
	}
	state := filepath.Join(os.Getenv("MSB_HOME"), "state")
	switch {
	case slices.Equal(args, []string{"--version"}):
		fmt.Println("msb 0.6.18")
	case slices.Equal(args, []string{"create", "--help"}):
		fmt.Println("  -n, --name <NAME>\n      --no-net\n          Disable the network")
	case args[0] == "create":
		if len(args) != 12 || !slices.Equal(slices.Delete(slices.Clone(args), 2, 3), []string{
			"create", "-n", "-q", "--pull", "never", "--no-net", "-c", args[8], "-m", args[10], args[11],
		}) {
			return usage()
		}
		text, err := json.Marshal(fakeSandbox{args[2], args[8], args[10], args[11]})
		if err = errors.Join(err, os.WriteFile(state, text, 0o600)); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			return 1
		}
	case args[0] == "exec":
		if len(args) < 7 || !slices.Equal(args[:4], []string{"exec", "-q", "--no-tty", "--stream"}) || args[5] != "--" {
			return usage()
		}
		if err := fakeExec(state, args[4], args[6:]); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			return 1
		}
	case args[0] == "logs":
		text, _ := os.ReadFile(state + ".console")
		fmt.Printf("%s", text)
	default:
		return usage()
	}
	return 0
}

// fakeExec boots the machine of the sandbox and runs a command in it.
func fakeExec(state, name string, command []string) error {
	var s fakeSandbox
	text, err := os.ReadFile(state)
	if err != nil || json.Unmarshal(text, &s) != nil || s.Name != name {
		return fmt.Errorf("sandbox %q not found", name)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var c fakeConfig
	if text, err = os.ReadFile(filepath.Join(filepath.Dir(self), "config")); err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		return err
	}
	im := initramfs.Image{}
	for _, dir := range []string{"/dev", "/proc", "/sys/fs/cgroup", "/tmp", "/run", hostDir} {
		im.Add(dir, unix.S_IFDIR|0o755, "")
	}
	text, err = json.Marshal(command)
	im.Add(fakeCommand, unix.S_IFREG|0o644, string(text))
	im.Add(fakeInit, unix.S_IFLNK|0o777, guestProgram)
	if err := errors.Join(err, im.Copy(guestProgram, filepath.Join(s.Root, guestProgram))); err != nil {
		return err
	}
	more, err := os.ReadFile(c.Modules)
	if err == nil {
		err = os.WriteFile(state+".initrd", slices.Concat(im.Bytes(), more), 0o600)
	}
	if err != nil {
		return err
	}
	args := []string{
		program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none", "-machine", "q35",
		"-smp", s.CPUs, "-m", s.Memory, "-kernel", c.Kernel, "-initrd", state + ".initrd",
		"-append", "console=ttyS0 quiet panic=-1 cgroup_no_v1=all rdinit=" + fakeInit, "-serial", "file:" + state + ".console",
		"-chardev", "stdio,id=wire,signal=off", "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=wire,name=" + fakePort,
	}
	return syscall.Exec(c.QEMU, append(args, emulation...), os.Environ())
}

// fakeInitMain is the first process of a machine of the fake msb.
func fakeInitMain() error {
	if err := errors.Join(initramfs.Prepare(), mountAll()); err != nil {
		return err
	}
	wire, err := openPort(fakePort)
	if err != nil {
		return err
	}
	var command []string
	text, err := os.ReadFile(fakeCommand)
	if err = errors.Join(err, json.Unmarshal(text, &command)); err != nil {
		return err
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = []string{"PATH=/"}, wire.file, wire.file, os.Stderr
	return cmd.Run()
}

// useFakeMSB makes backends find the fake msb, and returns the directory of the package.
func useFakeMSB(t testing.TB) {
	t.Helper()
	NeedMachines(t)
	qemu := must.Get(findQEMU())(t)
	k := must.Get(findKernel())(t)
	dir := must.Get(os.MkdirTemp("", "cloister-msb-"))(t) // other users can read it
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(dir)) })
	im := initramfs.Image{}
	must.Succeed(t, im.AddModules(k.modules, modules))
	c := fakeConfig{qemu, filepath.Join(dir, "kernel"), filepath.Join(dir, "modules")}
	for name, text := range map[string][]byte{
		"kernel": must.Get(os.ReadFile(k.image))(t), "modules": im.Bytes(), "bin/config": must.Get(json.Marshal(c))(t),
		"bin/msb": must.Get(os.ReadFile("/proc/self/exe"))(t), "lib/libkrunfw.so.5.6.1": nil,
	} {
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, name), text, 0o755))
	}
	must.Succeed(t, os.Chmod(dir, 0o755))
	t.Setenv("MSB_PATH", filepath.Join(dir, "bin/msb"))
}

func newFakeMSB() *backend {
	b := newBackend(kind{msb: true, emulated: true})
	b.command = b.msbCommand
	return b
}

// TestBackendWithMSB tests the contract with a fake msb and everything else real.
func TestBackendWithMSB(t *testing.T) {
	useFakeMSB(t)
	sandboxtest.TestBackend(t, func() sandbox.Backend { return newFakeMSB() })
}

// TestRunInMSB: streams, files of the workspace and the exit code pass through the one wire to a machine of msb, each of
// them larger than the window of its port.
func TestRunInMSB(t *testing.T) {
	useFakeMSB(t)
	b := newFakeMSB()
	t.Cleanup(func() { must.Succeed(t, b.Close()) })
	const size = 3 * wire.Window
	w := must.Get(b.Workspace(t.Context(), sandbox.Unlimited, sandbox.Unlimited))(t)
	t.Cleanup(func() { must.Succeed(t, w.Close()) })
	must.Succeed(t, errors.Join(w.Root().Mkdir("in", 0o755), w.Root().Mkdir("out", 0o777), w.Root().Chmod("out", 0o777)))
	must.Succeed(t, w.Root().WriteFile("in/file", bytes.Repeat([]byte("i"), size), 0o644))
	read, write, err := os.Pipe()
	must.Succeed(t, err)
	defer read.Close()
	go func() { _, _ = write.Write(bytes.Repeat([]byte("s"), size)); write.Close() }() // fails if the run does not read
	s := plainSpec()
	s.Args = []string{"/bin/sh", "-c", "cat > /out/stdin; cat /in/file; exit 5"}
	s.Env, s.Workspace = []string{"PATH=/usr/bin:/bin"}, w.Name()
	for _, dir := range []string{"/usr", "/bin", "/lib", "/lib64"} {
		if src, err := filepath.EvalSymlinks(dir); err == nil {
			s.Inputs = append(s.Inputs, sandbox.Input{Target: dir, Content: "host", Source: src})
		}
	}
	s.Inputs = append(s.Inputs, sandbox.Input{Target: "/in", Content: "in", Source: "in"})
	s.Outputs = []sandbox.Output{{Target: "/out", Source: "out"}}
	var stdout bytes.Buffer
	res, err := b.Run(t.Context(), s, sandbox.Stdio{Stdin: read, Stdout: &stdout})
	if err != nil || res.ExitCode != 5 {
		t.Fatalf("got %+v, %v, want exit code 5", res, err)
	}
	if got := strings.Count(stdout.String(), "i"); got != size {
		t.Errorf("stdout: got %d bytes, want %d", got, size)
	}
	if got := must.Get(w.Root().ReadFile("out/stdin"))(t); len(got) != size {
		t.Errorf("stdin: got %d bytes, want %d", len(got), size)
	}
}

// TestBackendWithRealMSB tests the contract where msb and KVM are.
func TestBackendWithRealMSB(t *testing.T) {
	needStatic(t)
	_, err := findMSB(t.Context(), bootTime)
	if err = errors.Join(err, checkKVM(device, "/proc/cpuinfo")); err != nil {
		t.Skip("needs msb and KVM: ", err)
	}
	sandboxtest.TestBackend(t, NewMSB)
}

// TestMSBHasNoRights: whatever msb starts runs as a user that owns nothing, without network or a
// directory to write to but its own, and ends with its driver.
func TestMSBHasNoRights(t *testing.T) {
	useFakeMSB(t)
	b := newFakeMSB()
	t.Cleanup(func() { must.Succeed(t, b.Close()) })
	mounts := must.Get(os.ReadFile("/proc/self/mountinfo"))(t)
	m, err := b.acquireForTest(t)
	must.Succeed(t, err)
	members := namespaceOf(t, m.process.Pid)
	if len(members) < 2 {
		t.Fatalf("the namespace of the driver has processes %v, want also that of the machine", members)
	}
	host := must.Get(os.Readlink("/proc/self/ns/net"))(t)
	for _, pid := range members {
		status := string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))(t))
		for _, want := range []string{"CapEff:\t0000000000000000\n", "CapPrm:\t0000000000000000\n", "NoNewPrivs:\t1\n", "Groups:\t \n"} {
			if !strings.Contains(status, want) {
				t.Errorf("process %d: want %q in\n%s", pid, want, status)
			}
		}
		if net := must.Get(os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid)))(t); net == host {
			t.Errorf("process %d is in the network of this host", pid)
		}
		for line := range strings.Lines(string(must.Get(os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid)))(t))) {
			f := strings.Fields(line)
			if !strings.HasPrefix(f[5], "ro") && f[4] != driverDir && f[4] != "/proc" {
				t.Errorf("process %d can write to %s", pid, f[4])
			}
		}
	}
	must.Succeed(t, m.process.Kill())
	<-m.ended
	for _, pid := range members {
		if err := unix.Kill(pid, 0); err != unix.ESRCH {
			t.Errorf("process %d outlives its driver: %v", pid, err)
		}
	}
	must.Succeed(t, b.release(m, false))
	if after := must.Get(os.ReadFile("/proc/self/mountinfo"))(t); !bytes.Equal(after, mounts) {
		t.Errorf("the mounts changed from\n%s\nto\n%s", mounts, after)
	}
}

// acquireForTest boots a machine.
func (b *backend) acquireForTest(t testing.TB) (*machine, error) {
	t.Helper()
	if err := b.start(t.Context()); err != nil {
		return nil, err
	}
	return b.acquire(t.Context(), "", nil)
}

// namespaceOf returns the processes in the pid namespace of a process.
func namespaceOf(t testing.TB, pid int) (all []int) {
	t.Helper()
	want := must.Get(os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)))(t)
	dirs := must.Get(filepath.Glob("/proc/[0-9]*"))(t)
	for _, dir := range dirs {
		if got, err := os.Readlink(filepath.Join(dir, "ns/pid")); err == nil && got == want {
			all = append(all, must.Get(strconv.Atoi(filepath.Base(dir)))(t))
		}
	}
	return all
}

// TestDriverEndsWithTheWorker: after kill -9 of a worker nothing of msb is left, even if msb hangs.
func TestDriverEndsWithTheWorker(t *testing.T) {
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root")
	}
	dir := must.Get(os.MkdirTemp("", "cloister-msb-"))(t) // other users can read it
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(dir)) })
	file := filepath.Join(dir, "msb")
	must.Succeed(t, errors.Join(os.Chmod(dir, 0o755), os.WriteFile(file, []byte("#!/bin/sh\necho hangs >&2\nexec sleep 600\n"), 0o755)))
	worker := exec.CommandContext(t.Context(), "/proc/self/exe")
	worker.Env = append(os.Environ(), BootVariable+"="+file)
	must.Succeed(t, worker.Start())
	var members []int
	must.Hold(t, "the driver of the worker runs msb", func() bool {
		for _, pid := range Children(t, worker.Process.Pid, nameDriver+"\x00") {
			members = namespaceOf(t, must.Get(strconv.Atoi(pid))(t))
		}
		return len(members) == 2
	})
	must.Succeed(t, worker.Process.Kill())
	_ = worker.Wait() // reports the kill
	for _, pid := range members {
		must.Hold(t, fmt.Sprintf("process %d ends with the worker", pid), func() bool { return unix.Kill(pid, 0) == unix.ESRCH })
	}
}

// BootVariable makes the test binary a worker that boots a machine with the msb of that name, which hangs.
const BootVariable = "CLOISTER_TEST_MSB"

// Boot boots the machine.
func Boot() error {
	b := newFakeMSB()
	b.program, b.noNet = os.Getenv(BootVariable), "--no-net"
	var err error
	if b.groups, err = cgroup.Open(); err == nil {
		_, err = b.acquire(context.Background(), "", nil)
	}
	return err
}

// Children returns the process IDs of the children of a process whose command lines have the prefix.
func Children(t testing.TB, pid int, prefix string) (all []string) {
	t.Helper()
	for _, name := range must.Get(filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)))(t) {
		text, _ := os.ReadFile(name) // the thread may have ended
		for field := range strings.FieldsSeq(string(text)) {
			if line, _ := os.ReadFile("/proc/" + field + "/cmdline"); strings.HasPrefix(string(line), prefix) {
				all = append(all, field)
			}
		}
	}
	slices.Sort(all)
	return all
}

// TestMachinesAreCreatedWithoutNetwork: each machine is created with the no-network option that msb's help lists.
func TestMachinesAreCreatedWithoutNetwork(t *testing.T) {
	needStatic(t)
	if os.Geteuid() != 0 {
		sandboxtest.Unavailable(t, "root", "the backend needs root")
	}
	for _, option := range []string{"--no-net", "--no-network"} {
		dir := must.Get(os.MkdirTemp("", "cloister-msb-"))(t) // other users can read it
		t.Cleanup(func() { must.Succeed(t, os.RemoveAll(dir)) })
		must.Succeed(t, errors.Join(os.Chmod(dir, 0o755), os.Mkdir(filepath.Join(dir, "bin"), 0o755), os.Mkdir(filepath.Join(dir, "lib"), 0o755)))
		script := "#!/bin/sh\ncase $* in --version) echo msb 0.6.18;; 'create --help') echo '  " + option + "  Disable';; " +
			"create*) echo got $* >&2; exit 1;; esac\n"
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "lib/libkrunfw.so.5"), nil, 0o644))
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "bin/msb"), []byte(script), 0o755))
		t.Setenv("MSB_PATH", filepath.Join(dir, "bin/msb"))
		b := newFakeMSB()
		_, err := b.Probe(t.Context())
		if want := "got create -n " + guestName + " -q --pull never " + option + " -c "; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want an error with %q", option, err, want)
		}
		must.Succeed(t, b.Close())
	}
}

// TestMachineWithNetworkIsRefused: an interface with a device ends the guest before it runs anything.
func TestMachineWithNetworkIsRefused(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"lo", "sit0"} {
		must.Succeed(t, os.Mkdir(filepath.Join(dir, name), 0o755))
	}
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "bonding_masters"), nil, 0o644))
	must.Succeed(t, checkNoNetwork(dir))
	if err := checkNoNetwork(filepath.Join(dir, "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a list of interfaces: got %v, want %v", err, os.ErrNotExist)
	}
	must.Succeed(t, os.MkdirAll(filepath.Join(dir, "eth0/device"), 0o755))
	if err := checkNoNetwork(dir); err == nil || !strings.Contains(err.Error(), "eth0") {
		t.Errorf("got %v, want an error that names eth0", err)
	}
}

// TestMSBPreflightHasCodes: each reason why msb cannot be used has its code, before anything is started.
func TestMSBPreflightHasCodes(t *testing.T) {
	const works = "case $1 in --version) echo msb 0.6.18;; create) echo '  --no-net  Disable';; esac"
	for name, c := range map[string]struct {
		script   string // "" is no program
		complete bool
		want     string // code, or the option for no network
	}{
		"works":               {works, true, "--no-net"},
		"older":               {strings.NewReplacer("0.6.18", "0.7.2", "--no-net ", "--no-network ").Replace(works), true, "--no-network"},
		"no program":          {"", true, preflight.MSBNotFound},
		"newer C library":     {"echo 'version `GLIBC_2.39 not found' >&2; exit 1", true, preflight.MSBNotStarted},
		"cannot be executed":  {"exit 126", true, preflight.MSBNotStarted},
		"launcher alone":      {"echo 'msb binary not found' >&2; exit 127", true, preflight.MSBShim},
		"old version":         {strings.ReplaceAll(works, "0.6.18", "0.5.5"), true, preflight.MSBVersion},
		"no version":          {strings.ReplaceAll(works, "0.6.18", "unknown"), true, preflight.MSBVersion},
		"no kernel":           {works, false, preflight.MSBKrunfw},
		"no such option":      {strings.ReplaceAll(works, "--no-net", "--network"), true, preflight.MSBFlag},
		"a similar option":    {strings.ReplaceAll(works, "--no-net", "--no-net-cache"), true, preflight.MSBFlag},
		"help that fails":     {"case $1 in --version) echo msb 0.6.18;; *) exit 3;; esac", true, preflight.MSBNotStarted},
		"a command that lags": {"case $1 in --version) kill -STOP $$;; esac", true, preflight.MSBNotStarted},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("MSB_PATH", filepath.Join(dir, "bin/msb"))
			must.Succeed(t, errors.Join(os.Mkdir(filepath.Join(dir, "bin"), 0o755), os.Mkdir(filepath.Join(dir, "lib"), 0o755)))
			if c.script != "" {
				must.Succeed(t, os.WriteFile(filepath.Join(dir, "bin/msb"), []byte("#!/bin/sh\n"+c.script+"\n"), 0o755))
			}
			if c.complete {
				must.Succeed(t, os.WriteFile(filepath.Join(dir, "lib/libkrunfw.so.5"), nil, 0o644))
			}
			limit := time.Minute
			if strings.Contains(c.script, "STOP") {
				limit = 100 * time.Millisecond
			}
			m, err := findMSB(t.Context(), limit)
			if got := preflight.Code(err); err != nil && got != c.want || err == nil && m.noNetwork != c.want {
				t.Errorf("got %+v, %v, want %q", m, err, c.want)
			}
		})
	}
}
