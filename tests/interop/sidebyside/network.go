// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// A network delays and limits the bytes of connections as a long line that loses packets does. A program above TCP
// cannot lose a packet, so a loss is what TCP makes of it: the bytes from the lost segment on arrive one round trip
// later, after the retransmission, and the rate of a direction is at most that of Mathis et al. for the loss,
// MSS/RTT * sqrt(3/2)/sqrt(loss). Slow start, timeouts and lost retransmissions are not modelled.
type network struct {
	rtt  time.Duration
	loss float64 // fraction of the segments

	passed *atomic.Int64 // bytes in both directions; nil counts none
}

// segment is the number of bytes in a full TCP segment over Ethernet.
const segment = 1448

// forward listens on a loopback address and connects each connection to addr through the network, until stop.
func (n network) forward(ctx context.Context, addr string) (listening string, stop func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() { n.connect(ctx, near, addr) })
		}
	})
	return l.Addr().String(), func() error {
		cancel()
		err := l.Close()
		conns.Wait()
		return err
	}, nil
}

// connect forwards a connection until one end closes it or ctx ends.
func (n network) connect(ctx context.Context, near net.Conn, addr string) {
	defer near.Close()
	far, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer far.Close()
	defer context.AfterFunc(ctx, func() { near.Close(); far.Close() })()
	var both sync.WaitGroup
	for _, c := range [][2]net.Conn{{near, far}, {far, near}} {
		both.Go(func() {
			n.copy(c[1], c[0])
			c[1].(*net.TCPConn).CloseWrite()
		})
	}
	both.Wait()
}

// A delayed piece of a stream arrives at due.
type delayed struct {
	data []byte
	due  time.Time
}

// copy copies a stream through the network.
func (n network) copy(to io.Writer, from io.Reader) {
	pieces := make(chan delayed, 256) // the sender's window
	go func() {
		defer close(pieces)
		d := direction{network: n, lost: func() bool { return rand.Float64() < n.loss }}
		for {
			b := make([]byte, segment)
			k, err := from.Read(b)
			if k > 0 {
				if n.passed != nil {
					n.passed.Add(int64(k))
				}
				pieces <- delayed{b[:k], d.due(time.Now(), k)}
			}
			if err != nil {
				return
			}
		}
	}()
	var failed error
	for p := range pieces {
		if failed == nil {
			time.Sleep(time.Until(p.due))
			_, failed = to.Write(p.data)
		}
	}
}

// A direction of a connection.
type direction struct {
	network
	lost func() bool // decides for each segment
	sent time.Time   // when the line is free
	last time.Time   // when the last byte arrives
}

// due returns when the next k bytes arrive, if they are sent at now: in order, and no faster than the rate.
func (d *direction) due(now time.Time, k int) time.Time {
	if d.sent.Before(now) {
		d.sent = now
	}
	if d.loss > 0 {
		rate := segment / d.rtt.Seconds() * math.Sqrt(1.5/d.loss) // bytes per second
		d.sent = d.sent.Add(time.Duration(float64(k) / rate * float64(time.Second)))
	}
	at := d.sent.Add(d.rtt / 2)
	if d.lost() {
		at = at.Add(d.rtt)
	}
	if at.Before(d.last) {
		at = d.last
	}
	d.last = at
	return at
}
