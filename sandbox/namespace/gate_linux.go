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

// dialTime is how long the gate tries to reach an endpoint.
const dialTime = 30 * time.Second

// maxConnections bounds those that one run has open through the gate at a time; more have to wait.
const maxConnections = 256

// A gate carries a run's connections to the endpoints that it may reach. It listens inside the run's network, where
// each endpoint has an address of its own, and dials outside: the run itself never has a socket of the host's
// network, and no route.
type gate struct {
	cancel    context.CancelFunc
	listeners []net.Listener
	open      chan struct{}
	serving   sync.WaitGroup

	mu     sync.Mutex
	events []sandbox.Event
}

// openGate serves the listening sockets, which it takes over, one for each endpoint.
func openGate(fds []int, endpoints []sandbox.Endpoint) *gate {
	ctx, cancel := context.WithCancel(context.Background())
	g := &gate{cancel: cancel, open: make(chan struct{}, maxConnections)}
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), endpoints[i].String())
		l, err := net.FileListener(f) // of a descriptor of its own
		f.Close()
		if err != nil {
			g.record(endpoints[i], "cannot listen: "+err.Error())
			continue
		}
		g.listeners = append(g.listeners, l)
		g.serving.Go(func() { g.serve(ctx, l, endpoints[i]) })
	}
	return g
}

// close ends every connection and returns an event for each that there was. It may be called again.
func (g *gate) close() []sandbox.Event {
	g.cancel()
	for _, l := range g.listeners {
		l.Close()
	}
	g.serving.Wait()
	return g.events
}

func (g *gate) serve(ctx context.Context, l net.Listener, e sandbox.Endpoint) {
	for {
		inside, err := l.Accept()
		if err != nil {
			return // closed
		}
		select {
		case g.open <- struct{}{}:
		case <-ctx.Done():
			inside.Close()
			return
		}
		g.serving.Go(func() {
			defer func() { <-g.open }()
			g.record(e, carry(ctx, inside, e))
		})
	}
}

// carry connects inside with e until either has no more to say, and returns what to tell of it.
func carry(ctx context.Context, inside net.Conn, e sandbox.Endpoint) string {
	defer inside.Close()
	dialer := net.Dialer{Timeout: dialTime, ControlContext: elsewhere}
	outside, err := dialer.DialContext(ctx, "tcp", e.String())
	if err != nil {
		// The run sees a connection that ends at once.
		return strings.ReplaceAll("failed: "+err.Error(), "\n", " ")
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
	return fmt.Sprintf("at %s, %d bytes sent, %d received", outside.RemoteAddr(), sent, received)
}

// elsewhere refuses addresses that are this host itself, or its neighbour without a router: a name may lead anywhere.
func elsewhere(_ context.Context, _, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	if a := to.Addr().Unmap(); a.IsLoopback() || a.IsUnspecified() || a.IsLinkLocalUnicast() || a.IsMulticast() {
		return fmt.Errorf("%s is no address of another host", a)
	}
	return nil
}

// pass copies until from ends, and then ends to in that direction.
func pass(to, from net.Conn) int64 {
	n, _ := io.Copy(to, from) // an end is an end, however it comes
	if t, ok := to.(*net.TCPConn); ok {
		_ = t.CloseWrite() // closed already if the run is over
	}
	return n
}

// record makes an event of a connection; beyond the bound those of an endpoint are counted by the last of its own.
func (g *gate) record(e sandbox.Endpoint, detail string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	event := sandbox.Event{Kind: sandbox.EventAllowed, Subject: e.String(), Count: 1, Detail: detail}
	if len(g.events) >= sandbox.MaxEvents {
		for i := len(g.events) - 1; i >= 0; i-- {
			if g.events[i].Subject == event.Subject {
				g.events[i].Count++
				return
			}
		}
	}
	g.events = append(g.events, event)
}
