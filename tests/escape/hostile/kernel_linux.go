// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// absent looks for files that reveal the machine or lead to its devices.
func absent(r *report, args []string) {
	for _, name := range append(args,
		"/sys", "/run", "/var", "/home", "/root", "/boot", "/mnt", "/etc/shadow", "/etc/hostname", "/etc/machine-id", "/etc/resolv.conf",
		"/proc/sys", "/proc/sys/kernel/random/boot_id", "/proc/kallsyms", "/proc/kcore", "/proc/keys", "/proc/key-users",
		"/proc/sysrq-trigger", "/proc/kmsg", "/proc/cpuinfo", "/proc/meminfo", "/proc/cmdline", "/proc/version", "/proc/modules",
		"/proc/config.gz", "/proc/kpagemap", "/proc/kpagecount", "/proc/interrupts", "/proc/diskstats", "/proc/uptime", "/proc/stat",
		"/proc/sysvipc", "/proc/bus", "/proc/irq", "/proc/acpi", "/proc/scsi", "/proc/timer_list", "/proc/fs", "/proc/driver",
		"/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/console", "/dev/ptmx", "/dev/pts", "/dev/fuse", "/dev/kvm",
		"/dev/net", "/dev/vsock", "/dev/mqueue", "/dev/log", "/dev/disk", "/dev/mapper", "/dev/loop0", "/dev/sda", "/dev/vda",
		"/.host", "/.workspace", "/proc/1/root/sys",
	) {
		_, err := os.Lstat(name)
		r.refused(name, err, unix.ENOENT, unix.ENOTDIR)
	}
}

// mounts looks for words of the host in the files of /proc about mounts and control groups.
func mounts(r *report, args []string) {
	for _, name := range []string{"mountinfo", "mounts", "mountstats", "cgroup", "maps", "environ", "status"} {
		b, err := os.ReadFile("/proc/self/" + name)
		if err != nil {
			r.refused("read "+name, err, unix.ENOENT)
			continue
		}
		for _, word := range args {
			for line := range strings.Lines(string(b)) {
				if strings.Contains(line, word) {
					r.escape("%s: %s", name, strings.TrimSpace(line))
				}
			}
		}
		if name == "cgroup" {
			for line := range strings.Lines(string(b)) {
				if f := strings.SplitN(strings.TrimSpace(line), ":", 3); f[len(f)-1] != "/" {
					r.escape("the group is %s", f[len(f)-1])
				}
			}
		}
		r.hold("%s: %d bytes", name, len(b))
	}
}

// filtered records a system call that the filter must stop. An error other than the filter's means that the call
// reached the kernel.
func (r *report) filtered(what string, err error) {
	switch err {
	case nil:
		r.escape("%s succeeded", what)
	case unix.EPERM, unix.ENOSYS:
		r.hold("%s: %s", what, errorName(err))
	default:
		r.escape("%s reached the kernel: %v", what, err)
	}
}

