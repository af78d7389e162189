// SPDX-License-Identifier: Apache-2.0

package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/cgroup"
	"github.com/cloister-build/cloister/sandbox/internal/limit"
	"github.com/cloister-build/cloister/sandbox/internal/preflight"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"golang.org/x/sys/unix"
)

// A backend boots virtual machines.
type backend struct {
	kind
	times      times
	command    func(*machine, []*os.File) (*exec.Cmd, error) // that runs a machine with the guest's ends of its ports
	ending     chan struct{}                                 // closed by Close
	workspaces *namespace.Backend                            // makes workspaces and runs nothing
	turns      chan struct{}                                 // has an element for each machine in use

	mu       sync.Mutex
	closed   bool
	program  string // QEMU or msb; "" until it was found
	noNet    string // option of msb
	kernel   *os.File
	initrd   *os.File
	memory   int64 // of each machine, in bytes
	groups   *cgroup.Host
	cells    []*cell    // free ones
	made     int        // cells
	idle     []*machine // stopped, least recently used first; only if emulated
	features *sandbox.Features
	open     map[string]*workspace
	busy     sync.WaitGroup
}

// A cell holds what one machine at a time uses: a host user, that of the slot with the same number, and a control
// group.
type cell struct {
	number int
	group  *cgroup.Group // nil without control groups
	lost   bool          // QEMU may still use them
}

// errEnding is the error of boots and runs that Close ended.
var errEnding = fmt.Errorf("%w, with every run in it", sandbox.ErrClosed)

// NewQEMU returns a backend that runs commands in QEMU virtual machines. It runs at most as many commands at a time as
// this host has processors, or two if it has one; further runs wait. Half of the host's memory is divided equally among
// the machines, from 1 to 8 GiB each. If the processor is emulated, nothing protects this host from hostile commands.
// The caller closes the backend.
func NewQEMU(emulated bool) sandbox.Backend {
	b := newBackend(kind{emulated: emulated})
	b.command = b.qemuCommand
	return b
}

// NewMSB returns a backend whose virtual machines are those of msb (microsandbox). It divides the host as NewQEMU does.
// The caller closes it.
func NewMSB() sandbox.Backend {
	b := newBackend(kind{msb: true})
	b.command = b.msbCommand
	return b
}

func newBackend(k kind) *backend {
	memory, turns := shares(hostMemory(), runtime.NumCPU())
	b := &backend{
		kind: k, times: times{stop: 30 * time.Second, late: 30 * time.Second, copy: 10 * time.Minute, end: 30 * time.Second},
		ending: make(chan struct{}), open: map[string]*workspace{}, workspaces: namespace.New(namespace.Config{}),
		memory: memory, turns: make(chan struct{}, turns),
	}
	if k.emulated {
		b.times.late = 10 * time.Minute // on a busy host, an emulated guest is late
	}
	return b
}

// shares divides half of a host's memory among machines: it returns the memory of each, in bytes, and their number.
func shares(host int64, cpus int) (memory int64, machines int) {
	const least, most = 1 << 30, 8 << 30
	machines = int(max(1, min(int64(max(2, cpus)), zygote.MaxSlots, host/2/least)))
	return min(max(host/2/int64(machines), least), most) &^ (1<<20 - 1), machines
}

// hostMemory returns the memory of this host in bytes, or 0 if it is unknown.
func hostMemory() int64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// Close ends every run and every machine, and waits for their end.
func (b *backend) Close() error {
	b.mu.Lock()
	if !b.closed {
		b.closed = true
		close(b.ending)
	}
	b.mu.Unlock()
	b.busy.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	for _, m := range b.idle {
		errs = append(errs, m.kill())
	}
	b.idle = nil
	if b.groups != nil {
		errs = append(errs, b.groups.Close())
		b.groups = nil
	}
	for _, f := range []*os.File{b.kernel, b.initrd} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	b.kernel, b.initrd = nil, nil
	return errors.Join(append(errs, b.workspaces.Close())...)
}

// start checks and prepares what machines need, as far as possible without booting one.
func (b *backend) start(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return sandbox.ErrClosed
	}
	if b.program != "" {
		return nil
	}
	if os.Geteuid() != 0 {
		return preflight.Fail(preflight.NotRoot, "%s needs root here, since each machine gets a user of its own", b.engine())
	}
	if runtime.GOARCH != "amd64" {
		return preflight.Fail(preflight.WrongSystem, "the backend has no virtual machine for %s", runtime.GOARCH)
	}
	if !b.emulated {
		if err := checkKVM(device, "/proc/cpuinfo"); err != nil {
			return err
		}
		if _, err := groups(device); err != nil {
			return err
		}
	}
	if err := preflight.Static("/proc/self/exe"); err != nil {
		return preflight.Fail(preflight.ProgramDynamic, "this program is the first process of each virtual machine and %w; build it with CGO_ENABLED=0", err)
	}
	if !zygote.Callable() {
		return errors.New("this program must call namespace.Init first in main")
	}
	var err error
	if b.groups == nil {
		if b.groups, err = cgroup.Open(); err != nil {
			return fmt.Errorf("control groups: %w", err)
		}
	}
	if b.program, err = b.find(ctx); err != nil {
		b.program = ""
		return err
	}
	return nil
}

// find returns the program that runs machines, and prepares what it needs.
func (b *backend) find(ctx context.Context) (string, error) {
	if b.msb {
		m, err := findMSB(ctx, bootTime)
		b.noNet = m.noNetwork
		return m.path, err
	}
	program, err := findQEMU()
	if err != nil {
		return "", err
	}
	k, err := findKernel()
	if err != nil {
		return "", err
	}
	return program, b.prepare(k)
}

