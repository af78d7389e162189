// SPDX-License-Identifier: Apache-2.0

//go:build linux

package zygote

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The runtime's hooks around a fork. Between them no signal is handled and no stack grows.
//
//go:linkname beforeFork syscall.runtime_BeforeFork
func beforeFork()

//go:linkname afterFork syscall.runtime_AfterFork
func afterFork()

// A step is what a forked process was doing when it failed.
type step uint32

// The steps of pid 1, then of the command.
const (
	stepParent step = iota
	stepDescriptors
	stepSignals
	stepCgroup
	stepProc
	stepPrivileges
	stepGroups
	stepHandoff
	stepHostname
	stepClocks
	stepNumbers
	stepFork
	stepDrop
	stepReaperFilter
	stepSession
	stepUser
	stepIDs
	stepLimits
	stepProcessors
	stepLayout
	stepCapabilities
	stepStreams
	stepTerminal
	stepDir
	stepLandlock
	stepReady
	stepFilter
	stepListener
	stepExec
)

// String names the step.
func (s step) String() string {
	if int(s) < len(steps) {
		return steps[s]
	}
	return "start of the run"
}

var steps = [...]string{
	"parent is gone", "close descriptors", "signals", "cgroup namespace", "mount /proc",
	"no_new_privs", "supplementary groups", "receive the run", "host name", "time namespace", "process IDs", "fork", "drop the privileges of pid 1",
	"filter of pid 1 (seccomp)", "session", "user namespace", "user and group", "resource limits", "processors",
	"memory layout", "capabilities",
	"standard streams", "terminal", "working directory", "Landlock", "report to the worker", "system call filter (seccomp)",
	"listener of the filter (seccomp)", "execute",
}

// A launch is everything that a forked process needs, in memory shared with the slot, since the fork precedes the run.
// After the fork there is no allocation, lock or scheduler, only system calls (the rules of forkAndExecInChild1 in
// package syscall). Nothing in it points outside. The slot does not touch it between sending the run's descriptors and
// the death of pid 1.
type launch struct {
	// Descriptors; -1 is none. Control and stdio come with the run.
	cgroup, users, handoff, start, end, control, ruleset int
	stdio                                                [3]int
	reaper                                               int // user of pid 1; -1 if rootless

	terminal, keepCaps, hostIPC, procSubset bool

	gaps          [9][2]uintptr // descriptor ranges of others
	ngaps         int
	rlimits       [maxRlimits]struct{ resource, cur, max uintptr }
	nrlimits      int
	path, dir     uintptr
	proc          uintptr // mount options of /proc
	argv, envv    uintptr
	fprog, rprog  unix.SockFprog
	landlockFlags uintptr
	procRule      unix.LandlockPathBeneathAttr
	notify        bool
	filterFlags   uintptr
	conditions    launchConditions

	// Memory for system calls.
	clone     cloneArgs
	action    [4]uint64 // struct sigaction: zero is SIG_DFL
	set       uint64    // of signals
	capHeader unix.CapUserHeader
	capData   [2]unix.CapUserData
	rlim      [2]uint64
	polls     [3]unix.PollFd
	word      [16]byte
	info      [128]byte // struct signalfd_siginfo
	status    uint32
	record    [3]uint64
	failure   [2]uint32
	now       unix.Timespec
	message   unix.Msghdr
	iov       unix.Iovec
	rights    [40]byte // one control message with up to five descriptors

	used  uintptr // bytes of the arena in use
	arena [arenaBytes]byte
}

const (
	maxRlimits = 16
	// arenaBytes suffices for the longest command line that the kernel accepts, 6 MiB, and everything else.
	arenaBytes = 8 << 20
)

// cloneArgs is struct clone_args (clone(2)).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// Strings for the kernel.
var (
	textProc    = []byte("proc\x00")
	textProcDir = []byte("/proc\x00")
	textNone    = []byte("\x00")
	// Mount options of /proc, one by one.
	textSubset, textPID     = []byte("subset\x00"), []byte("pid\x00")
	textHide, textInvisible = []byte("hidepid\x00"), []byte("invisible\x00")
	textReady               = []byte{reportReady}
)

