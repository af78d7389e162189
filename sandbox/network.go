// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// A Network is what a run may reach (set N). Its zero value is nothing.
type Network struct {
	// Loopback gives the run a loopback interface of its own, which no other run shares.
	Loopback bool
	// Listen permits sockets that listen. Nothing outside the run can ever reach one.
	Listen bool
	// Allow are the endpoints that may be reached outside: exceptions, each connection to which is an
	// event. They need Loopback, through which they are reached.
	Allow []Endpoint
}

// An Endpoint is a host and a TCP port outside the sandbox.
type Endpoint struct {
	// Host is a name, in lower case, or an IPv4 address. A name is resolved outside the sandbox.
	Host string
	Port uint16
}

// String returns the endpoint as host:port.
func (e Endpoint) String() string { return e.Host + ":" + strconv.Itoa(int(e.Port)) }

// hostName is what a name of a host may be (RFC 1123, section 2.1).
var hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

// ParseEndpoint reads host:port. The error says what is wrong with it.
func ParseEndpoint(s string) (Endpoint, error) {
	host, port, ok := strings.Cut(s, ":")
	n, err := strconv.ParseUint(port, 10, 16)
	if !ok || err != nil {
		return Endpoint{}, fmt.Errorf("endpoint %q: write it as host:port, as in example.org:443", s)
	}
	e := Endpoint{Host: strings.ToLower(host), Port: uint16(n)}
	return e, e.validate()
}

func (e Endpoint) validate() error {
	if e.Port == 0 {
		return fmt.Errorf("endpoint %q: port 0 is none", e)
	}
	if len(e.Host) > 253 || !hostName.MatchString(e.Host) {
		return fmt.Errorf("endpoint %q: %q is neither the name of a host in lower case nor an IPv4 address", e, e.Host)
	}
	if a, err := netip.ParseAddr(e.Host); err == nil && (a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast()) {
		return fmt.Errorf("endpoint %q: %s is no address of another host", e, a)
	}
	if e.Host == "localhost" || strings.HasSuffix(e.Host, ".localhost") {
		return fmt.Errorf("endpoint %q: inside the sandbox localhost is the sandbox", e)
	}
	return nil
}

func (n *Network) validate() error {
	if n.Listen && !n.Loopback {
		return fmt.Errorf("listening is permitted, and there is no loopback to listen on")
	}
	if len(n.Allow) > 0 && !n.Loopback {
		return fmt.Errorf("endpoint %s is permitted, and there is no loopback to reach it through", n.Allow[0])
	}
	for i, e := range n.Allow {
		if err := e.validate(); err != nil {
			return err
		}
		if i > 0 && strings.Compare(n.Allow[i-1].String(), e.String()) >= 0 {
			return fmt.Errorf("endpoints are not sorted with each once: %s before %s", n.Allow[i-1], e)
		}
	}
	return nil
}
