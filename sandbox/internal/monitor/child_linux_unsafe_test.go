// SPDX-License-Identifier: Apache-2.0

//go:build linux

package monitor

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox/internal/seccomp"
)

// Environment variables that make the test binary a monitored process: how it is rooted, where its files are, what it
// does.
const (
	envRoot   = "WITNESS_TEST_ROOT"
	envBase   = "WITNESS_TEST_BASE"
	envAction = "WITNESS_TEST_DEED"
)

// The child's main goroutine stays in the first thread, whose name is that of the process.
func init() {
	if os.Getenv(envAction) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if action := os.Getenv(envAction); action != "" {
		if err := child(action); err != nil {
			fmt.Fprintln(os.Stderr, action+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child confines the process, installs a filter, sends its listener to the parent, waits, and performs an action. It
// prints what it observes.
func child(action string) error {
	base := os.Getenv(envBase)
	if err := os.Chdir(base); err != nil {
		return err
	}
	switch os.Getenv(envRoot) {
	case "pivot":
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		if err := unix.Mount(base, base, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind: %w", err)
		}
		if err := os.Chdir(base); err != nil {
			return err
		}
		if err := unix.PivotRoot(".", "."); err != nil {
			return fmt.Errorf("pivot root: %w", err)
		}
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("detach: %w", err)
		}
		base = ""
	case "chroot":
		if err := unix.Chroot(base); err != nil {
			return err
		}
		base = ""
	}
	if err := os.Chdir(base + "/in"); err != nil {
		return err
	}
	if action != "cost alone" {
		if err := install(); err != nil {
			return err
		}
	}
	if _, err := unix.Read(3, make([]byte, 1)); err != nil {
		return err
	}
	do, ok := actions[action]
	if !ok {
		return fmt.Errorf("no such action")
	}
	return do(base)
}

// install installs a filter in all threads that reports what the monitor records and a few refused calls, and sends the
// listener to the parent.
func install() error {
	jump := func(nr uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: nr, Jf: skip}
	}
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	prog := []unix.SockFilter{load(0)}
	const all = 1<<64 - 1
	for nr := range 600 {
		// Some calls are monitored for some arguments only.
		monitored := seccomp.Permitted(nr, [6]uint64{}) || seccomp.Permitted(nr, [6]uint64{all, all, all, all, all, all})
		if monitored || nr == unix.SYS_MOUNT || seccomp.Name(nr) == "arch_prctl" {
			prog = append(prog, jump(uint32(nr), 1), ret(unix.SECCOMP_RET_USER_NOTIF))
		}
	}
	prog = append(prog,
		jump(unix.SYS_SOCKET, 3), load(16), jump(unix.AF_VSOCK, 1), ret(unix.SECCOMP_RET_USER_NOTIF),
		ret(unix.SECCOMP_RET_ALLOW))
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	fprog := unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH,
		uintptr(unsafe.Pointer(&fprog)))
	if errno != 0 {
		return fmt.Errorf("install the filter: %w", errno)
	}
	if err := unix.Sendmsg(3, []byte("l"), unix.UnixRights(int(fd)), nil, 0); err != nil {
		return err
	}
	return unix.Close(int(fd))
}

// try makes a call and prints how it ended.
func try(what string, err error) {
	if err == nil {
		err = unix.Errno(0)
	}
	fmt.Printf("%s: %s\n", what, unix.ErrnoName(err.(unix.Errno)))
}

func create(p string) { try("create "+filepath.Base(p), open(p, unix.O_CREAT|unix.O_WRONLY)) }

func open(p string, flags int) error {
	fd, err := unix.Open(p, flags|unix.O_CLOEXEC, 0o644)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// openAt opens the path at an address of memory.
func openAt(address uintptr) error {
	fd, _, errno := unix.Syscall6(unix.SYS_OPENAT, uintptr(unix.AT_FDCWD&(1<<64-1)), address, unix.O_CREAT|unix.O_WRONLY, 0o644, 0, 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

// execveat executes an open file.
func execveat(fd int) error {
	empty := []byte{0}
	_, _, errno := unix.Syscall6(unix.SYS_EXECVEAT, uintptr(fd), address(empty), 0, 0, unix.AT_EMPTY_PATH, 0)
	return errno
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// begin makes the first call of a program again.
func begin() error {
	nr := 0
	for i := range 600 {
		if seccomp.Name(i) == "arch_prctl" {
			nr = i
		}
	}
	var thread uintptr
	const getFS, setFS = 0x1003, 0x1002
	if _, _, errno := unix.RawSyscall(uintptr(nr), getFS, uintptr(unsafe.Pointer(&thread)), 0); errno != 0 {
		return errno
	}
	_, _, errno := unix.RawSyscall(uintptr(nr), setFS, thread, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// actions by name; base precedes every path.
var actions = map[string]func(base string) error{
	"begin": func(string) error {
		try("begin", begin())
		return nil
	},
	"write": func(base string) error {
		create(base + "/in/absolute")
		create("relative")
		create("../in/up")
		create(base + "/out/fine")
		create(base + "/out/in/deeper")
		create(base + "/out/relative-link/through-relative")
		create(base + "/out/absolute-link/through-absolute")
		create(base + "/out/dangling")
		create(base + "/out/absent/../../in/nowhere")
		create(base + "/in/absent/below-absent")
		create("/proc/self/cwd/through-proc")
		dir, err := unix.Open(base+"/in", unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		fd, err := unix.Openat(dir, "by-descriptor", unix.O_CREAT|unix.O_RDWR, 0o644)
		if err != nil {
			return err
		}
		unix.Close(fd)
		create(fmt.Sprintf("/proc/self/fd/%d/through-descriptor", dir))
		how := unix.OpenHow{Flags: unix.O_CREAT | unix.O_WRONLY, Mode: 0o644}
		if fd, err = unix.Openat2(dir, "by-openat2", &how); err != nil {
			return err
		}
		unix.Close(fd)
		create(base + "/in/new\nline")
		return nil
	},
	"change": func(base string) error {
		// Calls that fail or succeed regardless of permission.
		try("read", open(base+"/in/keep", unix.O_RDONLY))
		try("read or create", open(base+"/in/keep", unix.O_CREAT|unix.O_RDONLY))
		try("create only", open(base+"/in/keep", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY))
		try("write a directory", open(base+"/in", unix.O_WRONLY))
		try("mkdir", unix.Mkdir(base+"/in", 0o755))
		try("mkdir .", unix.Mkdir(base+"/in/.", 0o755))
		try("unlink", unix.Unlink(base+"/in/absent"))
		try("rename", unix.Rename(base+"/in/absent", base+"/in/other"))
		try("pipe", open(base+"/in/pipe", unix.O_RDWR))
		try("/dev/tty", open("/dev/tty", unix.O_RDWR))
		try("/proc/self", open("/proc/self/fd/1", unix.O_WRONLY))
		// Changes.
		try("mkdir", unix.Mkdir(base+"/in/mkdir/", 0o755))
		try("symlink", unix.Symlink("x", base+"/in/symlink"))
		try("link", unix.Link(base+"/in/keep", base+"/in/link"))
		try("truncate", unix.Truncate("truncate", 0))
		try("chmod", unix.Chmod(base+"/in/chmod", 0o600))
		try("chown", unix.Lchown(base+"/in/chown", -1, -1))
		try("utime", unix.UtimesNanoAt(unix.AT_FDCWD, base+"/in/utime", nil, 0))
		try("unlink", unix.Unlink(base+"/in/unlink"))
		try("rmdir", unix.Rmdir(base+"/in/rmdir"))
		try("rename", unix.Rename(base+"/in/rename", base+"/in/renamed"))
		try("truncating", open(base+"/in/truncating", unix.O_RDONLY|unix.O_TRUNC))
		try("unnamed", open(base+"/in/unnamed", unix.O_TMPFILE|unix.O_WRONLY))
		return nil
	},
	"links": func(base string) error {
		out := base + "/out/"
		nofollow := func(p string) error { return unix.Fchownat(unix.AT_FDCWD, p, -1, -1, unix.AT_SYMLINK_NOFOLLOW) }
		try("of the link", nofollow(out+"keep"))
		try("new only", open(out+"dangling", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY))
		try("no link", open(out+"keep", unix.O_NOFOLLOW|unix.O_WRONLY))
		try("directory", nofollow(out+"relative-link/"))
		try("file", open(out+"keep", unix.O_WRONLY))
		create(out + "own-link/through-own")
		create(out + "loop")
		return nil
	},
	"memory": func(base string) error {
		const page = 4096
		at := func(length int, p string) []byte { // p ends where an unmapped page starts
			m, err := unix.Mmap(-1, 0, length+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
			if err != nil {
				panic(err)
			}
			if err := unix.Mprotect(m[length:], unix.PROT_NONE); err != nil {
				panic(err)
			}
			copy(m[length-len(p):], p)
			return m[length-len(p) : length]
		}
		try("end", openAt(address(at(page, base+"/in/end\x00"))))
		long := base + "/in/"
		for len(long) < page {
			long += "./"
		}
		try("crosses", openAt(address(at(3*page, long[:page-200]+"/crosses\x00"+string(make([]byte, page))))))
		try("unterminated", openAt(address(at(page, base+"/in/unterminated"))))
		try("too long", openAt(address(at(3*page, long+"/too-long\x00"))))
		try("unmapped", openAt(1<<40))
		try("nil", openAt(0))
		return nil
	},
	"threads": func(base string) error {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				runtime.LockOSThread()
				name := []byte("a thread\x00")
				_ = unix.Prctl(unix.PR_SET_NAME, address(name), 0, 0, 0)
				for range 200 {
					_ = open(base+"/in/thread"+strconv.Itoa(i), unix.O_CREAT|unix.O_WRONLY)
				}
			})
		}
		all.Wait()
		return nil
	},
	"many": func(base string) error {
		for i := range 10_000 {
			_ = open(base+"/absent/"+strconv.Itoa(i), unix.O_CREAT|unix.O_WRONLY)
		}
		return nil
	},
	"exec": func(base string) error {
		for _, p := range []string{"/bin1/tool", "/bin/tool", "/bin1/never", "/bin/never", "/bin1/tool"} {
			try(p, unix.Exec(base+p, []string{"x"}, nil))
		}
		return nil
	},
	"interpret": func(base string) error {
		for _, p := range []string{"/bin/script", "/out/script", "/bin/link", "/in/absent"} {
			try(p, unix.Exec(base+p, []string{"x"}, nil))
		}
		return nil
	},
	"descriptor": func(base string) error {
		fd, err := unix.Open(base+"/bin/tool", unix.O_PATH, 0)
		if err != nil {
			return err
		}
		try("execveat", execveat(fd))
		return nil
	},
	"refused": func(string) error {
		try("mount", unix.Mount("x", "/x", "tmpfs", 0, ""))
		_, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0)
		try("vsock", err)
		return nil
	},
	"connect": func(base string) error {
		connect := func(what string, family, kind int, to unix.Sockaddr) {
			s, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				fmt.Println(what, err)
				return
			}
			defer unix.Close(s)
			try(what, unix.Connect(s, to))
		}
		connect("tcp", unix.AF_INET, unix.SOCK_STREAM, &unix.SockaddrInet4{Port: 443, Addr: [4]byte{10, 0, 0, 1}})
		connect("udp", unix.AF_INET6, unix.SOCK_DGRAM, &unix.SockaddrInet6{Port: 53, Addr: [16]byte{0: 0xfd, 15: 1}})
		connect("loopback", unix.AF_INET, unix.SOCK_DGRAM, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
		mapped := [16]byte{10: 0xff, 11: 0xff, 12: 127, 15: 1}
		connect("mapped", unix.AF_INET6, unix.SOCK_DGRAM, &unix.SockaddrInet6{Port: 9, Addr: mapped})
		connect("docker", unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: "/run/absent-monitor.sock"})
		connect("nscd", unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: "/var/run/nscd/socket"})
		connect("own", unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: base + "/out/own.sock"})
		connect("abstract", unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: "@/run/x"})
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		try("sendto", unix.Sendto(s, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{10, 0, 0, 2}}))
		return nil
	},
	"read": func(base string) error {
		try("keep", open(base+"/in/keep", unix.O_RDONLY))
		try("through a link", open(base+"/out/relative-link/pipe2", unix.O_RDONLY))
		try("written", open(base+"/out/in/file", unix.O_RDONLY))
		try("output", open(base+"/out", unix.O_RDONLY))
		for _, p := range []string{"/usr/on-host", "/usr/nowhere", "/out/header.h", "/in/keep"} {
			var st unix.Stat_t
			try(p, unix.Stat(base+p, &st))
		}
		try("tool", unix.Exec(base+"/bin/tool", []string{"x"}, nil))
		return nil
	},
	"hang": func(base string) error {
		create(base + "/in/hang")
		create(base + "/in/after")
		return nil
	},
	"cost monitored": cost,
	"cost alone":     cost,
}

