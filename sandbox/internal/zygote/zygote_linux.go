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

// zygoteMain serves the socket until it closes.
func zygoteMain() {
	if len(os.Args) == 2 {
		if err := forgetKeys(); err != nil {
			reply(socketFD, err.Error(), -1)
			return
		}
	}
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
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		reply(socketFD, "open /dev/null: "+err.Error(), -1)
		return
	}
	z := &zygote{rootless: len(os.Args) > 1 && os.Args[1] == Rootless, null: null}
	if !z.rootless {
		z.users = make(chan int, LastUID-FirstUID+1)
		for uid := FirstUID; uid <= LastUID; uid++ {
			z.users <- uid
		}
	}
	reply(socketFD, "", -1)
	for {
		req, fds, err := Receive(socketFD)
		if errors.Is(err, ErrTruncated) {
			continue // a request that lost its descriptors; its control closed with them
		}
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
			go z.run(fds)
		}
	}
}

// forgetKeys starts this process again without the keys that the worker's session has. Credentials belong to
// threads; exec makes the calling one's those of the process. The new session keyring is revoked at once,
// so that a run has none, where it could leave a key for the next; and it is one for all runs, since a
// user's keys are few.
func forgetKeys() error {
	_, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
	switch {
	case err == unix.ENOSYS:
		// A kernel without keys has none to hide.
	case err == unix.EPERM && keysAreFiltered():
		// So has a container whose filter of system calls denies them: it covers the runs, too.
	case err != nil:
		return fmt.Errorf("new session keyring (keyctl): %w", err)
	default:
		if _, err := unix.KeyctlInt(unix.KEYCTL_REVOKE, unix.KEY_SPEC_SESSION_KEYRING, 0, 0, 0); err != nil {
			return fmt.Errorf("revoke the session keyring: %w", err)
		}
	}
	return syscall.Exec("/proc/self/exe", append(os.Args, "keyless"), []string{})
}

// keysAreFiltered reports whether no call that deals with keys can be made at all.
func keysAreFiltered() bool {
	_, add := unix.AddKey("user", "", nil, unix.KEY_SPEC_SESSION_KEYRING)
	_, request := unix.RequestKey("user", "cloister", "", 0)
	return add == unix.EPERM && request == unix.EPERM
}

// reply sends a text, empty for success, and a descriptor if fd is not negative.
func reply(sock int, text string, fd int) {
	var fds []int
	if fd >= 0 {
		fds = []int{fd}
	}
	err := Send(sock, append([]byte{'.'}, text...), fds...)
	if err != nil && fd >= 0 {
		// Too many descriptors of this user may be on their way (ETOOMANYREFS): the worker must not
		// wait for one for ever. If the worker is gone there is nobody to tell.
		_ = Send(sock, []byte(".send the descriptor: "+err.Error()))
	}
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

// A zygote is the state of the process.
type zygote struct {
	rootless bool
	null     int      // /dev/null
	users    chan int // that no run has; nil if rootless, where every run has the only one
}

// run performs one run on a thread of its own: a run dies with the thread that started it
// (PR_SET_PDEATHSIG speaks of threads), and this one lives as long as the run.
func (z *zygote) run(fds []int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer closeAll(fds)
	uid := 0
	if !z.rootless {
		uid = <-z.users
		defer func() { z.users <- uid }()
	}
	z.start(fds, uid)
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
				Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC |
					unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP,
				Pdeathsig: syscall.SIGKILL,
			},
		})
	if err != nil {
		fail("pid, mount, network, IPC, UTS and cgroup namespaces", err)
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
