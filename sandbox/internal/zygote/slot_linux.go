// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A slot is a process that carries one run at a time, and all of it is one thread: it forks pid 1 before a run is
// there, lays out what the run has beyond its base, and follows it to its end.
type slot struct {
	rootless bool
	command  int // the user of the host that the command is
	reaper   int // the one that its pid 1 becomes; -1 if rootless, where there is only one
	users    int // the descriptor of the user namespace of its runs
	cgroup   int // of the control group in which runs are born; -1 if it is this thread's
	proc     int // of the host's /proc
	host     int // of the mount namespace with the host's root
	stage    int // of one with the host's root in oldRoot; -1 until something of the host is wanted

	attached bool // mounts are copied only where they are attached, as by kernels before Linux 6.15

	base     *Base
	template int            // the mount namespace that each run gets a copy of; -1 if there is none
	private  bool           // the thread has a network that is not the host's
	looped   bool           // with a loopback interface that is up
	used     bool           // and a run had it
	left     bool           // and it may have left sockets there
	launch   *launch        // in memory that it shares with pid 1
	text     [16 << 10]byte // what was read last of /proc
	next     *child         // the run that waits to begin, or nil
	runs     int
}

// slotMain serves runs until its socket closes.
func slotMain() {
	// The thread that joins control groups must not be the main one (cgroup.Group.Join).
	go func() {
		runtime.LockOSThread()
		s, err := newSlot()
		if err != nil {
			reply(socketFD, err.Error(), -1)
			os.Exit(1)
		}
		for s.serve() {
		}
		os.Exit(0) // what still runs dies with this process
	}()
	select {}
}

// newSlot makes of this process, whose arguments are the mode of the zygote and a Slot, what a slot is.
func newSlot() (*slot, error) {
	// Descriptors that came along are this process's alone.
	if err := unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("close inherited descriptors: %w", err)
	}
	var want Slot
	if err := json.Unmarshal([]byte(os.Args[2]), &want); err != nil {
		return nil, err
	}
	s := &slot{rootless: os.Args[1] == Rootless, reaper: -1, cgroup: -1, stage: -1, template: -1}
	if !s.rootless {
		s.command = commandUser(want.Number)
		s.reaper = s.command + 1
	}
	var err error
	if s.users, err = userNamespace(s.command, UID, s.rootless, want.Nested); err != nil {
		return nil, fmt.Errorf("user namespace: %w", err)
	}
	if s.launch, err = newLaunch(); err != nil {
		return nil, fmt.Errorf("memory to launch from: %w", err)
	}
	if s.proc, err = unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("/proc: %w", err)
	}
	if s.host, err = s.mounts(); err != nil {
		return nil, err
	}
	s.attached = want.Attached || !CopiesDetached()
	if want.Cgroup {
		s.cgroup = socketFD + 1
	}
	for fd := socketFD + 1; fd <= socketFD+want.Tasks; fd++ {
		if _, err := unix.Write(fd, []byte("0")); err != nil {
			return nil, fmt.Errorf("join a control group: %w", err)
		}
		unix.Close(fd)
	}
	// A root and a working directory of its own.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("unshare the working directory: %w", err)
	}
	return s, nil
}

