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

// A cannotExec error means that the program itself is why no process started.
type cannotExec struct {
	code    int
	text    string
	missing string // see Exited
}

func (e *cannotExec) Error() string { return e.text }

// A child is the forked pid 1 of a run, as its slot sees it.
type child struct {
	pid, init  int // process ID and pidfd
	handoff    int // socket on which pid 1 waits for its descriptors
	rules      int // Landlock ruleset, which pid 1 has as well
	start, end int // pipes: why the command could not start; how it ended
	program    string
	temps      []temp
}

// A temp is a temporary directory and its descriptor.
type temp struct {
	target string
	fd     int
}

// prepare forks pid 1 of the next run, if there is a template, in a copy of the template's mounts and new namespaces.
// The slot stays in those mounts to add to them.
func (s *slot) prepare() error {
	if s.pending != nil || s.base == nil {
		return nil
	}
	if s.residue && s.ownNetwork {
		// Leftover sockets are visible in the network and may hold files of the template open, with locks.
		s.ownNetwork, s.residue = false, false
		if err := s.takeRootAgain(); err != nil {
			return err
		}
		if err := s.makeTemplate(s.base); err != nil {
			return err
		}
	}
	if !s.base.HostNetwork && (!s.ownNetwork || s.loopbackUp != s.base.Loopback || s.resolving && !s.base.Notify) {
		if err := s.newNetwork(); err != nil {
			return err
		}
	}
	if err := unix.Setns(s.template, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace of the template: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}
	c := &child{init: -1, handoff: -1, rules: -1, start: -1, end: -1}
	if err := s.fork(c); err != nil {
		c.close()
		return err
	}
	s.pending = c
	return nil
}

