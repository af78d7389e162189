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
	// Loopback gives the run a private loopback interface.
	Loopback bool
	// Listen permits listening sockets and binding datagram sockets; an unmonitored run may always bind the latter.
	// Nothing outside the run can reach them.
	Listen bool
	// Allow lists endpoints outside the sandbox that may be reached; each connection is an event. They are reached
	// through Loopback, which must be set.
	Allow []Endpoint
}

// An Endpoint is a host and a TCP port outside the sandbox.
type Endpoint struct {
	// Host is a lower-case name or an IPv4 address. Names are resolved outside the sandbox.
	Host string
	Port uint16
}

// String returns the endpoint as host:port, with brackets around an IPv6 address.
func (e Endpoint) String() string {
	if strings.Contains(e.Host, ":") {
		return "[" + e.Host + "]:" + strconv.Itoa(int(e.Port))
	}
	return e.Host + ":" + strconv.Itoa(int(e.Port))
}

// hostName matches host names (RFC 1123, section 2.1).
var hostName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$`)

// ParseEndpoint parses host:port.
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
		return fmt.Errorf("endpoint %q: port 0 is invalid", e)
	}
	if len(e.Host) > 253 || !hostName.MatchString(e.Host) {
		return fmt.Errorf("endpoint %q: %q is neither a lower-case host name nor an IPv4 address", e, e.Host)
	}
	if a, err := netip.ParseAddr(e.Host); err == nil && (a.IsLoopback() || a.IsUnspecified() || a.IsMulticast() || a.IsLinkLocalUnicast()) {
		return fmt.Errorf("endpoint %q: %s does not belong to another host", e, a)
	}
	if e.Host == "localhost" || strings.HasSuffix(e.Host, ".localhost") {
		return fmt.Errorf("endpoint %q: localhost is the sandbox itself", e)
	}
	return nil
}

func (n *Network) validate() error {
	if n.Listen && !n.Loopback {
		return fmt.Errorf("listening is permitted without loopback")
	}
	if len(n.Allow) > 0 && !n.Loopback {
		return fmt.Errorf("endpoint %s is permitted without loopback, through which it would be reached", n.Allow[0])
	}
	for i, e := range n.Allow {
		if err := e.validate(); err != nil {
			return err
		}
		if i > 0 && strings.Compare(n.Allow[i-1].String(), e.String()) >= 0 {
			return fmt.Errorf("endpoints must be sorted and unique: %s precedes %s", n.Allow[i-1], e)
		}
	}
	return nil
}
