// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloister-build/cloister/sandbox"
)

// A resolver answers the DNS queries of a run at port 53 of the run's loopback, and records the names. It starts when
// the run has a socket that could send a query. Nothing leaves the host: it resolves only the names that the run may
// reach.
type resolver struct {
	socket  *os.File // nil if nothing can ask
	hosts   map[string]netip.Addr
	lookups *lookups
	kill    func(sandbox.Event) bool // Config.Kill

	serving *os.File // a duplicate, once it runs
	stopped atomic.Bool
	done    chan struct{}

	mu      sync.Mutex
	senders map[uint16]string // the process that sends from a port
}

// start starts the resolver, unless it is running.
func (r *resolver) start() {
	if r.socket == nil || r.serving != nil {
		return
	}
	raw, err := r.socket.SyscallConn()
	if err != nil {
		return
	}
	fd := -1
	if raw.Control(func(socket uintptr) { fd, err = unix.FcntlInt(socket, unix.F_DUPFD_CLOEXEC, 0) }) != nil || err != nil {
		return // too many open files: lookups wait until their programs give up
	}
	r.serving, r.done = os.NewFile(uintptr(fd), "resolver"), make(chan struct{})
	go r.serve()
}

// mayAsk reports whether socket(2) makes a socket that could send a lookup.
func mayAsk(args [6]uint64) bool {
	kind := uint32(args[1]) &^ (unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK)
	return uint32(args[0]) != unix.AF_NETLINK && kind == unix.SOCK_DGRAM
}

func (r *resolver) serve() {
	defer close(r.done)
	raw, err := r.serving.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(socket uintptr) bool { // until stop sets the deadline
		for !r.stopped.Load() && r.next(int(socket)) {
		}
		return r.stopped.Load()
	})
}

// stop ends the resolver. It first answers up to lastAnswers queries that have arrived.
func (r *resolver) stop() {
	if r.serving == nil {
		return
	}
	r.stopped.Store(true)
	_ = r.serving.SetReadDeadline(time.Now())
	<-r.done
	r.kill = nil // the run has ended
	if raw, err := r.serving.SyscallConn(); err == nil {
		_ = raw.Control(func(socket uintptr) {
			for left := lastAnswers; left > 0 && r.next(int(socket)); left-- {
			}
		})
	}
	r.serving.Close()
}

// next answers one datagram and reports whether there was one.
func (r *resolver) next(socket int) bool {
	var packet [maxQuery]byte
	var control [64]byte
	n, controls, _, from, err := unix.Recvmsg(socket, packet[:], control[:], unix.MSG_DONTWAIT)
	if err != nil {
		return err == unix.EINTR
	}
	process := r.sender(from)
	h, q, ok := question(packet[:n])
	if !ok {
		r.lookups.add("", "", process)
		return true
	}
	host := hostOf(&q)
	at := r.hosts[host]
	switch {
	case ownName(host):
		if !strings.HasSuffix(host, ".arpa") {
			at = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
	case !at.IsValid():
		r.lookups.add(host, typeOf(&q), process)
		if r.kill != nil && r.kill(sandbox.Event{Kind: sandbox.EventConnect, Subject: "dns " + host, Process: process}) {
			return true
		}
	}
	if answer, err := reply(&h, &q, at); err == nil {
		// The control message has the address that the query was sent to, from which the answer must come. A full
		// socket buffer loses the answer.
		_ = unix.Sendmsg(socket, answer, control[:controls], from, unix.MSG_DONTWAIT)
	}
	return true
}

// sender returns the process that sends from an address, or "" if it is unknown.
func (r *resolver) sender(from unix.Sockaddr) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.senders[portOf(from)]
}

// identifySender records which process sends from the socket of a call, since a query carries only a port. It binds a
// socket without a port, as the call itself would.
func (w *session) identifySender(n *notification) {
	if w.resolver.socket == nil {
		return
	}
	fd, err := opened(n)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_DGRAM ||
		!w.queue.valid(n.ID) { // it may be another process's
		return
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		return
	}
	if portOf(at) == 0 {
		switch at := at.(type) {
		case *unix.SockaddrInet4:
			err = unix.Bind(fd, &unix.SockaddrInet4{Addr: at.Addr})
		case *unix.SockaddrInet6:
			err = unix.Bind(fd, &unix.SockaddrInet6{Addr: at.Addr})
		}
		if err != nil {
			return
		}
		if at, err = unix.Getsockname(fd); err != nil {
			return
		}
	}
	r := w.resolver
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.senders == nil {
		r.senders = map[uint16]string{}
	}
	r.senders[portOf(at)] = processName(n.PID)
}

// portOf returns the port of an address, 0 if it has none.
func portOf(a unix.Sockaddr) uint16 {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return uint16(a.Port)
	case *unix.SockaddrInet6:
		return uint16(a.Port)
	}
	return 0
}

// asks returns a record of the name in a query that a process sends to port 53 of another host. seen are the events of
// the call.
func (w *session) asks(n *notification, seen []sandbox.Event) []sandbox.Event {
	if !slices.ContainsFunc(seen, func(e sandbox.Event) bool {
		return e.Endpoint.Port == dnsPort && strings.HasPrefix(e.Subject, "udp ")
	}) {
		return nil
	}
	packet := make([]byte, min(n.Args[2], maxQuery))
	_, q, ok := question(packet[:readMemory(n.PID, n.Args[1], packet)])
	if !ok {
		return nil
	}
	return []sandbox.Event{{Kind: nameAsked, Subject: hostOf(&q), Detail: typeOf(&q)}}
}
