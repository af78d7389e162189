// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// A control is a group of the module, of either version.
type control interface {
	// create creates a child.
	create(name string) (control, error)
	// limit sets every limit whose controller the group has.
	limit(Limits) error
	// Delete removes the group and its children, which must be empty.
	Delete() error
}

// noLimit is written where the module does not pass on "max" or -1; the kernel caps it.
const noLimit = math.MaxInt64

// socketFraction is the fraction of the memory limit to which version 1 limits the buffers of sockets.
const socketFraction = 4

// maxProcesses is PID_MAX_LIMIT, the highest limit that version 1 takes.
const maxProcesses = 4 << 20

// quotaPeriod is the period in which a group with a limit of processors gets its processor time, in microseconds.
const quotaPeriod = 100_000

// minQuota is the lowest quota that the kernel takes, in microseconds.
const minQuota = 1000

// quota returns the processor time that a number of processors gives in a period, in microseconds.
func quota(milliCPUs int64) int64 { return milliCPUs * (quotaPeriod / 1000) }

// A v1 is a group of version 1 in every hierarchy that it needs.
type v1 struct {
	cgroup1.Cgroup
	swap, sockets, bandwidth bool // the kernel accounts swap and buffers of sockets, and limits processors
}

func (c v1) create(name string) (control, error) {
	child, err := c.New(name, &specs.LinuxResources{})
	return v1{child, c.swap, c.sockets, c.bandwidth}, err
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
	if c.bandwidth {
		period, most := uint64(quotaPeriod), int64(Unlimited)
		if l.MilliCPUs != Unlimited {
			most = quota(l.MilliCPUs)
		}
		r.CPU = &specs.LinuxCPU{Period: &period, Quota: &most}
	} else if l.MilliCPUs != Unlimited {
		return errors.ErrUnsupported
	}
	if c.sockets {
		// The memory limit excludes socket buffers, so they have a limit of their own, beyond which senders wait.
		sockets := memory / socketFraction
		r.Memory.KernelTCP = &sockets
	}
	if c.swap {
		// The limit of memory and swap must never be below that of memory. Update would raise the memory limit first.
		most := int64(noLimit)
		if err := c.Update(&specs.LinuxResources{Memory: &specs.LinuxMemory{Swap: &most}}); err != nil {
			return err
		}
		r.Memory.Swap = &memory
	}
	err := c.Update(r)
	if errors.Is(err, unix.EINVAL) && l.MilliCPUs != Unlimited && *r.CPU.Quota >= minQuota {
		// A group above has a lower quota, which version 1 permits no child to exceed. It applies to this group as well.
		*r.CPU.Quota = Unlimited
		err = c.Update(r)
	}
	return err
}

// subsystems returns the version 1 controllers that the host mounts.
func subsystems() (map[cgroup1.Name]cgroup1.Subsystem, error) {
	mounted, err := cgroup1.Default()
	found := map[cgroup1.Name]cgroup1.Subsystem{}
	for _, s := range mounted {
		found[s.Name()] = s
	}
	return found, err
}

// directory returns where a group is in the hierarchy of a version 1 controller.
func directory(s cgroup1.Subsystem, group string) string {
	return s.(interface{ Path(string) string }).Path(group)
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// sharesOfCPU are the cpu.shares of a thread that is in no group.
const sharesOfCPU = 1024

// newV1 creates a group for some controllers; groups has the parent for each. All of its processes together get as much
// of the processors as one thread of its neighbours on each processor: by default it would be one thread in all.
func newV1(name string, groups map[cgroup1.Name]string, active []cgroup1.Subsystem) (v1, error) {
	path := func(n cgroup1.Name) (string, error) { return filepath.Join(groups[n], name), nil }
	hierarchy := func() ([]cgroup1.Subsystem, error) { return active, nil }
	shares := uint64(sharesOfCPU * runtime.NumCPU())
	c, err := cgroup1.New(path, &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}, cgroup1.WithHierarchy(hierarchy))
	has := func(file string) bool {
		return slices.ContainsFunc(active, func(s cgroup1.Subsystem) bool {
			return exists(filepath.Join(directory(s, filepath.Join(groups[s.Name()], name)), file))
		})
	}
	return v1{c, has("memory.memsw.limit_in_bytes"), has("memory.kmem.tcp.limit_in_bytes"), has("cpu.cfs_quota_us")}, err
}

