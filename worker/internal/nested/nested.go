// SPDX-License-Identifier: Apache-2.0

// Package nested serves remote APIs to running actions: the store, the action cache and Execution of the server that
// executes them, each on a socket of its own. It implements none of these services: they are registered on its gRPC
// server as on that of clients, with the same options to authenticate and limit calls.
//
// A connection carries the identity of the client that requested the action, so a call has the rights that this client
// has when it arrives, and counts against its limits; credentials that the action sends are ignored. In addition, the
// package confines calls to the instance of the action, ends them and what they execute with the action, and records
// what they fetch.
package nested

import (
	"context"
	"log/slog"
	"net"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/worker/internal/actionapi"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// Limits of one action, which bound the memory of its messages. Compilers that each have a connection (recc) and clients
// with one connection for everything (Bazel) need many connections and many streams. Therefore a call beyond maxCalls
// waits, before its message is received; until then it takes a window and its headers. Calls of Execute count, too:
// maxCalls is above the number of slots for nested actions (queue.Config.Depth).
const (
	maxConnections = 32
	maxStreams     = 32 // per connection
	maxCalls       = 64 // in progress
	maxMessage     = 4 << 20
	maxHeaders     = 16 << 10
	window         = 64 << 10 // of a stream: what it receives before a call reads it
	maxFetched     = 100_000
)

// Config configures an Endpoint.
type Config struct {
	// Options authenticate callers and limit calls, as on the server of clients.
	Options   []grpc.ServerOption
	Instances cas.Instances
	// Cancel ends the operation of that name.
	Cancel func(operation string)
	// Log receives defects; nil discards them.
	Log *slog.Logger
}

// An Endpoint implements actionapi.Endpoint.
type Endpoint struct {
	server    *grpc.Server
	instances cas.Instances
	cancel    func(string)
}

// New returns an Endpoint, which the caller closes.
func New(c Config) *Endpoint {
	e := &Endpoint{instances: c.Instances, cancel: c.Cancel}
	e.server = grpc.NewServer(slices.Concat(casserver.ServerOptions(c.Log), []grpc.ServerOption{
		casserver.Codec(), grpc.Creds(handshake{insecure.NewCredentials()}),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxConcurrentStreams(maxStreams), grpc.MaxHeaderListSize(maxHeaders),
		grpc.StaticStreamWindowSize(window), grpc.StatsHandler(admission{}), // other windows grow to 16 MiB
		grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(e.stream),
	}, c.Options)...)
	return e
}

// services are those that actions can call.
var services = []string{
	repb.Capabilities_ServiceDesc.ServiceName, repb.ContentAddressableStorage_ServiceDesc.ServiceName,
	"google.bytestream.ByteStream", repb.ActionCache_ServiceDesc.ServiceName, repb.Execution_ServiceDesc.ServiceName,
}

// RegisterService implements grpc.ServiceRegistrar. Services that actions cannot call are dropped.
func (e *Endpoint) RegisterService(d *grpc.ServiceDesc, service any) {
	if slices.Contains(services, d.ServiceName) {
		e.server.RegisterService(d, service)
	}
}

// Close ends all calls. No Session may be open.
func (e *Endpoint) Close() { e.server.Stop() }

// Serve implements actionapi.Endpoint. Services must be registered before.
func (e *Endpoint) Serve(a actionapi.Action, l net.Listener) actionapi.Session {
	s := &session{Action: a, conns: map[*conn]bool{}, permits: make(chan struct{}, maxCalls), fetched: &record{
		instance: func() (*cas.Instance, error) { return e.instances(a.Instance) }, set: map[manifest.Fetched]bool{},
	}}
	s.listener = &listener{l, s}
	s.serving.Go(func() { _ = e.server.Serve(s.listener) }) // until the listener is closed
	return s
}

// CallerOf returns the caller of a call. For a call of an action it also returns the invocation of the outermost
// action's build, which takes precedence over the headers.
func CallerOf(ctx context.Context) (caller *actionapi.Caller, invocation string) {
	if s := sessionOf(ctx); s != nil {
		nested := *s.Caller
		nested.Depth++
		return &nested, s.Invocation
	}
	c := &actionapi.Caller{Identity: context.Background()}
	if p, ok := peer.FromContext(ctx); ok {
		c.Address = p.Addr
		c.Identity = peer.NewContext(c.Identity, &peer.Peer{Addr: p.Addr, AuthInfo: p.AuthInfo})
	}
	if values := metadata.ValueFromIncomingContext(ctx, "authorization"); len(values) > 0 {
		c.Identity = metadata.NewIncomingContext(c.Identity, metadata.MD{"authorization": values})
	}
	return c, ""
}

// sessionOf returns the session of a call, nil if it is not a call of an action.
func sessionOf(ctx context.Context) *session {
	if p, ok := peer.FromContext(ctx); ok {
		if a, ok := p.AuthInfo.(actionInfo); ok {
			return a.session
		}
	}
	return nil
}

// actionInfo is the identity of a connection.
type actionInfo struct{ session *session }

// AuthType implements credentials.AuthInfo.
func (actionInfo) AuthType() string { return "action" }

// Identity returns a context with the credentials of the client that requested the action; see package access.
func (a actionInfo) Identity() context.Context { return a.session.Caller.Identity }

// handshake implements transport credentials that identify the action of a connection.
type handshake struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (handshake) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return raw, actionInfo{raw.(*conn).session}, nil
}

// A listener accepts the connections of a session.
type listener struct {
	net.Listener
	session *session
}

// Accept implements net.Listener. It closes connections beyond the limit at once.
func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := (&conn{raw, l.session}); l.session.add(c) {
			return c, nil
		}
		raw.Close()
	}
}

// A conn is a connection of an action.
type conn struct {
	net.Conn
	session *session
}

// RemoteAddr returns the address of the client that requested the action.
func (c *conn) RemoteAddr() net.Addr {
	if a := c.session.Caller.Address; a != nil {
		return a
	}
	return c.Conn.RemoteAddr()
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.session.remove(c)
	return c.Conn.Close()
}
