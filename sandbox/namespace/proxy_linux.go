// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// dialTime is how long the proxy tries to reach an endpoint.
const dialTime = 30 * time.Second

// maxConnections is how many connections of one run are open at a time; more wait.
const maxConnections = 256

// An egressProxy forwards a run's connections to the endpoints that it may reach. It listens inside the run's network,
// where each endpoint has its own address, and dials outside: the run never has a socket of the host's network, and no
// route.
type egressProxy struct {
	cancel    context.CancelFunc
	listeners []net.Listener
	open      chan struct{}
	serving   sync.WaitGroup

	mu     sync.Mutex
	events []sandbox.Event
}

// startProxy serves the listening sockets, one for each endpoint, and takes them over.
func startProxy(fds []int, endpoints []sandbox.Endpoint) *egressProxy {
	ctx, cancel := context.WithCancel(context.Background())
	p := &egressProxy{cancel: cancel, open: make(chan struct{}, maxConnections)}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), endpoints[i].String())
		l, err := net.FileListener(f) // which duplicates the descriptor
		f.Close()
		if err != nil {
			p.record(sandbox.EventUnreachable, endpoints[i], "cannot listen: "+err.Error())
			continue
		}
		p.listeners = append(p.listeners, l)
		p.serving.Go(func() { p.serve(ctx, l, endpoints[i]) })
	}
	return p
}

// close ends every connection and returns one event for each. It may be called repeatedly.
func (p *egressProxy) close() []sandbox.Event {
	p.cancel()
	for _, l := range p.listeners {
		l.Close()
	}
	p.serving.Wait()
	return p.events
}

func (p *egressProxy) serve(ctx context.Context, l net.Listener, e sandbox.Endpoint) {
	for {
		inside, err := l.Accept()
		if err != nil {
			return // closed
		}
		select {
		case p.open <- struct{}{}:
		case <-ctx.Done():
			inside.Close()
			return
		}
		p.serving.Go(func() {
			defer func() { <-p.open }()
			p.record(carry(ctx, inside, e))
		})
	}
}

// carry connects inside with e until both directions have ended, and returns the event that describes the connection.
func carry(ctx context.Context, inside net.Conn, e sandbox.Endpoint) (sandbox.EventKind, sandbox.Endpoint, string) {
	defer inside.Close()
	dialer := net.Dialer{Timeout: dialTime, ControlContext: elsewhere}
	outside, err := dialer.DialContext(ctx, "tcp", e.String())
	if err != nil {
		// The run sees a connection that closes at once.
		return sandbox.EventUnreachable, e, strings.ReplaceAll(err.Error(), "\n", " ")
	}
	defer outside.Close()
	end := context.AfterFunc(ctx, func() {
		inside.Close()
		outside.Close()
	})
	defer end()
	var sent, received int64
	var sending sync.WaitGroup
	sending.Go(func() { sent = pass(outside, inside) })
	received = pass(inside, outside)
	sending.Wait()
	return sandbox.EventAllowed, e, fmt.Sprintf("at %s, %d bytes sent, %d received", outside.RemoteAddr(), sent, received)
}

// elsewhere refuses addresses of this host itself and of its link: a name may resolve to anything.
func elsewhere(_ context.Context, _, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	if a := to.Addr().Unmap(); a.IsLoopback() || a.IsUnspecified() || a.IsLinkLocalUnicast() || a.IsMulticast() {
		return fmt.Errorf("%s does not belong to another host", a)
	}
	return nil
}

// pass copies until from ends, and then ends that direction of to.
func pass(to, from net.Conn) int64 {
	n, _ := io.Copy(to, from) // an error ends the connection as EOF does
	if t, ok := to.(*net.TCPConn); ok {
		_ = t.CloseWrite() // fails if the run has ended
	}
	return n
}

// record adds an event for a connection. Beyond the limit it increments the count of the endpoint's last event of that
// kind.
func (p *egressProxy) record(kind sandbox.EventKind, e sandbox.Endpoint, detail string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	event := sandbox.Event{Kind: kind, Subject: e.String(), Endpoint: e, Count: 1, Detail: detail}
	if len(p.events) >= sandbox.MaxEvents {
		for i := len(p.events) - 1; i >= 0; i-- {
			if p.events[i].Kind == kind && p.events[i].Subject == event.Subject {
				p.events[i].Count++
				return
			}
		}
	}
	p.events = append(p.events, event)
}
