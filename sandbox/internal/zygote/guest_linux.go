// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Guest is what pid 1 of a container does: it mounts what gVisor's kernel provides itself, limits the command,
// starts it as an ordinary user and reports its end. A Guest in JSON comes first on GuestIn, then the word WordStart, and
// then the word WordTerm for each request to end. Reports in JSON go to GuestOut.
type Guest struct {
	Args, Env []string
	Dir       string
	Temps     []Op // of the kind OpTmpfs
	// Writable are the directories of the root that the run may change. ReadOnly are paths inside them that it may not:
	// their mounts outside are read-only, but gVisor would create FIFOs and sockets of its own there.
	Writable, ReadOnly []string
	Full               []string // directories of which Reaped.Full says whether they are full
	// Processes bounds the processes and threads of the command; -1 is unlimited.
	Processes int64
	Umask     int
	UID       int
	Domain    string
	Loopback  bool // keep the addresses of the loopback interface
	Filter    []byte
}

// guestMain runs the Guest. The worker ends the container after the last report.
func guestMain() {
	in := json.NewDecoder(os.NewFile(GuestIn, "in"))
	out := json.NewEncoder(os.NewFile(GuestOut, "out"))
	var g Guest
	err := in.Decode(&g)
	if err == nil {
		err = g.run(in, out)
	}
	if err != nil {
		_ = out.Encode(Report{Failed: err.Error()}) // the worker may be gone
	}
	for {
		_ = unix.Pause()
	}
}

func (g *Guest) run(in *json.Decoder, out *json.Encoder) error {
	for fd := GuestIn; fd <= GuestStderr; fd++ {
		unix.CloseOnExec(fd)
	}
	unix.Umask(0)
	for _, fd := range []int{GuestStdin, GuestStdout, GuestStderr} {
		// The run owns its pipes, so that it can open /dev/stdout.
		if err := unix.Fchown(fd, g.UID, g.UID); err != nil {
			return fmt.Errorf("owner of a standard stream: %w", err)
		}
	}
	group, err := g.setUp()
	if err != nil {
		return err
	}
	// The worker must know first: only from then on does a stop grant the command its grace period.
	if err := out.Encode(Report{Started: time.Now().UnixNano()}); err != nil {
		return err
	}
	var word string
	if err := in.Decode(&word); err != nil || word != WordStart {
		return fmt.Errorf("got %q, %v instead of the word to start", word, err)
	}
	pid, err := g.start(group)
	cannot := isCannotExec(err)
	if err != nil && cannot == nil {
		return err
	}
	if cannot != nil {
		_, _ = unix.Write(GuestStderr, []byte("cloister: "+cannot.text+"\n")) // the reader may be gone
	}
	closeAll([]int{GuestStdin, GuestStdout, GuestStderr})
	exited := &Exited{}
	if cannot != nil {
		exited.Code, exited.Missing = cannot.code, cannot.missing
	} else {
		go func() {
			for word := ""; in.Decode(&word) == nil; {
				_ = unix.Kill(-1, unix.SIGTERM) // fails if nobody is left
			}
		}()
		if err := g.wait(pid, exited); err != nil {
			return err
		}
	}
	exited.At = time.Now().UnixNano()
	_ = unix.Kill(-1, unix.SIGKILL) // likewise
	full := g.full()
	unix.Sync() // what the kernel has not passed on to the gofer
	return errors.Join(out.Encode(Report{Exited: exited}), out.Encode(Report{Reaped: &Reaped{Full: full}}))
}

// setUp completes the root, moves into it, and returns the file through which a thread joins the command's control
// group, or nil.
func (g *Guest) setUp() (*os.File, error) {
	if err := g.lock(); err != nil {
		return nil, err
	}
	if err := makeDevices(guestRoot + "/dev"); err != nil {
		return nil, fmt.Errorf("/dev: %w", err)
	}
	if err := unix.Mount("proc", guestRoot+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return nil, fmt.Errorf("/proc: %w", err)
	}
	for _, o := range g.Temps {
		data := fmt.Sprintf("mode=1777,size=%d", o.Bytes+int64(os.Getpagesize()))
		if err := unix.Mount("tmp", guestRoot+o.Target, "tmpfs", uintptr(o.Attrs), data); err != nil {
			return nil, fmt.Errorf("%s: %w", o.Target, err)
		}
	}
	if err := unix.Mount("", guestRoot+"/dev", "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NOEXEC, ""); err != nil {
		return nil, fmt.Errorf("/dev: %w", err)
	}
	group, err := g.limitProcesses()
	if err != nil {
		return nil, fmt.Errorf("limit of processes: %w", err)
	}
	if !g.Loopback {
		if err := removeLoopback(); err != nil {
			return nil, fmt.Errorf("loopback interface: %w", err)
		}
	}
	if err := unix.Chroot(guestRoot); err != nil {
		return nil, fmt.Errorf("root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return nil, err
	}
	return group, nil
}

// lock makes the root read-only in gVisor's kernel as well.
func (g *Guest) lock() error {
	// bind makes a directory a mount, and restrict sets its attributes.
	bind := func(dir string) error {
		if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("%s: bind: %w", dir, err)
		}
		return nil
	}
	restrict := func(dir string, flags uintptr) error {
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_NOSUID|unix.MS_NODEV|flags, ""); err != nil {
			return fmt.Errorf("%s: restrict the mount: %w", dir, err)
		}
		return nil
	}
	if err := bind(guestRoot); err != nil {
		return err
	}
	for _, dir := range g.Writable {
		if err := errors.Join(bind(guestRoot+dir), restrict(guestRoot+dir, 0)); err != nil {
			return err
		}
	}
	for _, p := range g.ReadOnly {
		if st, err := os.Lstat(guestRoot + p); err != nil || !st.IsDir() {
			continue // nothing can be created in a file
		}
		if err := errors.Join(bind(guestRoot+p), restrict(guestRoot+p, unix.MS_RDONLY)); err != nil {
			return err
		}
	}
	return restrict(guestRoot, unix.MS_RDONLY)
}

