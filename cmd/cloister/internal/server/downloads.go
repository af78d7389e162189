// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/proto"
)

// idleTime is how long a client that got a result must be idle before a draining server stops. A client that downloads
// outputs makes its calls in quick succession.
const idleTime = 5 * time.Second

// downloads is a stats.Handler that knows which clients may still download the outputs of results. A client is a build,
// or a connection if its calls name none.
type downloads struct {
	mu        sync.Mutex
	executing int                    // calls in progress that end with a result
	clients   map[string]*downloader // those that got a result recently
	swept     time.Time
}

// A downloader is a client that got a result.
type downloader struct {
	calls int       // in progress
	last  time.Time // when a call ended
}

// A call is a call of a client.
type call struct {
	client  string
	execute bool
	reads   bool        // it may read an output
	of      *downloader // that counts it, or nil
}

// reads are the methods that download outputs. A client that makes only other calls is idle, such as a build that
// continues without this server.
var reads = []string{
	"/google.bytestream.ByteStream/Read",
	repb.ContentAddressableStorage_BatchReadBlobs_FullMethodName,
	repb.ContentAddressableStorage_GetTree_FullMethodName,
}

type connKey struct{}

type callKey struct{}

// TagConn names the connection.
func (d *downloads) TagConn(ctx context.Context, i *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connKey{}, i.RemoteAddr.String())
}

// HandleConn forgets a client that has disconnected.
func (d *downloads) HandleConn(ctx context.Context, s stats.ConnStats) {
	if _, ended := s.(*stats.ConnEnd); ended {
		d.mu.Lock()
		defer d.mu.Unlock()
		name, _ := ctx.Value(connKey{}).(string)
		delete(d.clients, name)
	}
}

// TagRPC determines the client of a call.
func (d *downloads) TagRPC(ctx context.Context, i *stats.RPCTagInfo) context.Context {
	const header = "build.bazel.remote.execution.v2.requestmetadata-bin"
	c := &call{}
	c.client, _ = ctx.Value(connKey{}).(string)
	c.execute = strings.HasPrefix(i.FullMethodName, "/"+repb.Execution_ServiceDesc.ServiceName+"/")
	c.reads = slices.Contains(reads, i.FullMethodName)
	if values := metadata.ValueFromIncomingContext(ctx, header); len(values) > 0 {
		var m repb.RequestMetadata
		if proto.Unmarshal([]byte(values[0]), &m) == nil && m.ToolInvocationId != "" {
			c.client = "build " + m.ToolInvocationId
		}
	}
	return context.WithValue(ctx, callKey{}, c)
}

// HandleRPC counts the calls of clients that got a result.
func (d *downloads) HandleRPC(ctx context.Context, s stats.RPCStats) {
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok {
		return
	}
	switch s := s.(type) {
	case *stats.Begin:
		d.begin(c)
	case *stats.End:
		d.end(c, s.Error)
	}
}

func (d *downloads) begin(c *call) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.execute {
		d.executing++
	} else if c.reads {
		if c.of = d.clients[c.client]; c.of != nil {
			c.of.calls++
		}
	}
}

func (d *downloads) end(c *call, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if c.of != nil {
		c.of.calls--
		c.of.last = now
	}
	if !c.execute {
		return
	}
	d.executing--
	if err != nil {
		return
	}
	if now.Sub(d.swept) > idleTime {
		d.sweep(now)
	}
	if d.clients == nil {
		d.clients = map[string]*downloader{}
	}
	if w := d.clients[c.client]; w != nil {
		w.last = now
	} else {
		d.clients[c.client] = &downloader{last: now}
	}
}

// sweep forgets idle clients.
func (d *downloads) sweep(now time.Time) {
	d.swept = now
	for name, w := range d.clients {
		if w.calls == 0 && now.Sub(w.last) >= idleTime {
			delete(d.clients, name)
		}
	}
}

// busy returns the number of clients that may still download, and of calls that are about to end with a result.
func (d *downloads) busy() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sweep(time.Now())
	return len(d.clients) + d.executing
}

// wait waits until no client downloads, or until ctx ends.
func (d *downloads) wait(ctx context.Context) {
	tick := time.NewTicker(idleTime / 50)
	defer tick.Stop()
	for d.busy() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
