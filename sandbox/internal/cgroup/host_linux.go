// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	prefix = "cloister."
	leaf   = "cloister-worker"
)

// What to do where there are no groups.
const (
	fixV2 = "set Delegate=yes in the worker's systemd unit, or start it by: systemd-run --user --scope -p Delegate=yes cloister ..."
	fixV1 = "start the worker as root, or boot with systemd.unified_cgroup_hierarchy=1 and set Delegate=yes in its systemd unit"
)

// A Host is the control groups that this host lets the worker have. It is safe for concurrent use.
type Host struct {
	mode        Mode
	detail, fix string
	can         Ability
	// parents are the worker's own groups, one in each hierarchy, and controllers says which of them has
	// a controller.
	parents     []parent
	controllers map[string]string

	mu     sync.Mutex
	groups []*Group // guarded by mu
}

// A parent is the worker's own group in one hierarchy. Its lock ends with the worker.
type parent struct {
	dir  string
	lock *os.File
}

// Open removes the groups of workers that are dead, makes this worker's own and tries out what they can do.
// Where version 2 is delegated to the worker, it moves itself into a leaf there and stays in it: so it comes
// before any other process is started. Lack of rights or of controllers is no error: then Mode is None. The
// caller closes the Host.
func Open() (*Host, error) {
	cgroups, err := os.ReadFile("/proc/self/cgroup")
	if errors.Is(err, os.ErrNotExist) {
		return &Host{mode: None, detail: "this kernel has no control groups"}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the control groups of this process: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find the control groups of this host: %w", err)
	}
	ps := places(string(cgroups), string(mounts))
	if i := slices.IndexFunc(ps, place.unified); i >= 0 {
		dir := ps[i].dir
		if filepath.Base(dir) == leaf {
			dir = filepath.Dir(dir)
		}
		if cs, err := available(dir, "memory", "pids", "io"); err == nil && (slices.Contains(cs, "memory") || slices.Contains(cs, "pids")) {
			return openV2(dir, cs)
		}
	}
	if slices.ContainsFunc(ps, func(p place) bool { return !p.unified() }) {
		return openV1(ps)
	}
	return &Host{mode: None, detail: "no control group with a memory or pids controller is delegated to this process", fix: fixV2}, nil
}

// A place is the group that this process is in, in one hierarchy.
type place struct {
	controllers []string // of version 1
	dir         string
}

func (p place) unified() bool { return len(p.controllers) == 0 }

// places returns the groups of a process that it can reach, from the texts of its cgroup and mountinfo in
// /proc.
func places(cgroups, mountinfo string) []place {
	var ps []place
	for line := range strings.Lines(cgroups) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 || strings.HasPrefix(f[1], "name=") || strings.HasPrefix(f[2], "/..") {
			continue // a hierarchy without controllers, or outside of this cgroup namespace
		}
		p := place{}
		if f[1] != "" {
			p.controllers = strings.Split(f[1], ",")
		}
		for line := range strings.Lines(mountinfo) {
			mount, fs, ok := strings.Cut(line, " - ")
			m, s := strings.Fields(mount), strings.Fields(fs)
			if !ok || len(m) < 5 || len(s) < 3 || p.unified() != (s[0] == "cgroup2") {
				continue
			}
			if !p.unified() && (s[0] != "cgroup" || !slices.Contains(strings.Split(s[2], ","), p.controllers[0])) {
				continue
			}
			// A mount may show a part of the hierarchy only, and this process may be elsewhere.
			if rel, err := filepath.Rel(unescape(m[3]), f[2]); err == nil && filepath.IsLocal(rel) {
				p.dir = filepath.Join(unescape(m[4]), rel)
				ps = append(ps, p)
				break
			}
		}
	}
	return ps
}

// unescape undoes what mountinfo does to blanks.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// available returns which of the controllers the children of a group of version 2 can have.
func available(dir string, want ...string) ([]string, error) {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	have := strings.Fields(string(b))
	return slices.DeleteFunc(want, func(c string) bool { return !slices.Contains(have, c) }), err
}

// openV2 makes a Host of a group of version 2 that offers the controllers.
func openV2(dir string, controllers []string) (*Host, error) {
	h := &Host{mode: V2, controllers: map[string]string{}}
	if err := settle(dir, controllers); err != nil {
		return h.none(err, fixV2)
	}
	p, err := newParent(dir)
	if err != nil {
		return h.none(err, fixV2)
	}
	h.parents = []parent{p}
	if err := enable(p.dir, controllers); err != nil {
		return h.none(err, fixV2)
	}
	// Version 2 counts processor time without a controller.
	for _, c := range append(controllers, "cpuacct") {
		h.controllers[c] = p.dir
	}
	return h.tryOut(nil, fixV2)
}

