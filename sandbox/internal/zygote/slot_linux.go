// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A slot is a thread that carries one run at a time: it makes the run's network, mounts and root around
// itself, forks, and returns to the zygote's mounts. It lives as long as the zygote, and a run no
// longer.
type slot struct {
	z       *zygote
	command int // the user of the host that the command is
	reaper  int // the one that its pid 1 becomes; -1 if rootless, where there is only one
	users   int // the descriptor of the user namespace of its runs
	fresh   bool
	work    chan []int
}

// newSlot starts a slot, whose thread joins the control groups of these files.
func (z *zygote) newSlot(want Slot, tasks []int) error {
	if want.Number < 0 || want.Number >= MaxSlots || z.slots[want.Number] != nil {
		return fmt.Errorf("there is no slot %d to be made", want.Number)
	}
	// A slot is asked for one run at a time: the one who asks never waits.
	s := &slot{z: z, reaper: -1, work: make(chan []int, 1)}
	if !z.rootless {
		s.command = FirstUID + 2*want.Number
		s.reaper = s.command + 1
	}
	var err error
	if s.users, err = userNamespace(s.command, z.rootless, want.Nested); err != nil {
		return fmt.Errorf("user namespace: %w", err)
	}
	ready := make(chan error)
	go s.serve(tasks, ready)
	if err := <-ready; err != nil {
		unix.Close(s.users)
		return err
	}
	z.slots[want.Number] = s
	return nil
}

// serve is the slot's thread. It is never unlocked.
func (s *slot) serve(tasks []int, ready chan<- error) {
	runtime.LockOSThread()
	err := s.join(tasks)
	ready <- err
	if err != nil {
		return
	}
	for fds := range s.work {
		private := s.run(fds)
		closeAll(fds)
		if private {
			// Made ahead of need: it is the slowest part of a run. If it fails, so does the next run.
			_ = s.newNetwork()
		}
	}
}

// join gives the thread control groups and a root and working directory of its own.
func (s *slot) join(tasks []int) error {
	for _, fd := range tasks {
		if _, err := unix.Write(fd, []byte("0")); err != nil {
			return fmt.Errorf("join a control group: %w", err)
		}
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	return nil
}

// newNetwork gives the thread, and what it forks, a network namespace in which nothing has happened.
func (s *slot) newNetwork() error {
	if s.fresh {
		return nil
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	s.fresh = true
	return nil
}

// run performs one run: it says on control how it went, and returns whether the run had a network of its own. The
// caller closes fds.
func (s *slot) run(fds []int) (private bool) {
	control := fds[fdControl]
	fail := func(err error) { report(control, Report{Failed: fmt.Sprintf("%.2000s", err)}) } // a packet has room for that
	var plan Plan
	if err := readPlan(fds[fdPlan], &plan); err != nil {
		fail(fmt.Errorf("read plan: %w", err))
		return private
	}
	private = !plan.HostNetwork
	listeners, err := s.network(&plan)
	defer closeAll(listeners)
	if err != nil {
		fail(err)
		return private
	}
	if len(listeners) > 0 {
		report(control, Report{Listening: true}, listeners...)
	}
	child, err := s.start(&plan, fds)
	if err == nil {
		defer child.close()
		err = child.started()
	}
	now := time.Now().UnixNano()
	cannot := isCannotExec(err)
	switch {
	case cannot != nil:
		_, _ = unix.Write(fds[fdStderr], []byte("cloister: "+cannot.text+"\n")) // nobody may be reading
		report(control, Report{Started: now})
		report(control, Report{Exited: &Exited{Code: cannot.code, At: now}})
	case err != nil:
		fail(err)
	default:
		init, err := unix.PidfdOpen(child.pid, 0)
		if err == nil {
			err = report(control, Report{Started: now}, init)
			unix.Close(init)
		}
		if err != nil {
			report(control, Report{Started: now}) // the word matters more than the descriptor
		}
	}
	// The zygote keeps no end of the run's pipes: their readers must see the end with the run's.
	closeAll(fds[fdStdin:fdMore])
	fds[fdStdin], fds[fdStdout], fds[fdStderr] = -1, -1, -1
	usage := &Reaped{}
	if child != nil {
		if exited := child.exited(); exited != nil && err == nil {
			report(control, Report{Exited: exited})
		}
		full := child.full()
		if usage, err = child.reap(); err != nil {
			fail(fmt.Errorf("wait for pid 1: %w", err))
			return private
		}
		usage.Full = full
	}
	if private {
		usage.NoRoute = noRoute()
	}
	report(control, Report{Reaped: usage})
	return private
}

// readPlan reads the plan from its start, wherever other holders of the descriptor stand.
func readPlan(fd int, into *Plan) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	b := make([]byte, st.Size)
	for n := 0; n < len(b); {
		m, err := unix.Pread(fd, b[n:], int64(n))
		if err != nil || m == 0 {
			return fmt.Errorf("short plan: %d of %d bytes: %w", n, len(b), err)
		}
		n += m
	}
	return json.Unmarshal(b, into)
}

// network makes the run's network and returns the sockets that the worker listens on in it.
func (s *slot) network(plan *Plan) ([]int, error) {
	if plan.HostNetwork {
		return nil, nil // the zygote's, which this thread has until it makes another
	}
	if err := s.newNetwork(); err != nil {
		return nil, err
	}
	s.fresh = false
	if !plan.Loopback {
		return nil, nil
	}
	if err := loopback("lo", nil); err != nil {
		return nil, fmt.Errorf("loopback interface: %w", err)
	}
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

// noRoute returns how many packets of this thread's network found no route (RFC 4293, ipIfStatsOutNoRoutes).
func noRoute() int64 {
	var n int64
	b, _ := os.ReadFile("/proc/thread-self/net/snmp")
	// A line of names, then one of values: "Ip: ... OutNoRoutes", "Ip: ... 0".
	var names []string
	for line := range strings.Lines(string(b)) {
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
	b, _ = os.ReadFile("/proc/thread-self/net/snmp6")
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "Ip6OutNoRoutes" {
			v, _ := strconv.ParseInt(f[1], 10, 64)
			n += v
		}
	}
	return n
}

// userNamespace returns the descriptor of a new user namespace with the one user UID, who is user outside,
// and in which no further one can be made unless nested.
func userNamespace(user int, rootless, nested bool) (int, error) {
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
			UidMappings:                []syscall.SysProcIDMap{{ContainerID: UID, HostID: user, Size: 1}},
			GidMappings:                []syscall.SysProcIDMap{{ContainerID: GID, HostID: user, Size: 1}},
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