// acquire returns a machine that serves the sources, for exclusive use until release, and waits while all machines are
// in use. It takes over the sources, which the key identifies.
func (b *backend) acquire(ctx context.Context, key string, sources []int) (*machine, error) {
	taken := false
	defer func() {
		if !taken {
			closeAll(sources)
		}
	}()
	select {
	case b.turns <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-b.ending:
		return nil, sandbox.ErrClosed
	}
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		<-b.turns
		return nil, sandbox.ErrClosed
	}
	b.busy.Add(1)
	m, old := b.choose(key)
	b.mu.Unlock()
	var errs []error
	for _, o := range old {
		errs = append(errs, b.destroy(o))
	}
	err := errors.Join(errs...)
	switch {
	case m == nil && err == nil:
		m, err = b.add(ctx)
	case m != nil:
		err = errors.Join(err, m.process.Signal(unix.SIGCONT))
	}
	if err != nil {
		if m != nil {
			err = errors.Join(err, b.destroy(m))
		}
		b.busy.Done()
		<-b.turns
		return nil, err
	}
	if m.key != key {
		m.key, taken = key, true
		m.files.serveFrom(sources)
	}
	return m, nil
}

// choose takes an idle machine: the most recently used of those with the same sources, which know their files, or any
// other. It also returns idle ones to destroy: those that have ended. The caller holds b.mu.
func (b *backend) choose(key string) (m *machine, old []*machine) {
	b.idle = slices.DeleteFunc(b.idle, func(m *machine) bool {
		if m.dead() {
			old = append(old, m)
		}
		return m.dead()
	})
	if len(b.idle) == 0 {
		return nil, old
	}
	chosen := 0 // the least recently used, unless one knows the sources
	for i, m := range b.idle {
		if m.key == key {
			chosen = i
		}
	}
	m = b.idle[chosen]
	b.idle = slices.Delete(b.idle, chosen, chosen+1)
	return m, old
}

// add boots a machine.
func (b *backend) add(ctx context.Context) (*machine, error) {
	c, err := b.takeCell()
	if err != nil {
		return nil, err
	}
	m, err := b.bootIn(ctx, c)
	if err != nil {
		b.putCell(c)
		return nil, err
	}
	return m, nil
}

func (b *backend) takeCell() (*cell, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.cells); n > 0 {
		c := b.cells[n-1]
		b.cells = b.cells[:n-1]
		return c, nil
	}
	if b.made == zygote.MaxSlots {
		return nil, fmt.Errorf("at most %d virtual machines; lost ones count until the worker restarts", zygote.MaxSlots)
	}
	c := &cell{number: b.made}
	if b.groups.Mode() != cgroup.None {
		var err error
		if c.group, err = b.groups.New("qemu" + strconv.Itoa(c.number)); err != nil {
			return nil, fmt.Errorf("control group: %w", err)
		}
	}
	b.made++
	return c, nil
}

// putCell makes a cell available again, unless its user and group are still in use.
func (b *backend) putCell(c *cell) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !c.lost {
		b.cells = append(b.cells, c)
	}
}

// limits returns the limits of QEMU on a host that can limit what is given.
func (b *backend) limits(can cgroup.Capabilities) cgroup.Limits {
	limits := cgroup.Limits{Memory: cgroup.Unlimited, Processes: cgroup.Unlimited, MilliCPUs: cgroup.Unlimited, DiskRate: cgroup.Unlimited}
	if can.LimitMemory {
		limits.Memory = b.memory + overhead
	}
	if can.LimitProcesses {
		limits.Processes = maxThreads
	}
	if can.LimitCPUs {
		limits.MilliCPUs = 1000 * (processors + 1) // one for QEMU's devices
	}
	return limits
}

// bootIn limits a cell and boots a machine in it.
func (b *backend) bootIn(ctx context.Context, c *cell) (*machine, error) {
	if c.group != nil {
		if err := c.group.Reset(b.limits(b.groups.Capabilities())); err != nil {
			return nil, fmt.Errorf("limits of the virtual machine: %w", err)
		}
	}
	return b.boot(ctx, c)
}

// destroy ends a machine.
func (b *backend) destroy(m *machine) error {
	err := m.kill()
	b.putCell(m.cell)
	return err
}

// release destroys a machine, because what ran in it may have taken it over. An emulated one, which is no boundary and
// takes long to boot, is kept for the next run if it is fit; it is stopped meanwhile.
func (b *backend) release(m *machine, fit bool) error {
	defer func() {
		<-b.turns
		b.busy.Done()
	}()
	if b.emulated && fit && m.process.Signal(unix.SIGSTOP) == nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.idle = append(b.idle, m)
		return nil
	}
	return b.destroy(m)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// fileMemory is about what a file takes in memory besides its data, in bytes.
const fileMemory = 1 << 10

// Workspace returns a new detached tmpfs. It holds no more than a machine: a hostile guest may return more than it has
// memory for.
func (b *backend) Workspace(ctx context.Context, bytes, files int64) (sandbox.Workspace, error) {
	bytes, files = limit.Lower(bytes, b.memory), limit.Lower(files, b.memory/fileMemory)
	w, err := b.workspaces.Workspace(ctx, bytes, files)
	if err != nil {
		return nil, err
	}
	own := &workspace{w, b, bytes, files}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.open[w.Name()] = own
	return own, nil
}

// A workspace remembers its limits.
type workspace struct {
	sandbox.Workspace
	b            *backend
	bytes, files int64
}

func (w *workspace) Close() error {
	w.b.mu.Lock()
	if w.b.open[w.Name()] == w { // not a newer one with the same descriptor
		delete(w.b.open, w.Name())
	}
	w.b.mu.Unlock()
	return w.Workspace.Close()
}

// workspace returns the open workspace of that name, or nil.
func (b *backend) workspace(name string) *workspace {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.open[name]
}
