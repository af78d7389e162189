// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// dial connects and returns the kernel's answer within two seconds.
func dial(family, kind int, to unix.Sockaddr) error {
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, to)
	if err == unix.EINPROGRESS {
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 2000); err != nil || n == 0 {
			return nil // packets leave and nobody refuses them
		}
		no, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil || no == 0 {
			return err
		}
		return unix.Errno(no)
	}
	return err
}

func sockaddr(a netip.AddrPort) (int, unix.Sockaddr) {
	if a.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
}

// connect tries to reach listeners of the host. Nobody listens on the loopback of the run.
func connect(r *report, args []string) {
	for _, a := range args {
		to, err := netip.ParseAddrPort(a)
		if !r.must("address", err) {
			continue
		}
		family, sa := sockaddr(to)
		r.refused("connect to "+a, dial(family, unix.SOCK_STREAM, sa), unix.ECONNREFUSED, unix.ENETUNREACH, unix.EADDRNOTAVAIL)
	}
}

// query is a DNS query for an address of example.com.
const query = "\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"

// public tries to reach documentation addresses (RFC 5737, RFC 3849) and cloud metadata. Never run it with a network.
func public(r *report, _ []string) {
	for _, a := range []string{"192.0.2.1:80", "192.0.2.1:53", "169.254.169.254:80", "[2001:db8::1]:80", "[ff02::1]:53"} {
		family, sa := sockaddr(netip.MustParseAddrPort(a))
		r.refused("tcp "+a, dial(family, unix.SOCK_STREAM, sa), unix.ENETUNREACH, unix.EADDRNOTAVAIL)
		fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if !r.must("socket", err) {
			continue
		}
		r.refused("udp "+a, unix.Sendto(fd, []byte(query), 0, sa), unix.ENETUNREACH, unix.EADDRNOTAVAIL)
		unix.Close(fd)
	}
}

// abstract tries to reach abstract unix sockets of the host.
func abstract(r *report, args []string) {
	for _, name := range args {
		r.refused("connect to "+name, dial(unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: name}), unix.ECONNREFUSED)
	}
}

// inbound listens on all addresses, prints the port, and waits a second for a connection.
func inbound(r *report, _ []string) {
	fd, err := listen(netip.AddrPortFrom(netip.IPv4Unspecified(), 0))
	if !r.must("listen", err) {
		return
	}
	at, err := unix.Getsockname(fd)
	if !r.must("port", err) {
		return
	}
	fmt.Println("port", at.(*unix.SockaddrInet4).Port)
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000); err == nil && n > 0 {
		r.escape("accepted a connection")
	}
	r.hold("no connection")
}

func listen(at netip.AddrPort) (int, error) {
	family, sa := sockaddr(at)
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	return fd, errors.Join(unix.Bind(fd, sa), unix.Listen(fd, 1))
}

// families tries socket families that bypass a network namespace or expose much of the kernel.
func families(r *report, _ []string) {
	for _, s := range []struct {
		name                   string
		family, kind, protocol int
	}{
		{"AF_VSOCK", unix.AF_VSOCK, unix.SOCK_STREAM, 0},
		{"AF_PACKET", unix.AF_PACKET, unix.SOCK_RAW, 0},
		{"AF_ALG", unix.AF_ALG, unix.SOCK_SEQPACKET, 0},
		{"AF_XDP", unix.AF_XDP, unix.SOCK_RAW, 0},
		{"AF_KEY", unix.AF_KEY, unix.SOCK_RAW, 2},
		{"AF_BLUETOOTH", unix.AF_BLUETOOTH, unix.SOCK_RAW, 1},
		{"AF_CAN", unix.AF_CAN, unix.SOCK_RAW, 1},
		{"AF_TIPC", unix.AF_TIPC, unix.SOCK_STREAM, 0},
		{"AF_RDS", unix.AF_RDS, unix.SOCK_SEQPACKET, 0},
		{"AF_SMC", unix.AF_SMC, unix.SOCK_STREAM, 0},
		{"raw AF_INET", unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP},
		{"raw AF_INET6", unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_ICMPV6},
	} {
		fd, err := unix.Socket(s.family, s.kind|unix.SOCK_CLOEXEC, s.protocol)
		if err == nil {
			unix.Close(fd)
		}
		r.refused("socket "+s.name, err, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ESOCKTNOSUPPORT)
	}
}

// route tries to change interfaces and routes.
func route(r *report, _ []string) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if !r.must("netlink", err) {
		return
	}
	local := []byte{127, 0, 0, 9}
	address := append([]byte{unix.AF_INET, 8, 0, 0, 1, 0, 0, 0}, attribute(unix.IFA_LOCAL, local)...)
	way := append([]byte{unix.AF_INET, 0, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RT_SCOPE_LINK, unix.RTN_UNICAST, 0, 0, 0, 0},
		attribute(unix.RTA_OIF, []byte{1, 0, 0, 0})...)
	link := append(make([]byte, 16), attribute(unix.IFLA_IFNAME, []byte("hostile\x00"))...)
	for _, m := range []struct {
		name    string
		kind    uint16
		payload []byte
	}{{"add an address", unix.RTM_NEWADDR, address}, {"add a route", unix.RTM_NEWROUTE, way}, {"add an interface", unix.RTM_NEWLINK, link}} {
		r.refused(m.name, netlink(fd, m.kind, m.payload), unix.EOPNOTSUPP)
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if !r.must("socket", err) {
		return
	}
	if ifr, err := unix.NewIfreq("lo"); r.must("interface", err) {
		r.refused("take the interface down", unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr))
	}
}

