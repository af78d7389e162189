// SPDX-License-Identifier: Apache-2.0

package casserver_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/cloister-build/cloister/cas/casserver"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// A textCodec encodes *string, as the codec of another service on the same server may.
type textCodec struct{}

func (textCodec) Name() string { return "casserver-test-text" }

func (textCodec) Marshal(v any) ([]byte, error) {
	s, ok := v.(*string)
	if !ok {
		return nil, fmt.Errorf("message is %T, want *string", v)
	}
	return []byte(*s), nil
}

func (textCodec) Unmarshal(b []byte, v any) error {
	s, ok := v.(*string)
	if !ok {
		return fmt.Errorf("message is %T, want *string", v)
	}
	*s = string(b)
	return nil
}

// echo is a service with textCodec: Echo returns its message, and Panic panics with it.
var echo = grpc.ServiceDesc{
	ServiceName: "test.Echo", HandlerType: (*any)(nil),
	Methods: []grpc.MethodDesc{
		{MethodName: "Echo", Handler: handleText(func(s string) string { return s })},
		{MethodName: "Panic", Handler: handleText(func(s string) string { panic(s) })},
	},
}

func handleText(do func(string) string) grpc.MethodHandler {
	return func(_ any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
		var s string
		if err := decode(&s); err != nil {
			return nil, err
		}
		return intercept(ctx, &s, &grpc.UnaryServerInfo{FullMethod: "test.Echo"}, func(context.Context, any) (any, error) {
			return new(do(s)), nil
		})
	}
}

// A protoStream checks that an interceptor can treat the messages of a stream as protocol buffers.
type protoStream struct {
	grpc.ServerStream
	t *testing.T
}

func (s *protoStream) SendMsg(m any) error {
	s.check(m)
	return s.ServerStream.SendMsg(m)
}

func (s *protoStream) RecvMsg(m any) error {
	defer s.check(m)
	return s.ServerStream.RecvMsg(m)
}

func (s *protoStream) check(m any) {
	if _, ok := m.(proto.Message); !ok {
		s.t.Errorf("the interceptor got a %T, want a proto.Message", m)
	}
}

// TestServicesBesideOthers: the services share a server without a logger with a service that has its own codec and
// panics, and with an interceptor that looks into messages.
func TestServicesBesideOthers(t *testing.T) {
	encoding.RegisterCodec(textCodec{})
	look := grpc.ChainStreamInterceptor(func(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
		return next(srv, &protoStream{s, t})
	})
	s := grpc.NewServer(append(casserver.ServerOptions(nil), look)...)
	s.RegisterService(&echo, nil)
	c := &client{instances: castest.Instances()}
	stop := must.Get(casserver.Register(s, casserver.Config{Instances: c.instances}))(t)
	t.Cleanup(stop)
	c.connect(t, s, nil)

	text := grpc.CallContentSubtype(textCodec{}.Name())
	var got string
	if err := c.conn.Invoke(t.Context(), "/test.Echo/Echo", new("hello"), &got, text); err != nil || got != "hello" {
		t.Errorf("Echo: got %q, %v, want hello", got, err)
	}
	wantCode(t, c.conn.Invoke(t.Context(), "/test.Echo/Panic", new("on purpose"), &got, text), codes.Internal, "internal server error")

	const data = "uploaded beside others"
	upload := must.Get(c.Write(t.Context()))(t)
	must.Succeed(t, upload.Send(message(uploadName(data), 0, data, true)))
	expect.Error(t, expect.Err(upload.CloseAndRecv()), nil, "Write")
	b, err := c.read(t.Context(), &bspb.ReadRequest{ResourceName: sum(data).Resource()})
	expect.That(t, string(b) == data, "Read: got %q, %v, want %q", b, err, data)
}