// Constants that x/sys/unix lacks.
const (
	lastSignal    = 64
	sigsetSize    = 8
	capKill       = 5
	lastCap       = 63
	seccompFilter = 1 // SECCOMP_SET_MODE_FILTER
)

// newLaunch returns a launch in shared memory, for the lifetime of the process.
func newLaunch() (*launch, error) {
	b, err := unix.Mmap(-1, 0, int(unsafe.Sizeof(launch{})), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	return (*launch)(unsafe.Pointer(&b[0])), nil
}

// alloc returns the address of n bytes of the arena, or 0 if it is full.
func (l *launch) alloc(n int) uintptr {
	at := (l.used + 7) &^ 7
	if n > arenaBytes || at > uintptr(arenaBytes-n) {
		return 0
	}
	l.used = at + uintptr(n)
	return uintptr(unsafe.Pointer(&l.arena[0])) + at
}

// text returns the address of a NUL-terminated copy of s.
func (l *launch) text(s string) (uintptr, error) {
	if strings.IndexByte(s, 0) >= 0 {
		return 0, unix.EINVAL
	}
	at := l.alloc(len(s) + 1)
	if at == 0 {
		return 0, unix.E2BIG
	}
	off := at - uintptr(unsafe.Pointer(&l.arena[0]))
	copy(l.arena[off:], s)
	l.arena[off+uintptr(len(s))] = 0
	return at, nil
}

// texts returns the address of a null-terminated array of copies.
func (l *launch) texts(list []string) (uintptr, error) {
	at := l.alloc(8 * (len(list) + 1))
	if at == 0 {
		return 0, unix.E2BIG
	}
	addresses := unsafe.Slice((*uintptr)(unsafe.Pointer(&l.arena[at-uintptr(unsafe.Pointer(&l.arena[0]))])), len(list)+1)
	for i, s := range list {
		var err error
		if addresses[i], err = l.text(s); err != nil {
			return 0, err
		}
	}
	addresses[len(list)] = 0
	return at, nil
}

// program copies a filter; its instructions have 8 bytes each.
func (l *launch) program(b []byte) (unix.SockFprog, error) {
	n := len(b) / int(unsafe.Sizeof(unix.SockFilter{}))
	if n == 0 {
		return unix.SockFprog{}, nil
	}
	at := l.alloc(len(b))
	if at == 0 {
		return unix.SockFprog{}, unix.E2BIG
	}
	off := at - uintptr(unsafe.Pointer(&l.arena[0]))
	copy(l.arena[off:], b)
	return unix.SockFprog{Len: uint16(n), Filter: (*unix.SockFilter)(unsafe.Pointer(&l.arena[off]))}, nil
}

// prepare stores what is known before the run. The descriptors are pid 1's ends.
func (l *launch) prepare(s *slot, rules, handoff, start, end int) error {
	l.clear()
	b := s.base
	l.cgroup, l.users, l.reaper = s.cgroup, s.users, s.reaper
	l.ruleset, l.handoff, l.start, l.end = rules, handoff, start, end
	l.keepCaps, l.hostIPC, l.procSubset = b.KeepCapabilities, b.HostIPC, b.ProcOptions != ""
	if b.Notify {
		l.notify, l.filterFlags = true, listenerFlags()
	}
	l.procRule.Allowed_access = landlockRights(b.Landlock) & landlockFile
	if b.Landlock >= 7 {
		// An action must not fill the host's audit log.
		l.landlockFlags = unix.LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF
	}
	var err error
	if l.proc, err = l.text(b.ProcOptions); err != nil {
		return err
	}
	if l.fprog, err = l.program(b.Filter); err != nil {
		return err
	}
	if l.rprog, err = l.program(b.InitFilter); err != nil {
		return err
	}

	// Descriptors between those of this run belong to others. The first three stay, so that descriptors that come later
	// get higher numbers.
	mine := []int{0, 1, 2, l.users, l.handoff, l.start, l.end}
	if rules >= 0 {
		mine = append(mine, rules)
	}
	slices.Sort(mine)
	next := 0
	for _, fd := range mine {
		if fd > next {
			l.gaps[l.ngaps] = [2]uintptr{uintptr(next), uintptr(fd - 1)}
			l.ngaps++
		}
		next = max(next, fd+1)
	}
	l.gaps[l.ngaps] = [2]uintptr{uintptr(next), math.MaxUint32}
	l.ngaps++

	l.set = math.MaxUint64
	l.capHeader.Version = unix.LINUX_CAPABILITY_VERSION_3
	return nil
}

// clear zeroes everything but the arena.
func (l *launch) clear() {
	clear(unsafe.Slice((*byte)(unsafe.Pointer(l)), unsafe.Offsetof(l.arena)))
}

// complete stores what the run adds.
func (l *launch) complete(plan *Plan, executable string) error {
	var err error
	if l.path, err = l.text(executable); err != nil {
		return err
	}
	if l.dir, err = l.text(plan.Dir); err != nil {
		return err
	}
	if l.argv, err = l.texts(plan.Args); err == nil {
		l.envv, err = l.texts(plan.Env)
	}
	if err == unix.E2BIG {
		return &cannotExec{126, fmt.Sprintf("%s: cannot be executed: %v", plan.Args[0], err), ""}
	}
	if err != nil {
		return err
	}
	if err := l.setConditions(plan.Conditions); err != nil {
		return err
	}
	l.terminal = plan.Terminal
	for i, r := range plan.Rlimits {
		var now unix.Rlimit
		if err := unix.Getrlimit(r.Resource, &now); err != nil {
			return err
		}
		v := uintptr(min(r.Value, now.Max))
		if r.Resource == unix.RLIMIT_NOFILE {
			// The limit also bounds a user's descriptors in flight, of which the zygote needs some if it is the same
			// user.
			v = uintptr(min(r.Value, now.Max/2))
		}
		l.rlimits[i].resource, l.rlimits[i].cur, l.rlimits[i].max = uintptr(r.Resource), v, v
	}
	l.nrlimits = len(plan.Rlimits)
	return nil
}

// listenerFlags returns the flags of a filter that notifies. A process that waits for an answer should be interrupted
// only by its death (Linux 5.19); a kernel that knows the flag complains about the missing program instead.
func listenerFlags() uintptr {
	const killable = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	if _, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, seccompFilter, killable, 0); errno == unix.EFAULT {
		return killable
	}
	return unix.SECCOMP_FILTER_FLAG_NEW_LISTENER
}

