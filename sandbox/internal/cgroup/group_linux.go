// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// A Group serves one run at a time. Reset is called between runs; the other methods may be called at any time until
// Remove, also concurrently.
type Group struct {
	host    *Host
	name    string
	control control
	dirs    map[string]string // by controller

	dir   *os.File   // version 2
	tasks []*os.File // version 1, one for each hierarchy

	counterFiles
	limits   Limits // as set last
	limited  bool   // limits are known to be set
	baseline counters
}

// open opens the files of a new group.
func (g *Group) open() error {
	if err := g.counterFiles.open(g.host.mode, g.dirs); err != nil {
		return err
	}
	if g.host.mode == V2 {
		var err error
		g.dir, err = open(g.dirs["cpuacct"], unix.O_RDONLY|unix.O_DIRECTORY)
		return err
	}
	for _, dir := range g.dirs {
		f, err := open(filepath.Join(dir, "tasks"), unix.O_WRONLY)
		if err != nil {
			return err
		}
		g.tasks = append(g.tasks, f)
	}
	return nil
}

// Join returns how a process enters the group. On version 2 dir is a descriptor for CLONE_INTO_CGROUP. On version 1 dir
// is -1, and one thread writes "0" into each of tasks before the first Reset; its children inherit the group. It must
// not be the main thread of its process, or the OOM killer may choose that process. The Group keeps the descriptors.
func (g *Group) Join() (dir int, tasks []*os.File) {
	if g.dir == nil {
		return -1, g.tasks
	}
	return int(g.dir.Fd()), nil
}

// joined is the number of threads in the group that belong to no run.
func (g *Group) joined() int64 { return int64(min(len(g.tasks), 1)) }

// Reset prepares the group for a run: it sets the limits and restarts the counters. It returns errors.ErrUnsupported
// for a limit that this host cannot enforce.
func (g *Group) Reset(l Limits) error {
	// The module ignores a limit of zero, and takes a negative one for unlimited.
	for _, c := range []struct {
		limit      int64
		controller string
	}{{l.Memory, "memory"}, {l.Processes, "pids"}, {l.MilliCPUs, "cpu"}, {l.DiskRate, "io"}} {
		switch {
		case c.limit <= 0 && c.limit != Unlimited:
			return fmt.Errorf("limit the group %s to %+v: limits must be positive", g.name, l)
		case c.limit != Unlimited && g.dirs[c.controller] == "":
			return fmt.Errorf("limit the group %s: %w: no %s controller", g.name, errors.ErrUnsupported, c.controller)
		}
	}
	if l.Processes != Unlimited {
		l.Processes += g.joined()
	}
	if !g.limited || g.limits != l || l.DiskRate != Unlimited { // there may be another disk since
		g.limited = false
		if err := g.control.limit(l); err != nil {
			return fmt.Errorf("limit the group %s to %+v: %w", g.name, l, err)
		}
		g.limits, g.limited = l, true
	}
	if err := g.resetPeak(); err != nil {
		return fmt.Errorf("reset the group %s: %w", g.name, err)
	}
	var err error
	g.baseline, err = g.read()
	return err
}

// Sample returns what the group used since Reset.
func (g *Group) Sample() (Usage, error) {
	c, err := g.read()
	if err != nil {
		return Usage{}, err
	}
	b := &g.baseline
	// User time may be counted in ticks and so exceed the total for a moment.
	cpu := c.cpu - b.cpu
	user := min(c.user-b.user, cpu)
	u := Usage{
		User: user, System: cpu - user,
		PeakMemory: max(c.memory-b.memory, 0),
		ReadBytes:  c.read - b.read, WrittenBytes: c.written - b.written,
		OOMKilled: c.killed > b.killed, ForksRefused: c.refused - b.refused,
	}
	if c.processes > b.processes {
		u.PeakProcesses = c.processes - g.joined()
	}
	return u, nil
}

// Remove kills what is left in a group of version 2, closes the group and deletes it. On version 1 its processes must
// be dead: only the end of their pid namespace kills them reliably, and the group may hold a thread of this process.
func (g *Group) Remove() error {
	g.host.forget(g)
	g.counterFiles.close()
	for _, f := range append(g.tasks, g.dir) {
		f.Close() // nothing is buffered; a nil file returns an error only
	}
	if c, ok := g.control.(v2); ok {
		if err := c.kill(); err != nil {
			return fmt.Errorf("kill the group %s: %w", g.name, err)
		}
	}
	return remove(g.control, time.Now().Add(leaveTime))
}
