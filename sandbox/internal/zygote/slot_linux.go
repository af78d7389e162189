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

// A slot is a process with one thread that holds one run at a time: it forks pid 1 before the run is known, adds to the
// base what the run needs, and follows the run to its end.
type slot struct {
	rootless   bool
	command    int // host user of the command
	reaper     int // host user of pid 1; -1 if rootless
	users      int // user namespace of its runs
	cgroup     int // version 2 control group of its runs; -1 if it is this thread's
	proc       int // the host's /proc
	hostMounts int // mount namespace with the host's root
	staging    int // mount namespace with the host's root in oldRoot; -1 until needed

	root tree // of the template that is made next, if its base has one; fd is -1 otherwise

	attached bool // the kernel copies attached mounts only (before Linux 6.15)

	base        *Base
	template    int     // mount namespace that each run gets a copy of; -1 before the first
	ownNetwork  bool    // the thread has its own network
	loopbackUp  bool    // its loopback interface is up
	networkUsed bool    // a run had it
	resolving   bool    // it has a socket for lookups
	residue     bool    // the run may have left sockets in it
	launch      *launch // in memory shared with pid 1
	oom         *oomScore
	text        [16 << 10]byte // buffer for files in /proc
	pending     *child         // the next run's pid 1, or nil
	unwritable  []string       // see Report, of the current run
	runs        int
}

// slotMain serves runs until its socket closes. It does not return.
func slotMain() {
	// The thread that joins control groups must not be the main thread (cgroup.Group.Join). A goroutine that gets the
	// main thread keeps it locked and starts another goroutine.
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			slotMain()
		}
		s, err := newSlot()
		if err != nil {
			reply(err.Error(), -1)
			os.Exit(1)
		}
		for s.serve() {
		}
		syscall.Exit(0) // what still runs dies with this process
	}()
	select {}
}

// newSlot sets up this process as a slot. Its arguments are the zygote's mode and a Slot.
func newSlot() (*slot, error) {
	// Do not pass on descriptors.
	if err := unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("close inherited descriptors: %w", err)
	}
	var want Slot
	if err := json.Unmarshal([]byte(os.Args[2]), &want); err != nil {
		return nil, err
	}
	s := &slot{rootless: os.Args[1] == Rootless, reaper: -1, cgroup: -1, staging: -1, template: -1, root: tree{fd: -1}}
	if !s.rootless {
		s.command = CommandUser(want.Number)
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
	if s.oom, err = newOOMScore(s.proc); err != nil {
		return nil, err
	}
	if s.hostMounts, err = s.mounts(); err != nil {
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
	// Do not share the root and working directory.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("unshare the working directory: %w", err)
	}
	return s, nil
}