// CopiesDetached reports whether the kernel copies mounts that are attached nowhere, for whoever may mount.
func CopiesDetached() bool {
	mount, err := NewWorkspace(Room{})
	if err != nil {
		return false
	}
	defer unix.Close(mount)
	fd, err := unix.OpenTree(mount, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// mounts returns a descriptor of the thread's mount namespace.
func (s *slot) mounts() (int, error) {
	fd, err := unix.Openat(s.proc, "thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("mount namespace: %w", err)
	}
	return fd, nil
}

// collectEvery is after how many runs garbage is collected: little enough of it for a small process.
const collectEvery = 300

// serve does one request, and returns false if there are no more.
func (s *slot) serve() bool {
	if s.runs++; s.runs%collectEvery == 0 {
		runtime.GC()
	}
	// If it fails, so does the next run, which says why. With it goes what is left of the last run.
	_ = s.prepare()
	reply(socketFD, "", -1)
	req, fds, err := receive(socketFD)
	defer closeAll(fds)
	if err == ErrTruncated {
		reply(socketFD, "receive a run: "+err.Error(), -1) // whose control is closed with the rest
		return true
	}
	if err != nil || len(req) == 0 {
		return false
	}
	switch req[0] {
	case ReqRun:
		if len(fds) < fdMore {
			reply(socketFD, fmt.Sprintf("a run came with %d descriptors", len(fds)), -1)
			return true
		}
		s.run(req[1:], fds)
	case ReqFile:
		if len(fds) <= fdMore {
			reply(socketFD, fmt.Sprintf("a run in a file came with %d descriptors", len(fds)), -1)
			return true
		}
		// What cannot be read is no plan, and the run says so.
		text, _ := readFile(fds[0])
		s.run(text, fds[1:])
	case ReqNetwork:
		b, err := json.Marshal(Traffic{NoRoute: s.noRoute()})
		s.forget()
		if err == nil {
			err = s.newNetwork()
		}
		if err == nil {
			err = Send(socketFD, b)
		} else {
			reply(socketFD, err.Error(), -1)
		}
		return err == nil // without a network there are no more runs
	}
	return true
}

// run performs one run and says on control how it went. The caller closes fds.
func (s *slot) run(text []byte, fds []int) {
	control := fds[fdControl]
	c, err := s.begin(text, fds)
	if err == nil {
		defer s.end(c)
		err = c.started()
	}
	now := time.Now().UnixNano()
	cannot := isCannotExec(err)
	switch {
	case cannot != nil:
		_, _ = unix.Write(fds[fdStderr], []byte("cloister: "+cannot.text+"\n")) // nobody may be reading
		report(control, Report{Started: now})
		report(control, Report{Exited: &Exited{Code: cannot.code, At: now}})
	case errors.Is(err, errUnheard):
		report(control, Report{Lost: err.Error()})
	case err != nil:
		report(control, Report{Failed: fmt.Sprintf("%.2000s", err)}) // a packet has room for that
	default:
		if report(control, Report{Started: now}, c.init) != nil {
			report(control, Report{Started: now}) // the word matters more than the descriptor
		}
	}
	// The slot keeps no end of the run's pipes: their readers must see the end with the run's.
	closeAll(fds[fdStdin:])
	for i := fdStdin; i < len(fds); i++ {
		fds[i] = -1
	}
	usage := &Reaped{}
	if c != nil {
		if exited := c.exited(); exited != nil && err == nil {
			report(control, Report{Exited: exited})
		}
		full := c.full()
		if usage, err = c.reap(); err != nil {
			report(control, Report{Failed: "wait for pid 1: " + err.Error()})
			return
		}
		usage.Full = full
		if s.private && !s.socketsLeft() {
			s.left, usage.Gone = false, 1
		}
	}
	report(control, Report{Reaped: usage})
}

// readFile returns what a file in memory holds.
func readFile(fd int) ([]byte, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	b := make([]byte, st.Size)
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		if err != nil || m == 0 {
			return nil, fmt.Errorf("short plan: %d of %d bytes: %w", n, len(b), err)
		}
		n += m
	}
	return b, nil
}

// newNetwork gives the thread, and what it forks, a network namespace in which nothing has happened.
func (s *slot) newNetwork() error {
	if s.base == nil || s.base.HostNetwork {
		return nil // the zygote's
	}
	s.private = false
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if s.base.Loopback {
		if err := loopback("lo", nil); err != nil {
			return fmt.Errorf("loopback interface: %w", err)
		}
	}
	s.private, s.looped, s.used = true, s.base.Loopback, false
	return nil
}

// listen gives loopback the addresses of the plan and returns the sockets that the worker listens on there.
func listen(plan *Plan) ([]int, error) {
	for i, a := range plan.Addresses {
		if err := loopback("lo:"+strconv.Itoa(i), a[:]); err != nil {
			return nil, fmt.Errorf("address %v: %w", a, err)
		}
	}
	var fds []int
	for _, l := range plan.Listeners {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fds, fmt.Errorf("listen at %v: %w", l, err)
		}
		fds = append(fds, fd)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: l.Address, Port: int(l.Port)}); err != nil {
			return fds, fmt.Errorf("listen at %v: %w", l, err)
		}
		if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
			return fds, fmt.Errorf("listen at %v: %w", l, err)
		}
	}
	return fds, nil
}

