// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A cannotExec says that the program is the reason why there is no process.
type cannotExec struct {
	code int
	text string
}

func (e *cannotExec) Error() string { return e.text }

// start makes the root of the run around the calling thread, forks pid 1 and takes the thread back.
func (s *slot) start(plan *Plan, fds []int) (*child, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("mount namespace: %w", err)
	}
	defer func() {
		if unix.Setns(s.z.mounts, unix.CLONE_NEWNS) != nil {
			os.Exit(1) // the slot is of no use any more, and who waits for it learns that in no other way
		}
	}()
	l := &launch{
		cgroup: -1, users: s.users, reaper: s.reaper, control: fds[fdControl],
		stdio: [3]int{fds[fdStdin], fds[fdStdout], fds[fdStderr]},
	}
	workspace, more := -1, fds[fdMore:]
	if plan.Workspace && len(more) > 0 {
		workspace, more = more[0], more[1:]
	}
	if plan.Cgroup && len(more) > 0 {
		l.cgroup = more[0]
	}
	if err := makeRoot(plan, workspace); err != nil {
		return nil, err
	}
	program, err := find(plan)
	if err != nil {
		return nil, err
	}
	if !plan.Terminal {
		// The run owns its output pipes, so that it can open them again as /dev/stdout.
		for _, fd := range l.stdio[1:] {
			if err := unix.Fchown(fd, s.command, s.command); err != nil {
				return nil, fmt.Errorf("owner of the output: %w", err)
			}
		}
	}
	if l.ruleset, err = ruleset(plan); err != nil {
		return nil, fmt.Errorf("Landlock: %w", err)
	}
	defer closeAll([]int{l.ruleset})

	c := &child{start: -1, end: -1, program: plan.Args[0]}
	for _, o := range plan.Ops {
		if o.Kind != OpTmpfs {
			continue
		}
		fd, err := unix.Open(o.Target, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			c.close()
			return nil, err
		}
		c.temps = append(c.temps, temp{o.Target, fd})
	}
	var start, end [2]int
	if err := unix.Pipe2(start[:], unix.O_CLOEXEC); err != nil {
		c.close()
		return nil, err
	}
	c.start = start[0]
	defer unix.Close(start[1])
	if err := unix.Pipe2(end[:], unix.O_CLOEXEC); err != nil {
		c.close()
		return nil, err
	}
	defer unix.Close(end[1])
	c.end = end[0]
	l.start, l.end = start[1], end[1]
	if err = l.prepare(plan, program); err == nil {
		c.pid, err = l.fork()
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("pid, IPC and cgroup namespaces: %w", err)
	}
	return c, nil
}

// find returns the path of the program: as it is if it has a slash, relative to the working directory;
// else the first executable file of that name in the directories of PATH.
func find(plan *Plan) (string, error) {
	if st, err := os.Stat(plan.Dir); err != nil || !st.IsDir() {
		return "", fmt.Errorf("working directory %s: not a directory of the sandbox", plan.Dir)
	}
	name := plan.Args[0]
	var tries []string
	if strings.Contains(name, "/") {
		tries = []string{name}
	} else {
		for _, kv := range plan.Env {
			if list, ok := strings.CutPrefix(kv, "PATH="); ok {
				for dir := range strings.SplitSeq(list, ":") {
					tries = append(tries, path.Join(dir, name))
				}
			}
		}
	}
	var found string
	for _, p := range tries {
		abs := p
		if !path.IsAbs(p) {
			abs = path.Join(plan.Dir, p)
		}
		st, err := os.Stat(abs)
		if err != nil {
			continue
		}
		if st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			// The working directory is entered before the program is looked up again.
			return p, nil
		}
		found = p
	}
	if found != "" {
		return "", &cannotExec{126, fmt.Sprintf("%s: is not an executable file", name)}
	}
	return "", &cannotExec{127, fmt.Sprintf("%s: not found in the sandbox", name)}
}

// A child is a run that was forked, seen from its slot.
type child struct {
	pid        int
	start, end int // pipes: why the command could not start, if so; how it ended
	program    string
	temps      []temp
}

// A temp is a temporary directory and its descriptor.
type temp struct {
	target string
	fd     int
}

func (c *child) close() {
	closeAll([]int{c.start, c.end})
	for _, t := range c.temps {
		unix.Close(t.fd)
	}
}

// full returns the temporary directories that have no room left, and lets go of all: their memory counts as the
// run's, and not as the next one's.
func (c *child) full() []string {
	var full []string
	for _, t := range c.temps {
		var st unix.Statfs_t
		if unix.Fstatfs(t.fd, &st) == nil && (st.Bavail == 0 || st.Ffree == 0) {
			full = append(full, t.target)
		}
		unix.Close(t.fd)
	}
	c.temps = nil
	return full
}

// started waits until the command executes, or says why it does not: a *cannotExec if it is the program's
// doing.
func (c *child) started() error {
	var word [8]byte
	if !readAll(c.start, word[:]) {
		return nil // closed by exec
	}
	step := step(binary.NativeEndian.Uint32(word[:]))
	errno := syscall.Errno(binary.NativeEndian.Uint32(word[4:]))
	switch {
	case step != stepExec:
	case errno == syscall.ENOENT:
		return &cannotExec{127, fmt.Sprintf("%s: its interpreter was not found in the sandbox", c.program)}
	case slices.Contains(execErrors, errno):
		return &cannotExec{126, fmt.Sprintf("%s: cannot be executed: %v", c.program, errno)}
	}
	return fmt.Errorf("%s: %w", step, errno)
}

// execErrors are how execve(2) says that a file cannot be executed.
var execErrors = []syscall.Errno{
	syscall.EACCES, syscall.ENOEXEC, syscall.ETXTBSY, syscall.ENOTDIR, syscall.ELOOP, syscall.E2BIG, syscall.ELIBBAD,
	syscall.EISDIR, syscall.EIO, syscall.EINVAL, syscall.ENAMETOOLONG,
}

// exited waits until the command has ended and returns how, or nil if pid 1 ended before it.
func (c *child) exited() *Exited {
	var word [24]byte
	if !readAll(c.end, word[:]) {
		return nil
	}
	ws := unix.WaitStatus(binary.NativeEndian.Uint64(word[:]))
	e := &Exited{At: int64(binary.NativeEndian.Uint64(word[8:]))*int64(time.Second) + int64(binary.NativeEndian.Uint64(word[16:]))}
	if ws.Signaled() {
		e.Signal = int(ws.Signal())
	} else {
		e.Code = ws.ExitStatus()
	}
	return e
}

// reap waits for pid 1, which is dead only when everything in its pid namespace is.
func (c *child) reap() (*Reaped, error) {
	var ws unix.WaitStatus
	var ru unix.Rusage
	for {
		_, err := unix.Wait4(c.pid, &ws, 0, &ru)
		if err == unix.EINTR {
			continue
		}
		return &Reaped{
			UserNS: ru.Utime.Nano(), SystemNS: ru.Stime.Nano(), PeakRSS: ru.Maxrss * 1024,
			ReadBlocks: ru.Inblock, Written: ru.Oublock, Voluntary: ru.Nvcsw, Involuntary: ru.Nivcsw,
		}, err
	}
}

// readAll fills b from a pipe, and reports whether all of it came before the end.
func readAll(fd int, b []byte) bool {
	for len(b) > 0 {
		n, err := unix.Read(fd, b)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return false
		}
		b = b[n:]
	}
	return true
}

// isCannotExec returns err as a *cannotExec, or nil.
func isCannotExec(err error) *cannotExec {
	var c *cannotExec
	errors.As(err, &c)
	return c
}