// CopiesDetached reports whether the kernel copies mounts that are attached nowhere. It needs the right to mount.
func CopiesDetached() bool {
	mount, err := NewWorkspace(WorkspaceSize{})
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

// collectEvery is the number of runs between garbage collections: rare enough not to matter, often enough to stay
// small.
const collectEvery = 300

// serve handles one request and returns false if there are no more.
func (s *slot) serve() bool {
	if s.runs++; s.runs%collectEvery == 0 {
		runtime.GC()
	}
	// If it fails, so does the next run, which reports why. It also removes what is left of the last run.
	_ = s.prepare()
	reply("", -1)
	req, fds, err := receive(socketFD)
	defer closeAll(fds)
	if errors.Is(err, ErrTruncated) {
		reply("receive a run: "+err.Error(), -1) // its control is closed with the rest
		return true
	}
	if err != nil || len(req) == 0 {
		return false
	}
	switch req[0] {
	case ReqRun:
		if len(fds) < fdMore {
			reply(fmt.Sprintf("a run came with %d descriptors", len(fds)), -1)
			return true
		}
		s.run(req[1:], fds)
	case ReqFile:
		if len(fds) <= fdMore {
			reply(fmt.Sprintf("a run in a file came with %d descriptors", len(fds)), -1)
			return true
		}
		// An unreadable plan fails to decode.
		text, _ := readFile(fds[0])
		s.run(text, fds[1:])
	case ReqNetwork:
		b, err := json.Marshal(Traffic{NoRoute: s.noRoute()})
		s.discardPending()
		if err == nil {
			err = s.newNetwork()
		}
		if err == nil {
			err = Send(socketFD, b)
		} else {
			reply(err.Error(), -1)
		}
		return err == nil // without a network the slot is useless
	}
	return true
}

// run executes one run and reports on control. The caller closes fds.
func (s *slot) run(text []byte, fds []int) {
	control := fds[fdControl]
	c, err := s.start(text, fds)
	if err == nil {
		defer s.finish(c)
		err = c.waitStarted()
	}
	now := time.Now().UnixNano()
	cannot := isCannotExec(err)
	switch {
	case cannot != nil:
		_, _ = unix.Write(fds[fdStderr], []byte("cloister: "+cannot.text+"\n")) // the reader may be gone
		report(control, Report{Started: now})
		report(control, Report{Exited: &Exited{Code: cannot.code, At: now, Missing: cannot.missing}})
	case errors.Is(err, errInitDied):
		report(control, Report{Lost: err.Error()})
	case err != nil:
		report(control, Report{Failed: fmt.Sprintf("%.2000s", err)}) // a packet has room for that
	default:
		if report(control, Report{Started: now}, c.init) != nil {
			report(control, Report{Started: now}) // the report matters more than the descriptor
		}
	}
	// The slot must not keep the run's pipes open: their readers wait for the end.
	closeAll(fds[fdStdin:])
	for i := fdStdin; i < len(fds); i++ {
		fds[i] = -1
	}
	usage := &Reaped{}
	if c != nil {
		if exited := c.waitExited(); exited != nil && err == nil {
			report(control, Report{Exited: exited})
		}
		full := c.fullTemps()
		if usage, err = c.reap(); err != nil {
			report(control, Report{Failed: "wait for pid 1: " + err.Error()})
			return
		}
		usage.Full = full
		if s.ownNetwork && !s.socketsLeft() {
			s.residue, usage.Released = false, 1
		}
	}
	report(control, Report{Reaped: usage})
}

// readFile returns the contents of a file in memory.
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

// newNetwork gives the thread, and what it forks, an unused network namespace.
func (s *slot) newNetwork() error {
	s.ownNetwork = false
	if s.base == nil || s.base.HostNetwork {
		return nil // the next run makes it, or has the zygote's
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if s.base.Loopback {
		if err := loopback("lo", nil); err != nil {
			return fmt.Errorf("loopback interface: %w", err)
		}
	}
	s.ownNetwork, s.loopbackUp, s.networkUsed, s.resolving = true, s.base.Loopback, false, false
	return nil
}

// listen adds the plan's addresses to loopback and returns the sockets on which the worker listens there.
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

// resolve gives the worker the sockets of Report.Resolving for monitored runs, unless it has them in this network.
// Elsewhere lookups must fail at once instead of waiting for an answer.
func (s *slot) resolve(control int) error {
	if s.resolving || !s.ownNetwork || !s.base.Loopback || !s.base.Notify {
		return nil
	}
	fd, err := resolverSocket()
	if err != nil {
		return fmt.Errorf("socket for lookups: %w", err)
	}
	defer unix.Close(fd)
	sockets, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return fmt.Errorf("socket that finds others: %w", err)
	}
	defer unix.Close(sockets)
	// The run can read this number, which would otherwise be the worker's process ID.
	if err := unix.Bind(sockets, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Pid: 1}); err != nil {
		return fmt.Errorf("socket that finds others: %w", err)
	}
	s.resolving = true
	return report(control, Report{Resolving: true}, fd, sockets)
}

// resolverSocket returns a socket at port 53 of every address of the thread's network, which receives the address that
// a datagram was sent to.
func resolverSocket() (int, error) {
	const flags = unix.SOCK_DGRAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	var any unix.Sockaddr = &unix.SockaddrInet6{Port: 53}
	level, option := unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	fd, err := unix.Socket(unix.AF_INET6, flags, 0)
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	} else { // the kernel has no IPv6
		any, level, option = &unix.SockaddrInet4{Port: 53}, unix.IPPROTO_IP, unix.IP_PKTINFO
		fd, err = unix.Socket(unix.AF_INET, flags, 0)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, level, option, 1)
	}
	if err == nil {
		err = unix.Bind(fd, any)
	}
	if err != nil {
		closeAll([]int{fd})
		return -1, err
	}
	return fd, nil
}

// loopback sets an interface's address, if not nil, and brings it up (netdevice(7)).
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