// loopback gives an interface an address, if there is one, and brings it up (netdevice(7)).
func loopback(name string, address []byte) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	if address != nil {
		if err := ifr.SetInet4Addr(address); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(s, unix.SIOCSIFADDR, ifr); err != nil {
			return err
		}
		if err := ifr.SetInet4Addr([]byte{255, 255, 255, 255}); err != nil {
			return err
		}
		if err := unix.IoctlIfreq(s, unix.SIOCSIFNETMASK, ifr); err != nil {
			return err
		}
	}
	ifr.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}

// noRoute returns how many packets of this thread's network found no route (RFC 4293, ipIfStatsOutNoRoutes); 0 for
// the host's.
func (s *slot) noRoute() int64 {
	if !s.private {
		return 0
	}
	var n int64
	// A line of names, then one of values: "Ip: ... OutNoRoutes", "Ip: ... 0".
	var names []string
	for line := range strings.Lines(s.readProc("thread-self/net/snmp")) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "Ip:" {
			continue
		}
		if names == nil {
			names = f
			continue
		}
		for i, name := range names {
			if name == "OutNoRoutes" && i < len(f) {
				v, _ := strconv.ParseInt(f[i], 10, 64)
				n += v
			}
		}
	}
	for line := range strings.Lines(s.readProc("thread-self/net/snmp6")) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6OutNoRoutes" {
			v, _ := strconv.ParseInt(f[1], 10, 64)
			n += v
		}
	}
	return n
}

// socketsLeft reports whether this thread's network has unix sockets, though all is dead that could have them open: they
// are on their way through each other, and the kernel has not found out yet that they will not arrive.
func (s *slot) socketsLeft() bool {
	return strings.Count(s.readProc("thread-self/net/unix"), "\n") > 1 // a line of names
}

// readProc returns what a short file of the host's /proc holds, "" if it cannot be read.
func (s *slot) readProc(name string) string {
	fd, err := unix.Openat(s.proc, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	b := s.text[:]
	n := 0
	for n < len(b) {
		m, err := unix.Read(fd, b[n:])
		if err != nil || m == 0 {
			break
		}
		n += m
	}
	return string(b[:n])
}

// userNamespace returns the descriptor of a new user namespace with the one user uid, and group of the same number, who
// is user outside, and in which no further one can be made unless nested.
func userNamespace(user, uid int, rootless, nested bool) (int, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return -1, err
	}
	defer r.Close()
	defer w.Close()
	held, hold, err := os.Pipe()
	if err != nil {
		return -1, err
	}
	defer held.Close()
	defer hold.Close()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{nameHolder, strconv.FormatBool(nested)}, &syscall.ProcAttr{
		Env:   []string{"GOMAXPROCS=1"},
		Files: []uintptr{held.Fd(), w.Fd(), 2},
		Sys: &syscall.SysProcAttr{
			Cloneflags:                 unix.CLONE_NEWUSER,
			UidMappings:                []syscall.SysProcIDMap{{ContainerID: uid, HostID: user, Size: 1}},
			GidMappings:                []syscall.SysProcIDMap{{ContainerID: uid, HostID: user, Size: 1}},
			GidMappingsEnableSetgroups: !rootless,
			// What the holder writes needs it, and exec would take it away.
			AmbientCaps: []uintptr{unix.CAP_SYS_RESOURCE},
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		return -1, err
	}
	defer func() {
		hold.Close()
		var ws unix.WaitStatus
		for {
			if _, err := unix.Wait4(pid, &ws, 0, nil); err != unix.EINTR {
				return
			}
		}
	}()
	w.Close()
	var ready [1]byte
	if _, err := r.Read(ready[:]); err != nil {
		return -1, fmt.Errorf("its holder does not answer: %w", err)
	}
	return unix.Open(fmt.Sprintf("/proc/%d/ns/user", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// holderMain holds a user namespace until its stdin ends. Where the kernel does not let it forbid further ones, the
// filter of system calls still does.
func holderMain() {
	limit := func(name, n string) { _ = os.WriteFile("/proc/sys/user/max_"+name, []byte(n), 0) }
	if len(os.Args) == 2 && os.Args[1] == "false" {
		limit("user_namespaces", "0")
	}
	// What a run has of these counts for the user who owns its namespace as well: the host's root, as a rule.
	limit("inotify_instances", "16")
	limit("inotify_watches", "8192")
	limit("fanotify_groups", "0")
	_, _ = os.Stdout.Write([]byte("."))
	_, _ = os.Stdin.Read(make([]byte, 1))
}
