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

// counterFiles are the files of a group that are used for every run; nil if this kernel or group lacks them. The module
// reads the same counters by opening every file again and allocating for every line, which takes several times as long
// (BenchmarkResetAndSample, BenchmarkModuleStat), and it cannot reset a peak.
type counterFiles struct {
	mode                     Mode
	memoryPeak, memoryEvents *os.File
	pidsPeak, pidsEvents     *os.File
	cpu, cpuUser, io         *os.File
}

// counters are the values in the files of a group.
type counters struct {
	cpu, user         time.Duration
	memory, processes int64
	killed, refused   int64
	read, written     int64
}

// open opens the files below the directories of each controller.
func (c *counterFiles) open(mode Mode, dirs map[string]string) error {
	c.mode = mode
	for _, f := range []struct {
		to         **os.File
		controller string
		v1, v2     string
		flag       int
	}{
		{&c.memoryPeak, "memory", "memory.max_usage_in_bytes", "memory.peak", unix.O_RDWR},
		{&c.memoryEvents, "memory", "memory.oom_control", "memory.events", unix.O_RDONLY},
		{&c.pidsPeak, "pids", "pids.peak", "pids.peak", unix.O_RDONLY},
		{&c.pidsEvents, "pids", "pids.events", "pids.events", unix.O_RDONLY},
		{&c.cpu, "cpuacct", "cpuacct.usage", "cpu.stat", unix.O_RDONLY},
		{&c.cpuUser, "cpuacct", "cpuacct.usage_user", "", unix.O_RDONLY},
		{&c.io, "io", "", "io.stat", unix.O_RDONLY},
	} {
		name := f.v2
		if mode == V1 {
			name = f.v1
		}
		if name == "" || dirs[f.controller] == "" {
			continue
		}
		var err error
		*f.to, err = open(filepath.Join(dirs[f.controller], name), f.flag)
		// Kernels differ in the files that they have and in which of them are writable.
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrPermission) {
			return err
		}
	}
	// Before Linux 6.12 the peak of version 2 cannot be reset.
	if c.resetPeak() != nil {
		c.memoryPeak.Close()
		c.memoryPeak = nil
	}
	return nil
}

func (c *counterFiles) close() {
	for _, f := range []*os.File{c.memoryPeak, c.memoryEvents, c.pidsPeak, c.pidsEvents, c.cpu, c.cpuUser, c.io} {
		f.Close() // nothing is buffered; a nil file returns an error only
	}
}

// resetPeak restarts the memory peak; on version 2 it does so for reads of this file alone.
func (c *counterFiles) resetPeak() error {
	if c.memoryPeak == nil {
		return nil
	}
	_, err := c.memoryPeak.WriteAt([]byte("0"), 0)
	return err
}

func (c *counterFiles) read() (counters, error) {
	var s scanner
	now := counters{
		memory:    s.number(c.memoryPeak),
		killed:    s.value(s.text(c.memoryEvents), "oom_kill"),
		processes: s.number(c.pidsPeak),
		refused:   s.value(s.text(c.pidsEvents), "max"),
	}
	if c.mode == V1 {
		now.cpu, now.user = time.Duration(s.number(c.cpu)), time.Duration(s.number(c.cpuUser))
	} else {
		stat := s.text(c.cpu)
		now.cpu = time.Duration(s.value(stat, "usage_usec")) * time.Microsecond
		now.user = time.Duration(s.value(stat, "user_usec")) * time.Microsecond
		stat = s.text(c.io)
		now.read, now.written = s.value(stat, "rbytes"), s.value(stat, "wbytes")
	}
	if s.err != nil {
		return counters{}, fmt.Errorf("read control group counters: %w", s.err)
	}
	return now, nil
}

// A scanner reads whole files with one system call each and keeps the first error. A nil file reads as empty, and as
// zero.
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

// value adds up the numbers that follow key, as in "key 1" or "key=1"; io.stat has one for each device.
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

// open opens a file of a control group. Package os would register it with the poller.
func open(path string, flag int) (*os.File, error) {
	fd, err := unix.Open(path, flag|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}
