// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A verdict is what becomes of a call.
type verdict uint8

const (
	// absent: it fails with ENOSYS and is never watched, because it is no attempt at anything.
	absent verdict = iota
	// refuse: it fails with the rule's errno, from the filter or from the supervisor.
	refuse
	// allow: the kernel performs it.
	allow
	// look: it is allowed, and of interest to a full watch.
	look
	// attempt: it is allowed, and of interest to every watch.
	attempt
	// listen: it is allowed or refused as Config.Listen says.
	listen
	// clock: it is allowed, and sent if Config.Clock.
	clock
	// random: it is allowed, and sent if Config.Random.
	random
	// begins: it is allowed, and sent if either.
	begins
	// source: it is as look, and sent if Config.Random, since it may be /dev/random that is looked for.
	source
	// dated: it is as look, and sent if Config.Clock, since it tells the times of a file.
	dated
)

// A rule is for calls that are judged alike. Arguments are judged only if they are in registers: what a
// pointer leads to may change between the filter and the kernel.
type rule struct {
	calls string // names, separated by space; each in one rule
	// A call for which one of these cases holds is allowed, before anything else is asked.
	allowed []all
	// A call meets then if one of the cases holds, and otherwise if none does.
	cases     []all
	then      verdict
	otherwise verdict
	errno     unix.Errno // of refuse; 0 means EPERM
}

// all is a case: it holds if each of its conditions does.
type all []condition

// A condition holds if the argument, masked, is one of the values. The kernel takes most arguments as 32
// bits and ignores the rest of the register: so must the mask, or a filter is passed by setting a high bit.
type condition struct {
	arg    int
	mask   uint64
	values []uint32
}

const (
	low32 = 1<<32 - 1
	low16 = 1<<16 - 1
	all64 = 1<<64 - 1

	// Every namespace that clone(2) can make. CLONE_NEWTIME is no flag there: its bit is of the signal.
	newNamespace = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	// What a process may stop sharing with another. All else of unshare(2) makes a namespace.
	unshareable = unix.CLONE_FILES | unix.CLONE_FS | unix.CLONE_SYSVSEM
	// Any of these flags makes an open one for writing.
	writing = unix.O_ACCMODE | unix.O_CREAT | unix.O_TRUNC

	sockType = 0xf // the other bits of a socket's type are SOCK_CLOEXEC and SOCK_NONBLOCK

	// Absent from x/sys, or there for some architectures only.
	setDelegation  = 1024 + 16 // F_SETDELEG, Linux 6.19
	ttyInject      = 0x5412    // TIOCSTI
	ttySelection   = 0x541c    // TIOCLINUX
	ttyDiscipline  = 0x5423    // TIOCSETD
	noRandomLayout = 0x0040000 // ADDR_NO_RANDOMIZE
	askPersonality = low32
	archSetFS      = 0x1002 // ARCH_SET_FS

	futexWaitBitset    = 9
	futexPrivate       = 128
	futexClockRealtime = 256
)

