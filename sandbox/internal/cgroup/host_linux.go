// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"golang.org/x/sys/unix"
)

const (
	prefix = "cloister."
	leaf   = "cloister-worker"
)

// Where systemd and container runtimes mount version 2; the module detects the mode there.
const (
	unifiedMount = "/sys/fs/cgroup"
	hybridMount  = "/sys/fs/cgroup/unified"
)

// How to enable control groups.
const (
	fixV2 = "set Delegate=yes in the worker's systemd unit, or start it with: systemd-run --user --scope -p Delegate=yes cloister ..."
	fixV1 = "start the worker as root, or boot with systemd.unified_cgroup_hierarchy=1 and set Delegate=yes in its systemd unit"
)

// A Host is the control groups that a worker may use. It is safe for concurrent use.
type Host struct {
	mode        Mode
	reason, fix string
	can         Capabilities
	parent      control           // the worker's group, which holds all others
	dirs        map[string]string // its directory by controller
	locks       []*os.File        // on these directories; they end with the worker

	mu     sync.Mutex
	groups []*Group // guarded by mu
}

// Open removes the groups of dead workers, creates this worker's group and tries what groups can do. On version 2 it
// moves the worker into a leaf group, where it stays, so call Open before starting any other process. Missing rights or
// controllers are no error: the Mode is None then. The caller closes the Host.
func Open() (*Host, error) {
	mode, mount := cgroups.Mode(), unifiedMount
	if mode == cgroups.Unavailable {
		return &Host{mode: None, reason: "no control groups are mounted at " + unifiedMount}, nil
	}
	groups, unified, err := cgroups.ParseCgroupFileUnified("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find the control groups of this process: %w", err)
	}
	if mode == cgroups.Hybrid {
		mount = hybridMount
	}
	if mode != cgroups.Legacy {
		if own, err := ownV2(mount, unified); err == nil && (own.has("memory") || own.has("pids")) {
			return openV2(own)
		}
	}
	if mode != cgroups.Unified {
		return openV1(groups)
	}
	return &Host{
		mode: None, reason: "no control group with a memory or pids controller is delegated to this process", fix: fixV2,
	}, nil
}

// ownV2 returns the group that this process was started in.
func ownV2(mount, group string) (v2, error) {
	group, err := locate(mount, group)
	if err != nil {
		return v2{}, err
	}
	if filepath.Base(group) == leaf {
		group = filepath.Dir(group)
	}
	own, err := loadV2(mount, group)
	if err != nil {
		return v2{}, err
	}
	have, err := own.Controllers()
	for _, c := range []string{"memory", "pids", "io"} {
		if slices.Contains(have, c) {
			own.controllers = append(own.controllers, c)
		}
	}
	return own, err
}

// openV2 returns a Host whose groups are below own.
func openV2(own v2) (*Host, error) {
	h := &Host{mode: V2}
	if err := h.createV2(own); err != nil {
		return h.none(err, fixV2)
	}
	return h.tryOut(nil, fixV2)
}

// createV2 creates the worker's group in own. This process moves from own into a leaf first, since a group whose children
// have controllers must hold no process; only the root of the hierarchy may, which has no type. If the controllers cannot
// be enabled then, own holds processes of others as well: it is not the worker's, and the process moves back.
func (h *Host) createV2(own v2) error {
	sweep(own.dir, func(name string) (control, error) {
		m, err := own.NewChild(name, nil)
		return v2{Manager: m}, err
	})
	create := func(name string) (control, map[string]string, error) {
		c, err := own.create(name)
		if err != nil {
			return nil, nil, err
		}
		dir := c.(v2).dir
		dirs := map[string]string{"cpuacct": dir} // version 2 counts processor time without a controller
		for _, name := range own.controllers {
			dirs[name] = dir
		}
		return c, dirs, nil
	}
	if _, err := own.GetType(); errors.Is(err, os.ErrNotExist) {
		return h.createParent(own.dir, create)
	}
	self := uint64(os.Getpid())
	m, err := own.NewChild(leaf, nil)
	if err != nil {
		return err
	}
	if err = m.AddProc(self); err == nil {
		if err = h.createParent(own.dir, create); err == nil {
			return nil
		}
		err = errors.Join(err, own.AddProc(self))
	}
	_ = unix.Rmdir(filepath.Join(own.dir, leaf)) // fails if another worker of this group is in it
	return err
}

