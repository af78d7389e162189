// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel dates files by the host's clock, whatever a run is told of the time. So where a run with a clock of its own
// asks about a file that it has changed since it began, the file's times become what they are by that clock, and the
// kernel answers from there. What has another time, as every input has, or the program has set itself, is left alone:
// it lies outside of the host's time since then. So does a time that was moved already.

// squeeze is by how much files age more slowly in a run whose clock is held, so that those of a quarter of an hour have
// times of one millisecond, and keep their order.
const squeeze = 1_000_000

// coarse returns the time by the clock by which the kernel dates files, which lags behind the other by up to a tick of the
// scheduler.
func coarse() time.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &ts); err != nil {
		return time.Now() // which no Linux does
	}
	return time.Unix(ts.Unix())
}

// dated returns a file's time by the clock of the run, or false if it is none that the kernel set since the run began.
func (c *clock) dated(t time.Time) (time.Time, bool) {
	if t.Before(c.since) || t.After(time.Now()) {
		return time.Time{}, false
	}
	if c.held {
		// A second before the clock begins: no file is ever younger than the time that is read.
		return c.begin.Add(t.Sub(c.since)/squeeze - time.Second), true
	}
	return t.Add(c.shift), true
}

// date moves the times of the file that a call asks about. It answers nothing: where it cannot say what the call means
// or may not change the file, the kernel tells the times that are there.
func (w *watch) date(n *notification, name string) {
	fd := w.asked(n, name)
	if fd < 0 {
		return
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK:
	default:
		return // devices and pipes are not the run's alone
	}
	changed, ok := w.clock.dated(time.Unix(st.Mtim.Unix()))
	if !ok || !w.queue.valid(n.ID) { // whose descriptor it is may be another's by now
		return
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: changed.Unix(), Nsec: int64(changed.Nanosecond())}}
	if read, ok := w.clock.dated(time.Unix(st.Atim.Unix())); ok {
		times[0] = unix.Timespec{Sec: read.Unix(), Nsec: int64(read.Nanosecond())}
	}
	_ = unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH) // where that is not permitted the file is not the run's own
}

// asked opens the file that a call asks about, without following more than the call does, or returns -1.
func (w *watch) asked(n *notification, name string) int {
	of := func(arg int) int {
		number := int32(n.Args[arg])
		link := fmt.Sprintf("/proc/%d/fd/%d", n.PID, number)
		if number == unix.AT_FDCWD {
			link = fmt.Sprintf("/proc/%d/cwd", n.PID)
		}
		fd, err := unix.Open(link, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1
		}
		return fd
	}
	if name == "fstat" {
		return of(0)
	}
	o := operands[name][0]
	p, ok := w.path(n, o)
	if !ok {
		if o.dir != none && n.Args[o.follow]&unix.AT_EMPTY_PATH != 0 {
			return of(o.dir)
		}
		return -1
	}
	at := w.resolve(n.PID, p, o.followed(n, 0))
	if at.mode == 0 {
		return -1
	}
	fd, err := unix.Openat2(w.root, at.path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return -1
	}
	return fd
}
