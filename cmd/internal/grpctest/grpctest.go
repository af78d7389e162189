// SPDX-License-Identifier: Apache-2.0

// Package grpctest runs gRPC servers in tests of the commands.
package grpctest

import (
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Serve serves what register adds until the test ends, and returns HOST:PORT.
func Serve(t *testing.T, register func(*grpc.Server), options ...grpc.ServerOption) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(options...)
	register(s)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Serve(l); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// Authorization serves nothing at address. shown calls the server with the given options and returns the authorization
// header that it receives.
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
		if err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient(address, append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)...)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = healthpb.NewHealthClient(conn).Check(t.Context(), &healthpb.HealthCheckRequest{})
		if status.Code(err) != codes.Unimplemented {
			t.Fatal(err)
		}
		return strings.Join(<-seen, ", ")
	}
}