// openV1 returns a Host whose groups are below the groups of this process, given by controller.
func openV1(groups map[string]string) (*Host, error) {
	h := &Host{mode: V1}
	mounted, err := subsystems()
	if err != nil {
		return h.none(err, fixV1)
	}
	var (
		missing []error
		usable  []cgroup1.Subsystem
		own     = map[cgroup1.Name]string{}
	)
	for _, name := range []cgroup1.Name{cgroup1.Memory, cgroup1.Pids, cgroup1.Cpuacct} {
		s, ok := mounted[name]
		if !ok {
			missing = append(missing, fmt.Errorf("no hierarchy with the %s controller is mounted", name))
			continue
		}
		group, err := locate(directory(s, "/"), groups[string(name)])
		if err == nil {
			err = unix.Access(directory(s, group), unix.W_OK)
		}
		if err != nil {
			missing = append(missing, fmt.Errorf("%s controller: %w", name, err))
			continue
		}
		sweep(directory(s, group), func(name string) (control, error) {
			c, err := loadV1(s, filepath.Join(group, name))
			return v1{Cgroup: c}, err
		})
		own[name] = group
		usable = append(usable, s)
	}
	if len(usable) == 0 {
		return h.none(errors.Join(missing...), fixV1)
	}
	err = h.createParent(directory(usable[0], own[usable[0].Name()]), func(name string) (control, map[string]string, error) {
		c, err := newV1(name, own, usable)
		dirs := map[string]string{}
		for _, s := range usable {
			dirs[string(s.Name())] = directory(s, filepath.Join(own[s.Name()], name))
		}
		_, noSwap := os.Stat(filepath.Join(dirs["memory"], "memory.memsw.limit_in_bytes"))
		return v1{c, noSwap == nil}, dirs, err
	})
	if err != nil {
		return h.none(err, fixV1)
	}
	return h.tryOut(missing, fixV1)
}

// createParent creates and locks the worker's group, in dir among others.
func (h *Host) createParent(dir string, create func(name string) (control, map[string]string, error)) error {
	for n := range 1000 {
		name := fmt.Sprintf("%s%d.%d", prefix, os.Getpid(), n)
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			continue // it belongs to a worker with this pid in another pid namespace
		}
		parent, dirs, err := create(name)
		if err != nil {
			return err
		}
		h.parent, h.dirs = parent, dirs
		// Until the group is locked another worker may take it for that of a dead worker and remove it.
		if err := h.lock(); err == nil {
			return nil
		}
		h.unlock()
	}
	return fmt.Errorf("%s holds too many groups of dead workers", dir)
}

// lock locks every directory of the worker's group.
func (h *Host) lock() error {
	for _, dir := range h.dirs {
		if slices.ContainsFunc(h.locks, func(f *os.File) bool { return sameFile(f, dir) }) {
			continue // two controllers in one hierarchy
		}
		f, err := lock(dir)
		if err != nil {
			return err
		}
		h.locks = append(h.locks, f)
		if !sameFile(f, dir) {
			return fmt.Errorf("%s was removed", dir)
		}
	}
	return nil
}

func (h *Host) unlock() {
	for _, f := range h.locks {
		f.Close()
	}
	h.locks = nil
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	b, errPath := os.Stat(path)
	return err == nil && errPath == nil && os.SameFile(a, b)
}

// lock locks the group of a worker until the file is closed. It fails while a living worker holds the lock.
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

// sweep deletes the groups of dead workers in dir. The lock tells whether a worker is dead; the pid in the name may be
// reused and differs between namespaces. A group that still holds a process stays for the next worker to delete.
func sweep(dir string, load func(name string) (control, error)) {
	workers, _ := filepath.Glob(filepath.Join(dir, prefix+"*"))
	for _, w := range workers {
		f, err := lock(w)
		if err != nil {
			continue
		}
		if c, err := load(filepath.Base(w)); err == nil {
			_ = c.Delete()
		}
		f.Close()
	}
}

// none closes h and returns a Host without groups. The error is that of closing.
func (h *Host) none(why error, fix string) (*Host, error) {
	n := &Host{mode: None}
	n.explain(why, fix)
	return n, h.Close()
}

func (h *Host) explain(why error, fix string) {
	h.reason, h.fix = strings.ReplaceAll(why.Error(), "\n", "; "), fix
}

// Mode returns the kind of groups that this host offers the worker.
func (h *Host) Mode() Mode { return h.mode }

// Missing returns, one line each, why something cannot be limited and how to enable it. Both are empty if everything can.
func (h *Host) Missing() (reason, fix string) { return h.reason, h.fix }

// Capabilities returns what the groups can do.
func (h *Host) Capabilities() Capabilities { return h.can }

// New creates a group; the name must be unique in the Host. It returns errors.ErrUnsupported if Mode is None. The caller
// removes the group or closes the Host.
func (h *Host) New(name string) (*Group, error) {
	if h.mode == None {
		return nil, fmt.Errorf("create the group %s: %w: %s", name, errors.ErrUnsupported, h.reason)
	}
	c, err := h.parent.create(name)
	if err != nil {
		return nil, fmt.Errorf("create the group %s: %w", name, err)
	}
	g := &Group{host: h, name: name, control: c, dirs: map[string]string{}}
	for controller, dir := range h.dirs {
		g.dirs[controller] = filepath.Join(dir, name)
	}
	if err := g.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open the group %s: %w", name, err), g.Remove())
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

// Close removes every group. Their processes must be dead but may still be on their way out. The leaf that the worker is
// in stays.
func (h *Host) Close() error {
	h.mu.Lock()
	groups := slices.Clone(h.groups)
	h.mu.Unlock()
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.Remove())
	}
	if h.parent != nil {
		errs = append(errs, remove(h.parent))
		h.parent = nil
	}
	h.unlock()
	return errors.Join(errs...)
}
