// SPDX-License-Identifier: Apache-2.0

// Package grpctest runs gRPC servers in tests.
package grpctest

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// Serve serves what register adds until the test ends, and returns HOST:PORT.
func Serve(t testing.TB, register func(*grpc.Server), options ...grpc.ServerOption) string {
	t.Helper()
	s := grpc.NewServer(options...)
	register(s)
	return Listen(t, s)
}

// Listen serves s until the test ends, and returns HOST:PORT.
func Listen(t testing.TB, s *grpc.Server) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	serve(t, s, l)
	return l.Addr().String()
}

// Connect serves s in memory until the test ends, also in a synctest bubble, and returns a connection to it.
func Connect(t testing.TB, s *grpc.Server, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	serve(t, s, l)
	return Dial(t, "passthrough:///memory", append([]grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
	}, options...)...)
}

// Dial returns a connection without TLS that ends with the test.
func Dial(t testing.TB, target string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	options = append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)
	conn := must.Get(grpc.NewClient(target, options...))(t)
	t.Cleanup(func() { conn.Close() })
	return conn
}

func serve(t testing.TB, s *grpc.Server, l net.Listener) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) { // before it served
			t.Error(err)
		}
	}()
	t.Cleanup(func() { s.Stop(); <-done })
}

// Authorization starts a server without services at address. shown calls it with the given options and returns the
// authorization header that it receives.
func Authorization(t *testing.T) (address string, shown func([]grpc.DialOption, error) string) {
	t.Helper()
	seen := make(chan []string, 1)
	address = Serve(t, func(*grpc.Server) {}, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		md, _ := metadata.FromIncomingContext(stream.Context())
		seen <- md.Get("authorization")
		return status.Error(codes.Unimplemented, "no services here")
	}))
	return address, func(options []grpc.DialOption, err error) string {
		t.Helper()
		must.Succeed(t, err)
		_, err = healthpb.NewHealthClient(Dial(t, address, options...)).Check(t.Context(), &healthpb.HealthCheckRequest{})
		if status.Code(err) != codes.Unimplemented {
			t.Fatal(err)
		}
		return strings.Join(<-seen, ", ")
	}
}
