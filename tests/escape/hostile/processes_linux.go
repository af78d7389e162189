// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const self = "/proc/self/exe"

// start starts this program or a copy of it.
func start(program string, attr syscall.SysProcAttr, args ...string) (int, error) {
	return syscall.ForkExec(program, append([]string{"hostile"}, args...), &syscall.ProcAttr{
		Files: []uintptr{0, 1, 2}, Sys: &attr,
	})
}

// ended runs a program that prints nothing unless something is wrong, and reports its exit.
func ended(r *report, what, program string, args ...string) {
	pid, err := syscall.ForkExec(program, append([]string{"hostile"}, args...), &syscall.ProcAttr{Files: []uintptr{0, 2, 2}})
	if !r.must(what, err) {
		return
	}
	var ws unix.WaitStatus
	_, err = unix.Wait4(pid, &ws, 0, nil)
	switch {
	case !r.must(what, err):
	case ws.ExitStatus() == exitEscaped:
		r.escape("%s escaped", what)
	case ws.ExitStatus() != 0:
		r.stop("%s ended with %#x", what, ws)
	default:
		r.hold("%s gained nothing", what)
	}
}

// kill kills and reaps a child.
func kill(pid int) {
	_ = unix.Kill(pid, unix.SIGKILL)
	_, _ = unix.Wait4(pid, nil, 0, nil)
}

// sleep is a child that waits to be attacked, for at most a minute.
func sleep() {
	time.Sleep(time.Minute)
	os.Exit(0)
}

// userns tries every way to create a user namespace, in which it would be root.
func userns(r *report, _ []string) {
	try := func(what string, attr syscall.SysProcAttr) {
		pid, err := start(self, attr, "child-sleep")
		if err == nil {
			kill(pid)
		}
		// The runtime reports a refused clone and a refused unshare alike. ENOSPC is the kernel's limit of namespaces.
		r.refused(what, err)
	}
	try("clone into a user namespace", syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER})
	try("clone into user and mount namespaces", syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS})
	try("unshare the user namespace", syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWUSER})
	try("unshare user and network namespaces", syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNET})
	r.refused("clone3 into a user namespace", cloneThree(unix.CLONE_NEWUSER))
}

// mount tries to change the mount table with each call of the old and the new interface.
func mount(r *report, args []string) {
	if !r.must("make a directory", errors.Join(os.Mkdir("/tmp/at", 0o700), os.Mkdir("/tmp/at/old", 0o700))) {
		return
	}
	r.refused("mount tmpfs", unix.Mount("tmp", "/tmp/at", "tmpfs", 0, ""))
	r.refused("mount proc", unix.Mount("proc", "/tmp/at", "proc", 0, ""))
	r.refused("bind mount", unix.Mount("/tmp", "/tmp/at", "", unix.MS_BIND, ""))
	r.refused("make the root shared", unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""))
	r.refused("pivot_root", unix.PivotRoot("/tmp/at", "/tmp/at/old"), unix.EINVAL)
	_, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	r.refused("fsopen", err)
	_, err = unix.OpenTree(unix.AT_FDCWD, "/tmp", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	r.refused("open_tree", err)
	for _, in := range args {
		r.refused("make "+in+" writable", unix.Mount("", in, "", unix.MS_REMOUNT|unix.MS_BIND, ""))
		r.refused("make "+in+" writable by mount_setattr", unix.MountSetattr(unix.AT_FDCWD, in, 0, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}))
		r.refused("mount over "+in, unix.Mount("/build", in, "", unix.MS_BIND, ""))
		r.refused("unmount "+in, unix.Unmount(in, unix.MNT_DETACH))
		_, err := call(unix.SYS_MOVE_MOUNT, unix.AT_FDCWD, in, unix.AT_FDCWD, "/tmp/at", 0)
		r.refused("move "+in, err)
	}
	r.refused("chroot", unix.Chroot("/tmp/at"))
	// Root of a user namespace may mount in it.
	pid, err := start(self, syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}, "child-mount", "/tmp/at")
	var ws unix.WaitStatus
	if err == nil {
		if _, err = unix.Wait4(pid, &ws, 0, nil); ws.ExitStatus() == 0 {
			err = unix.EPERM
		}
	}
	r.refused("mount in a new user namespace", err)
}

// mountHere exits with 1 if it could mount.
func mountHere(_ *report, args []string) {
	if unix.Mount("tmp", args[0], "tmpfs", 0, "") == nil {
		os.Exit(exitEscaped)
	}
	os.Exit(0)
}

