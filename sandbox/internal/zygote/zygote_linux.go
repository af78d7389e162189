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

// socketFD is where the zygote finds its socket.
const socketFD = 3

// A zygote is the state of the process.
type zygote struct {
	rootless bool
	mounts   int // the descriptor of the mount namespace in which it lives
	slots    map[int]*slot
}

// zygoteMain serves the socket until it closes.
func zygoteMain() {
	z, err := begin()
	if err != nil {
		reply(socketFD, err.Error(), -1)
		return
	}
	reply(socketFD, "", -1)
	for {
		req, fds, err := Receive(socketFD)
		if errors.Is(err, ErrTruncated) {
			// A request that lost its descriptors. Of a run, control closed with them.
			if len(req) > 0 && req[0] != ReqRun {
				reply(socketFD, err.Error(), -1)
			}
			continue
		}
		if err != nil || len(req) == 0 {
			return // the worker is gone; what still runs dies with this process's threads
		}
		z.serve(req[0], req[1:], fds)
	}
}

// begin makes of this process what a zygote is.
func begin() (*zygote, error) {
	if len(os.Args) == 2 {
		return nil, forgetKeys()
	}
	z := &zygote{rootless: os.Args[1] == Rootless, slots: map[int]*slot{}}
	// Whatever the worker's own parent left open goes no further.
	if err := unix.CloseRange(socketFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, fmt.Errorf("close inherited descriptors: %w", err)
	}
	// Mounts of the host still arrive here, ours never go back.
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
	// Where no core is permitted, one byte is better (see Plan.Rlimits): that takes a right that few have.
	var core unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &core) == nil && core.Max == 0 {
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: 1})
	}
	var err error
	if z.mounts, err = unix.Open("/proc/self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("mount namespace: %w", err)
	}
	return z, nil
}

// serve does one request.
func (z *zygote) serve(kind byte, text []byte, fds []int) {
	switch kind {
	case ReqWorkspace:
		var room Room
		err := json.Unmarshal(text, &room)
		fd := -1
		if err == nil {
			fd, err = newWorkspace(room)
		}
		if err != nil {
			reply(socketFD, err.Error(), -1)
			return
		}
		reply(socketFD, "", fd)
		unix.Close(fd)
	case ReqSlot:
		var want Slot
		err := json.Unmarshal(text, &want)
		if err == nil {
			err = z.newSlot(want, fds)
		}
		closeAll(fds)
		if err != nil {
			reply(socketFD, err.Error(), -1)
			return
		}
		reply(socketFD, "", -1)
	case ReqRun:
		n, err := strconv.Atoi(string(text))
		s := z.slots[n]
		if err != nil || s == nil || len(fds) < fdMore {
			closeAll(fds) // with control, which tells the worker
			return
		}
		select {
		case s.work <- fds:
		default:
			// It has one that it cannot even begin. Nobody else is to wait for that.
			report(fds[fdControl], Report{Failed: "the slot does not answer"})
			closeAll(fds)
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

// maxWorkspaceFiles bounds the files of a workspace that has no bound of its own: each takes about 1 KiB of
// memory that cannot be reclaimed. Bytes without a bound are bounded by the kernel, at half of the memory.
const maxWorkspaceFiles = 1_500_000

// newWorkspace returns the descriptor of a detached tmpfs. It has a page and a file more than the room that is asked
// for: when nothing is left, more was wanted.
func newWorkspace(room Room) (int, error) {
	if room.Files <= 0 {
		room.Files = maxWorkspaceFiles
	}
	room.Files++
	options := [][2]string{{"mode", "0755"}, {"source", "workspace"}, {"nr_inodes", strconv.FormatInt(room.Files, 10)}}
	if room.Bytes > 0 {
		options = append(options, [2]string{"size", strconv.FormatInt(room.Bytes+int64(os.Getpagesize()), 10)})
	}
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open tmpfs: %w", err)
	}
	defer unix.Close(fs)
	for _, kv := range options {
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

// report sends r on control. If the worker is gone there is nobody to tell, and few need to know.
func report(control int, r Report, fds ...int) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return Send(control, b, fds...)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}