// settle makes dir a group that may have children with controllers: no process may stay in it, so this one
// goes to a leaf. The root of the hierarchy alone is exempt, and known by having no type.
func settle(dir string, controllers []string) error {
	if _, err := os.Stat(filepath.Join(dir, "cgroup.type")); errors.Is(err, os.ErrNotExist) {
		return enable(dir, controllers)
	}
	l := filepath.Join(dir, leaf)
	if err := os.Mkdir(l, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	err := write(filepath.Join(l, "cgroup.procs"), "0")
	if err == nil {
		if err = enable(dir, controllers); err == nil {
			return nil
		}
		// Others are in the group, too: it is not the worker's, and stays as it was.
		err = errors.Join(err, write(filepath.Join(dir, "cgroup.procs"), "0"))
	}
	_ = unix.Rmdir(l) // a second worker of this group may be in it
	return err
}

// enable lets the children of a group of version 2 have the controllers.
func enable(dir string, controllers []string) error {
	for _, c := range controllers {
		if err := write(filepath.Join(dir, "cgroup.subtree_control"), "+"+c); err != nil {
			return fmt.Errorf("enable the %s controller: %w", c, err)
		}
	}
	return nil
}

// openV1 makes a Host of the groups of version 1 that this process is in.
func openV1(ps []place) (*Host, error) {
	h := &Host{mode: V1, controllers: map[string]string{}}
	var lacks []error
	for _, c := range []string{"memory", "pids", "cpuacct"} {
		i := slices.IndexFunc(ps, func(p place) bool { return slices.Contains(p.controllers, c) })
		if i < 0 {
			lacks = append(lacks, fmt.Errorf("no hierarchy with the %s controller is mounted", c))
			continue
		}
		// Two controllers may share a hierarchy, and then the worker's group in it.
		for _, other := range ps[i].controllers {
			if dir, ok := h.controllers[other]; ok {
				h.controllers[c] = dir
			}
		}
		if h.controllers[c] != "" {
			continue
		}
		p, err := newParent(ps[i].dir)
		if err != nil {
			lacks = append(lacks, err)
			continue
		}
		h.parents = append(h.parents, p)
		h.controllers[c] = p.dir
	}
	return h.tryOut(lacks, fixV1)
}

// newParent removes what dead workers left in dir and makes this worker's group there.
func newParent(dir string) (parent, error) {
	sweep(dir)
	for n := range 1000 {
		d := filepath.Join(dir, fmt.Sprintf("%s%d.%d", prefix, os.Getpid(), n))
		if err := os.Mkdir(d, 0o755); errors.Is(err, os.ErrExist) {
			continue
		} else if err != nil {
			return parent{}, err
		}
		// Until it is locked another worker may take it for a dead one's.
		f, err := lock(d)
		if err != nil {
			continue
		}
		if _, err := os.Stat(d); err != nil {
			f.Close()
			continue
		}
		return parent{d, f}, nil
	}
	return parent{}, fmt.Errorf("%s holds too many groups of dead workers", dir)
}

// lock locks the group of a worker for as long as the file is open, if no living worker has it.
func lock(dir string) (*os.File, error) {
	f, err := open(dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// sweep removes the groups of dead workers. A lock says who is dead, and not the pid in the name: pids are
// used again, and differ between namespaces. What still holds a process cannot be removed and is left to
// the next worker.
func sweep(dir string) {
	workers, _ := filepath.Glob(filepath.Join(dir, prefix+"*"))
	for _, w := range workers {
		f, err := lock(w)
		if err != nil {
			continue
		}
		groups, _ := os.ReadDir(w)
		for _, g := range groups {
			if g.IsDir() {
				_ = unix.Rmdir(filepath.Join(w, g.Name()))
			}
		}
		_ = unix.Rmdir(w)
		f.Close()
	}
}

// tryOut finds what the groups can do, by doing it in one. Lacks is what is known to be missing.
func (h *Host) tryOut(lacks []error, fix string) (*Host, error) {
	if len(h.parents) == 0 {
		return h.none(errors.Join(lacks...), fix)
	}
	g, err := h.New("try")
	if err != nil {
		return h.none(err, fix)
	}
	const some = 64 << 20
	var s scanner
	if err := g.Reset(Limits{Memory: some, Processes: Unlimited}); err != nil {
		lacks = append(lacks, err)
	} else if n := s.number(g.memoryMax); n != some {
		lacks = append(lacks, fmt.Errorf("the limit of memory is %d after setting it to %d", n, some))
	} else {
		h.can.LimitMemory = true
	}
	h.can.CountMemory = g.memoryPeak != nil
	h.can.CountIO = g.io != nil

	var lack error
	once(func() { lack, err = h.tryInside(g) })
	if lack != nil {
		lacks = append(lacks, lack)
	}
	if err := errors.Join(err, g.Remove()); err != nil {
		return h.none(err, fix)
	}
	if !h.can.LimitMemory && !h.can.LimitProcesses {
		return h.none(errors.Join(lacks...), fix)
	}
	if !h.can.LimitMemory || !h.can.LimitProcesses {
		h.explain(errors.Join(lacks...), fix)
	}
	return h, nil
}

// tryInside tries what needs a process in g. Lack is why processes cannot be limited.
func (h *Host) tryInside(g *Group) (lack, err error) {
	dir, tasks := g.Join()
	for _, t := range tasks {
		if _, err := t.WriteString("0"); err != nil {
			return nil, fmt.Errorf("join: %w", err)
		}
	}
	if lack = g.Reset(Limits{Memory: Unlimited, Processes: 0}); lack == nil {
		refused := start(dir)
		u, err := g.Sample()
		if h.can.LimitProcesses = refused != nil && u.ForksRefused > 0; !h.can.LimitProcesses {
			lack = fmt.Errorf("a limit of no processes was not kept: %w", errors.Join(refused, err))
		}
	}
	if err := g.Reset(Limits{Memory: Unlimited, Processes: Unlimited}); err != nil {
		return lack, err
	}
	if err := start(dir); err != nil {
		return lack, fmt.Errorf("start a process in a group: %w", err)
	}
	// A thread's time is counted when it gives the processor up.
	if err := unix.Nanosleep(&unix.Timespec{Nsec: 1000}, nil); err != nil && err != unix.EINTR {
		return lack, err
	}
	u, err := g.Sample()
	h.can.CountCPU = u.User+u.System > 0
	return lack, err
}

// once calls f on a thread that ends soon after, and is not the main thread, which would stay.
func once(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			once(f)
			runtime.UnlockOSThread()
			return
		}
		f() // and the thread ends with the goroutine that is locked to it
	}()
	<-done
}

// start starts a process in the group of version 2, or where this thread is if dir is negative. Its program
// cannot exist, so it is gone again when start returns.
func start(dir int) error {
	_, err := syscall.ForkExec("/dev/null/none", nil, &syscall.ProcAttr{
		Sys: &syscall.SysProcAttr{UseCgroupFD: dir >= 0, CgroupFD: dir},
	})
	if err == unix.ENOTDIR {
		return nil
	}
	return err
}

// none gives back what h has and says why there is nothing. Only that it cannot be given back is an error.
func (h *Host) none(why error, fix string) (*Host, error) {
	n := &Host{mode: None}
	n.explain(why, fix)
	return n, h.Close()
}

func (h *Host) explain(why error, fix string) {
	h.detail, h.fix = strings.ReplaceAll(why.Error(), "\n", "; "), fix
}

// Mode is the kind of groups that this host has for the worker.
func (h *Host) Mode() Mode { return h.mode }

// Why says in a line each why something cannot be limited, and what would enable it; both are empty if
// everything can.
func (h *Host) Why() (detail, fix string) { return h.detail, h.fix }

// Can is what the groups can do.
func (h *Host) Can() Ability { return h.can }

// New makes a group whose name no other group of the Host has; errors.ErrUnsupported if Mode is None. The
// caller removes it, or closes the Host.
func (h *Host) New(name string) (*Group, error) {
	if h.mode == None {
		return nil, fmt.Errorf("make the group %s: %w: %s", name, errors.ErrUnsupported, h.detail)
	}
	g := &Group{host: h, name: name}
	for _, p := range h.parents {
		d := filepath.Join(p.dir, name)
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, errors.Join(err, g.Remove())
		}
		g.dirs = append(g.dirs, d)
	}
	if err := g.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("the group %s: %w", name, err), g.Remove())
	}
	h.mu.Lock()
	h.groups = append(h.groups, g)
	h.mu.Unlock()
	return g, nil
}

func (h *Host) forget(g *Group) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.groups = slices.DeleteFunc(h.groups, func(o *Group) bool { return o == g })
}

// Close removes all groups. The processes in them must be dead; they need not yet have vanished. The leaf
// that the worker is in stays.
func (h *Host) Close() error {
	h.mu.Lock()
	groups := slices.Clone(h.groups)
	h.mu.Unlock()
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.Remove())
	}
	for _, p := range h.parents {
		errs = append(errs, remove(p.dir), p.lock.Close())
	}
	h.parents = nil
	return errors.Join(errs...)
}

// remove removes a group, within two seconds. A killed process stays in its group for a moment after it was
// waited for, and version 1 tells nobody when it leaves.
func remove(dir string) error {
	var err error
	for range 400 {
		if err = unix.Rmdir(dir); err != unix.EBUSY {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err == nil || err == unix.ENOENT {
		return nil
	}
	return fmt.Errorf("remove %s: %w", dir, err)
}

// write writes to a file that must exist.
func write(path, s string) error {
	f, err := open(path, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteString(s)
	return err
}

// open opens a file of a control group. Package os would watch it for events, as it watches sockets.
func open(path string, flag int) (*os.File, error) {
	fd, err := unix.Open(path, flag|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
