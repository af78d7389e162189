// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// socketFD is where the zygote finds its socket.
const socketFD = 3

// Where init finds what it needs, after its standard streams, which are the command's.
const (
	initPlan      = 3
	initControl   = 4
	initWorkspace = 5 // if the plan says so
)

// slotUID is the first of the host's users that runs are mapped to if the zygote is the host's root:
// one a slot, so that two runs at once never share a user. The range from here to 61183 belongs to
// nobody by the table of systemd (https://systemd.io/UIDS-GIDS).
const (
	slotUID  = 60578
	maxSlots = 61183 - slotUID + 1
)

// zygoteMain serves the socket until it closes.
func zygoteMain() {
	// Whatever the worker's own parent left open goes no further.
	if err := unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		reply(socketFD, "close inherited descriptors: "+err.Error(), -1)
		return
	}
	// Mounts of the host still arrive here, ours never go back.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		reply(socketFD, "make mounts private: "+err.Error(), -1)
		return
	}
	// Rootless, one user exists and every slot has it.
	rootless := len(os.Args) > 1 && os.Args[1] == "rootless"
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		reply(socketFD, "open /dev/null: "+err.Error(), -1)
		return
	}
	reply(socketFD, "", -1)
	z := &zygote{rootless: rootless, null: null, idle: map[bool][]chan<- []int{}}
	for {
		req, fds, err := Receive(socketFD)
		if err != nil || len(req) == 0 {
			return // the worker is gone; what still runs dies with this process's threads
		}
		switch req[0] {
		case ReqWorkspace:
			fd, err := newWorkspace()
			if err != nil {
				reply(socketFD, err.Error(), -1)
				continue
			}
			reply(socketFD, "", fd)
			unix.Close(fd)
		case ReqRun:
			z.take(len(req) > 1 && req[1] == Loopback) <- fds
		}
	}
}

// reply sends a text, empty for success, and a descriptor if fd is not negative.
func reply(sock int, text string, fd int) {
	var fds []int
	if fd >= 0 {
		fds = []int{fd}
	}
	// If the worker is gone there is nobody to tell.
	_ = Send(sock, append([]byte{'.'}, text...), fds...)
}

// workspaceInodes bounds the files of a workspace: each takes about 1 KiB of memory that cannot be
// reclaimed. Its bytes are bounded by the kernel, at half of the memory.
const workspaceInodes = "1500000"

// newWorkspace returns the descriptor of a detached tmpfs.
func newWorkspace() (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open tmpfs: %w", err)
	}
	defer unix.Close(fs)
	for _, kv := range [][2]string{{"mode", "0755"}, {"source", "workspace"}, {"nr_inodes", workspaceInodes}} {
		if err := unix.FsconfigSetString(fs, kv[0], kv[1]); err != nil {
			return -1, fmt.Errorf("tmpfs %s=%s: %w", kv[0], kv[1], err)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("make tmpfs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, fmt.Errorf("mount tmpfs: %w", err)
	}
	return fd, nil
}

// A zygote holds the slots: threads that each have a network and a UTS namespace and start one run at
// a time. A slot outlives its runs because a new network namespace costs more than a whole run.
type zygote struct {
	rootless bool
	null     int // /dev/null

	mu   sync.Mutex
	idle map[bool][]chan<- []int // by whether loopback is up: once it was, it cannot be undone without a trace
	made int
}

// take returns an idle slot, or a new one.
func (z *zygote) take(loopback bool) chan<- []int {
	z.mu.Lock()
	defer z.mu.Unlock()
	if n := len(z.idle[loopback]); n > 0 {
		s := z.idle[loopback][n-1]
		z.idle[loopback] = z.idle[loopback][:n-1]
		return s
	}
	s := make(chan []int, 1)
	uid := 0
	if !z.rootless {
		uid = slotUID + z.made%maxSlots
	}
	z.made++
	go z.slot(s, uid, loopback)
	return s
}

// slot serves runs, one at a time. Its thread is its own and ends with it: the namespaces are the
// thread's, and a run dies with the thread that started it (PR_SET_PDEATHSIG speaks of threads).
func (z *zygote) slot(runs chan []int, uid int, loopback bool) {
	runtime.LockOSThread()
	ready := newSlotNamespaces(loopback)
	for fds := range runs {
		control := fds[fdControl]
		if ready != nil {
			report(control, Report{Failed: ready.Error()})
		} else {
			z.start(fds, uid)
		}
		closeAll(fds)
		if ready != nil {
			return // a slot that could not be made is not offered again
		}
		z.mu.Lock()
		z.idle[loopback] = append(z.idle[loopback], runs)
		z.mu.Unlock()
	}
}

// newSlotNamespaces moves the calling thread into a network namespace, with loopback up if asked for,
// and a UTS namespace with the fixed host name.
func newSlotNamespaces(loopback bool) error {
	if err := unix.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWUTS); err != nil {
		return fmt.Errorf("network and UTS namespaces: %w", err)
	}
	if err := unix.Sethostname([]byte(Hostname)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := unix.Setdomainname([]byte("(none)")); err != nil {
		return fmt.Errorf("domain name: %w", err)
	}
	if !loopback {
		return nil
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("loopback interface: %w", err)
	}
	return nil
}

// loopbackUp starts the loopback interface of the calling thread's network namespace.
func loopbackUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}

// start starts init for one run, waits until all of it is dead and says so.
func (z *zygote) start(fds []int, uid int) {
	control := fds[fdControl]
	fail := func(what string, err error) { report(control, Report{Failed: what + ": " + err.Error()}) }
	files := []uintptr{uintptr(z.null), uintptr(fds[fdStdout]), uintptr(fds[fdStderr]),
		initPlan: uintptr(fds[fdPlan]), initControl: uintptr(control)}
	if len(fds) > fdWorkspace {
		files = append(files, uintptr(fds[fdWorkspace]))
	}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{nameInit, strconv.Itoa(uid), strconv.FormatBool(z.rootless)},
		&syscall.ProcAttr{
			// Init makes mounts one after the other: more threads, or a collector, only cost.
			Env:   []string{"GOMAXPROCS=1", "GOGC=off"},
			Files: files,
			Sys: &syscall.SysProcAttr{
				Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWCGROUP,
				Pdeathsig:  syscall.SIGKILL,
			},
		})
	if err != nil {
		fail("pid, mount, IPC and cgroup namespaces", err)
		return
	}
	// The zygote keeps no end of the run's pipes: their readers must see the end with the run's.
	for _, fd := range []int{fdStdout, fdStderr} {
		unix.Close(fds[fd])
		fds[fd] = -1
	}
	var ws unix.WaitStatus
	var ru unix.Rusage
	for {
		if _, err = unix.Wait4(pid, &ws, 0, &ru); err != unix.EINTR {
			break
		}
	}
	if err != nil {
		fail("wait for init", err)
		return
	}
	report(control, Report{Reaped: &Reaped{
		UserNS: ru.Utime.Nano(), SystemNS: ru.Stime.Nano(), PeakRSS: ru.Maxrss * 1024,
	}})
}

// report sends r on control. If the worker is gone there is nobody to tell.
func report(control int, r Report) {
	b, err := json.Marshal(r)
	if err == nil {
		_ = Send(control, b)
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}