// setns tries to enter other namespaces.
func setns(r *report, _ []string) {
	for _, of := range []string{"self", "1"} {
		for _, kind := range []string{"user", "mnt", "pid", "net", "ipc", "uts", "cgroup"} {
			name := "/proc/" + of + "/ns/" + kind
			fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err == nil {
				// For its own user namespace, and with several threads, the error differs.
				err = unix.Setns(fd, 0)
				unix.Close(fd)
			}
			r.refused("enter "+name, err, unix.ENOENT, unix.EINVAL)
		}
	}
	fd, err := unix.PidfdOpen(1, 0)
	if err == nil {
		err = unix.Setns(fd, unix.CLONE_NEWNS|unix.CLONE_NEWNET)
	}
	r.refused("enter the namespaces of pid 1", err)
}

// ptrace tries to control and read pid 1 and a child.
func ptrace(r *report, _ []string) {
	runtime.LockOSThread()
	pid, err := start(self, syscall.SysProcAttr{}, "child-sleep")
	if !r.must("start a child", err) {
		return
	}
	defer kill(pid)
	for name, pid := range map[string]int{"pid 1": 1, "a child": pid} {
		r.refused("attach to "+name, unix.PtraceAttach(pid))
		_, err = call(unix.SYS_PTRACE, unix.PTRACE_SEIZE, pid, 0, 0)
		r.refused("seize "+name, err, unix.ESRCH)
		buffer := make([]byte, 8)
		local := []unix.Iovec{{Base: &buffer[0]}}
		local[0].SetLen(len(buffer))
		// The program is not position-independent, so its data has the same address in all processes.
		_, err = unix.ProcessVMReadv(pid, local, []unix.RemoteIovec{{Base: address(shared), Len: len(buffer)}}, 0)
		r.refused("read memory of "+name, err)
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			_, err = unix.PidfdGetfd(fd, 0, 0)
		}
		r.refused("take a descriptor of "+name, err)
	}
	traced, err := start(self, syscall.SysProcAttr{Ptrace: true}, "child-sleep")
	if err == nil {
		kill(traced)
	}
	r.refused("be traced by the parent", err)
}

var shared = []byte("the same in every copy of this program")

// initProcess tries to inspect and to kill pid 1, which was once outside the sandbox.
func initProcess(r *report, _ []string) {
	for _, name := range []string{"environ", "mem", "maps", "auxv", "stack", "syscall", "pagemap", "fd/0", "fdinfo/3", "map_files"} {
		f, err := os.Open("/proc/1/" + name)
		if err == nil {
			_, err = f.Read(make([]byte, 1))
			f.Close()
		}
		r.refused("read /proc/1/"+name, err, unix.ENOENT, unix.EIO, unix.EISDIR)
	}
	for _, name := range []string{"root", "cwd", "exe", "ns/mnt", "fd/3", "fd/4"} {
		_, err := os.Readlink("/proc/1/" + name)
		r.refused("read the link /proc/1/"+name, err, unix.ENOENT)
	}
	_, err := os.ReadDir("/proc/1/root/")
	r.refused("enter /proc/1/root", err, unix.ENOENT)
	for s := syscall.Signal(1); s <= 64; s++ {
		_ = unix.Kill(1, s) // it may succeed but must have no effect
	}
	if fd, err := unix.PidfdOpen(1, 0); err == nil {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
	// If pid 1 had been killed, this process would be dead.
	time.Sleep(50 * time.Millisecond)
	r.hold("pid 1 ignored all signals")
}

// others looks for foreign processes in /proc, and by the given process IDs of the host.
func others(r *report, args []string) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if !r.must("list processes", err) {
		return
	}
	for _, d := range dirs {
		if pid, _ := strconv.Atoi(filepath.Base(d)); pid != os.Getpid() && pid != 1 {
			r.escape("process %d is visible", pid)
		}
	}
	for _, a := range args {
		pid, err := strconv.Atoi(a)
		if !r.must("process id", err) {
			continue
		}
		// EPERM would mean that it exists.
		if err := unix.Kill(pid, 0); err != unix.ESRCH {
			r.escape("process %d is reachable: %v", pid, err)
		}
	}
	r.hold("no other process of %d", len(args))
}

// killAll sends SIGKILL to every reachable process. Never run it outside a pid namespace.
func killAll(r *report, _ []string) {
	pid, err := start(self, syscall.SysProcAttr{Setsid: true}, "child-sleep")
	if !r.must("start a child", err) || !r.must("kill -1", unix.Kill(-1, unix.SIGKILL)) {
		return
	}
	var ws unix.WaitStatus
	if _, err := unix.Wait4(pid, &ws, 0, nil); err != nil || ws.Signal() != unix.SIGKILL {
		r.stop("the child was not killed: %v, %#x", err, ws)
	}
	r.hold("only the run's own processes were killed")
}