// fork forks pid 1 of the run and returns its process ID.
//
//go:norace
//go:noinline
func (l *launch) fork() (int, error) {
	l.clone = cloneArgs{flags: unix.CLONE_NEWPID, exitSignal: uint64(unix.SIGCHLD)}
	if !l.hostIPC {
		l.clone.flags |= unix.CLONE_NEWIPC
	}
	call, a, b := uintptr(unix.SYS_CLONE), uintptr(l.clone.flags|l.clone.exitSignal), uintptr(0)
	if l.cgroup >= 0 {
		l.clone.flags |= unix.CLONE_INTO_CGROUP
		l.clone.cgroup = uint64(l.cgroup)
		call, a, b = unix.SYS_CLONE3, uintptr(unsafe.Pointer(&l.clone)), unsafe.Sizeof(l.clone)
	}
	syscall.ForkLock.Lock()
	beforeFork()
	pid, _, errno := unix.RawSyscall6(call, a, b, 0, 0, 0, 0)
	if pid == 0 && errno == 0 {
		l.runInit()
	}
	afterFork()
	syscall.ForkLock.Unlock()
	if errno != 0 {
		return 0, errno
	}
	return int(pid), nil
}

// fail reports the failed step and ends the process.
//
//go:norace
//go:nosplit
func (l *launch) fail(s step, errno syscall.Errno) {
	l.failure[0], l.failure[1] = uint32(s), uint32(errno)
	unix.RawSyscall(unix.SYS_WRITE, uintptr(l.start), uintptr(unsafe.Pointer(&l.failure)), 8)
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
	}
}

