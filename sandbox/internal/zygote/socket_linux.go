// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"bytes"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxPacket bounds a packet, in bytes: what is longer travels in a file.
const MaxPacket = 64 << 10

// maxDescriptors bounds those that come with a packet; the kernel takes 253.
const maxDescriptors = 253

// buffers are for packets and their control messages.
var buffers = sync.Pool{New: func() any {
	return &buffer{make([]byte, MaxPacket), make([]byte, unix.CmsgSpace(maxDescriptors*4))}
}}

type buffer struct{ packet, rights []byte }

// ErrTruncated says that a packet came without all of its descriptors: this process has as many open as it
// may. The packet is gone, and the socket is as good as before.
var ErrTruncated = errors.New("too many open files to receive a descriptor")

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
// A closed socket is os.ErrClosed, a packet
// cut off ErrTruncated.
//
// The kernel may say that a socket has ended while its last packets are there: it looks for a packet first, and then,
// without a lock over both, whether the other end was closed (__unix_dgram_recvmsg, __skb_wait_for_more_packets). What was
// sent before that is found by a second look.
func Receive(sock int) ([]byte, []int, error) {
	b := buffers.Get().(*buffer)
	defer buffers.Put(b)
	buf, oob := b.packet, b.rights
	for ended := false; ; {
		n, oobn, flags, _, err := unix.Recvmsg(sock, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNRESET {
			// The other end was closed before it had read all: said once, ahead of what it had sent.
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if n == 0 && oobn == 0 {
			if ended {
				return nil, nil, os.ErrClosed
			}
			ended = true
			continue
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
		if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
			closeAll(fds)
			return bytes.Clone(buf[:n]), nil, ErrTruncated
		}
		return bytes.Clone(buf[:n]), fds, nil
	}
}
