// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// connects returns the event of a connection or datagram to the socket address at an address of memory.
func (w *session) connects(n *notification, at, size uint64) []sandbox.Event {
	var buf [unix.SizeofSockaddrUnix]byte
	b := buf[:min(size&0xffffffff, uint64(len(buf)))] // an int in the kernel
	b = b[:readMemory(n.PID, at, b)]
	if to, ok := endpoint(b); ok {
		if w.view.Loopback && (to.Addr().IsLoopback() || to.Addr().IsUnspecified()) { // unspecified means the host itself
			if to.Port() == dnsPort {
				w.identifySender(n)
			}
			return w.connectsLoopback(n, to)
		}
		if protocol := protocol(n); protocol != "tcp" || !slices.Contains(w.view.Allowed, to) {
			return []sandbox.Event{{
				Kind: sandbox.EventConnect, Subject: protocol + " " + to.String(),
				Endpoint: sandbox.Endpoint{Host: to.Addr().String(), Port: to.Port()},
			}}
		}
		return nil
	}
	if p, ok := socketPath(b); ok {
		w.openRoot(n)
		s := w.resolve(n.PID, p, true)
		// A socket in a writable directory is the run's own; one elsewhere is a service of the host.
		if !w.view.writable(s.path) && (s.mode != 0 || hostSocket(p)) {
			return []sandbox.Event{{Kind: sandbox.EventConnect, Subject: "unix " + p}}
		}
	}
	return nil
}

// endpoint returns the address and port of a struct sockaddr_in or sockaddr_in6.
func endpoint(b []byte) (netip.AddrPort, bool) {
	if len(b) < 2 {
		return netip.AddrPort{}, false
	}
	switch binary.NativeEndian.Uint16(b) {
	case unix.AF_INET:
		if len(b) >= unix.SizeofSockaddrInet4 {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:])), true
		}
	case unix.AF_INET6:
		if len(b) >= 24 { // shorter without a scope, which the kernel accepts
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])).Unmap(), binary.BigEndian.Uint16(b[2:])), true
		}
	}
	return netip.AddrPort{}, false
}

// socketPath returns the path of a struct sockaddr_un. It excludes abstract names, which belong to the run's network
// namespace, and relative paths.
func socketPath(b []byte) (string, bool) {
	if len(b) < 3 || binary.NativeEndian.Uint16(b) != unix.AF_UNIX || b[2] != '/' {
		return "", false
	}
	name, _, _ := bytes.Cut(b[2:], []byte{0})
	return path.Clean(string(name)), true
}

// hostSocket reports whether host services listen at such a path. The C library queries nscd before each user lookup,
// which says nothing about the action.
func hostSocket(p string) bool {
	return (within(p, "/run") || within(p, "/var/run") || within(p, "/tmp/.X11-unix")) &&
		p != "/var/run/nscd/socket" && p != "/run/nscd/socket"
}

// protocol returns "tcp" or "udp" for the socket of a call, or "ip" if it is unknown.
func protocol(n *notification) string {
	socket, err := opened(n)
	if err != nil {
		return "ip"
	}
	defer unix.Close(socket)
	switch kind, _ := unix.GetsockoptInt(socket, unix.SOL_SOCKET, unix.SO_TYPE); kind {
	case unix.SOCK_STREAM:
		return "tcp"
	case unix.SOCK_DGRAM:
		return "udp"
	}
	return "ip"
}

// opened returns a descriptor of the open file, such as a socket, that is the first argument of a call.
func opened(n *notification) (int, error) {
	process, err := unix.PidfdOpen(leader(n.PID), 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(process)
	return unix.PidfdGetfd(process, int(int32(n.Args[0])), 0)
}

// families are the names of protocol families that programs request.
var families = map[uint32]string{
	unix.AF_UNIX: "AF_UNIX", unix.AF_INET: "AF_INET", unix.AF_INET6: "AF_INET6", unix.AF_NETLINK: "AF_NETLINK",
	unix.AF_PACKET: "AF_PACKET", unix.AF_VSOCK: "AF_VSOCK", unix.AF_ALG: "AF_ALG", unix.AF_XDP: "AF_XDP",
	unix.AF_BLUETOOTH: "AF_BLUETOOTH", unix.AF_CAN: "AF_CAN", unix.AF_TIPC: "AF_TIPC", unix.AF_KEY: "AF_KEY",
	unix.AF_RDS: "AF_RDS", unix.AF_SMC: "AF_SMC", unix.AF_QIPCRTR: "AF_QIPCRTR",
}

// family describes why socket(2) is refused: "AF_VSOCK", "AF_INET, SOCK_RAW".
func family(args [6]uint64) string {
	f := uint32(args[0])
	name, ok := families[f]
	if !ok {
		name = strconv.FormatUint(uint64(f), 10)
	}
	switch kind := uint32(args[1]) &^ (unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK); {
	case f == unix.AF_NETLINK:
		return fmt.Sprintf("%s, protocol %d", name, uint32(args[2]))
	case f == unix.AF_INET || f == unix.AF_INET6:
		switch kind {
		case unix.SOCK_RAW:
			return name + ", SOCK_RAW"
		case unix.SOCK_STREAM, unix.SOCK_DGRAM:
			return fmt.Sprintf("%s, protocol %d", name, uint32(args[2]))
		}
		return fmt.Sprintf("%s, type %d", name, kind)
	}
	return name
}
