// SPDX-License-Identifier: Apache-2.0

// Package loopback chooses addresses for servers that tests restart, or whose address they need before the start.
package loopback

import (
	"crypto/rand"
	"net"
	"net/netip"
)

// Address returns an unused HOST:PORT of this machine. HOST is a random address of 127.0.0.0/8 instead of 127.0.0.1,
// whose ports the kernel gives to connections of any program while no server listens (ip(7), ip_local_port_range).
func Address() (string, error) {
	host := [4]byte{127}
	_, _ = rand.Read(host[1:]) // never fails
	host[1] |= 1               // not 127.0.0.0
	host[3] &= 127             // not 127.255.255.255
	l, err := net.Listen("tcp4", netip.AddrPortFrom(netip.AddrFrom4(host), 0).String())
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
