// SPDX-License-Identifier: Apache-2.0

package interop_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/tests/must"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// A relay forwards every call to another address and records its trace. It can be cut.
type relay struct {
	addr string // HOST:PORT
	conn *grpc.ClientConn
	cut  atomic.Bool // calls fail as UNAVAILABLE

	mu     sync.Mutex
	traced map[string][]string // methods by their traceparent; guarded by mu
}

// relayTo starts a relay to an address.
func relayTo(t *testing.T, addr string) *relay {
	t.Helper()
	conn := must.Get(grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	r := &relay{addr: l.Addr().String(), conn: conn, traced: map[string][]string{}}
	s := grpc.NewServer(grpc.UnknownServiceHandler(r.forward))
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		conn.Close()
		must.Succeed(t, <-ended)
	})
	return r
}

// methods returns the methods called as part of a trace, sorted.
func (r *relay) methods(trace string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for parent, methods := range r.traced {
		if strings.HasPrefix(parent, "00-"+trace+"-") {
			all = append(all, methods...)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// forward is a grpc.StreamHandler. It decodes every message as an empty one, which keeps unknown fields.
func (r *relay) forward(_ any, in grpc.ServerStream) error {
	if r.cut.Load() {
		return status.Error(codes.Unavailable, "the relay is cut")
	}
	method, _ := grpc.MethodFromServerStream(in)
	md, _ := metadata.FromIncomingContext(in.Context())
	r.mu.Lock()
	for _, parent := range md["traceparent"] {
		r.traced[parent] = append(r.traced[parent], method)
	}
	r.mu.Unlock()
	ctx, cancel := context.WithCancel(metadata.NewOutgoingContext(in.Context(), md))
	defer cancel()
	out, err := r.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		return err
	}
	go func() { // until forward returns, which ends in
		for {
			m := &emptypb.Empty{}
			if err := in.RecvMsg(m); err != nil {
				if errors.Is(err, io.EOF) {
					_ = out.CloseSend() // RecvMsg below returns its error
				}
				return
			}
			if err := out.SendMsg(m); err != nil {
				return
			}
		}
	}()
	for {
		m := &emptypb.Empty{}
		if err := out.RecvMsg(m); err != nil {
			in.SetTrailer(out.Trailer())
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := in.SendMsg(m); err != nil {
			return err
		}
	}
}