// systemCalls makes system calls that no action needs, with arguments that do no harm if they reach the kernel.
func systemCalls(r *report, _ []string) {
	try := func(name string, number int, args ...any) {
		fd, err := call(number, args...)
		r.filtered(name, err)
		if err == nil && fd > 2 {
			unix.Close(fd)
		}
	}
	none := []byte(nil)
	try("syslog", unix.SYS_SYSLOG, 10, none, 0)
	try("bpf", unix.SYS_BPF, 0, make([]byte, 128), 128)
	try("perf_event_open", unix.SYS_PERF_EVENT_OPEN, perfAttr(), 0, -1, -1, 0)
	try("userfaultfd", unix.SYS_USERFAULTFD, unix.O_CLOEXEC|1)
	try("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, make([]byte, 120))
	try("io_uring_enter", unix.SYS_IO_URING_ENTER, -1, 0, 0, 0, none, 0)
	try("io_uring_register", unix.SYS_IO_URING_REGISTER, -1, 0, none, 0)
	try("kexec_load", unix.SYS_KEXEC_LOAD, 0, 0, none, 0)
	try("kexec_file_load", unix.SYS_KEXEC_FILE_LOAD, -1, -1, 0, none, 0)
	try("init_module", unix.SYS_INIT_MODULE, none, 0, "")
	try("finit_module", unix.SYS_FINIT_MODULE, -1, "", 0)
	try("delete_module", unix.SYS_DELETE_MODULE, "cloister_no_such_module", 0)
	try("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, unix.AT_FDCWD, binary.NativeEndian.AppendUint64(nil, 8), 0)
	try("fanotify_init", unix.SYS_FANOTIFY_INIT, unix.FAN_CLOEXEC, 0)
	// An invalid time.
	never := bytes.Repeat([]byte{0xff}, 16)
	try("settimeofday", unix.SYS_SETTIMEOFDAY, never, none)
	try("clock_settime", unix.SYS_CLOCK_SETTIME, unix.CLOCK_REALTIME, never)
	try("sethostname", unix.SYS_SETHOSTNAME, "cloister", 8)
	try("setdomainname", unix.SYS_SETDOMAINNAME, "(none)", 6)
	try("reboot", unix.SYS_REBOOT, 0, 0, 0, none) // without the magic numbers
	try("swapon", unix.SYS_SWAPON, "/build/no-such-swap", 0)
	try("swapoff", unix.SYS_SWAPOFF, "/build/no-such-swap")
	try("acct", unix.SYS_ACCT, "/build/no-such-account")
	try("quotactl", unix.SYS_QUOTACTL, -1, "/build/no-such-device", 0, none)
	try("kcmp", unix.SYS_KCMP, os.Getpid(), os.Getpid(), 1, 0, 0)
	try("open_tree", unix.SYS_OPEN_TREE, unix.AT_FDCWD, "/tmp", unix.O_CLOEXEC)
	try("fspick", unix.SYS_FSPICK, unix.AT_FDCWD, "/tmp", 0)
	try("statmount", unix.SYS_STATMOUNT, none, none, 0, 0)
	try("listmount", unix.SYS_LISTMOUNT, none, none, 0, 0)
	try("clock_adjtime", unix.SYS_CLOCK_ADJTIME, unix.CLOCK_REALTIME, make([]byte, 256)) // a query
	try("move_pages", unix.SYS_MOVE_PAGES, 0, 0, none, none, none, 0)
	try("migrate_pages", unix.SYS_MIGRATE_PAGES, 0, 0, none, none)
	try("vhangup", unix.SYS_VHANGUP)
	try("personality READ_IMPLIES_EXEC", unix.SYS_PERSONALITY, 0x0400000)
	try("memfd_secret", unix.SYS_MEMFD_SECRET, 0)
	try("ioctl TIOCSTI", unix.SYS_IOCTL, 0, unix.TIOCSTI, "x")
	try("ioctl TIOCLINUX", unix.SYS_IOCTL, 0, 0x541c, "\x02")
	try("ioctl TIOCSTI with high bits", unix.SYS_IOCTL, 0, 1<<40|unix.TIOCSTI, "x")
	try("an unknown call", 1000)
	for name, c := range machineCalls {
		try(name, c[0], c[1], c[2], c[3])
	}
}

// hostCounters exhausts resources that all users of the machine share, or makes the kernel work for all of them.
func hostCounters(r *report, _ []string) {
	context := make([]byte, 8)
	_, err := call(unix.SYS_IO_SETUP, 1000, context)
	r.filtered("io_setup", err) // fs.aio-max-nr
	if err := unix.Syncfs(-1); err == nil {
		r.hold("syncfs: does nothing")
	} else {
		r.escape("syncfs reached the kernel: %v", err)
	}
	if pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		r.hold("socketpair: %v", err)
	} else {
		program := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		err := unix.SetsockoptSockFprog(pair[0], unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &program})
		r.filtered("SO_ATTACH_FILTER", err) // net.core.bpf_jit_limit
		unix.Close(pair[0])
		unix.Close(pair[1])
	}
	if s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		r.hold("socket: %v", err)
	} else {
		r.filtered("TCP_ULP", unix.SetsockoptString(s, unix.IPPROTO_TCP, unix.TCP_ULP, "tls"))
		unix.Close(s)
	}
}

// perfAttr describes a software counter of this process.
func perfAttr() []byte {
	b := make([]byte, 128)
	binary.NativeEndian.PutUint32(b, 1)                // PERF_TYPE_SOFTWARE
	binary.NativeEndian.PutUint32(b[4:], 128)          // size
	binary.NativeEndian.PutUint64(b[40:], 1<<5|1<<6|1) // disabled, without kernel and hypervisor
	return b
}