// noRoute returns how many packets of this thread's network found no route (RFC 4293, ipIfStatsOutNoRoutes); 0 for the
// host's network.
func (s *slot) noRoute() int64 {
	if !s.ownNetwork {
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

// socketsLeft reports whether this thread's network has unix sockets although every process that could hold them is
// dead: they are in flight inside each other, and the kernel has not collected them yet.
func (s *slot) socketsLeft() bool {
	return strings.Count(s.readProc("thread-self/net/unix"), "\n") > 1 // a header line
}

// readProc returns a short file of the host's /proc, "" if it is unreadable.
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

// userNamespace returns the descriptor of a new user namespace with one user uid, and a group of the same number, who
// is user outside. Without nested no further namespace can be created in it.
//
// Its uid_map shows the user's ID in the parent namespace, which is 0 for every slot: without privileges, the parent is
// the zygote's namespace; otherwise it is a namespace that exists only for this.
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
	args := []string{nameHolder, strconv.Itoa(uid), strconv.FormatBool(nested)}
	attr := &syscall.SysProcAttr{UidMappings: idMap(uid, user), GidMappings: idMap(uid, user)}
	if !rootless {
		args[0] = nameOuterHolder
		// The creator of a namespace must be mapped in its parent: here as user 1.
		attr.UidMappings = append(idMap(0, user), idMap(1, os.Geteuid())...)
		attr.GidMappings = append(idMap(0, user), idMap(1, os.Getegid())...)
		attr.AmbientCaps = []uintptr{unix.CAP_SETUID, unix.CAP_SETGID, unix.CAP_SETFCAP}
	}
	pid, err := startHolder(args, attr, held, w)
	if err != nil {
		return -1, err
	}
	defer func() {
		hold.Close()
		_ = waitFor(pid)
	}()
	w.Close()
	b := make([]byte, 32)
	n, err := r.Read(b)
	if err != nil {
		return -1, fmt.Errorf("its holder process does not answer: %w", err)
	}
	return unix.Open(fmt.Sprintf("/proc/%s/ns/user", b[:n]), unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// idMap maps one ID.
func idMap(inside, outside int) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: inside, HostID: outside, Size: 1}}
}

// startHolder starts this program in a new user namespace.
func startHolder(args []string, attr *syscall.SysProcAttr, stdin, stdout *os.File) (int, error) {
	attr.Cloneflags = unix.CLONE_NEWUSER
	attr.AmbientCaps = append(attr.AmbientCaps, unix.CAP_SYS_RESOURCE) // the holder's writes need it, and exec would drop it
	attr.Pdeathsig = syscall.SIGKILL
	return syscall.ForkExec("/proc/self/exe", args, &syscall.ProcAttr{
		Env: []string{"GOMAXPROCS=1"}, Files: []uintptr{stdin.Fd(), stdout.Fd(), 2}, Sys: attr,
	})
}

// waitFor waits for the end of a child.
func waitFor(pid int) error {
	for {
		if _, err := unix.Wait4(pid, nil, 0, nil); err != unix.EINTR {
			return err
		}
	}
}

// outerHolderMain starts the holder, whose user is user 0 here.
func outerHolderMain() {
	uid, err := strconv.Atoi(os.Args[1])
	if err == nil {
		var pid int
		attr := &syscall.SysProcAttr{UidMappings: idMap(uid, 0), GidMappings: idMap(uid, 0)}
		args := append([]string{nameHolder}, os.Args[1:]...)
		if pid, err = startHolder(args, attr, os.Stdin, os.Stdout); err == nil {
			err = waitFor(pid)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "user namespace:", err)
	}
}

// holderMain holds a user namespace until its stdin ends, and prints its process ID. If the kernel does not let it
// forbid further namespaces, the system call filter still does. probeMain checks whether it accepted the limits of
// inotify.
func holderMain() {
	limit := func(name, n string) { _ = os.WriteFile("/proc/sys/user/max_"+name, []byte(n), 0) }
	if os.Args[2] == "false" {
		limit("user_namespaces", "0")
	}
	// These count for the owner of the run's namespace as well, usually the host's root.
	limit("inotify_instances", strconv.Itoa(MaxInotify))
	limit("inotify_watches", "8192")
	limit("fanotify_groups", "0")
	_, _ = os.Stdout.WriteString(strconv.Itoa(os.Getpid()))
	_, _ = os.Stdin.Read(make([]byte, 1))
}