// rules are what every run may call. A call in none of them is absent.
var rules = []rule{
	// Open files, and pipes.
	{otherwise: allow, calls: `read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
		close close_range dup dup2 dup3 pipe pipe2 sendfile splice tee vmsplice copy_file_range
		fstatfs fsync fdatasync sync_file_range syncfs ftruncate fallocate fadvise64 readahead flock
		fchmod fchown fgetxattr flistxattr fsetxattr fremovexattr getdents getdents64 fchdir memfd_create`},
	// Paths, without a change and without news for the watch.
	{otherwise: allow, calls: `getcwd chdir umask statfs sync getxattr lgetxattr listxattr llistxattr
		name_to_handle_at inotify_init inotify_init1 inotify_add_watch inotify_rm_watch`},
	// Waiting, events, timers and the clock's reading.
	{otherwise: allow, calls: `select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait
		epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime
		timerfd_gettime timer_create timer_settime timer_gettime timer_getoverrun timer_delete alarm pause
		getitimer setitimer clock_getres times
		io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents`},
	// The time of day. Those that wait for a while are told of, since a clock that is held goes on by it.
	{otherwise: clock, calls: `gettimeofday time nanosleep`},
	{
		calls: `clock_gettime clock_nanosleep`,
		cases: []all{{{0, low32, []uint32{unix.CLOCK_REALTIME, unix.CLOCK_REALTIME_COARSE, unix.CLOCK_REALTIME_ALARM, unix.CLOCK_TAI}}}},
		then:  clock, otherwise: allow,
	},
	{
		calls:   `futex`,
		allowed: []all{{{3, all64, []uint32{0}}}}, // it waits without end
		cases:   []all{{{1, low32 &^ futexPrivate, []uint32{futexWaitBitset | futexClockRealtime}}}},
		then:    clock, otherwise: allow,
	},
	// Memory.
	{otherwise: allow, calls: `brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock
		mlockall munlockall mseal map_shadow_stack membarrier pkey_alloc pkey_free pkey_mprotect
		get_mempolicy set_mempolicy set_mempolicy_home_node mbind`},
	// Processes, threads and signals: all they can reach is of the same run. The kernel itself puts
	// uretprobe and uprobe into a program that the host's administrator observes.
	{otherwise: allow, calls: `fork vfork exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp
		setpgid getsid setsid set_tid_address set_robust_list get_robust_list futex_waitv futex_wake
		futex_wait futex_requeue rseq kill tkill tgkill pidfd_open pidfd_send_signal
		rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait
		rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack restart_syscall uretprobe uprobe`},
	// Each program that was executed gets memory of its thread by it, before it asks for anything else.
	{
		calls: `arch_prctl`,
		cases: []all{{{0, low32, []uint32{archSetFS}}}},
		then:  begins, otherwise: allow,
	},
	// Scheduling and limits: nobody gets more than was given.
	{otherwise: allow, calls: `sched_yield sched_setaffinity sched_getaffinity sched_setscheduler
		sched_getscheduler sched_setparam sched_getparam sched_setattr sched_getattr
		sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority setpriority
		ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage getcpu`},
	// Identity, of which there is one, and facts of the kernel.
	{otherwise: allow, calls: `getuid geteuid getgid getegid getgroups getresuid getresgid setuid setgid
		setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset uname sysinfo`},
	{otherwise: random, calls: `getrandom`},
	// Sandboxes that a program makes for itself.
	{otherwise: allow, calls: `landlock_create_ruleset landlock_add_rule landlock_restrict_self`},
	// Open sockets: where they lead is a matter of the network namespace. Addresses of sendmsg and
	// sendmmsg are in memory, out of a filter's sight.
	{otherwise: allow, calls: `bind accept accept4 getsockname getpeername getsockopt setsockopt shutdown
		recvfrom recvmsg recvmmsg sendmsg sendmmsg`},
	// System V and POSIX message passing, in the run's own IPC namespace.
	{otherwise: allow, calls: `shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv
		msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr`},

	// What looks for a path.
	{otherwise: look, calls: `access faccessat faccessat2 readlink readlinkat`},
	// And tells its times.
	{otherwise: dated, calls: `stat lstat newfstatat statx`},
	{otherwise: clock, calls: `fstat`},
	{
		calls: `open`,
		cases: []all{{{1, writing, []uint32{0}}}},
		then:  source, otherwise: attempt,
	},
	{
		calls: `openat`,
		cases: []all{{{2, writing, []uint32{0}}}},
		then:  source, otherwise: attempt,
	},
	// What changes something at a path; the flags of openat2 are in memory.
	{otherwise: attempt, calls: `openat2 creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
		link linkat symlink symlinkat truncate chmod fchmodat fchmodat2 chown lchown fchownat utime utimes
		setxattr lsetxattr removexattr lremovexattr`},
	// Without a path these are of an open file.
	{
		calls: `utimensat futimesat`,
		cases: []all{{{1, all64, []uint32{0}}}},
		then:  allow, otherwise: attempt,
	},
	{otherwise: attempt, calls: `execve execveat connect`},
	// With an address.
	{
		calls: `sendto`,
		cases: []all{{{4, all64, []uint32{0}}}},
		then:  allow, otherwise: attempt,
	},
	{otherwise: listen, calls: `listen`},

	// Device nodes, those without a device included: overlayfs takes one for a deletion. It is not in the
	// watch as a change, so that the supervisor never has to tell one kind from the other.
	{
		calls: `mknod`,
		cases: []all{{{1, unix.S_IFMT, []uint32{0, unix.S_IFREG, unix.S_IFIFO, unix.S_IFSOCK}}}},
		then:  allow, otherwise: refuse,
	},
	{
		calls: `mknodat`,
		cases: []all{{{2, unix.S_IFMT, []uint32{0, unix.S_IFREG, unix.S_IFIFO, unix.S_IFSOCK}}}},
		then:  allow, otherwise: refuse,
	},
	// New namespaces: the way to capabilities, and to most of the kernel's errors that need one.
	{
		calls: `clone`,
		cases: []all{{{0, newNamespace, []uint32{0}}}},
		then:  allow, otherwise: refuse,
	},
	{
		calls: `unshare`,
		cases: []all{{{0, all64 &^ unshareable, []uint32{0}}}},
		then:  allow, otherwise: refuse,
	},
	// Sockets by family, type and protocol. AF_VSOCK leads to the virtual machine's host whatever the
	// network namespace is; protocols beyond these load modules into the kernel. SOCK_PACKET (10) turns
	// AF_INET into AF_PACKET, and so the types are listed, too.
	{
		calls: `socket`,
		// These belong to no network. Of all others a watch is told, since what they leave there must not meet the
		// next run.
		allowed: []all{{{0, low32, []uint32{unix.AF_UNIX}}}},
		cases: []all{
			{
				{0, low32, []uint32{unix.AF_INET, unix.AF_INET6}},
				{1, sockType, []uint32{unix.SOCK_STREAM}},
				{2, low32, []uint32{0, unix.IPPROTO_TCP, unix.IPPROTO_MPTCP}},
			},
			{
				{0, low32, []uint32{unix.AF_INET, unix.AF_INET6}},
				{1, sockType, []uint32{unix.SOCK_DGRAM}},
				{2, low32, []uint32{0, unix.IPPROTO_UDP}},
			},
			{{0, low32, []uint32{unix.AF_NETLINK}}, {2, low32, []uint32{unix.NETLINK_ROUTE}}},
		},
		then: attempt, otherwise: refuse, errno: unix.EAFNOSUPPORT,
	},
	{
		calls: `socketpair`,
		cases: []all{{{0, low32, []uint32{unix.AF_UNIX}}}},
		then:  allow, otherwise: refuse, errno: unix.EAFNOSUPPORT,
	},
	// Putting input into a terminal that somebody else reads, and its line disciplines, which are modules.
	{
		calls: `ioctl`,
		cases: []all{{{1, low32, []uint32{ttyInject, ttySelection, ttyDiscipline}}}},
		then:  refuse, otherwise: allow,
	},
	// Leases hold up whoever opens an input that is shared with other runs; notices tell of their accesses.
	{
		calls: `fcntl`,
		cases: []all{{{1, low32, []uint32{unix.F_SETLEASE, unix.F_NOTIFY, setDelegation}}}},
		then:  refuse, otherwise: allow,
	},
	// Passing for another program in /proc; idling the sibling of a processor's core.
	{
		calls: `prctl`,
		cases: []all{{{0, low32, []uint32{unix.PR_SET_MM, unix.PR_SCHED_CORE}}}},
		then:  refuse, otherwise: allow,
	},
	// No other personality than Linux, of which a debugger may fix the layout of memory.
	{
		calls: `personality`,
		cases: []all{{{0, low32, []uint32{0, noRandomLayout, askPersonality}}}},
		then:  allow, otherwise: refuse,
	},
	// A filter of the program's own may only take away. A supervisor of its own works in some runs and not
	// in others: the kernel lets a process have one, which a watched run has.
	{
		calls: `seccomp`,
		cases: []all{{{1, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, []uint32{0}}}},
		then:  allow, otherwise: refuse,
	},

	// The mount table and the root.
	{otherwise: refuse, calls: `mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen
		fsconfig fsmount fspick mount_setattr setns`},
	// Files by handles instead of paths, and accesses of others to files.
	{otherwise: refuse, calls: `open_by_handle_at fanotify_init fanotify_mark`},
	// Other processes' memory and descriptors.
	{otherwise: refuse, calls: `ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd migrate_pages
		move_pages`},
	// Keys, which no namespace divides.
	{otherwise: refuse, calls: `add_key request_key keyctl`},
	// Programs in the kernel, and parts of it that were often its weak spot.
	{otherwise: refuse, calls: `bpf perf_event_open userfaultfd memfd_secret modify_ldt`},
	// The machine: its modules, clock, name, disks, ports, log.
	{otherwise: refuse, calls: `init_module finit_module delete_module kexec_load kexec_file_load reboot
		swapon swapoff acct quotactl quotactl_fd iopl ioperm syslog vhangup sethostname setdomainname
		settimeofday clock_settime clock_adjtime adjtimex`},

	// Libraries try these first and do without: clone3, whose flags are in memory, io_uring, which does
	// what the filter and the watch do not see, and questions about mounts, which would show the host's paths.
	{otherwise: absent, calls: `clone3 io_uring_setup io_uring_enter io_uring_register statmount listmount`},
	// No program that builds needs these yet.
	{otherwise: absent, calls: `setxattrat getxattrat listxattrat removexattrat file_getattr file_setattr
		cachestat process_madvise process_mrelease lsm_get_self_attr lsm_set_self_attr lsm_list_modules
		listns rseq_slice_yield`},
	// The kernel has most of them no more.
	{otherwise: absent, calls: `_sysctl afs_syscall create_module epoll_ctl_old epoll_wait_old
		get_kernel_syms get_thread_area getpmsg lookup_dcookie nfsservctl putpmsg query_module
		remap_file_pages security set_thread_area sysfs tuxcall uselib ustat vserver`},
}

