// SPDX-License-Identifier: Apache-2.0

package zygote

import (
	"bytes"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxPacket is the maximum size of a packet in bytes; longer messages travel in a file.
const MaxPacket = 64 << 10

// maxDescriptors is the kernel's limit of descriptors per packet.
const maxDescriptors = 253

// buffers are for packets and their control messages.
var buffers = sync.Pool{New: func() any {
	return &buffer{make([]byte, MaxPacket), make([]byte, unix.CmsgSpace(maxDescriptors*4))}
}}

type buffer struct{ packet, rights []byte }

// ErrTruncated means that a packet came without all of its descriptors because this process has too many files open.
// The packet is lost; the socket still works.
var ErrTruncated = errors.New("too many open files to receive a descriptor")

// Send sends one packet with descriptors, which stay open here.
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

// Receive returns the next packet and its descriptors, which the caller closes and no child inherits. It returns
// os.ErrClosed for a closed socket and ErrTruncated for a packet cut short.
//
// The kernel may report the end of a socket while its last packets are queued: it looks for a packet first and then,
// without holding a lock over both, checks whether the other end was closed (__unix_dgram_recvmsg,
// __skb_wait_for_more_packets). A second look finds what was sent before.
func Receive(sock int) ([]byte, []int, error) {
	b := buffers.Get().(*buffer)
	defer buffers.Put(b)
	buf, oob := b.packet, b.rights
	for ended := false; ; {
		n, oobn, flags, _, err := unix.Recvmsg(sock, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if err == unix.EINTR || err == unix.ECONNRESET {
			// The other end closed with unread data; reported once, before what it had sent.
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