// do makes a system call that must succeed.
//
//go:norace
//go:nosplit
func (l *launch) do(s step, call, a, b, c, d, e uintptr) uintptr {
	r, _, errno := unix.RawSyscall6(call, a, b, c, d, e, 0)
	if errno != 0 {
		l.fail(s, errno)
	}
	return r
}

// runInit is pid 1 of the run. It completes the root, waits for the run, forks the command, drops its privileges and
// waits for the end. When it dies, however that happens, the kernel kills every other process of its pid namespace
// before it can be waited for.
//
//go:norace
//go:nosplit
func (l *launch) runInit() {
	l.do(stepParent, unix.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
	// The following would do harm in a process of the host.
	if pid, _, _ := unix.RawSyscall(unix.SYS_GETPID, 0, 0, 0); pid != 1 {
		l.fail(stepParent, unix.ESRCH)
	}
	// Descriptors of other runs: their readers would wait while they are open here.
	for i := 0; i < l.ngaps; i++ {
		l.do(stepDescriptors, unix.SYS_CLOSE_RANGE, l.gaps[i][0], l.gaps[i][1], 0, 0, 0)
	}
	// Signals that the worker's parent ignored would stay ignored in the command. To pid 1 the kernel delivers no
	// signal from inside that has its default action. All are blocked since before the fork.
	for signal := uintptr(1); signal <= lastSignal; signal++ {
		if signal != uintptr(unix.SIGKILL) && signal != uintptr(unix.SIGSTOP) {
			l.do(stepSignals, unix.SYS_RT_SIGACTION, signal, uintptr(unsafe.Pointer(&l.action)), 0, sigsetSize, 0)
		}
	}
	l.do(stepCgroup, unix.SYS_UNSHARE, unix.CLONE_NEWCGROUP, 0, 0, 0, 0)
	if l.reaper >= 0 {
		l.do(stepProc, unix.SYS_MOUNT, uintptr(unsafe.Pointer(&textProc[0])), uintptr(unsafe.Pointer(&textProcDir[0])),
			uintptr(unsafe.Pointer(&textProc[0])), unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, l.proc)
	} else {
		l.replaceProc()
	}
	if l.ruleset >= 0 {
		// A rule applies to what is mounted. Processes may name their threads and set their OOM score.
		l.procRule.Parent_fd = int32(l.do(stepLandlock, unix.SYS_OPENAT, atFDCWD, uintptr(unsafe.Pointer(&textProcDir[0])), unix.O_PATH|unix.O_CLOEXEC, 0, 0))
		l.do(stepLandlock, unix.SYS_LANDLOCK_ADD_RULE, uintptr(l.ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&l.procRule)), 0, 0)
		unix.RawSyscall(unix.SYS_CLOSE, uintptr(l.procRule.Parent_fd), 0, 0)
	}
	l.do(stepPrivileges, unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if l.reaper >= 0 {
		// Without privileges the kernel forbids it, and the run keeps the user's groups, which own nothing that it can
		// see.
		l.do(stepGroups, unix.SYS_SETGROUPS, 0, 0, 0, 0, 0)
	}
	l.set = 1 << (uint(unix.SIGCHLD) - 1)
	ended := l.do(stepSignals, unix.SYS_SIGNALFD4, ^uintptr(0), uintptr(unsafe.Pointer(&l.set)), sigsetSize, unix.SFD_CLOEXEC, 0)
	l.receive()
	l.polls[0] = unix.PollFd{Fd: int32(l.control), Events: unix.POLLIN}
	l.polls[1] = unix.PollFd{Fd: int32(ended), Events: unix.POLLIN}
	l.polls[2] = unix.PollFd{Fd: int32(l.end)}
	if l.conditions.unusual {
		l.setupNamespaces()
	}
	// The command shares the memory of pid 1, which waits until it executes: nothing is copied.
	command, errno := vfork(unix.CLONE_VM|unix.CLONE_VFORK|uintptr(unix.SIGCHLD), l)
	for l.conditions.skip > 0 && errno == 0 { // that child only used up an ID
		l.do(stepNumbers, unix.SYS_WAIT4, command, 0, 0, 0, 0)
		l.conditions.skip--
		command, errno = vfork(unix.CLONE_VM|unix.CLONE_VFORK|uintptr(unix.SIGCHLD), l)
	}
	if errno != 0 {
		l.fail(stepFork, syscall.Errno(errno))
	}
	l.dropPrivileges()
	l.reap(command)
}

// replaceProc mounts /proc over the host's: without privileges it can only be mounted beside that.
//
//go:norace
//go:nosplit
func (l *launch) replaceProc() {
	fs := l.do(stepProc, unix.SYS_FSOPEN, uintptr(unsafe.Pointer(&textProc[0])), unix.FSOPEN_CLOEXEC, 0, 0, 0)
	if l.procSubset {
		l.do(stepProc, unix.SYS_FSCONFIG, fs, unix.FSCONFIG_SET_STRING, uintptr(unsafe.Pointer(&textSubset[0])), uintptr(unsafe.Pointer(&textPID[0])), 0)
		l.do(stepProc, unix.SYS_FSCONFIG, fs, unix.FSCONFIG_SET_STRING, uintptr(unsafe.Pointer(&textHide[0])), uintptr(unsafe.Pointer(&textInvisible[0])), 0)
	}
	l.do(stepProc, unix.SYS_FSCONFIG, fs, unix.FSCONFIG_CMD_CREATE, 0, 0, 0)
	mount := l.do(stepProc, unix.SYS_FSMOUNT, fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, 0, 0)
	l.do(stepProc, unix.SYS_UMOUNT2, uintptr(unsafe.Pointer(&textProcDir[0])), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW, 0, 0, 0)
	l.do(stepProc, unix.SYS_MOVE_MOUNT, mount, uintptr(unsafe.Pointer(&textNone[0])), atFDCWD, uintptr(unsafe.Pointer(&textProcDir[0])), unix.MOVE_MOUNT_F_EMPTY_PATH)
	unix.RawSyscall(unix.SYS_CLOSE, fs, 0, 0)
	unix.RawSyscall(unix.SYS_CLOSE, mount, 0, 0)
}

// receive waits for the run's descriptors. If the socket closes instead, no run will come.
//
//go:norace
//go:nosplit
func (l *launch) receive() {
	l.iov.Base, l.iov.Len = &l.word[0], 1
	l.message.Iov, l.message.Iovlen = &l.iov, 1
	l.message.Control, l.message.Controllen = &l.rights[0], uint64(len(l.rights))
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(l.handoff), uintptr(unsafe.Pointer(&l.message)), unix.MSG_CMSG_CLOEXEC)
	if n == 0 && errno == 0 { // it may have been sent nevertheless: see Receive
		l.message.Controllen = uint64(len(l.rights))
		n, _, errno = unix.RawSyscall(unix.SYS_RECVMSG, uintptr(l.handoff), uintptr(unsafe.Pointer(&l.message)), unix.MSG_CMSG_CLOEXEC)
	}
	header := (*unix.Cmsghdr)(unsafe.Pointer(&l.rights[0]))
	come := fdMore
	if l.conditions.users {
		come++
	}
	if int(n) != 1 || l.message.Controllen < unix.SizeofCmsghdr || header.Len != uint64(unix.SizeofCmsghdr+4*come) {
		if errno == 0 {
			errno = unix.EBADMSG
		}
		l.fail(stepHandoff, errno) // reported if a run was sent
	}
	fds := (*[fdMore + 1]int32)(unsafe.Pointer(&l.rights[unix.SizeofCmsghdr]))
	if l.conditions.users {
		l.users = int(fds[fdMore])
	}
	l.control = int(fds[0])
	for i := range l.stdio {
		l.stdio[i] = int(fds[i+1])
	}
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(l.handoff), 0, 0)
	// What the command sends, with the listener if it notifies.
	l.iov.Base, l.iov.Len = &textReady[0], uint64(len(textReady))
	header.Level, header.Type, header.Len = unix.SOL_SOCKET, unix.SCM_RIGHTS, uint64(unix.SizeofCmsghdr+4)
	l.message.Controllen = 0
	if l.notify {
		l.message.Controllen = uint64(unix.SizeofCmsghdr + 8)
	}
	l.message.Flags = 0
}