// reaper is what pid 1 of a run may call once the command runs; all else is refused. Its work: hear the worker, wait for
// processes, end them, report.
var reaper = []rule{
	{otherwise: allow, calls: `read recvfrom write close poll ppoll wait4 kill exit exit_group clock_gettime
		restart_syscall`},
}

// index returns the rule of each number, nil where there is none. Names that this architecture does not
// have are passed over.
func index(rules []rule) []*rule {
	numbers := make(map[string]int, len(names))
	for nr, name := range names {
		numbers[name] = nr
	}
	byNumber := make([]*rule, len(names))
	for i := range rules {
		for name := range strings.FieldsSeq(rules[i].calls) {
			if nr, ok := numbers[name]; ok {
				byNumber[nr] = &rules[i]
			}
		}
	}
	return byNumber
}

var indexed = sync.OnceValue(func() []*rule { return index(rules) })

// of returns the rule of a number, or nil.
func of(nr int) *rule {
	if nr < 0 || nr >= len(names) {
		return nil
	}
	return indexed()[nr]
}

// Name returns the name of a system call: "mount", or "syscall 999" for a number without one.
func Name(nr int) string {
	if nr < 0 || nr >= len(names) || names[nr] == "" {
		return fmt.Sprintf("syscall %d", nr)
	}
	return names[nr]
}

// Permitted reports whether the supervisor lets a call with these arguments continue of which it is notified. Any other
// it refuses.
func Permitted(nr int, args [6]uint64) bool {
	r := of(nr)
	if r == nil {
		return false
	}
	v := r.otherwise
	if slices.ContainsFunc(r.cases, func(a all) bool { return a.holds(args) }) {
		v = r.then
	}
	return v == look || v == source || v == dated || v == attempt
}

// holds is what the filter finds of the case.
func (a all) holds(args [6]uint64) bool {
	return !slices.ContainsFunc(a, func(c condition) bool {
		masked := args[c.arg] & c.mask
		return masked>>32 != 0 || !slices.Contains(c.values, uint32(masked))
	})
}

// Errno returns what a refused call fails with, whoever refuses it.
func Errno(nr int) unix.Errno {
	r := of(nr)
	switch {
	case r == nil || r.otherwise == absent:
		return unix.ENOSYS
	case r.errno != 0:
		return r.errno
	}
	return unix.EPERM
}
