// SPDX-License-Identifier: Apache-2.0

package seccomp

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// A verdict decides what happens to a call.
type verdict uint8

const (
	// absent: fails with ENOSYS and is never reported.
	absent verdict = iota
	// omit: succeeds without reaching the kernel, and is never reported.
	omit
	// refuse: fails with the rule's errno, from the filter or from the monitor.
	refuse
	// allow: performed by the kernel.
	allow
	// lookup: allowed, reported at MonitorFull.
	lookup
	// report: allowed, reported at every level but MonitorOff.
	report
	// listen: allowed or refused by Config.Listen.
	listen
	// binding: allowed, reported without Config.Listen, since a datagram socket receives once it is bound.
	binding
	// clock: allowed, reported if Config.Clock.
	clock
	// random: allowed, reported if Config.Random.
	random
	// startup: allowed, reported if Config.Clock or Config.Random.
	startup
	// openRead: as lookup, and reported if Config.Random: it may open /dev/random.
	openRead
	// statFile: as lookup, and reported if Config.Clock or Config.Files: it returns file times and owners.
	statFile
	// statOpen: allowed, reported if Config.Clock or Config.Files.
	statOpen
	// listing: allowed, reported if Config.Files.
	listing
)

// A rule is for calls that are treated alike. It checks only arguments in registers: memory behind a pointer may change
// between the filter and the kernel.
type rule struct {
	calls string // names separated by spaces; each is in one rule
	// If one of these cases holds, the call is allowed; this is checked first.
	allowed []all
	// If one of the cases holds, the verdict is then, else otherwise.
	cases     []all
	then      verdict
	otherwise verdict
	errno     unix.Errno // for refuse; 0 means EPERM
}

// all is a case: it holds if each of its conditions holds.
type all []condition

// A condition holds if the masked argument is one of the values. The kernel takes most arguments as 32 bits and ignores
// the rest of the register; the mask must do the same, or setting a high bit bypasses the filter.
type condition struct {
	arg    int
	mask   uint64
	values []uint32
}

