// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel sets file times by the host's clock. If a run with its own clock queries a file that it has changed, the
// file's times are first changed to the run's clock, and the kernel answers. Other times stay: those of inputs and
// those set by programs are outside the host's time since the run began, and so are times that were changed already.

// Runs can also see another time and owner of inputs: only the answers change.

// inputTime is the modification time, in seconds since 1970, of inputs that state none.
const inputTime = 1_000_000_000

// changesFiles reports whether the run sees other times or owners of files than the kernel keeps.
func (w *session) changesFiles() bool {
	return w.clock != nil || w.view.Conditions.InputTime != 0 || w.view.Conditions.InputOwner != 0
}

// input reports whether a file of the given owner is of the host or an input: the run does not own it, or cannot change
// it. Only if the run's user is the worker's may it own inputs.
func (w *session) input(fd int, owner uint32) bool {
	var of unix.Statfs_t
	return int(owner) != w.view.User ||
		unix.Fstatfs(fd, &of) == nil && of.Flags&unix.ST_RDONLY != 0 && of.Type != unix.PROC_SUPER_MAGIC
}

// shown returns the time that the run sees of an input.
func (w *session) shown(t unix.StatxTimestamp) unix.StatxTimestamp {
	if t == (unix.StatxTimestamp{Sec: inputTime}) {
		t.Sec = cmp.Or(w.view.Conditions.InputTime, inputTime)
	}
	return t
}

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

// changed returns the ctime or btime t of a file by the run's clock. Programs cannot set these times, so for a file
// with older contents, such as an input, they show when the worker staged the file: changed returns its mtime instead.
func (c *clock) changed(t, contents unix.StatxTimestamp) unix.StatxTimestamp {
	began := c.since.Add(c.offset)
	if c.frozen {
		began = c.begin.Add(-time.Second)
	}
	at, ok := c.dated(time.Unix(t.Sec, int64(t.Nsec)))
	switch {
	case !ok, time.Unix(contents.Sec, int64(contents.Nsec)).Before(began):
		return contents
	case c.frozen:
		return unix.StatxTimestamp{Sec: at.Unix()}
	}
	return unix.StatxTimestamp{Sec: at.Unix(), Nsec: uint32(at.Nanosecond())}
}

// statBuffers has the calls that return file times, each with the index of the argument that points to the result.
var statBuffers = map[string]int{"fstat": 1, "stat": 1, "lstat": 1, "newfstatat": 2, "statx": 4}

// answerStat answers a call that queries a file with the times and owner that the run sees, and reports whether the
// call still waited. The kernel answers for what the process cannot reach and for anything but files, directories and
// links.
func (w *session) answerStat(n *notification, name string) bool {
	fd := w.statTarget(n, name)
	if fd < 0 {
		return w.queue.proceed(n.ID)
	}
	defer unix.Close(fd)
	if w.clock != nil {
		w.rewriteTimes(n, fd)
	}
	result, ok := w.stat(n, name, fd)
	if !ok {
		return w.queue.proceed(n.ID)
	}
	m, err := w.memory(n)
	if err != nil {
		return w.queue.proceed(n.ID)
	}
	defer m.close()
	if !m.write(n.Args[statBuffers[name]], result) {
		return w.queue.fail(n.ID, unix.EFAULT)
	}
	return w.queue.value(n.ID, 0)
}