// A v2 is a group of version 2.
type v2 struct {
	*cgroup2.Manager
	dir         string
	controllers []string // that its children can have
	swap        bool     // the kernel accounts swap
	bandwidth   bool     // the kernel limits processors
}

func (c v2) has(controller string) bool { return slices.Contains(c.controllers, controller) }

func (c v2) create(name string) (control, error) {
	m, err := c.NewChild(name, nil)
	if err != nil {
		return nil, err
	}
	if err := m.ToggleControllers(c.controllers, cgroup2.Enable); err != nil && len(c.controllers) > 0 {
		return nil, errors.Join(err, m.Delete())
	}
	dir := filepath.Join(c.dir, name)
	has := func(file string) bool { return exists(filepath.Join(dir, file)) }
	return v2{m, dir, c.controllers, has("memory.swap.max"), has("cpu.max")}, nil
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
	if l.MilliCPUs != Unlimited {
		most := quota(l.MilliCPUs)
		r.CPU = &cgroup2.CPU{Max: cgroup2.NewCPUMax(&most, nil)}
	} else if c.bandwidth {
		r.CPU = &cgroup2.CPU{Max: cgroup2.NewCPUMax(nil, nil)}
	}
	if err := c.Update(r); err != nil {
		return err
	}
	disks, err := c.disks(l.DiskRate)
	if err != nil {
		return err
	}
	for i := range disks {
		err := c.Update(&cgroup2.Resources{IO: &cgroup2.IO{Max: disks[i : i+1]}})
		if err != nil && !errors.Is(err, unix.ENODEV) { // it was removed meanwhile
			return err
		}
	}
	return nil
}

// disks returns the limits of a rate for every disk, or lifts those that the group has.
func (c v2) disks(rate int64) (disks []cgroup2.Entry, err error) {
	most, text := uint64(rate), ""
	if rate == Unlimited {
		b, err := os.ReadFile(filepath.Join(c.dir, "io.max"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		most, text = math.MaxUint64, string(b)
	} else {
		files, err := filepath.Glob("/sys/block/*/dev") // without partitions, which have no limits of their own
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			size, err := os.ReadFile(filepath.Join(filepath.Dir(file), "size"))
			number, err2 := os.ReadFile(file)
			switch err := cmp.Or(err, err2); {
			case errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV):
				continue // it was removed meanwhile
			case err != nil:
				return nil, err
			}
			if string(size) != "0\n" { // unused loop devices
				text += string(number)
			}
		}
	}
	for line := range strings.Lines(text) {
		var major, minor int64
		if _, err := fmt.Sscanf(line, "%d:%d", &major, &minor); err != nil {
			return nil, fmt.Errorf("disk %q: %w", line, err)
		}
		for _, t := range []cgroup2.IOType{cgroup2.ReadBPS, cgroup2.WriteBPS} {
			disks = append(disks, cgroup2.Entry{Type: t, Major: major, Minor: minor, Rate: most})
		}
	}
	return disks, nil
}

// kill kills the processes in the group.
func (c v2) kill() error {
	procs, err := c.Procs(true)
	if errors.Is(err, os.ErrNotExist) {
		return nil // somebody else deleted the group
	}
	if err != nil || len(procs) == 0 {
		return err
	}
	return c.Kill()
}

// ownV2 returns the version 2 group that this process was started in.
func ownV2(mount, group string) (v2, error) {
	group, err := locate(mount, group)
	if err != nil {
		return v2{}, err
	}
	if filepath.Base(group) == leaf {
		group = filepath.Dir(group)
	}
	m, err := cgroup2.Load(group, cgroup2.WithMountpoint(mount))
	if err != nil {
		return v2{}, err
	}
	have, err := m.Controllers()
	useful := []string{"memory", "pids", "io", "cpu"} // cpu divides the processors by group instead of by thread
	useful = slices.DeleteFunc(useful, func(c string) bool { return !slices.Contains(have, c) })
	return v2{Manager: m, dir: filepath.Join(mount, group), controllers: useful}, err
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

// leaveTime is how long killed processes may take to leave their groups.
const leaveTime = 2 * time.Second

// remove deletes a group. Until the deadline it waits for killed processes to leave it: they stay for a moment after
// they were waited for, and version 1 does not report when they leave.
func remove(c control, deadline time.Time) error {
	for ; ; time.Sleep(5 * time.Millisecond) {
		err := c.Delete()
		if err == nil || errors.Is(err, cgroup1.ErrCgroupDeleted) || errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}
