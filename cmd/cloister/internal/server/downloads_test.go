// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// A caller makes calls on one connection, as gRPC reports them.
type caller struct {
	of   *downloads
	conn context.Context
}

func newCaller(of *downloads, address string) *caller {
	addr, _ := net.ResolveTCPAddr("tcp", address)
	return &caller{of, of.TagConn(context.Background(), &stats.ConnTagInfo{RemoteAddr: addr})}
}

func (c *caller) begin(method string) (end func(error)) {
	ctx := c.of.TagRPC(metadata.NewIncomingContext(c.conn, nil), &stats.RPCTagInfo{FullMethodName: method})
	c.of.HandleRPC(ctx, &stats.Begin{})
	return func(err error) { c.of.HandleRPC(ctx, &stats.End{Error: err}) }
}

const (
	execute = "/build.bazel.remote.execution.v2.Execution/Execute"
	read    = "/google.bytestream.ByteStream/Read"
	write   = "/google.bytestream.ByteStream/Write"
)

// A server waits for clients with a result while they make calls and until they have been idle, and for nobody else.
func TestWaitForDownloads(t *testing.T) {
	for name, test := range map[string]struct {
		calls func(a, b *caller)
		least time.Duration // that the wait takes; it ends soon afterwards
	}{
		"nobody":             {func(a, b *caller) { a.begin(read)(nil) }, 0},
		"a result":           {func(a, b *caller) { a.begin(execute)(nil) }, idleTime},
		"no result":          {func(a, b *caller) { a.begin(execute)(errors.New("refused")) }, 0},
		"an earlier result":  {func(a, b *caller) { a.begin(execute)(nil); time.Sleep(idleTime) }, 0},
		"a result to come":   {func(a, b *caller) { a.later(execute, time.Minute) }, time.Minute + idleTime},
		"a long download":    {func(a, b *caller) { a.begin(execute)(nil); a.later(read, time.Minute) }, time.Minute + idleTime},
		"a long upload":      {func(a, b *caller) { a.begin(execute)(nil); a.later(write, time.Minute) }, idleTime},
		"another's download": {func(a, b *caller) { a.begin(execute)(nil); b.later(read, time.Minute) }, idleTime},
		"a disconnection": {func(a, b *caller) {
			a.begin(execute)(nil)
			a.of.HandleConn(a.conn, &stats.ConnEnd{})
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &downloads{}
				test.calls(newCaller(d, "192.0.2.1:1"), newCaller(d, "192.0.2.1:2"))
				begun := time.Now()
				d.wait(t.Context())
				if took := time.Since(begun); took < test.least || took > test.least+time.Second {
					t.Errorf("waited %v, want %v", took, test.least)
				}
			})
		})
	}
}

// later begins a call that ends after a time.
func (c *caller) later(method string, after time.Duration) {
	end := c.begin(method)
	time.AfterFunc(after, func() { end(nil) })
}

// The wait ends with its context, which has the drain timeout.
func TestWaitForDownloadsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &downloads{}
		newCaller(d, "192.0.2.1:1").begin(execute)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		d.wait(ctx)
	})
}
