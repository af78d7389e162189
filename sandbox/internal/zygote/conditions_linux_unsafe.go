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

// launchConditions are the Conditions in a launch. Pid 1 and the command set them for themselves after the fork, so
// that nothing of them stays in the slot. Runs without Conditions make none of these system calls.
type launchConditions struct {
	unusual bool
	users   bool // a user namespace comes with the descriptors
	fixed   bool
	uid     uintptr
	umask   uintptr
	skip    int        // processes that still have to use up an ID
	name    [2]uintptr // address and length of the host name; 0 is none
	offsets [2]uintptr // address and length of the text for timens_offsets; 0 is none
	cpus    unix.CPUSet
	limited bool // to cpus
}

var textOffsets = []byte("/proc/self/timens_offsets\x00")

// noRandomize is ADDR_NO_RANDOMIZE of personality(2), which x/sys/unix lacks.
const noRandomize = 0x0040000

// setConditions stores the run's conditions; c may be nil.
func (l *launch) setConditions(c *Conditions) error {
	if c == nil {
		return nil
	}
	g := &l.conditions
	g.unusual, g.users, g.fixed = true, c.OtherUser(), c.FixedLayout
	g.uid, g.umask, g.skip = uintptr(c.UID), uintptr(c.Umask), c.SkippedPIDs
	if err := l.sizedText(&g.name, c.Hostname); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if c.Uptime != 0 {
		s, ns := c.Uptime/int64(time.Second), c.Uptime%int64(time.Second)
		if err := l.sizedText(&g.offsets, fmt.Sprintf("monotonic %d %d\nboottime %d %d\n", s, ns, s, ns)); err != nil {
			return fmt.Errorf("time namespace: %w", err)
		}
	}
	if c.CPUs == 0 {
		return nil
	}
	g.limited = true
	return firstCPUs(&g.cpus, c.CPUs)
}

// sizedText stores the address of a copy of s and its length in to, unless s is empty.
func (l *launch) sizedText(to *[2]uintptr, s string) error {
	if s == "" {
		return nil
	}
	at, err := l.text(s)
	to[0], to[1] = at, uintptr(len(s))
	return err
}

// firstCPUs sets to to the first n processors that this thread may use.
func firstCPUs(to *unix.CPUSet, n int) error {
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return fmt.Errorf("processors: %w", err)
	}
	for cpu := 0; n > 0; cpu++ {
		if cpu >= 8*int(unsafe.Sizeof(mine)) {
			return errors.New("fewer processors than the run needs")
		}
		if mine.IsSet(cpu) {
			to.Set(cpu)
			n--
		}
	}
	return nil
}

// setupNamespaces creates the namespaces that the conditions need, as pid 1.
//
//go:norace
//go:nosplit
func (l *launch) setupNamespaces() {
	g := &l.conditions
	if g.name[1] > 0 {
		l.do(stepHostname, unix.SYS_UNSHARE, unix.CLONE_NEWUTS, 0, 0, 0, 0)
		l.do(stepHostname, unix.SYS_SETHOSTNAME, g.name[0], g.name[1], 0, 0, 0)
		l.do(stepHostname, unix.SYS_SETDOMAINNAME, g.name[0], g.name[1], 0, 0, 0)
	}
	if g.offsets[1] > 0 {
		// It applies to programs executed from now on (time_namespaces(7)); the clocks of pid 1 stay.
		l.do(stepClocks, unix.SYS_UNSHARE, unix.CLONE_NEWTIME, 0, 0, 0, 0)
		file := l.do(stepClocks, unix.SYS_OPENAT, atFDCWD, uintptr(unsafe.Pointer(&textOffsets[0])), unix.O_WRONLY|unix.O_CLOEXEC, 0, 0)
		l.do(stepClocks, unix.SYS_WRITE, file, g.offsets[0], g.offsets[1], 0, 0)
		unix.RawSyscall(unix.SYS_CLOSE, file, 0, 0)
	}
}

// layoutIsFixed reports whether this process has noRandomize.
func layoutIsFixed() bool {
	// This value only queries.
	now, _, errno := unix.RawSyscall(unix.SYS_PERSONALITY, 0xffffffff, 0, 0)
	return errno == 0 && now&noRandomize != 0
}
