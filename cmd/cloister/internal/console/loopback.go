// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// A Loopback is the listener of a gRPC server in the same process. Each connection carries the address and the TLS
// state of a browser, so that the server authenticates the browser, and limits it, as it does its other callers.
type Loopback struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// NewLoopback returns a Loopback. The server that serves it closes it.
func NewLoopback() *Loopback {
	return &Loopback{conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (l *Loopback) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *Loopback) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *Loopback) Addr() net.Addr { return browserAddr("loopback") }

// Credentials is the option of the server.
func (l *Loopback) Credentials() grpc.ServerOption {
	return grpc.Creds(carried{insecure.NewCredentials()})
}

// Options returns the options to connect to the server with the credentials of r: its client certificate, and its
// bearer token, which is also accepted as the password of basic authentication.
func (l *Loopback) Options(r *http.Request) []grpc.DialOption {
	// The browser's TLS ends at the console, whatever the scheme of the server's address is.
	options := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		client, server := net.Pipe()
		select {
		case l.conns <- &carrier{server, browserAddr(r.RemoteAddr), r.TLS}:
			return client, nil
		case <-l.closed:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})}
	text := r.Header.Get("Authorization")
	if _, password, ok := r.BasicAuth(); ok {
		text = "Bearer " + password
	}
	if text != "" {
		options = append(options, grpc.WithPerRPCCredentials(authorization(text)))
	}
	return options
}

// A carrier is the server's end of a connection.
type carrier struct {
	net.Conn
	browser browserAddr
	tls     *tls.ConnectionState // of the browser, nil without TLS
}

// RemoteAddr returns the address of the browser.
func (c *carrier) RemoteAddr() net.Addr { return c.browser }

// A browserAddr is the address of a browser.
type browserAddr string

// Network implements net.Addr.
func (browserAddr) Network() string { return "tcp" }

// String implements net.Addr.
func (r browserAddr) String() string { return string(r) }

// carried are transport credentials that take over the TLS state of the browser.
type carried struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (c carried) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if b, ok := raw.(*carrier); ok && b.tls != nil {
		info := credentials.TLSInfo{State: *b.tls, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
		return raw, info, nil
	}
	return c.TransportCredentials.ServerHandshake(raw)
}

// authorization is the value of the header authorization.
type authorization string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (a authorization) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": string(a)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials. The connection stays in this process.
func (authorization) RequireTransportSecurity() bool { return false }
