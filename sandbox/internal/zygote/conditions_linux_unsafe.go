// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// given is the part of a launch that a run with Conditions has. Pid 1 and the command set all of it for themselves, after
// the slot has forked, so that nothing of it is left in the slot for the next run; a run without has none of
// these system calls.
type given struct {
	unusual bool
	users   bool // a user namespace comes over the gate
	fixed   bool
	uid     uintptr
	umask   uintptr
	skip    int        // how many processes are still to take a number and end
	name    [2]uintptr // the host's name and its length; 0 is none
	offsets [2]uintptr // the text of timens_offsets and its length; 0 is none
	cpus    unix.CPUSet
	limited bool // to cpus
}

var textOffsets = []byte("/proc/self/timens_offsets\x00")

// noRandomize is ADDR_NO_RANDOMIZE of personality(2), which x/sys/unix lacks.
const noRandomize = 0x0040000

// give fills in what a run notices otherwise than usual; c may be nil.
func (l *launch) give(c *Conditions) error {
	if c == nil {
		return nil
	}
	g := &l.given
	g.unusual, g.users, g.fixed = true, c.UID != 0, c.FixedLayout
	g.uid, g.umask, g.skip = uintptr(c.UID), uintptr(c.Umask), c.SkippedPIDs
	if err := l.sized(&g.name, c.Hostname); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if c.Uptime != 0 {
		s, ns := c.Uptime/int64(time.Second), c.Uptime%int64(time.Second)
		if err := l.sized(&g.offsets, fmt.Sprintf("monotonic %d %d\nboottime %d %d\n", s, ns, s, ns)); err != nil {
			return fmt.Errorf("time namespace: %w", err)
		}
	}
	if c.CPUs == 0 {
		return nil
	}
	g.limited = true
	return first(&g.cpus, c.CPUs)
}

// sized puts a text, unless it is empty, and its length into to.
func (l *launch) sized(to *[2]uintptr, s string) error {
	if s == "" {
		return nil
	}
	at, err := l.text(s)
	to[0], to[1] = at, uintptr(len(s))
	return err
}

// first sets to to the first n processors that this thread may use.
func first(to *unix.CPUSet, n int) error {
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return fmt.Errorf("processors: %w", err)
	}
	for cpu := 0; n > 0; cpu++ {
		if cpu >= 8*int(unsafe.Sizeof(mine)) {
			return errors.New("processors: there are fewer than the run is to have")
		}
		if mine.IsSet(cpu) {
			to.Set(cpu)
			n--
		}
	}
	return nil
}

// surround makes what surrounds the command, as pid 1: namespaces of its own.
//
//go:norace
//go:nosplit
func (l *launch) surround() {
	g := &l.given
	if g.name[1] > 0 {
		l.do(stepHostname, unix.SYS_UNSHARE, unix.CLONE_NEWUTS, 0, 0, 0, 0)
		l.do(stepHostname, unix.SYS_SETHOSTNAME, g.name[0], g.name[1], 0, 0, 0)
	}
	if g.offsets[1] > 0 {
		// It is for what is executed from now on (time_namespaces(7)); the clocks of pid 1 stay.
		l.do(stepClocks, unix.SYS_UNSHARE, unix.CLONE_NEWTIME, 0, 0, 0, 0)
		file := l.do(stepClocks, unix.SYS_OPENAT, atFDCWD, uintptr(unsafe.Pointer(&textOffsets[0])), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		l.do(stepClocks, unix.SYS_WRITE, file, g.offsets[0], g.offsets[1], 0, 0)
		unix.RawSyscall(unix.SYS_CLOSE, file, 0, 0)
	}
}

// layoutIsFixed reports whether this process has noRandomize.
func layoutIsFixed() bool {
	// The number that asks without setting anything.
	now, _, errno := unix.RawSyscall(unix.SYS_PERSONALITY, 0xffffffff, 0, 0)
	return errno == 0 && now&noRandomize != 0
}