// dropPrivileges leaves pid 1 only the capability to send signals, which reach processes of this run, and a user other
// than the command's if it has one.
//
//go:norace
//go:nosplit
func (l *launch) dropPrivileges() {
	if l.reaper >= 0 {
		user := uintptr(l.reaper)
		l.do(stepDrop, unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1, 0, 0, 0)
		l.do(stepDrop, unix.SYS_SETRESGID, user, user, user, 0, 0)
		l.do(stepDrop, unix.SYS_SETRESUID, user, user, user, 0, 0)
	}
	l.capData[0].Effective, l.capData[0].Permitted = 1<<capKill, 1<<capKill
	l.do(stepDrop, unix.SYS_CAPSET, uintptr(unsafe.Pointer(&l.capHeader)), uintptr(unsafe.Pointer(&l.capData)), 0, 0, 0)
	l.do(stepDrop, unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	if l.rprog.Len > 0 {
		l.do(stepReaperFilter, unix.SYS_SECCOMP, seccompFilter, 0, uintptr(unsafe.Pointer(&l.rprog)), 0, 0)
	}
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(l.start), 0, 0)
	for fd := range uintptr(3) {
		unix.RawSyscall(unix.SYS_CLOSE, fd, 0, 0)
		unix.RawSyscall(unix.SYS_CLOSE, uintptr(l.stdio[fd]), 0, 0)
	}
}