// daemon leaves processes behind that detach from their parent and ignore signals. Their command lines contain the
// mark.
func daemon(r *report, args []string) {
	ready, theirs, err := os.Pipe()
	if !r.must("pipe", err) {
		return
	}
	_, err = syscall.ForkExec(self, []string{"hostile", "child-linger", args[0], "2"}, &syscall.ProcAttr{
		Files: []uintptr{0, theirs.Fd(), theirs.Fd()}, Sys: &syscall.SysProcAttr{Setsid: true},
	})
	if !r.must("start", err) {
		return
	}
	theirs.Close()
	alive := make([]byte, 3)
	for n := 0; n < len(alive); {
		m, err := ready.Read(alive[n:])
		if !r.must("wait for the daemons", err) {
			return
		}
		n += m
	}
	r.hold("left %d daemons", len(alive))
}

// linger is a process that was left behind, with a few children.
func linger(r *report, args []string) {
	signal.Ignore()
	more, err := strconv.Atoi(args[1])
	if !r.must("number", err) {
		return
	}
	if more > 0 {
		_, err := start(self, syscall.SysProcAttr{Setsid: true}, "child-linger", args[0], strconv.Itoa(more-1))
		if !r.must("start another", err) {
			return
		}
	}
	fmt.Print("x")
	time.Sleep(20 * time.Second)
	os.Exit(0)
}

// stubborn ignores signals.
func stubborn(r *report, _ []string) {
	signal.Ignore()
	fmt.Println("ready")
	time.Sleep(time.Minute)
	r.escape("nobody killed it")
}

// core dies in a way that makes the kernel dump core.
func core(r *report, _ []string) {
	for _, dir := range []string{"/build", "/tmp"} {
		if !r.must("directory", os.Chdir(dir)) {
			return
		}
		pid, err := start(self, syscall.SysProcAttr{}, "child-abort")
		if !r.must("start", err) {
			return
		}
		var ws unix.WaitStatus
		if _, err := unix.Wait4(pid, &ws, 0, nil); err != nil || !ws.Signaled() {
			r.stop("the child did not crash: %v, %#x", err, ws)
			return
		}
		if ws.CoreDump() {
			r.escape("the kernel dumped core")
		}
		if found, _ := filepath.Glob(dir + "/*core*"); len(found) > 0 {
			r.escape("%v was left", found)
		}
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &l); err != nil || l.Max > 1 {
		r.escape("the limit of core files is %d (%v)", l.Max, err)
	}
	r.hold("no core")
}

// abort is the process that crashes.
func abort() {
	if null, err := os.OpenFile("/dev/null", os.O_WRONLY, 0); err == nil {
		_ = unix.Dup3(int(null.Fd()), 2, 0) // discard the stacks
	}
	debug.SetTraceback("crash")
	panic("deliberate")
}

// identity looks for anything that distinguishes workers.
func identity(r *report, _ []string) {
	if uid, gid := os.Getuid(), os.Getgid(); uid != 1000 || gid != 1000 {
		r.escape("user %d, group %d", uid, gid)
	}
	for _, name := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		if b, err := os.ReadFile(name); r.must(name, err) && !slices.Equal(strings.Fields(string(b)), []string{"1000", "0", "1"}) {
			r.escape("%s is %s", name, strings.TrimSpace(string(b)))
		}
	}
	// If a host cannot empty the list, its entries have no names in the sandbox.
	if groups, err := os.Getgroups(); r.must("groups", err) && slices.ContainsFunc(groups, func(g int) bool { return g != 65534 && g != 1000 }) {
		r.escape("groups %v", groups)
	}
	if name, err := os.Hostname(); err != nil || name != "cloister" {
		r.escape("host name %q", name)
	}
	if env := os.Environ(); !slices.Equal(env, []string{"A=1", "PATH=/usr/bin:/bin"}) {
		r.escape("environment %q", env)
	}
	if fds, err := os.ReadDir("/proc/self/fd"); r.must("descriptors", err) {
		for _, e := range fds {
			to, err := os.Readlink("/proc/self/fd/" + e.Name())
			if n, _ := strconv.Atoi(e.Name()); n > 2 && err == nil && to != "anon_inode:[eventpoll]" && to != "anon_inode:[eventfd]" {
				r.escape("descriptor %s is %s", e.Name(), to)
			}
		}
	}
	if n, err := os.Stdin.Read(make([]byte, 1)); n != 0 || err == nil {
		r.escape("stdin is not empty")
	}
	if fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		unix.Close(fd)
		r.escape("there is a terminal")
	}
	if sid, err := unix.Getsid(0); err != nil || sid != os.Getpid() {
		r.escape("the session leader is %d", sid)
	}
	r.hold("workers cannot be distinguished")
}

// capabilities looks for a capability in any set.
func capabilities(r *report, _ []string) {
	status, err := os.ReadFile("/proc/self/status")
	if !r.must("status", err) {
		return
	}
	fields := fields(string(status))
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if v := fields[set]; v != "0000000000000000" {
			r.escape("%s is %s", set, v)
		}
	}
	if fields["NoNewPrivs"] != "1" {
		r.escape("no_new_privs is %s", fields["NoNewPrivs"])
	}
	r.hold("all five sets are empty")
}
