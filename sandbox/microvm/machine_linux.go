// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/printable"
	"golang.org/x/sys/unix"
)

const (
	program = "qemu-system-x86_64"
	device  = "/dev/kvm"

	// bootTime is how long a machine may take to boot with KVM, or to answer a probe, and slowBootTime if it is emulated
	// on a busy host.
	bootTime     = 10 * time.Second
	slowBootTime = 3 * time.Minute
	// processors of a machine.
	processors = 2
	// overhead is the memory of QEMU itself, in bytes, beside that of the machine.
	overhead = 1 << 30
	// maxThreads bounds the threads of QEMU.
	maxThreads = 64
	// maxConsole bounds what is kept of the text of QEMU and the machine's console.
	maxConsole = 8 << 10
)

// emulation lists QEMU's arguments for an emulated processor. With a thread per processor, guests crash at random. With
// svm=off, probes in guests of QEMU 7.2 fail.
var emulation = []string{"-accel", "tcg,thread=single", "-cpu", "max"}

// A machine is a virtual machine. It runs one command at a time.
type machine struct {
	cell    *cell
	end     time.Duration // that it may take to end once it has been killed
	key     string        // of the sources; "" if it has had none
	files   *fileServer   // of its sources
	ports   [ports]*port  // to the guest
	ended   chan struct{} // closed when QEMU has been reaped
	err     error         // of QEMU, once ended
	process *os.Process
	thread  int // that started QEMU
	console console
	serving sync.WaitGroup
}

// arguments returns the arguments of QEMU. Descriptors 3 and 4 are kernel and initial root, those after them the ports.
func (b *backend) arguments() []string {
	how := []string{"-accel", "kvm", "-cpu", "host,vmx=off,svm=off,pmu=off"} // nothing that this host's kernel would emulate
	if b.emulated {
		how = emulation
	}
	// On a busy host, interrupts can be late enough to fail the kernel's timer check. Its cipher tests take a fifth of the
	// boot time.
	parameters := "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests cgroup_no_v1=all rdinit=" + nameInit
	args := []string{
		program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		"-machine", "q35,dump-guest-core=off", "-smp", fmt.Sprint(processors), "-m", fmt.Sprintf("%dM", b.memory>>20),
		"-kernel", "/proc/self/fd/3", "-initrd", "/proc/self/fd/4",
		"-append", parameters,
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-device", "virtio-serial-pci,max_ports=16",
	}
	args = append(args, how...)
	for i := range ports {
		args = append(args, "-chardev", fmt.Sprintf("socket,id=port%d,fd=%d", i, firstPortQEMU+i),
			"-device", fmt.Sprintf("virtserialport,chardev=port%d,name=%s", i, portName(i)))
	}
	return args
}