// fork sets up c and forks pid 1.
func (s *slot) fork(c *child) error {
	for i := range s.base.Temps {
		o := &s.base.Temps[i]
		if err := o.do(); err != nil {
			return fmt.Errorf("%s %s: %w", o.Kind, o.Target, err)
		}
		if err := c.trackTemp(o); err != nil {
			return err
		}
	}
	handoff, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	c.handoff = handoff[0]
	defer unix.Close(handoff[1])
	var start, end [2]int
	if err := unix.Pipe2(start[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	c.start = start[0]
	defer unix.Close(start[1])
	if err := unix.Pipe2(end[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	defer unix.Close(end[1])
	c.end = end[0]
	if c.rules, err = ruleset(s.base.Landlock); err != nil {
		return fmt.Errorf("Landlock: %w", err)
	}
	for _, t := range c.temps {
		if err := c.allowWrites(s.base, t.target); err != nil {
			return err
		}
	}
	if err := s.launch.prepare(s, c.rules, handoff[1], start[1], end[1]); err != nil {
		return err
	}
	if err := s.oom.set(s.oom.run); err != nil {
		return err
	}
	c.pid, err = s.launch.fork()
	restored := s.oom.set(s.oom.slot)
	if err != nil {
		return fmt.Errorf("pid, IPC and cgroup namespaces: %w", err)
	}
	if restored != nil {
		return restored
	}
	if c.init, err = unix.PidfdOpen(c.pid, 0); err != nil {
		c.init = -1 // needed only if a run goes wrong
	}
	return nil
}

// discardPending ends the prepared pid 1.
func (s *slot) discardPending() {
	if s.pending == nil {
		return
	}
	unix.Close(s.pending.handoff)
	s.pending.handoff = -1
	_, _ = s.pending.reap()
	s.pending.close()
	s.pending = nil
}

// start sets up the plan and releases the prepared pid 1. If it returns a child with an error, the run has begun and
// must be followed to its end.
func (s *slot) start(text []byte, fds []int) (*child, error) {
	plan, err := decodePlan(text)
	if err != nil {
		return nil, fmt.Errorf("read plan: %w", err)
	}
	streams, sources := split(plan, fds)
	if err := s.ownAll(plan, sources); err != nil {
		return nil, err
	}
	if plan.Base != nil {
		if err := s.takeRoot(plan, sources); err != nil {
			return nil, err
		}
		if err := s.makeTemplate(plan.Base); err != nil {
			return nil, err
		}
	}
	if s.base == nil {
		return nil, errors.New("the slot has no base for this run")
	}
	if !plan.SameNetwork && s.ownNetwork && s.networkUsed {
		s.discardPending()
		s.ownNetwork = false
	}
	if err := s.prepare(); err != nil {
		return nil, err
	}
	c := s.pending
	s.pending, s.networkUsed, s.residue = nil, true, true // until the end shows otherwise
	if err := s.complete(c, plan, fds[fdControl], streams, sources); err != nil {
		closeAll([]int{c.handoff})
		c.handoff = -1
		var said error
		if errors.Is(err, errInitDied) {
			said = c.waitStarted()
		}
		ended, _ := c.reap()
		s.finish(c)
		if !errors.Is(err, errInitDied) {
			return nil, err
		}
		if said != nil {
			return nil, said
		}
		return nil, fmt.Errorf("%w: it was killed (%s)", err, unix.SignalName(syscall.Signal(ended.Killed)))
	}
	return c, nil
}

// errInitDied means that pid 1 was dead when its run came, so the run has not begun.
var errInitDied = errors.New("pid 1 died before the run")

// split divides the descriptors of a run into those of pid 1 and the sources of its plan: the workspace, -1 if there is
// none, and the images.
func split(plan *Plan, fds []int) (streams, sources []int) {
	streams, more := fds[:fdMore], fds[fdMore:]
	if u := plan.Conditions; u != nil && u.OtherUser() && len(more) > 0 {
		// The user namespace goes to pid 1 with the streams.
		streams, more = append(slices.Clone(streams), more[len(more)-1]), more[:len(more)-1]
	}
	sources = append([]int{-1}, more...)
	if plan.Workspace && len(sources) > 1 {
		sources = sources[1:]
	}
	return streams, sources
}

// complete does the part of start after pid 1 was prepared.
func (s *slot) complete(c *child, plan *Plan, control int, streams, sources []int) error {
	if len(plan.Args) == 0 || len(plan.Rlimits) > maxRlimits {
		return unix.E2BIG
	}
	listeners, err := listen(plan)
	defer closeAll(listeners)
	if err != nil {
		return err
	}
	if len(listeners) > 0 {
		report(control, Report{Listening: true}, listeners...)
	}
	if err := s.resolve(control); err != nil {
		return err
	}
	if err := s.applyPlan(plan, sources); err != nil {
		return err
	}
	if len(s.unwritable) > 0 {
		report(control, Report{Unwritable: s.unwritable})
	}
	for i := range plan.Ops {
		if plan.Ops[i].Kind == OpTmpfs {
			if err := c.trackTemp(&plan.Ops[i]); err != nil {
				return err
			}
		}
	}
	program, err := findProgram(plan)
	if err != nil {
		return err
	}
	c.program = plan.Args[0]
	if !plan.Terminal {
		// The run owns its pipes, so that it can open /dev/stdout. An empty stdin is the host's /dev/null.
		for i, fd := range streams[fdStdin:] {
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				return fmt.Errorf("standard stream %d: %w", i, err)
			}
			if st.Mode&unix.S_IFMT != unix.S_IFIFO {
				continue
			}
			if err := unix.Fchown(fd, s.command, s.command); err != nil {
				return fmt.Errorf("owner of standard stream %d: %w", i, err)
			}
		}
	}
	for _, p := range plan.Writable {
		if err := c.allowWrites(s.base, p); err != nil {
			return err
		}
	}
	if err := s.launch.complete(plan, program); err != nil {
		return err
	}
	err = Send(c.handoff, []byte{'.'}, streams...)
	unix.Close(c.handoff)
	c.handoff = -1
	if err == unix.EPIPE || err == unix.ECONNRESET {
		return errInitDied
	}
	return err
}

// finish releases a run that has ended.
func (s *slot) finish(c *child) {
	c.close()
	if s.base != nil && s.base.SingleUse {
		s.base = nil // the worker sends it again
	}
}

// allowWrites adds everything below p to what Landlock lets the run change.
func (c *child) allowWrites(b *Base, p string) error {
	if c.rules < 0 {
		return nil
	}
	if err := allow(c.rules, p, landlockRights(b.Landlock)&(landlockRead|landlockWrite)); err != nil {
		return fmt.Errorf("Landlock: %w", err)
	}
	return nil
}

// trackTemp keeps a temporary directory open, to see whether it is full.
func (c *child) trackTemp(o *Op) error {
	fd, err := unix.Open(o.Target, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	c.temps = append(c.temps, temp{o.Target, fd})
	return nil
}

// findProgram returns the path of the program: as given if it contains a slash, relative to the working directory;
// otherwise the first executable file of that name in PATH.
func findProgram(plan *Plan) (string, error) {
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
			// The kernel looks it up again, from the working directory.
			return p, nil
		}
		found = p
	}
	if found != "" {
		return "", &cannotExec{126, fmt.Sprintf("%s: is not an executable file", name), ""}
	}
	return "", &cannotExec{127, fmt.Sprintf("%s: not found in the sandbox", name), MissingProgram}
}

func (c *child) close() {
	closeAll([]int{c.init, c.handoff, c.rules, c.start, c.end})
	for _, t := range c.temps {
		unix.Close(t.fd)
	}
	c.temps = nil
}

// fullTemps returns the temporary directories that are full, and closes all: their memory must not count for the next
// run.
func (c *child) fullTemps() []string {
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

// waitStarted waits until the command executes, or returns why it does not: a *cannotExec if the program is the cause.
func (c *child) waitStarted() error {
	var word [8]byte
	if !readAll(c.start, word[:]) {
		return nil // closed by exec
	}
	step := step(binary.NativeEndian.Uint32(word[:]))
	errno := syscall.Errno(binary.NativeEndian.Uint32(word[4:]))
	switch {
	case step != stepExec:
	case errno == syscall.ENOENT:
		return &cannotExec{127, fmt.Sprintf("%s: its interpreter was not found in the sandbox", c.program), MissingInterpreter}
	case slices.Contains(execErrors, errno):
		return &cannotExec{126, fmt.Sprintf("%s: cannot be executed: %v", c.program, errno), ""}
	}
	return fmt.Errorf("%s: %w", step, errno)
}

// execErrors are the errors of execve(2) for files that cannot be executed.
var execErrors = []syscall.Errno{
	syscall.EACCES, syscall.ENOEXEC, syscall.ETXTBSY, syscall.ENOTDIR, syscall.ELOOP, syscall.E2BIG, syscall.ELIBBAD,
	syscall.EISDIR, syscall.EIO, syscall.EINVAL, syscall.ENAMETOOLONG,
}

// waitExited waits until the command has ended and returns how, or nil if pid 1 ended before it.
func (c *child) waitExited() *Exited {
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
	var ws uint32
	var ru unix.Rusage
	for {
		err := wait(c.pid, &ws, &ru)
		if err == unix.EINTR {
			continue
		}
		killed := int64(0)
		if status := unix.WaitStatus(ws); status.Signaled() {
			killed = int64(status.Signal())
		}
		return &Reaped{
			Killed: killed,
			UserNS: ru.Utime.Nano(), SystemNS: ru.Stime.Nano(), PeakRSS: ru.Maxrss * 1024,
			ReadBlocks: ru.Inblock, Written: ru.Oublock, Voluntary: ru.Nvcsw, Involuntary: ru.Nivcsw,
		}, err
	}
}

// readAll fills b from a pipe and reports whether it did before the end.
func readAll(fd int, b []byte) bool {
	for len(b) > 0 {
		n, err := read(fd, b)
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