// makeDevices fills the directory of the devices, which are gVisor's own.
func makeDevices(dir string) error {
	if err := unix.Mount("dev", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755"); err != nil {
		return err
	}
	for name, minor := range map[string]uint32{"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9} {
		if err := unix.Mknod(dir+"/"+name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, minor))); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for name, fd := range map[string]string{"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"} {
		if err := os.Symlink("/proc/self/fd"+fd, dir+"/"+name); err != nil {
			return err
		}
	}
	return os.Mkdir(dir+"/shm", 0o755)
}

// limitProcesses makes a control group of gVisor's kernel that permits the command its processes, and the thread that
// starts it.
func (g *Guest) limitProcesses() (*os.File, error) {
	if g.Processes < 0 {
		return nil, nil
	}
	const dir = "/tmp/pids"
	if err := unix.Mount("tmp", "/tmp", "tmpfs", 0, ""); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	if err := unix.Mount("pids", dir, "cgroup", 0, "pids"); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir+"/run", 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(dir+"/run/pids.max", []byte(strconv.FormatInt(g.Processes+1, 10)), 0); err != nil {
		return nil, err
	}
	return os.OpenFile(dir+"/run/tasks", os.O_WRONLY, 0)
}

// start starts the command from a thread of its own, which has the command's restrictions.
func (g *Guest) start(group *os.File) (pid int, err error) {
	program, err := findProgram(&Plan{Args: g.Args, Env: g.Env, Dir: g.Dir})
	if err != nil {
		return 0, err
	}
	if err := unix.Setdomainname([]byte(g.Domain)); err != nil {
		return 0, fmt.Errorf("domain name: %w", err)
	}
	unix.Umask(g.Umask)
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocks: the thread ends with the goroutine
		if group != nil {
			if _, err = group.WriteString("0"); err != nil {
				return
			}
		}
		for c := uintptr(0); c <= unix.CAP_LAST_CAP; c++ {
			if err = unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); err != nil && err != unix.EINVAL { // one that gVisor lacks
				err = fmt.Errorf("capability %d: %w", c, err)
				return
			}
		}
		if err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return
		}
		if err = filterThread(g.Filter); err != nil {
			return
		}
		pid, err = syscall.ForkExec(program, g.Args, &syscall.ProcAttr{
			Dir: g.Dir, Env: g.Env, Files: []uintptr{GuestStdin, GuestStdout, GuestStderr},
			Sys: &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uint32(g.UID), Gid: uint32(g.UID)}},
		})
	}()
	<-done
	return pid, explainExec(g.Args[0], err)
}

// explainExec returns a *cannotExec if err is that of an execution.
func explainExec(name string, err error) error {
	var errno syscall.Errno
	switch {
	case !errors.As(err, &errno):
		return err
	case errno == syscall.ENOENT:
		return &cannotExec{127, fmt.Sprintf("%s: its interpreter was not found in the sandbox", name), MissingInterpreter}
	case slices.Contains(execErrors, errno):
		return &cannotExec{126, fmt.Sprintf("%s: cannot be executed: %v", name, errno), ""}
	}
	return err
}

// wait reaps processes until the command has ended.
func (g *Guest) wait(command int, exited *Exited) error {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		if err == unix.EINTR || err == nil && pid != command {
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the command: %w", err)
		}
		if exited.Code = ws.ExitStatus(); ws.Signaled() {
			exited.Code, exited.Signal = 0, int(ws.Signal())
		}
		return nil
	}
}

// full returns those of g.Full that are full.
func (g *Guest) full() []string {
	var full []string
	for _, dir := range g.Full {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Blocks > 0 && st.Bavail == 0 {
			full = append(full, dir)
		}
	}
	return full
}

// removeLoopback removes the addresses of the loopback interface (rtnetlink(7)): nothing is reachable then.
func removeLoopback() error {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	for _, a := range []struct {
		family byte
		prefix byte
		addr   []byte
	}{
		{unix.AF_INET, 8, []byte{127, 0, 0, 1}},
		{unix.AF_INET6, 128, append(make([]byte, 15), 1)},
	} {
		order := binary.NativeEndian
		msg := order.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg+unix.SizeofRtAttr+len(a.addr)))
		msg = order.AppendUint16(msg, unix.RTM_DELADDR)
		msg = order.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
		msg = append(msg, 0, 0, 0, 0, 0, 0, 0, 0)   // sequence and port
		msg = append(msg, a.family, a.prefix, 0, 0) // ifaddrmsg: family, prefix, flags, scope
		msg = order.AppendUint32(msg, 1)            // the interface, which is the only one
		msg = order.AppendUint16(msg, uint16(unix.SizeofRtAttr+len(a.addr)))
		msg = order.AppendUint16(msg, unix.IFA_LOCAL)
		msg = append(msg, a.addr...)
		if err := unix.Sendto(s, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
			return err
		}
		answer := make([]byte, 4096)
		n, _, err := unix.Recvfrom(s, answer, 0)
		if err != nil {
			return err
		}
		if n < unix.SizeofNlMsghdr+4 {
			return errors.New("short answer")
		}
		if e := int32(order.Uint32(answer[unix.SizeofNlMsghdr:])); e != 0 {
			return syscall.Errno(-e)
		}
	}
	return nil
}