// stat returns the result of a call that queries a file, or false if the kernel has to answer the call.
func (w *session) stat(n *notification, name string, fd int) ([]byte, bool) {
	var all unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &all); err != nil || !dated(all.Mode) {
		return nil, false
	}
	users, groups := w.idMaps(n.PID)
	user, group := users.inside(all.Uid), groups.inside(all.Gid)
	modified, accessed, changed, created := all.Mtime, all.Atime, all.Ctime, all.Btime
	if w.input(fd, all.Uid) {
		owner := w.view.Conditions.InputOwner
		user, group = cmp.Or(owner, user), cmp.Or(owner, group)
		modified, accessed = w.shown(modified), w.shown(accessed)
	}
	if w.clock != nil {
		changed, created = w.clock.changed(changed, modified), w.clock.changed(created, modified)
	}
	var b []byte
	var err error
	if name == "statx" {
		var st unix.Statx_t // with the requested fields
		if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, int(uint32(n.Args[3])), &st); err != nil {
			return nil, false
		}
		st.Uid, st.Gid = user, group
		st.Mtime, st.Atime, st.Ctime, st.Btime = modified, accessed, changed, created
		b, err = binary.Append(nil, binary.NativeEndian, &st)
	} else {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return nil, false
		}
		st.Uid, st.Gid = user, group
		st.Mtim, st.Atim, st.Ctim = timespec(modified), timespec(accessed), timespec(changed)
		b, err = binary.Append(nil, binary.NativeEndian, &st)
	}
	return b, err == nil
}

func timespec(t unix.StatxTimestamp) unix.Timespec {
	return unix.Timespec{Sec: t.Sec, Nsec: int64(t.Nsec)}
}

// dated reports whether a mode is that of a file, directory or link. Devices and pipes may be shared.
func dated[T uint16 | uint32](mode T) bool {
	return slices.Contains([]uint32{unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK}, uint32(mode)&unix.S_IFMT)
}

// rewriteTimes changes the times of the file that a call queries. If it cannot be changed, it keeps its real times.
func (w *session) rewriteTimes(n *notification, fd int) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || !dated(st.Mode) {
		return
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

// An idMap maps the users or groups that the monitor sees to those that a process sees (user_namespaces(7)).
type idMap []struct{ inside, outside, count uint32 }

// overflowID is the ID that a process sees for users and groups without an ID in its user namespace.
const overflowID = 65534

func (m idMap) inside(id uint32) uint32 {
	for _, r := range m {
		if id >= r.outside && id-r.outside < r.count {
			return r.inside + id - r.outside
		}
	}
	return overflowID
}

// idMaps returns the maps of the run, which are those of each of its processes.
func (w *session) idMaps(pid uint32) (users, groups idMap) {
	if w.users == nil || w.groups == nil { // a process that is killed has none
		w.users, w.groups = readIDMap(pid, "uid_map"), readIDMap(pid, "gid_map")
	}
	return w.users, w.groups
}

func readIDMap(pid uint32, name string) idMap {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	var m idMap
	for line := range strings.Lines(string(text)) {
		var r struct{ inside, outside, count uint32 }
		if _, err := fmt.Sscan(line, &r.inside, &r.outside, &r.count); err == nil {
			m = append(m, r)
		}
	}
	return m
}

// statFlags are the flags of newfstatat and statx that a local file system knows.
const statFlags = unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_EMPTY_PATH |
	unix.AT_STATX_FORCE_SYNC | unix.AT_STATX_DONT_SYNC

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
	if o.dir != none && n.Args[o.follow]&^statFlags != 0 {
		return -1
	}
	p, ok := w.path(n, o)
	if !ok {
		if o.dir != none && n.Args[o.follow]&unix.AT_EMPTY_PATH != 0 {
			return of(o.dir)
		}
		return -1
	}
	at := w.resolve(n.PID, p, o.followed(n, 0))
	if at.mode == 0 || at.mode != unix.S_IFDIR && strings.HasSuffix(p, "/") || !w.reaches(n.PID, at.path) {
		return -1 // the kernel returns the error
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

// reaches reports whether a process may search all directories above a resolved path.
func (w *session) reaches(pid uint32, name string) bool {
	var self unix.Stat_t // owned by its effective user and group
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &self); err != nil {
		return false
	}
	for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
		var st unix.Stat_t
		if err := unix.Fstatat(w.root, strings.TrimPrefix(dir, "/"), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return false
		}
		search := st.Mode & 0o001
		switch {
		case st.Uid == self.Uid:
			search = st.Mode & 0o100
		case st.Gid == self.Gid:
			search = st.Mode & 0o010
		}
		if search == 0 {
			return false
		}
	}
	return true
}
