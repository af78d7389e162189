// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

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
	if errors.Is(err, os.ErrNotExist) {
		return &Host{mode: None, reason: "this kernel has no control groups"}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the control groups of this process: %w", err)
	}
	if mode == cgroups.Hybrid {
		mount = hybridMount
	}
	if mode != cgroups.Legacy {
		if own, err := ownV2(mount, unified); err == nil && (own.has("memory") || own.has("pids")) {
			h := &Host{mode: V2}
			return h.tryOut(h.createV2(own), nil, fixV2)
		}
	}
	if mode != cgroups.Unified {
		h := &Host{mode: V1}
		missing, err := h.createV1(groups)
		return h.tryOut(err, missing, fixV1)
	}
	return &Host{mode: None, reason: "no control group with a memory or pids controller is delegated to this process", fix: fixV2}, nil
}

// createV2 creates the worker's group in own. This process moves from own into a leaf first, since a group whose
// children have controllers must hold no process; only the root of the hierarchy may, which has no type. If the
// controllers cannot be enabled then, own holds processes of others as well: it is not the worker's, and the process
// moves back.
func (h *Host) createV2(own v2) error {
	create := func() error {
		return h.create([]place{{own.dir, own.create}}, own.create, func(name string) map[string]string {
			dir := filepath.Join(own.dir, name)
			dirs := map[string]string{"cpuacct": dir} // version 2 counts processor time without a controller
			for _, c := range own.controllers {
				dirs[c] = dir
			}
			return dirs
		})
	}
	if _, err := own.GetType(); errors.Is(err, os.ErrNotExist) {
		return create()
	}
	self := uint64(os.Getpid())
	m, err := own.NewChild(leaf, nil)
	if err != nil {
		return err
	}
	if err = m.AddProc(self); err == nil {
		if err = create(); err == nil {
			return nil
		}
		err = errors.Join(err, own.AddProc(self))
	}
	_ = unix.Rmdir(filepath.Join(own.dir, leaf)) // fails if another worker of this group is in it
	return err
}

// createV1 creates the worker's group below the groups of this process, given by controller. Missing says why
// controllers cannot be used.
func (h *Host) createV1(groups map[string]string) (missing []error, err error) {
	mounted, err := subsystems()
	if err != nil {
		return nil, err
	}
	var usable []cgroup1.Subsystem
	own := map[cgroup1.Name]string{}
	for _, name := range []cgroup1.Name{cgroup1.Memory, cgroup1.Pids, cgroup1.Cpuacct, cgroup1.Cpu} {
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
		own[name] = group
		usable = append(usable, s)
	}
	if len(usable) == 0 {
		return missing, errors.Join(missing...)
	}
	var places []place
	for i, s := range usable {
		load := func(name string) (control, error) { return newV1(name, own, usable[i:i+1]) }
		places = append(places, place{directory(s, own[s.Name()]), load})
	}
	create := func(name string) (control, error) { return newV1(name, own, usable) }
	return missing, h.create(places, create, func(name string) map[string]string {
		dirs := map[string]string{}
		for _, s := range usable {
			dirs[string(s.Name())] = directory(s, filepath.Join(own[s.Name()], name))
		}
		return dirs
	})
}

// A place is a directory that holds the groups of workers, one in each hierarchy.
type place struct {
	dir  string
	load func(name string) (control, error) // loads a group in this hierarchy alone, or creates it
}

// create creates and locks the worker's group in all places; dirs names its directories. First it deletes what dead
// workers left in each: a worker may have been in other groups of one hierarchy and in the same of another.
func (h *Host) create(places []place, create func(string) (control, error), dirs func(string) map[string]string) error {
	left, deadline := map[string]bool{}, time.Now().Add(leaveTime)
	for _, p := range places {
		for _, name := range p.sweep(deadline) {
			left[name] = true
		}
	}
	for n := range 1000 {
		name := fmt.Sprintf("%s%d.%d", prefix, os.Getpid(), n)
		if left[name] {
			continue // it belongs to a worker with this pid in another pid namespace
		}
		parent, err := create(name)
		if err != nil {
			return err
		}
		// Until the group is locked another worker may take it for that of a dead worker and delete it.
		if locks, err := lockAll(dirs(name)); err == nil {
			h.parent, h.dirs, h.locks = parent, dirs(name), locks
			return nil
		}
	}
	return fmt.Errorf("%s holds too many groups of dead workers", places[0].dir)
}

// sweep deletes the groups of dead workers and returns the names of everything it found. The lock tells whether a
// worker is dead; the pid in the name may be reused and differs between namespaces. The processes of a dead worker have
// been killed, too. A group that still holds one at the deadline stays for the next worker to delete.
func (p place) sweep(deadline time.Time) (names []string) {
	entries, _ := os.ReadDir(p.dir)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		names = append(names, e.Name())
		if f, err := lock(filepath.Join(p.dir, e.Name())); err == nil {
			if c, err := p.load(e.Name()); err == nil {
				_ = remove(c, deadline)
			}
			f.Close()
		}
	}
	return names
}

// lockAll locks every directory of a worker's group.
func lockAll(dirs map[string]string) (locks []*os.File, err error) {
	defer func() {
		if err != nil {
			closeAll(locks)
		}
	}()
	var locked []os.FileInfo
	for _, dir := range dirs {
		st, err := os.Stat(dir)
		if err != nil {
			return locks, err
		}
		if slices.ContainsFunc(locked, func(l os.FileInfo) bool { return os.SameFile(l, st) }) {
			continue // two controllers in one hierarchy
		}
		f, err := lock(dir)
		if err != nil {
			return locks, err
		}
		locks, locked = append(locks, f), append(locked, st)
		if now, err := os.Stat(dir); err != nil || !os.SameFile(now, st) {
			return locks, fmt.Errorf("%s was deleted", dir)
		}
	}
	return locks, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close() // nothing is buffered
	}
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

// Missing returns, one line each, why something cannot be limited and how to enable it. Both are empty if everything
// can.
func (h *Host) Missing() (reason, fix string) { return h.reason, h.fix }

// Capabilities returns what the groups can do.
func (h *Host) Capabilities() Capabilities { return h.can }

// New creates a group; the name must be unique in the Host. It returns errors.ErrUnsupported if Mode is None. The
// caller removes the group or closes the Host.
func (h *Host) New(name string) (*Group, error) {
	if h.mode == None {
		return nil, fmt.Errorf("create the group %s: %w: %s", name, errors.ErrUnsupported, h.reason)
	}
	g := &Group{host: h, name: name, dirs: map[string]string{}}
	for controller, dir := range h.dirs {
		g.dirs[controller] = filepath.Join(dir, name)
		// The module would adopt it.
		if _, err := os.Stat(g.dirs[controller]); !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("create the group %s: %s: %w", name, g.dirs[controller], cmp.Or(err, os.ErrExist))
		}
	}
	var err error
	if g.control, err = h.parent.create(name); err != nil {
		return nil, fmt.Errorf("create the group %s: %w", name, err)
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

// Close removes every group. Their processes must be dead but may still be on their way out. The leaf that the worker
// is in stays.
func (h *Host) Close() error {
	h.mu.Lock()
	groups := slices.Clone(h.groups)
	h.mu.Unlock()
	var errs []error
	for _, g := range groups {
		errs = append(errs, g.Remove())
	}
	if h.parent != nil {
		errs = append(errs, remove(h.parent, time.Now().Add(leaveTime)))
		h.parent = nil
	}
	closeAll(h.locks)
	h.locks = nil
	return errors.Join(errs...)
}