// reap waits for processes and messages of the worker until the command has ended or the worker or zygote is gone. The
// kernel forgets PR_SET_PDEATHSIG when pid 1 changes its user; but only the slot reads how the command ended, and a
// pipe without a reader is an error (poll(2)).
//
//go:norace
//go:nosplit
func (l *launch) reap(command uintptr) {
	for {
		unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&l.polls)), uintptr(len(l.polls)), 0, 0, 0, 0)
		if l.polls[2].Revents != 0 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
		}
		if l.polls[0].Revents != 0 {
			n, _, _ := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(l.control), uintptr(unsafe.Pointer(&l.word)), uintptr(len(l.word)), 0, 0, 0)
			if int(n) > 0 && l.word[0] == WordTerm[0] {
				// From pid 1, -1 means every other process of the namespace.
				unix.RawSyscall(unix.SYS_KILL, ^uintptr(0), uintptr(unix.SIGTERM), 0)
			} else {
				unix.RawSyscall(unix.SYS_EXIT_GROUP, 1, 0, 0)
			}
		}
		if l.polls[1].Revents == 0 {
			continue
		}
		unix.RawSyscall(unix.SYS_READ, uintptr(l.polls[1].Fd), uintptr(unsafe.Pointer(&l.info)), uintptr(len(l.info)))
		for {
			pid, _, _ := unix.RawSyscall6(unix.SYS_WAIT4, ^uintptr(0), uintptr(unsafe.Pointer(&l.status)), unix.WNOHANG, 0, 0, 0)
			if int(pid) <= 0 {
				break
			}
			if pid != command {
				continue
			}
			unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_REALTIME, uintptr(unsafe.Pointer(&l.now)), 0)
			l.record[0], l.record[1], l.record[2] = uint64(l.status), uint64(l.now.Sec), uint64(l.now.Nsec)
			unix.RawSyscall(unix.SYS_WRITE, uintptr(l.end), uintptr(unsafe.Pointer(&l.record)), unsafe.Sizeof(l.record))
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
}

// becomeCommand is what vfork calls in the child.
//
//go:norace
//go:nosplit
func becomeCommand(l *launch) { l.runCommand() }

