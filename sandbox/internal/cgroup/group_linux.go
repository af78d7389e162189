// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A Group serves one run at a time. Reset is called between runs; the other methods may be called at any
// time until Remove, also concurrently.
type Group struct {
	host *Host
	name string
	dirs []string // one in each hierarchy

	dir   *os.File   // version 2
	tasks []*os.File // version 1

	// The files that are read or written for every run; nil where this kernel or group lacks one.
	memoryMax, swapMax, memoryPeak, memoryEvents *os.File
	pidsMax, pidsPeak, pidsEvents                *os.File
	cpu, cpuUser, io, kill                       *os.File

	// memoryLimit and pidsLimit are what the kernel was told last, or unset.
	memoryLimit, pidsLimit int64
	base                   counters
}

const unset = -2

// counters are what the files of a group say.
type counters struct {
	cpu, user         time.Duration
	memory, processes int64
	killed, refused   int64
	read, written     int64
}

// open opens the files of a group that was just made.
func (g *Group) open() error {
	g.memoryLimit, g.pidsLimit = unset, unset
	v1 := g.host.mode == V1
	for _, f := range []struct {
		to         **os.File
		controller string
		v1, v2     string
		flag       int
	}{
		{&g.memoryMax, "memory", "memory.limit_in_bytes", "memory.max", unix.O_RDWR},
		{&g.swapMax, "memory", "memory.memsw.limit_in_bytes", "memory.swap.max", unix.O_WRONLY},
		{&g.memoryPeak, "memory", "memory.max_usage_in_bytes", "memory.peak", unix.O_RDWR},
		{&g.memoryEvents, "memory", "memory.oom_control", "memory.events", unix.O_RDONLY},
		{&g.pidsMax, "pids", "pids.max", "pids.max", unix.O_WRONLY},
		{&g.pidsPeak, "pids", "pids.peak", "pids.peak", unix.O_RDONLY},
		{&g.pidsEvents, "pids", "pids.events", "pids.events", unix.O_RDONLY},
		{&g.cpu, "cpuacct", "cpuacct.usage", "cpu.stat", unix.O_RDONLY},
		{&g.cpuUser, "cpuacct", "cpuacct.usage_user", "", unix.O_RDONLY},
		{&g.io, "io", "", "io.stat", unix.O_RDONLY},
		{&g.kill, "cpuacct", "", "cgroup.kill", unix.O_WRONLY}, // of every group, as cpu.stat
	} {
		name := f.v2
		if v1 {
			name = f.v1
		}
		parent, ok := g.host.controllers[f.controller]
		if name == "" || !ok {
			continue
		}
		var err error
		*f.to, err = open(filepath.Join(parent, g.name, name), f.flag)
		// Kernels differ in what they have, and in what may be written to.
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	// Before Linux 6.12 the peak of version 2 can be read but not reset.
	if g.memoryPeak != nil && put(g.memoryPeak, "0") != nil {
		g.memoryPeak.Close()
		g.memoryPeak = nil
	}
	if v1 {
		for _, d := range g.dirs {
			f, err := open(filepath.Join(d, "tasks"), unix.O_WRONLY)
			if err != nil {
				return err
			}
			g.tasks = append(g.tasks, f)
		}
		return nil
	}
	var err error
	if g.dir, err = open(g.dirs[0], unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return err
	}
	if g.memoryMax == nil {
		return nil
	}
	if g.swapMax != nil {
		if err := put(g.swapMax, "0"); err != nil {
			return err
		}
	}
	// A run that lost a process for want of memory has failed: it ends as a whole.
	return write(filepath.Join(g.dirs[0], "memory.oom.group"), "1")
}

// Join says how a process gets into the group. On version 2 dir is a descriptor for CLONE_INTO_CGROUP. On
// version 1 dir is -1 and one thread writes "0" into each of tasks, before the first Reset: what it starts
// from then on is inside. That must not be the main thread of its process, for then the kernel may choose
// the process when memory is short. The descriptors are the Group's.
func (g *Group) Join() (dir int, tasks []*os.File) {
	if g.dir == nil {
		return -1, g.tasks
	}
	return int(g.dir.Fd()), nil
}

// joined is how many threads are in the group that are no run's.
func (g *Group) joined() int64 { return int64(min(len(g.tasks), 1)) }

// Reset prepares the group for a run: it sets the limits and begins to count anew. It returns
// errors.ErrUnsupported for a limit that this host cannot keep.
func (g *Group) Reset(l Limits) error {
	if l.Memory != Unlimited && g.memoryMax == nil || l.Processes != Unlimited && g.pidsMax == nil {
		return fmt.Errorf("limit the group %s: %w", g.name, errors.ErrUnsupported)
	}
	if g.memoryMax != nil && g.memoryLimit != l.Memory {
		g.memoryLimit = unset
		if err := g.limitMemory(l.Memory); err != nil {
			return fmt.Errorf("limit the memory of the group %s to %d: %w", g.name, l.Memory, err)
		}
		g.memoryLimit = l.Memory
	}
	if l.Processes != Unlimited {
		l.Processes += g.joined()
	}
	if g.pidsMax != nil && g.pidsLimit != l.Processes {
		g.pidsLimit = unset
		if err := put(g.pidsMax, limit(l.Processes, "max")); err != nil {
			return fmt.Errorf("limit the processes of the group %s to %d: %w", g.name, l.Processes, err)
		}
		g.pidsLimit = l.Processes
	}
	if g.memoryPeak != nil {
		if err := put(g.memoryPeak, "0"); err != nil {
			return fmt.Errorf("reset the group %s: %w", g.name, err)
		}
	}
	var err error
	g.base, err = g.read()
	return err
}

func (g *Group) limitMemory(n int64) error {
	if g.host.mode == V2 {
		return put(g.memoryMax, limit(n, "max"))
	}
	// The limit of memory and swap together may never be below that of memory.
	if g.swapMax == nil {
		return put(g.memoryMax, limit(n, "-1"))
	}
	if err := put(g.swapMax, "-1"); err != nil {
		return err
	}
	if err := put(g.memoryMax, limit(n, "-1")); err != nil {
		return err
	}
	return put(g.swapMax, limit(n, "-1"))
}

// Sample returns what the group used since Reset.
func (g *Group) Sample() (Usage, error) {
	c, err := g.read()
	if err != nil {
		return Usage{}, err
	}
	b := &g.base
	// User time may be counted by ticks, and so exceed the whole for a moment.
	cpu := c.cpu - b.cpu
	user := min(c.user-b.user, cpu)
	u := Usage{
		User: user, System: cpu - user,
		PeakMemory: max(c.memory-b.memory, 0),
		ReadBytes:  c.read - b.read, WrittenBytes: c.written - b.written,
		OOMKills: c.killed - b.killed, ForksRefused: c.refused - b.refused,
	}
	if c.processes > b.processes {
		u.PeakProcesses = c.processes - g.joined()
	}
	return u, nil
}

func (g *Group) read() (counters, error) {
	var s scanner
	c := counters{
		memory:    s.number(g.memoryPeak),
		killed:    s.value(s.text(g.memoryEvents), "oom_kill"),
		processes: s.number(g.pidsPeak),
		refused:   s.value(s.text(g.pidsEvents), "max"),
	}
	if g.host.mode == V1 {
		c.cpu, c.user = time.Duration(s.number(g.cpu)), time.Duration(s.number(g.cpuUser))
	} else {
		stat := s.text(g.cpu)
		c.cpu = time.Duration(s.value(stat, "usage_usec")) * time.Microsecond
		c.user = time.Duration(s.value(stat, "user_usec")) * time.Microsecond
		stat = s.text(g.io)
		c.read, c.written = s.value(stat, "rbytes"), s.value(stat, "wbytes")
	}
	if s.err != nil {
		return counters{}, fmt.Errorf("read the group %s: %w", g.name, s.err)
	}
	return c, nil
}

// Kill kills every process of a group of version 2. On version 1, where only the end of a pid namespace
// does that for certain, and on kernels before 5.14 it returns errors.ErrUnsupported.
func (g *Group) Kill() error {
	if g.kill == nil {
		return fmt.Errorf("kill the group %s: %w", g.name, errors.ErrUnsupported)
	}
	return put(g.kill, "1")
}

// Procs counts the processes in the group now, without that of the thread that joined.
func (g *Group) Procs() (int, error) {
	b, err := os.ReadFile(filepath.Join(g.dirs[0], "cgroup.procs"))
	return max(bytes.Count(b, []byte("\n"))-int(g.joined()), 0), err
}

// Remove closes the group and removes it. Its processes must be dead; it waits a moment for them to vanish.
func (g *Group) Remove() error {
	g.host.forget(g)
	for _, f := range append(g.tasks, g.dir, g.memoryMax, g.swapMax, g.memoryPeak, g.memoryEvents,
		g.pidsMax, g.pidsPeak, g.pidsEvents, g.cpu, g.cpuUser, g.io, g.kill) {
		f.Close() // nothing is buffered, and a nil file only says so
	}
	var errs []error
	for _, d := range g.dirs {
		errs = append(errs, remove(d))
	}
	return errors.Join(errs...)
}

// limit writes a limit as the kernel reads it.
func limit(n int64, unlimited string) string {
	if n == Unlimited {
		return unlimited
	}
	return strconv.FormatInt(n, 10)
}

// put writes to a file from its beginning.
func put(f *os.File, s string) error {
	_, err := f.WriteAt([]byte(s), 0)
	return err
}

// A scanner reads whole files with one system call each, and keeps the first error. A file that is nil is
// empty, and its number zero.
type scanner struct {
	buf [8192]byte
	err error
}

func (s *scanner) text(f *os.File) []byte {
	if f == nil || s.err != nil {
		return nil
	}
	n, err := unix.Pread(int(f.Fd()), s.buf[:], 0)
	if err != nil {
		s.err = fmt.Errorf("%s: %w", f.Name(), err)
		return nil
	}
	return s.buf[:n]
}

func (s *scanner) number(f *os.File) int64 {
	text := s.text(f)
	if text == nil {
		return 0
	}
	n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
	if err != nil {
		s.err = fmt.Errorf("%s: %w", f.Name(), err)
	}
	return n
}

// value adds the numbers that follow key, as "key 1" or "key=1": a text has one, or one for each device.
func (s *scanner) value(text []byte, key string) int64 {
	var sum int64
	found := false
	for word := range bytes.FieldsFuncSeq(text, func(r rune) bool { return r == ' ' || r == '=' || r == '\n' }) {
		if found {
			n, err := strconv.ParseInt(string(word), 10, 64)
			if err != nil && s.err == nil {
				s.err = fmt.Errorf("%s: %w", key, err)
			}
			sum += n
		}
		found = string(word) == key
	}
	return sum
}
