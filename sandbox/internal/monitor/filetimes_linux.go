// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel sets file times by the host's clock. If a run with its own clock queries a file that it has changed, the
// file's times are first changed to the run's clock, and the kernel answers. Other times stay: those of inputs and
// those set by programs are outside the host's time since the run began, and so are times that were changed already.

// squeeze is how much slower files age in a run with a frozen clock: files of a quarter of an hour fit into one
// millisecond and keep their order.
const squeeze = 1_000_000

// coarse returns the time of the clock by which the kernel sets file times, which lags by up to a scheduler tick.
func coarse() time.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME_COARSE, &ts); err != nil {
		return time.Now() // never on Linux
	}
	return time.Unix(ts.Unix())
}

// dated returns a file's time by the run's clock, or false if the kernel did not set it since the run began.
func (c *clock) dated(t time.Time) (time.Time, bool) {
	if t.Before(c.since) || t.After(time.Now()) {
		return time.Time{}, false
	}
	if c.frozen {
		// Subtract a second, so that no file is younger than the time that is read.
		return c.begin.Add(t.Sub(c.since)/squeeze - time.Second), true
	}
	return t.Add(c.offset), true
}

// rewriteTimes changes the times of the file that a call queries. If the file is unknown or cannot be changed, the
// kernel returns its real times.
func (w *session) rewriteTimes(n *notification, name string) {
	fd := w.statTarget(n, name)
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
		return // devices and pipes may be shared
	}
	changed, ok := w.clock.dated(time.Unix(st.Mtim.Unix()))
	if !ok || !w.queue.valid(n.ID) { // the descriptor may be another process's by now
		return
	}
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: changed.Unix(), Nsec: int64(changed.Nanosecond())}}
	if read, ok := w.clock.dated(time.Unix(st.Atim.Unix())); ok {
		times[0] = unix.Timespec{Sec: read.Unix(), Nsec: int64(read.Nanosecond())}
	}
	_ = unix.UtimesNanoAt(fd, "", times, unix.AT_EMPTY_PATH) // fails for files that are not the run's own
}

// statTarget opens the file that a call queries, following as much as the call does, or returns -1.
func (w *session) statTarget(n *notification, name string) int {
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