// runCommand becomes the command: the one user of the slot's user namespace, in a new session, without capabilities,
// behind Landlock and the filter. A child that only uses up an ID exits at once.
//
//go:norace
//go:nosplit
func (l *launch) runCommand() {
	if l.conditions.skip > 0 {
		l.do(stepNumbers, unix.SYS_EXIT_GROUP, 0, 0, 0, 0, 0)
	}
	l.do(stepSession, unix.SYS_SETSID, 0, 0, 0, 0, 0)
	l.do(stepUser, unix.SYS_SETNS, uintptr(l.users), unix.CLONE_NEWUSER, 0, 0, 0)
	user, group := uintptr(UID), uintptr(GID)
	if l.conditions.users {
		user, group = l.conditions.uid, l.conditions.uid
	}
	l.do(stepIDs, unix.SYS_SETRESGID, group, group, group, 0, 0)
	l.do(stepIDs, unix.SYS_SETRESUID, user, user, user, 0, 0)
	for i := 0; i < l.nrlimits; i++ {
		l.rlim[0], l.rlim[1] = uint64(l.rlimits[i].cur), uint64(l.rlimits[i].max)
		l.do(stepLimits, unix.SYS_PRLIMIT64, 0, l.rlimits[i].resource, uintptr(unsafe.Pointer(&l.rlim)), 0, 0)
	}
	if l.conditions.umask != 0 {
		unix.RawSyscall6(unix.SYS_UMASK, l.conditions.umask, 0, 0, 0, 0, 0)
	}
	if l.conditions.limited {
		l.do(stepProcessors, unix.SYS_SCHED_SETAFFINITY, 0, unsafe.Sizeof(l.conditions.cpus), uintptr(unsafe.Pointer(&l.conditions.cpus)), 0, 0)
	}
	if l.conditions.fixed {
		l.do(stepLayout, unix.SYS_PERSONALITY, noRandomize, 0, 0, 0, 0)
	}
	for i, fd := range l.stdio {
		l.do(stepStreams, unix.SYS_DUP3, uintptr(fd), uintptr(i), 0, 0, 0)
	}
	if l.terminal {
		l.do(stepTerminal, unix.SYS_IOCTL, 0, unix.TIOCSCTTY, 0, 0, 0)
	}
	// Closed on execution: until then there may be something to report.
	l.do(stepDescriptors, unix.SYS_CLOSE_RANGE, 3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC, 0, 0)
	l.do(stepDir, unix.SYS_CHDIR, l.dir, 0, 0, 0, 0)
	if !l.keepCaps {
		// The kernel ends the list with EINVAL.
		for c := uintptr(0); c <= lastCap; c++ {
			_, _, errno := unix.RawSyscall6(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c, 0, 0, 0, 0)
			if errno == unix.EINVAL && c > unix.CAP_AUDIT_READ {
				break
			} else if errno != 0 {
				l.fail(stepCapabilities, errno)
			}
		}
		l.capData = [2]unix.CapUserData{}
		l.do(stepCapabilities, unix.SYS_CAPSET, uintptr(unsafe.Pointer(&l.capHeader)), uintptr(unsafe.Pointer(&l.capData)), 0, 0, 0)
	}
	if l.ruleset >= 0 {
		l.do(stepLandlock, unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(l.ruleset), l.landlockFlags, 0, 0, 0)
	}
	l.set = 0
	l.do(stepSignals, unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&l.set)), 0, sigsetSize, 0)
	if !l.notify {
		l.do(stepReady, unix.SYS_SENDMSG, uintptr(l.control), uintptr(unsafe.Pointer(&l.message)), unix.MSG_NOSIGNAL, 0, 0)
	}
	if l.fprog.Len > 0 {
		listener := l.do(stepFilter, unix.SYS_SECCOMP, seccompFilter, l.filterFlags, uintptr(unsafe.Pointer(&l.fprog)), 0, 0)
		if l.notify {
			*(*int32)(unsafe.Pointer(&l.rights[unix.SizeofCmsghdr])) = int32(listener)
			l.do(stepListener, unix.SYS_SENDMSG, uintptr(l.control), uintptr(unsafe.Pointer(&l.message)), unix.MSG_NOSIGNAL, 0, 0)
			// If it stayed open after the worker's death, nobody would end the wait for an answer: pid 1 waits for this
			// process to execute.
			unix.RawSyscall(unix.SYS_CLOSE, listener, 0, 0)
		}
	}
	l.do(stepExec, unix.SYS_EXECVE, l.path, l.argv, l.envv, 0, 0)
}

// atFDCWD is AT_FDCWD as a register value.
const atFDCWD = ^uintptr(99)