const (
	low32 = 1<<32 - 1
	low16 = 1<<16 - 1
	all64 = 1<<64 - 1

	// All namespaces that clone(2) can create. CLONE_NEWTIME is part of the signal number there.
	newNamespace = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	// What a process may stop sharing. Everything else in unshare(2) creates a namespace.
	unshareable = unix.CLONE_FILES | unix.CLONE_FS | unix.CLONE_SYSVSEM
	// Any of these flags opens for writing.
	writing = unix.O_ACCMODE | unix.O_CREAT | unix.O_TRUNC

	sockType = 0xf // the other bits of a socket's type are SOCK_CLOEXEC and SOCK_NONBLOCK

	// Missing from x/sys, or present for some architectures only.
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

// rules are the calls of every run. A call in none of them is absent.
var rules = []rule{
	// Open files and pipes.
	{otherwise: allow, calls: `read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
		close close_range dup dup2 dup3 pipe pipe2 sendfile splice tee vmsplice copy_file_range
		fstatfs fsync fdatasync sync_file_range ftruncate fallocate fadvise64 readahead flock
		fchmod fchown fgetxattr flistxattr fsetxattr fremovexattr getdents fchdir memfd_create`},
	{otherwise: listing, calls: `getdents64`},
	// Paths, without changing anything and without interest for the monitor.
	{otherwise: allow, calls: `getcwd chdir umask statfs getxattr lgetxattr listxattr llistxattr
		name_to_handle_at inotify_init inotify_init1 inotify_add_watch inotify_rm_watch`},
	// Waiting, events, timers and clock resolution.
	{otherwise: allow, calls: `select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait
		epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime
		timerfd_gettime timer_create timer_settime timer_gettime timer_getoverrun timer_delete alarm pause
		getitimer setitimer clock_getres times`},
	// The time of day. Relative waits are reported too, since they advance a frozen clock.
	{otherwise: clock, calls: `gettimeofday time nanosleep`},
	{
		calls: `clock_gettime clock_nanosleep`,
		cases: []all{{{0, low32, []uint32{unix.CLOCK_REALTIME, unix.CLOCK_REALTIME_COARSE, unix.CLOCK_REALTIME_ALARM, unix.CLOCK_TAI}}}},
		then:  clock, otherwise: allow,
	},
	{
		calls:   `futex`,
		allowed: []all{{{3, all64, []uint32{0}}}}, // waits without a timeout
		cases:   []all{{{1, low32 &^ futexPrivate, []uint32{futexWaitBitset | futexClockRealtime}}}},
		then:    clock, otherwise: allow,
	},
	// Memory.
	{otherwise: allow, calls: `brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock
		mlockall munlockall mseal map_shadow_stack membarrier pkey_alloc pkey_free pkey_mprotect
		get_mempolicy set_mempolicy set_mempolicy_home_node mbind`},
	// Processes, threads and signals: they reach the same run only. The kernel itself puts uretprobe and uprobe into
	// programs that the administrator traces.
	{otherwise: allow, calls: `fork vfork exit exit_group wait4 waitid getpid getppid gettid getpgid getpgrp
		setpgid getsid setsid set_tid_address set_robust_list get_robust_list futex_waitv futex_wake
		futex_wait futex_requeue rseq kill tkill tgkill pidfd_open pidfd_send_signal
		rt_sigaction rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait
		rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack restart_syscall uretprobe uprobe`},
	// Each executed program sets up its thread's memory with it, before any other call of interest.
	{
		calls: `arch_prctl`,
		cases: []all{{{0, low32, []uint32{archSetFS}}}},
		then:  startup, otherwise: allow,
	},
	// Scheduling and limits: a process cannot raise what it was given.
	{otherwise: allow, calls: `sched_yield sched_setaffinity sched_getaffinity sched_setscheduler
		sched_getscheduler sched_setparam sched_getparam sched_setattr sched_getattr
		sched_get_priority_max sched_get_priority_min sched_rr_get_interval getpriority setpriority
		ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage getcpu`},
	// Identity, of which there is one, and facts about the kernel.
	{otherwise: allow, calls: `getuid geteuid getgid getegid getgroups getresuid getresgid setuid setgid
		setreuid setregid setresuid setresgid setfsuid setfsgid setgroups capget capset uname sysinfo`},
	{otherwise: random, calls: `getrandom`},
	// Sandboxes that programs make for themselves.
	{otherwise: allow, calls: `landlock_create_ruleset landlock_add_rule landlock_restrict_self`},
	// Open sockets: the network namespace limits where they lead. Addresses of sendmsg and sendmmsg are in memory,
	// invisible to a filter.
	{otherwise: allow, calls: `accept accept4 getsockname getpeername getsockopt shutdown recvfrom
		recvmsg recvmmsg sendmsg sendmmsg`},
	// Socket filters are compiled into memory of which the host has a fixed amount (net.core.bpf_jit_limit); upper layer
	// protocols are modules.
	{
		calls: `setsockopt`,
		cases: []all{
			{{1, low32, []uint32{unix.SOL_SOCKET}}, {2, low32, []uint32{
				unix.SO_ATTACH_FILTER, unix.SO_ATTACH_BPF, unix.SO_ATTACH_REUSEPORT_CBPF, unix.SO_ATTACH_REUSEPORT_EBPF,
			}}},
			{{1, low32, []uint32{unix.IPPROTO_TCP}}, {2, low32, []uint32{unix.TCP_ULP}}},
		},
		then: refuse, otherwise: allow,
	},
	// System V and POSIX message passing in the run's own IPC namespace.
	{otherwise: allow, calls: `shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv
		msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr`},

	// Lookups of a path.
	{otherwise: lookup, calls: `access faccessat faccessat2 readlink readlinkat`},
	// Lookups that return file times and owners.
	{otherwise: statFile, calls: `stat lstat newfstatat statx`},
	{otherwise: statOpen, calls: `fstat`},
	{
		calls: `open`,
		cases: []all{{{1, writing, []uint32{0}}}},
		then:  openRead, otherwise: report,
	},
	{
		calls: `openat`,
		cases: []all{{{2, writing, []uint32{0}}}},
		then:  openRead, otherwise: report,
	},
	// Changes at a path; the flags of openat2 are in memory.
	{otherwise: report, calls: `openat2 creat mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
		link linkat symlink symlinkat truncate chmod fchmodat fchmodat2 chown lchown fchownat utime utimes
		setxattr lsetxattr removexattr lremovexattr`},
	// Without a path they apply to an open file.
	{
		calls: `utimensat futimesat`,
		cases: []all{{{1, all64, []uint32{0}}}},
		then:  allow, otherwise: report,
	},
	{otherwise: report, calls: `execve execveat connect`},
	// With an address.
	{
		calls: `sendto`,
		cases: []all{{{4, all64, []uint32{0}}}},
		then:  allow, otherwise: report,
	},
	{otherwise: listen, calls: `listen`},
	{otherwise: binding, calls: `bind`},

	// Device nodes. Overlayfs takes one without a device for a deletion, so those are refused as well. Other nodes are
	// not reported as changes: then the monitor never has to distinguish kinds.
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
	// New namespaces: the way to capabilities, and to most kernel bugs that need one.
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
	// Sockets by family, type and protocol. AF_VSOCK reaches the virtual machine's host from any network namespace;
	// protocols beyond these load kernel modules. SOCK_PACKET (10) turns AF_INET into AF_PACKET, so the types are
	// listed as well.
	{
		calls: `socket`,
		// These belong to no network. All others are reported, since what they leave behind must not meet the next run.
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
		then: report, otherwise: refuse, errno: unix.EAFNOSUPPORT,
	},
	{
		calls: `socketpair`,
		cases: []all{{{0, low32, []uint32{unix.AF_UNIX}}}},
		then:  allow, otherwise: refuse, errno: unix.EAFNOSUPPORT,
	},
	// Injecting input into a terminal that somebody else reads, and line disciplines, which are modules.
	{
		calls: `ioctl`,
		cases: []all{{{1, low32, []uint32{ttyInject, ttySelection, ttyDiscipline}}}},
		then:  refuse, otherwise: allow,
	},
	// Leases delay anyone who opens an input shared with other runs; notifications reveal their accesses.
	{
		calls: `fcntl`,
		cases: []all{{{1, low32, []uint32{unix.F_SETLEASE, unix.F_NOTIFY, setDelegation}}}},
		then:  refuse, otherwise: allow,
	},
	// Impersonating another program in /proc; idling the sibling of a processor core.
	{
		calls: `prctl`,
		cases: []all{{{0, low32, []uint32{unix.PR_SET_MM, unix.PR_SCHED_CORE}}}},
		then:  refuse, otherwise: allow,
	},
	// Only the Linux personality, optionally with the fixed memory layout that debuggers use.
	{
		calls: `personality`,
		cases: []all{{{0, low32, []uint32{0, noRandomLayout, askPersonality}}}},
		then:  allow, otherwise: refuse,
	},
	// Programs may filter themselves. They may not be their own supervisor: the kernel allows one per process, and
	// monitored runs have one.
	{
		calls: `seccomp`,
		cases: []all{{{1, unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, []uint32{0}}}},
		then:  allow, otherwise: refuse,
	},

	// The mount table and the root.
	{otherwise: refuse, calls: `mount umount2 pivot_root chroot open_tree open_tree_attr move_mount fsopen
		fsconfig fsmount fspick mount_setattr setns`},
	// Files by handle instead of path, and watching others' file accesses.
	{otherwise: refuse, calls: `open_by_handle_at fanotify_init fanotify_mark`},
	// Other processes' memory and descriptors.
	{otherwise: refuse, calls: `ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd migrate_pages
		move_pages`},
	// Keys, which no namespace separates.
	{otherwise: refuse, calls: `add_key request_key keyctl`},
	// Programs in the kernel, and kernel features with many past vulnerabilities.
	{otherwise: refuse, calls: `bpf perf_event_open userfaultfd memfd_secret modify_ldt`},
	// The machine: modules, clock, name, disks, ports, log.
	{otherwise: refuse, calls: `init_module finit_module delete_module kexec_load kexec_file_load reboot
		swapon swapoff acct quotactl quotactl_fd iopl ioperm syslog vhangup sethostname setdomainname
		settimeofday clock_settime clock_adjtime adjtimex`},

	// Libraries fall back from these: clone3 (flags in memory), io_uring (invisible to the filter and the monitor), other
	// asynchronous I/O (fs.aio-max-nr limits the whole host), and mount queries (they would show the host's paths).
	{otherwise: absent, calls: `clone3 io_uring_setup io_uring_enter io_uring_register io_setup io_destroy io_submit
		io_cancel io_getevents io_pgetevents statmount listmount`},
	// They write the host's disks, and nothing of the run is on one.
	{otherwise: omit, calls: `sync syncfs`},
	// No program that builds needs these yet.
	{otherwise: absent, calls: `setxattrat getxattrat listxattrat removexattrat file_getattr file_setattr
		cachestat process_madvise process_mrelease lsm_get_self_attr lsm_set_self_attr lsm_list_modules
		listns rseq_slice_yield`},
	// Mostly removed from the kernel.
	{otherwise: absent, calls: `_sysctl afs_syscall create_module epoll_ctl_old epoll_wait_old
		get_kernel_syms get_thread_area getpmsg lookup_dcookie nfsservctl putpmsg query_module
		remap_file_pages security set_thread_area sysfs tuxcall uselib ustat vserver`},
}

// initRules are the calls of pid 1 of a run once the command runs. It receives from the worker, waits for processes,
// kills them and reports.
var initRules = []rule{
	{otherwise: allow, calls: `read recvfrom write close poll ppoll wait4 kill exit exit_group clock_gettime
		restart_syscall`},
}

// index returns the rule of each number, nil if it has none. Names that this architecture lacks are skipped.
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

// Name returns the name of a system call: "mount", or "syscall 999" for an unknown number.
func Name(nr int) string {
	if nr < 0 || nr >= len(names) || names[nr] == "" {
		return fmt.Sprintf("syscall %d", nr)
	}
	return names[nr]
}

// Permitted reports whether the monitor lets a notified call with these arguments continue. It refuses every other.
func Permitted(nr int, args [6]uint64) bool {
	r := of(nr)
	if r == nil {
		return false
	}
	v := r.otherwise
	if slices.ContainsFunc(r.cases, func(a all) bool { return a.holds(args) }) {
		v = r.then
	}
	return v == lookup || v == openRead || v == statFile || v == report || v == binding
}

// holds evaluates the case as the filter does.
func (a all) holds(args [6]uint64) bool {
	return !slices.ContainsFunc(a, func(c condition) bool {
		masked := args[c.arg] & c.mask
		return masked>>32 != 0 || !slices.Contains(c.values, uint32(masked))
	})
}

// Errno returns the error of a call that the filter or the monitor answers; 0 means success.
func Errno(nr int) unix.Errno {
	r := of(nr)
	switch {
	case r == nil || r.otherwise == absent:
		return unix.ENOSYS
	case r.otherwise == omit:
		return 0
	case r.errno != 0:
		return r.errno
	}
	return unix.EPERM
}
