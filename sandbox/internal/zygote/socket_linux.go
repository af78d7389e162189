// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxPacket bounds a packet: requests and reports are short, plans travel in a memory file.
const maxPacket = 4 << 10

// answerTime is how many seconds the worker waits for an answer of the zygote, which makes none wait.
const answerTime = 30

// Start starts a zygote and returns its process and the worker's end of its socket, which the caller
// closes to end it. If rootless it lives in a user namespace whose root is the calling user.
func Start(rootless bool) (*os.Process, int, error) {
	sv, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socket pair: %w", err)
	}
	// A zygote that does not answer must not hang the worker.
	if err := unix.SetsockoptTimeval(sv[0], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTime}); err != nil {
		return nil, -1, fmt.Errorf("socket pair: %w", err)
	}
	theirs := os.NewFile(uintptr(sv[1]), "zygote socket")
	defer theirs.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{nameZygote, "root"}
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.Stderr = os.Stderr
	// A terminal's Ctrl-C is for the worker, which drains; a session of its own keeps it from here.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Setsid: true}
	if rootless {
		cmd.Args[1] = "rootless"
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	if err := cmd.Start(); err != nil {
		unix.Close(sv[0])
		return nil, -1, fmt.Errorf("start the zygote: %w", err)
	}
	theirs.Close()
	// The first packet says whether it is ready.
	b, _, err := Receive(sv[0])
	if err == nil && len(b) > 1 {
		err = fmt.Errorf("%s", b[1:])
	}
	if err != nil {
		unix.Close(sv[0])
		cmd.Process.Kill()
		cmd.Wait()
		return nil, -1, fmt.Errorf("start the zygote: %w", err)
	}
	return cmd.Process, sv[0], nil
}

// Send sends one packet with descriptors. The caller keeps the descriptors.
func Send(sock int, packet []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(sock, packet, oob, nil, unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return err
		}
	}
}

// Receive returns the next packet and its descriptors, which the caller closes and no child inherits.
// A closed socket is os.ErrClosed.
func Receive(sock int) ([]byte, []int, error) {
	buf, oob := make([]byte, maxPacket), make([]byte, unix.CmsgSpace(8*4))
	for {
		n, oobn, flags, _, err := unix.Recvmsg(sock, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			return nil, nil, fmt.Errorf("packet was cut off")
		}
		if n == 0 && oobn == 0 {
			return nil, nil, os.ErrClosed
		}
		var fds []int
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return nil, nil, err
		}
		for _, m := range msgs {
			got, err := unix.ParseUnixRights(&m)
			if err != nil {
				return nil, nil, err
			}
			fds = append(fds, got...)
		}
		return buf[:n], fds, nil
	}
}