const costCalls = 20_000

// cost prints the time of one open for writing.
func cost(base string) error {
	start := time.Now()
	for range costCalls {
		if err := open(base+"/out/cost", unix.O_CREAT|unix.O_WRONLY); err != nil {
			return err
		}
	}
	fmt.Print(time.Since(start).Nanoseconds() / costCalls)
	return nil
}

// layout creates the files of the actions and returns the Config of a process that sees them below base.
func layout(t testing.TB, dir, base string) Config {
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	for _, d := range []string{"in/rmdir", "in/unnamed", "out/in", "bin", "usr"} {
		must(os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for _, f := range []string{
		"in/keep", "in/truncate", "in/chmod", "in/chown", "in/utime", "in/unlink", "in/rename",
		"in/truncating", "in/pipe2", "out/in/file", "bin/tool",
	} {
		must(os.WriteFile(filepath.Join(dir, f), nil, 0o644))
	}
	must(unix.Mkfifo(filepath.Join(dir, "in/pipe"), 0o644))
	for link, to := range map[string]string{
		"relative-link": "../in", "absolute-link": base + "/in", "dangling": "../in/dangling",
		"keep": "../in/keep", "own-link": "/proc/self/cwd", "loop": "loop",
	} {
		must(os.Symlink(to, filepath.Join(dir, "out", link)))
	}
	inside := func(paths ...string) []string {
		paths = slices.Clone(paths)
		for i := range paths {
			paths[i] = base + paths[i]
		}
		return paths
	}
	return Config{Writable: inside("/out"), Inputs: inside("/in", "/out/in", "/bin"), Loopback: true}
}
