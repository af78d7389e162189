// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// A control is a group of the module, of either version.
type control interface {
	// create creates a child.
	create(name string) (control, error)
	// limit sets every limit whose controller the group has.
	limit(Limits) error
	// limits reads the limits back.
	limits() (Limits, error)
	// kill kills the processes in the group.
	kill() error
	// Delete removes the group and its children, which must be empty.
	Delete() error
}

// noLimit is written where the module does not pass on "max" or -1; the kernel caps it.
const noLimit = math.MaxInt64

// maxProcesses is PID_MAX_LIMIT, the highest limit that version 1 takes.
const maxProcesses = 4 << 20

// A v1 is a group of version 1 in every hierarchy that it needs.
type v1 struct {
	cgroup1.Cgroup
	swap bool // the kernel accounts swap
}

func (c v1) create(name string) (control, error) {
	child, err := c.New(name, &specs.LinuxResources{})
	return v1{child, c.swap}, err
}

func (c v1) limit(l Limits) error {
	memory, processes := l.Memory, l.Processes
	if memory == Unlimited {
		memory = noLimit
	}
	if processes == Unlimited {
		processes = maxProcesses
	}
	r := &specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: &memory}, Pids: &specs.LinuxPids{Limit: &processes}}
	if c.swap {
		// The limit of memory and swap must never be below that of memory. Update would raise the memory limit first.
		most := int64(noLimit)
		if err := c.Update(&specs.LinuxResources{Memory: &specs.LinuxMemory{Swap: &most}}); err != nil {
			return err
		}
		r.Memory.Swap = &memory
	}
	return c.Update(r)
}

func (c v1) limits() (Limits, error) {
	m, err := c.Stat()
	if err != nil {
		return Limits{}, err
	}
	return Limits{
		Memory: int64(m.GetMemory().GetUsage().GetLimit()), Processes: int64(m.GetPids().GetLimit()),
	}, nil
}

// kill does nothing: on version 1 only the end of a pid namespace kills every process reliably, and a group may hold a
// thread of the worker.
func (c v1) kill() error { return nil }

// subsystems returns the version 1 controllers that the host mounts.
func subsystems() (map[cgroup1.Name]cgroup1.Subsystem, error) {
	mounted, err := cgroup1.Default()
	found := map[cgroup1.Name]cgroup1.Subsystem{}
	for _, s := range mounted {
		if s.Name() == cgroup1.Memory {
			// Stat fails on files that newer kernels lack.
			root := filepath.Dir(directory(s, "/"))
			s = cgroup1.NewMemory(root, cgroup1.IgnoreModules("memsw", "kmem", "kmem.tcp"))
		}
		found[s.Name()] = s
	}
	return found, err
}

// directory returns where a group is in the hierarchy of a version 1 controller.
func directory(s cgroup1.Subsystem, group string) string {
	return s.(interface{ Path(string) string }).Path(group)
}

// newV1 creates a group for some controllers; groups has the parent for each.
func newV1(name string, groups map[cgroup1.Name]string, active []cgroup1.Subsystem) (cgroup1.Cgroup, error) {
	path := func(n cgroup1.Name) (string, error) { return filepath.Join(groups[n], name), nil }
	return cgroup1.New(path, &specs.LinuxResources{}, withSubsystems(active))
}

// loadV1 returns an existing group of one controller.
func loadV1(s cgroup1.Subsystem, group string) (cgroup1.Cgroup, error) {
	return cgroup1.Load(cgroup1.StaticPath(group), withSubsystems([]cgroup1.Subsystem{s}))
}

func withSubsystems(active []cgroup1.Subsystem) cgroup1.InitOpts {
	return cgroup1.WithHierarchy(func() ([]cgroup1.Subsystem, error) { return active, nil })
}

// A v2 is a group of version 2.
type v2 struct {
	*cgroup2.Manager
	dir         string
	controllers []string // that its children can have
	swap        bool     // the kernel accounts swap
}

func (c v2) has(controller string) bool { return slices.Contains(c.controllers, controller) }

func (c v2) create(name string) (control, error) {
	r := &cgroup2.Resources{}
	if c.has("memory") {
		r.Memory = &cgroup2.Memory{}
	}
	if c.has("pids") {
		r.Pids = &cgroup2.Pids{}
	}
	if c.has("io") {
		r.IO = &cgroup2.IO{}
	}
	m, err := c.NewChild(name, r) // which enables the controllers in c
	child := v2{m, filepath.Join(c.dir, name), c.controllers, false}
	if err == nil && c.has("memory") {
		_, err := os.Stat(filepath.Join(child.dir, "memory.swap.max"))
		child.swap = err == nil
	}
	return child, err
}

func (c v2) limit(l Limits) error {
	r := &cgroup2.Resources{}
	if c.has("memory") {
		memory, swap, group := l.Memory, int64(0), true
		if memory == Unlimited {
			memory = noLimit
		}
		// A run that lost a process to the OOM killer has failed: the kernel kills all of it.
		r.Memory = &cgroup2.Memory{Max: &memory, OOMGroup: &group}
		if c.swap {
			r.Memory.Swap = &swap
		}
	}
	if c.has("pids") {
		r.Pids = &cgroup2.Pids{Max: l.Processes}
	}
	return c.Update(r)
}

func (c v2) limits() (Limits, error) {
	m, err := c.StatFiltered(cgroup2.StatMemory | cgroup2.StatPids)
	if err != nil {
		return Limits{}, err
	}
	return Limits{Memory: int64(m.GetMemory().GetUsageLimit()), Processes: int64(m.GetPids().GetLimit())}, nil
}

func (c v2) kill() error {
	if procs, err := c.Procs(true); err != nil || len(procs) == 0 {
		return err
	}
	return c.Kill()
}

// loadV2 returns the group at a path below a mount point.
func loadV2(mount, group string) (v2, error) {
	m, err := cgroup2.Load(group, cgroup2.WithMountpoint(mount))
	return v2{Manager: m, dir: filepath.Join(mount, group)}, err
}

// locate returns the path below a mount point of the group that this process is in. The mount point in a container may
// show only part of the hierarchy, so leading elements of the path in /proc/self/cgroup may be missing from it.
func locate(mount, group string) (string, error) {
	self := strconv.Itoa(os.Getpid())
	for rest := group; ; {
		procs, err := os.ReadFile(filepath.Join(mount, rest, "cgroup.procs"))
		if err == nil && slices.Contains(strings.Fields(string(procs)), self) {
			return rest, nil
		}
		if rest == "/" || rest == "" {
			return "", fmt.Errorf("%s does not show the group %s of this process", mount, group)
		}
		_, rest, _ = strings.Cut(rest[1:], "/")
		rest = "/" + rest
	}
}

// remove deletes a group and waits up to two seconds for killed processes to leave it: they stay for a moment after they
// were waited for, and version 1 does not report when they leave.
func remove(c control) error {
	var err error
	for range 400 {
		if err = c.Delete(); err == nil || errors.Is(err, cgroup1.ErrCgroupDeleted) || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		time.Sleep(5 * time.Millisecond)
	}
	return err
}
