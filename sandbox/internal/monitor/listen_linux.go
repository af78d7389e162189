// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// listenerOf returns where a call would make a socket listen: "tcp 127.0.0.1:80", "udp 0.0.0.0:53", "unix", or "" if it
// is unknown or the socket would not listen. A datagram socket receives once it is bound.
func listenerOf(n *notification, name string) string {
	switch name {
	case "bind":
		if !isUDP(n) {
			return ""
		}
		var b [unix.SizeofSockaddrInet6]byte
		size := min(n.Args[2]&0xffffffff, uint64(len(b))) // an int in the kernel
		if at, ok := endpoint(b[:readMemory(n.PID, n.Args[1], b[:size])]); ok {
			return "udp " + at.String()
		}
		return "udp unknown" // the kernel takes an address without a family for 0.0.0.0
	case "listen":
		return bound(n)
	}
	return ""
}

// isUDP reports whether the socket of a call is a UDP socket.
func isUDP(n *notification) bool {
	socket, err := opened(n)
	if err != nil {
		return false
	}
	defer unix.Close(socket)
	kind, _ := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return kind == unix.IPPROTO_UDP
}

// bound returns the address of the socket of a call.
func bound(n *notification) string {
	socket, err := opened(n)
	if err != nil {
		return ""
	}
	defer unix.Close(socket)
	switch at, _ := unix.Getsockname(socket); at := at.(type) {
	case *unix.SockaddrInet4:
		return "tcp " + netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port)).String()
	case *unix.SockaddrInet6:
		return "tcp " + netip.AddrPortFrom(netip.AddrFrom16(at.Addr).Unmap(), uint16(at.Port)).String()
	case *unix.SockaddrUnix:
		return "unix"
	}
	return ""
}