// boot starts a machine and waits until its guest is ready.
func (b *backend) boot(ctx context.Context, c *cell) (*machine, error) {
	m := &machine{cell: c, end: b.times.end, files: newFileServer(), ended: make(chan struct{})}
	theirs, err := m.connect()
	defer func() {
		for _, f := range theirs {
			f.Close()
		}
	}()
	var cmd *exec.Cmd
	if err == nil {
		cmd, err = b.command(m, theirs)
	}
	if err == nil {
		err = m.start(cmd)
	}
	if err != nil {
		m.closePorts()
		return nil, err
	}
	m.serving.Add(1)
	onThread(func() {
		defer m.serving.Done()
		err := m.files.serveAs(zygote.CommandUser(c.number), m.ports[portFiles])
		if !m.dead() { // its guest is hostile, or this process lacks rights
			fmt.Fprintln(&m.console, "files of the host:", err)
		}
		_ = m.process.Kill()
	})
	err = b.within(ctx, m, func() error {
		var hello answer
		return m.ports[portControl].receiveMessage(&hello, maxAnswer)
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// within calls f, which needs the machine's ports. It kills the machine if f fails or takes longer than a boot may, or
// when ctx or the backend ends.
func (b *backend) within(ctx context.Context, m *machine, f func() error) error {
	limit := bootTime
	if b.emulated {
		limit = slowBootTime
	}
	done := make(chan error, 1)
	go func() { done <- f() }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	var ended, failed error
	select {
	case failed = <-done:
		if failed == nil {
			return nil
		}
	case <-ctx.Done():
		ended = ctx.Err()
	case <-b.ending:
		ended = errEnding
	case <-timer.C:
		failed = fmt.Errorf("it did not answer within %v", limit)
	}
	killed := m.kill() // ends f
	if ended == nil {
		ended = preflight.Fail(preflight.VMProbe, "the virtual machine: %v: %s", failed, m.console.String())
	}
	return errors.Join(ended, killed)
}

// connect makes the ports, and returns the guest's ends of them, which the caller closes.
func (m *machine) connect() (theirs []*os.File, err error) {
	for i := range ports {
		ours, guests, err := socketPair(portName(i))
		if err != nil {
			return theirs, err
		}
		theirs = append(theirs, guests)
		m.ports[i] = newPort(ours)
	}
	return theirs, nil
}

// nameQEMU is the name under which this program becomes QEMU, as the first process of a pid namespace.
const nameQEMU = "cloister-qemu"

// firstPortQEMU is QEMU's descriptor of the first port; the others follow.
const firstPortQEMU = 5

// qemuCommand returns the command that starts QEMU with the guest's ends of the ports, without rights on this host
// except to its descriptors and to KVM: this program as qemuMain.
func (b *backend) qemuCommand(m *machine, theirs []*os.File) (*exec.Cmd, error) {
	files := append([]*os.File{b.kernel, b.initrd}, theirs...)
	return b.confined(m, files, nameQEMU, append([]string{b.program}, b.arguments()...)...)
}

// qemuMain becomes QEMU. It has the arguments of qemuCommand.
func qemuMain() error {
	runtime.LockOSThread() // no_new_privs is an attribute of a thread
	if len(os.Args) < 5 {
		return fmt.Errorf("got arguments %q", os.Args)
	}
	u, err := parseUser(os.Args[1], os.Args[2])
	if err != nil {
		return err
	}
	if err := separateMounts(); err != nil {
		return err
	}
	if err := u.become(firstPortQEMU); err != nil {
		return err
	}
	return fmt.Errorf("start %s: %w", os.Args[3], syscall.Exec(os.Args[3], os.Args[4:], nil))
}

// start starts QEMU from a thread that lives as long as QEMU, because the kernel kills QEMU when that thread ends
// (PR_SET_PDEATHSIG). The thread first joins the control group, if there is one.
func (m *machine) start(cmd *exec.Cmd) error {
	started := make(chan error, 1)
	onThread(func() {
		m.thread = unix.Gettid()
		err := m.join(cmd)
		if err == nil {
			err = startWithoutDumps(cmd)
		}
		if err != nil {
			started <- fmt.Errorf("start %s: %w", cmd.Path, err)
			return
		}
		m.process = cmd.Process
		started <- nil
		m.err = cmd.Wait()
		m.closePorts()
		close(m.ended)
	})
	return <-started
}

var limiting sync.Mutex // held while this process has the limit of QEMU

// startWithoutDumps starts a command with core dumps disabled, because a dump would contain the run's data. The command
// inherits the limit: setting it for another user's process needs a capability that containers lack.
func startWithoutDumps(cmd *exec.Cmd) error {
	limiting.Lock()
	defer limiting.Unlock()
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &own); err != nil {
		return err
	}
	if own.Max > 0 { // 0 does not prevent a dump that the kernel sends to a program, 1 does
		if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: own.Max}); err != nil {
			return err
		}
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_CORE, &own) }() // this process had it before
	return cmd.Start()
}

// onThread calls f on a thread that ends with it. The main thread never ends.
func onThread(f func()) {
	go func() {
		runtime.LockOSThread() // and does not unlock: the thread ends with the goroutine
		if unix.Gettid() != os.Getpid() {
			f()
			return
		}
		begun := make(chan struct{})
		onThread(func() { close(begun); f() })
		<-begun // on another thread, since this one is locked
		runtime.UnlockOSThread()
	}()
}

func (m *machine) join(cmd *exec.Cmd) error {
	if m.cell.group == nil {
		return nil
	}
	dir, tasks := m.cell.group.Join()
	if dir >= 0 {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, dir
	}
	for _, f := range tasks {
		if _, err := f.WriteString("0"); err != nil {
			return fmt.Errorf("control group: %w", err)
		}
	}
	return nil
}

func (m *machine) closePorts() {
	for _, p := range m.ports {
		if p != nil {
			p.file.Close()
		}
	}
}

// kill ends the machine and waits until it is dead. It may be called again.
func (m *machine) kill() error {
	_ = m.process.Kill() // it may have ended
	timer := time.NewTimer(m.end)
	defer timer.Stop()
	select {
	case <-m.ended:
	case <-timer.C:
		m.cell.lost = true
		m.closePorts() // unblock everything that waits for the guest
		return fmt.Errorf("QEMU (process %d) did not end within %v of its kill", m.process.Pid, m.end)
	}
	// The control group can be deleted only once the thread, which is in it, has ended.
	for deadline := time.Now().Add(m.end); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", m.thread)); err != nil {
			break
		}
		if time.Now().After(deadline) {
			m.cell.lost = true
			return errors.New("the thread of a virtual machine does not end")
		}
	}
	m.serving.Wait()
	m.files.serveFrom(nil)
	return nil
}

// dead reports whether the machine has ended.
func (m *machine) dead() bool {
	select {
	case <-m.ended:
		return true
	default:
		return false
	}
}

// A console keeps the end of what is written to it.
type console struct {
	mu   sync.Mutex
	text []byte
}

var _ io.Writer = (*console)(nil)

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.text = append(c.text, p[max(0, len(p)-maxConsole):]...)
	if extra := len(c.text) - maxConsole; extra > 0 {
		c.text = append(c.text[:0], c.text[extra:]...)
	}
	return len(p), nil
}

// String returns the lines as printable text.
func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var lines []string
	for line := range bytes.Lines(bytes.TrimSpace(c.text)) {
		lines = append(lines, printable.Text(string(bytes.TrimSpace(line))))
	}
	return strings.Join(lines, "; ")
}
