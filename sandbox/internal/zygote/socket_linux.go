// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// maxPacket bounds a packet: requests and reports are short, plans travel in a memory file.
const maxPacket = 4 << 10

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
