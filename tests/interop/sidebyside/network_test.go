// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestLossIsARetransmission: the lost segment and those behind it arrive a round trip later, in order.
func TestLossIsARetransmission(t *testing.T) {
	const rtt = 40 * time.Millisecond
	now := time.Unix(0, 0)
	segments := []bool{false, true, false, false}
	d := direction{network: network{rtt: rtt}, lost: func() bool {
		lost := segments[0]
		segments = segments[1:]
		return lost
	}}
	for i, c := range []struct{ sent, due time.Duration }{{0, rtt / 2}, {0, rtt * 3 / 2}, {0, rtt * 3 / 2}, {rtt * 2, rtt * 5 / 2}} {
		expect.Equal(t, d.due(now.Add(c.sent), segment).Sub(now), c.due, "segment %d", i)
	}
	// A loss of 1.5 % allows ten segments in each round trip.
	d = direction{network: network{rtt: rtt, loss: 0.015}, lost: func() bool { return false }}
	for range 9 {
		d.due(now, segment)
	}
	expect.Equal(t, d.due(now, segment).Sub(now).Round(time.Microsecond), rtt*3/2, "the tenth segment at once")
}

// TestNetworkForwardsStreams unchanged in both directions, and the end of each.
func TestNetworkForwardsStreams(t *testing.T) {
	echo := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer echo.Close()
	go func() {
		c, err := echo.Accept()
		if err == nil {
			io.Copy(c, c)
			c.Close()
		}
	}()
	addr, stop, err := network{rtt: time.Millisecond, loss: 0.1}.forward(t.Context(), echo.Addr().String())
	must.Succeed(t, err)
	c := must.Get(net.Dial("tcp", addr))(t)
	defer c.Close()
	data := make([]byte, 300_000)
	rand.NewChaCha8([32]byte{}).Read(data)
	go func() {
		c.Write(data)
		c.(*net.TCPConn).CloseWrite()
	}()
	got := must.Get(io.ReadAll(c))(t)
	expect.That(t, bytes.Equal(got, data), "got %d bytes back, want the %d sent", len(got), len(data))
	must.Succeed(t, stop())
}
