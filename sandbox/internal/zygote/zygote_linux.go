// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// socketFD is the socket of zygote and slots.
const socketFD = 3

// A zygote is the state of the zygote process.
type zygote struct {
	mode  string // Root or Rootless
	slots map[int]int
}

// zygoteMain serves the socket until it closes.
func zygoteMain() {
	z, err := newZygote()
	if err != nil {
		reply(err.Error(), -1)
		return
	}
	reply("", -1)
	for {
		req, fds, err := Receive(socketFD)
		if errors.Is(err, ErrTruncated) {
			reply(err.Error(), -1) // to a request that lost its descriptors
			continue
		}
		if err != nil || len(req) == 0 {
			return // the worker is gone, and with this process its slots go
		}
		fd, err := z.serve(req[0], req[1:], fds)
		closeAll(fds)
		if err != nil {
			reply(err.Error(), -1)
			continue
		}
		reply("", fd)
		unix.Close(fd)
	}
}

// newZygote sets up this process as a zygote.
func newZygote() (*zygote, error) {
	if len(os.Args) == 2 {
		return nil, dropKeys()
	}
	// Do not pass on what the worker's parent left open.
	if err := unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("close inherited descriptors: %w", err)
	}
	// Mounts of the host propagate here, ours do not propagate back.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return nil, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Sethostname([]byte(Hostname)); err != nil {
		return nil, fmt.Errorf("host name: %w", err)
	}
	if err := unix.Setdomainname([]byte("(none)")); err != nil {
		return nil, fmt.Errorf("domain name: %w", err)
	}
	unix.Umask(0o022)
	// If no core is permitted, one byte is better (see Plan.Rlimits). Few have the right to raise the limit.
	var core unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &core) == nil && core.Max == 0 {
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1})
	}
	return &zygote{mode: os.Args[1], slots: map[int]int{}}, nil
}

// serve handles one request and returns the descriptor that answers it.
func (z *zygote) serve(kind byte, text []byte, fds []int) (int, error) {
	switch kind {
	case ReqWorkspace:
		var size WorkspaceSize
		if err := json.Unmarshal(text, &size); err != nil {
			return -1, err
		}
		return NewWorkspace(size)
	case ReqUserNamespace:
		return z.newUsers(text)
	case ReqSlot:
		return z.newSlot(text, fds)
	case ReqSlotEnd:
		return -1, z.slotEnd(string(text))
	}
	return -1, fmt.Errorf("unknown request %q", kind)
}

// newUsers returns the descriptor of a user namespace with another user than the default.
func (z *zygote) newUsers(text []byte) (int, error) {
	var want UserNamespace
	if err := json.Unmarshal(text, &want); err != nil {
		return -1, err
	}
	if want.Slot < 0 || want.Slot >= MaxSlots || want.UID < 0 {
		return -1, fmt.Errorf("invalid user %d in slot %d", want.UID, want.Slot)
	}
	user := 0
	if z.mode != Rootless {
		user = CommandUser(want.Slot)
	}
	fd, err := userNamespace(user, want.UID, z.mode == Rootless, want.Nested)
	if err != nil {
		return -1, fmt.Errorf("user namespace: %w", err)
	}
	return fd, nil
}

// CommandUser returns the host user of a slot's commands if the zygote is Root.
func CommandUser(slot int) int { return FirstUID + 2*slot }

