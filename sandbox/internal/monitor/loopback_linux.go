// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// connectsLoopback returns the record of a TCP connection to the run's own loopback: that something listens there, or
// the event that nothing does. At port 53 that is a lookup.
func (w *session) connectsLoopback(n *notification, to netip.AddrPort) []sandbox.Event {
	if w.view.Sockets == nil || n.Nr != unix.SYS_CONNECT {
		return nil
	}
	at := to
	if to.Addr().IsUnspecified() { // which the kernel replaces
		at = netip.AddrPortFrom(netip.IPv6Loopback(), to.Port())
		if to.Addr().Is4() {
			at = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), to.Port())
		}
	}
	found, ok := false, false
	if raw, err := w.view.Sockets.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { found, ok = listens(int(fd), at) })
	}
	endpoint := sandbox.Endpoint{Host: to.Addr().String(), Port: to.Port()}
	switch {
	case found:
		return []sandbox.Event{{Kind: programFound, Subject: listenerName(to.Port())}}
	case protocol(n) != "tcp":
		return nil
	case to.Port() == dnsPort:
		return []sandbox.Event{{
			Kind: sandbox.EventConnect, Subject: "tcp " + to.String(), Detail: "it looks a name up", Endpoint: endpoint,
		}}
	case !ok || !findsListeners():
		return nil
	}
	return []sandbox.Event{{
		Kind: sandbox.EventUnreachable, Subject: to.String(), Detail: "nothing in the sandbox listens there", Endpoint: endpoint,
	}}
}

// findsListeners reports whether the kernel can find TCP listeners, for which it needs inet_diag.
var findsListeners = sync.OnceValue(func() bool {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return false
	}
	defer l.Close()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	found, _ := listens(fd, netip.MustParseAddrPort(l.Addr().String()))
	return found
})

// listens reports whether a TCP socket listens at an address in the network of a netlink socket, as the kernel would
// find it for a connection. If that is unknown, ok is false.
func listens(sockets int, at netip.AddrPort) (found, ok bool) {
	const byFamily = 20 // SOCK_DIAG_BY_FAMILY
	// struct nlmsghdr, struct inet_diag_req_v2 (linux/inet_diag.h)
	b := binary.NativeEndian.AppendUint32(nil, 16+56)
	b = binary.NativeEndian.AppendUint16(b, byFamily)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...)
	family := byte(unix.AF_INET6)
	if at.Addr().Is4() {
		family = unix.AF_INET
	}
	b = append(b, family, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, ^uint32(0)) // every state
	b = binary.BigEndian.AppendUint16(b, at.Port())
	b = append(b, 0, 0) // no peer
	b = append(b, at.Addr().AsSlice()...)
	b = append(b, make([]byte, 16+56-8-len(b))...)
	for range 8 {
		b = append(b, 0xff) // any cookie
	}
	if unix.Sendto(sockets, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) != nil {
		return false, false
	}
	var answer [512]byte
	n, _, err := unix.Recvfrom(sockets, answer[:], unix.MSG_DONTWAIT)
	if err != nil || n < 20 {
		return false, false
	}
	switch binary.NativeEndian.Uint16(answer[4:]) {
	case byFamily:
		return true, true
	case unix.NLMSG_ERROR:
		return false, int32(binary.NativeEndian.Uint32(answer[16:])) == -int32(unix.ENOENT)
	}
	return false, false
}