func attribute(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	return append(binary.NativeEndian.AppendUint16(b, kind), value...)
}

// netlink sends a request and returns the kernel's answer.
func netlink(fd int, kind uint16, payload []byte) error {
	const flags = unix.NLM_F_REQUEST | unix.NLM_F_ACK | unix.NLM_F_CREATE | unix.NLM_F_EXCL
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(payload)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = append(append(b, make([]byte, 8)...), payload...)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	answer := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil || n < unix.SizeofNlMsghdr+4 {
		return errors.Join(err, fmt.Errorf("got an answer of %d bytes", n))
	}
	if no := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); no != 0 {
		return unix.Errno(-no)
	}
	return nil
}

// Names of the objects that victim and leave create. If find sees them, runs can communicate.
const (
	meetingKey  = 0x636c6f69
	meetingName = "@cloister-escape"
	meetingPort = 47113
)

// leave creates an object of every kind that outlives a process.
func leave(r *report, args []string) {
	for _, dir := range args {
		r.must("leave a file", os.WriteFile(dir+"/left", []byte("left"), 0o666))
	}
	_, err := unix.SysvShmGet(meetingKey, 4096, unix.IPC_CREAT|0o666)
	r.must("shared memory", err)
	_, err = call(unix.SYS_MSGGET, meetingKey, unix.IPC_CREAT|0o666)
	r.must("message queue", err)
	_, err = call(unix.SYS_SEMGET, meetingKey, 1, unix.IPC_CREAT|0o666)
	r.must("semaphores", err)
	// Some filters refuse POSIX queues.
	if _, err = call(unix.SYS_MQ_OPEN, "cloister-escape", unix.O_CREAT|unix.O_RDWR, 0o666, []byte(nil)); err != nil {
		r.hold("POSIX queue: %s", errorName(err))
	}
	r.hold("left")
}

// find looks for the objects of leave and victim, and removes what it can.
func find(r *report, args []string) {
	for _, dir := range args {
		if _, err := os.Stat(dir + "/left"); err == nil {
			r.escape("%s/left was found", dir)
		}
	}
	if id, err := unix.SysvShmGet(meetingKey, 0, 0); err == nil {
		r.escape("shared memory was found")
		_, _ = unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	}
	if id, err := call(unix.SYS_MSGGET, meetingKey, 0); err == nil {
		r.escape("a message queue was found")
		_, _ = call(unix.SYS_MSGCTL, id, unix.IPC_RMID, 0)
	}
	if id, err := call(unix.SYS_SEMGET, meetingKey, 0, 0); err == nil {
		r.escape("semaphores were found")
		_, _ = call(unix.SYS_SEMCTL, id, 0, unix.IPC_RMID, 0)
	}
	if fd, err := call(unix.SYS_MQ_OPEN, "cloister-escape", unix.O_RDONLY, 0, []byte(nil)); err == nil {
		r.escape("a POSIX queue was found")
		unix.Close(fd)
		_, _ = call(unix.SYS_MQ_UNLINK, "cloister-escape")
	}
	family, sa := sockaddr(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), meetingPort))
	if dial(family, unix.SOCK_STREAM, sa) == nil {
		r.escape("a listener on loopback was found")
	}
	if dial(unix.AF_UNIX, unix.SOCK_STREAM, &unix.SockaddrUnix{Name: meetingName}) == nil {
		r.escape("an abstract socket was found")
	}
	r.hold("found nothing")
}

// victim creates everything that another run could reach, prints "ready", and waits for at most a minute. The first
// argument is a file to lock, the others are directories for files.
func victim(r *report, args []string) {
	leave(r, args[1:])
	_, err := listen(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), meetingPort))
	r.must("listen", err)
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	r.must("abstract socket", errors.Join(err, unix.Bind(s, &unix.SockaddrUnix{Name: meetingName}), unix.Listen(s, 1)))
	fd, err := unix.Open(args[0], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	r.must("lock", errors.Join(err, unix.Flock(fd, unix.LOCK_EX)))
	if len(r.broken) > 0 {
		return
	}
	fmt.Println("ready")
	time.Sleep(time.Minute)
}

// lock tries to see the lock of a victim on a shared file.
func lock(r *report, args []string) {
	fd, err := unix.Open(args[0], unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if !r.must("open", err) {
		return
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err == unix.EWOULDBLOCK {
		r.escape("the lock of another run is visible")
	}
	r.hold("no lock of another run")
}

// keys tries to add keys to keyrings and to find those of others.
func keys(r *report, _ []string) {
	for name, ring := range map[string]int{
		"thread": unix.KEY_SPEC_THREAD_KEYRING, "process": unix.KEY_SPEC_PROCESS_KEYRING,
		"session": unix.KEY_SPEC_SESSION_KEYRING, "user": unix.KEY_SPEC_USER_KEYRING, "user session": unix.KEY_SPEC_USER_SESSION_KEYRING,
	} {
		_, err := unix.AddKey("user", "cloister-escape", []byte("x"), ring)
		r.refused("add a key to the "+name+" keyring", err, unix.EKEYREVOKED)
	}
	_, err := unix.KeyctlJoinSessionKeyring("cloister-escape")
	r.refused("join a session keyring", err)
	_, err = unix.KeyctlSearch(unix.KEY_SPEC_SESSION_KEYRING, "user", "cloister-test", 0)
	r.refused("search the session keyring", err, unix.EKEYREVOKED, unix.ENOKEY)
	_, err = unix.RequestKey("user", "cloister-test", "", 0)
	r.refused("request a key", err, unix.EKEYREVOKED, unix.ENOKEY)
}

// fields reads lines of the form "name: value".
func fields(text string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}