// newSlot starts a slot with the control group files fds and returns its socket once it is ready.
func (z *zygote) newSlot(text []byte, fds []int) (int, error) {
	var want Slot
	if err := json.Unmarshal(text, &want); err != nil {
		return -1, err
	}
	if want.Number < 0 || want.Number >= MaxSlots {
		return -1, fmt.Errorf("invalid slot %d", want.Number)
	}
	z.killSlot(want.Number)
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket pair: %w", err)
	}
	defer unix.Close(sv[1])
	files := []uintptr{0, 1, 2, uintptr(sv[1])}
	for _, fd := range fds {
		files = append(files, uintptr(fd))
	}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{nameSlot, z.mode, string(text)}, &syscall.ProcAttr{
		// It runs on one thread and never yields its processor. It collects garbage between runs, and during one only
		// beyond many megabytes.
		Env:   []string{"GOMAXPROCS=1", "GODEBUG=asyncpreemptoff=1", "GOGC=off", "GOMEMLIMIT=32MiB"},
		Files: files,
		Sys:   &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		unix.Close(sv[0])
		return -1, fmt.Errorf("start a slot: %w", err)
	}
	z.slots[want.Number] = pid
	unix.Close(sv[1]) // so that closing shows its death
	b, _, err := Receive(sv[0])
	if err == nil && len(b) > 1 {
		err = errors.New(string(b[1:]))
	}
	if err != nil {
		unix.Close(sv[0])
		return -1, fmt.Errorf("start a slot: %w", err)
	}
	return sv[0], nil
}

// killSlot ends a slot that the worker lost, with its run.
func (z *zygote) killSlot(number int) {
	pid, ok := z.slots[number]
	if !ok {
		return
	}
	delete(z.slots, number)
	_ = unix.Kill(pid, unix.SIGKILL) // it is a child until it is waited for, even if dead
	for {
		if _, err := unix.Wait4(pid, nil, 0, nil); err != unix.EINTR {
			return
		}
	}
}

// slotEnd returns how a slot ended as an error; nil while it lives or if that is unknown.
func (z *zygote) slotEnd(number string) error {
	n, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	pid, ok := z.slots[n]
	if !ok {
		return nil
	}
	var ws unix.WaitStatus
	if got, err := unix.Wait4(pid, &ws, unix.WNOHANG, nil); err != nil || got != pid {
		return nil // the worker asks again
	}
	delete(z.slots, n)
	if ws.Signaled() {
		return fmt.Errorf("it was killed by signal %d (%s)", ws.Signal(), unix.SignalName(ws.Signal()))
	}
	return fmt.Errorf("it exited with status %d", ws.ExitStatus())
}

// dropKeys executes this program again without the session keys of the worker. Credentials belong to threads; exec
// makes those of this thread the process's. The new session keyring is revoked at once, so that a run has none in which
// it could leave a key for the next. All runs share it, since a user may have few keys.
func dropKeys() error {
	_, err := unix.KeyctlInt(unix.KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0)
	switch {
	case err == unix.ENOSYS:
		// The kernel has no keys.
	case err == unix.EPERM && keysAreFiltered():
		// The container's system call filter denies keys, also to runs.
	case err != nil:
		return fmt.Errorf("new session keyring (keyctl): %w", err)
	default:
		if _, err := unix.KeyctlInt(unix.KEYCTL_REVOKE, unix.KEY_SPEC_SESSION_KEYRING, 0, 0, 0); err != nil {
			return fmt.Errorf("revoke the session keyring: %w", err)
		}
	}
	return syscall.Exec("/proc/self/exe", append(os.Args, "keyless"), []string{})
}

// keysAreFiltered reports whether every call about keys is denied.
func keysAreFiltered() bool {
	_, add := unix.AddKey("user", "", nil, unix.KEY_SPEC_SESSION_KEYRING)
	_, request := unix.RequestKey("user", "cloister", "", 0)
	return add == unix.EPERM && request == unix.EPERM
}

// reply sends a text, empty for success, and a descriptor if fd is not negative.
func reply(text string, fd int) {
	var fds []int
	if fd >= 0 {
		fds = []int{fd}
	}
	err := Send(socketFD, append([]byte{'.'}, text...), fds...)
	if err != nil && fd >= 0 {
		// Too many descriptors of this user may be in flight (ETOOMANYREFS): the worker must not wait forever. If it is
		// gone, nobody needs to know.
		_ = Send(socketFD, []byte(".send the descriptor: "+err.Error()))
	}
}

// report sends r on control. It fails if the worker is gone; few callers need to know.
func report(control int, r Report, fds ...int) error {
	return Send(control, r.Append(nil), fds...)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}
