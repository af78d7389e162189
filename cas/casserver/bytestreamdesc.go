// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"

	bspb "google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
)

// byteStreamDesc describes ByteStream. The generated function registers it with a *grpc.Server only, not with a
// grpc.ServiceRegistrar.
var byteStreamDesc = grpc.ServiceDesc{
	ServiceName: "google.bytestream.ByteStream",
	HandlerType: (*bspb.ByteStreamServer)(nil),
	Methods:     []grpc.MethodDesc{{MethodName: "QueryWriteStatus", Handler: handleQueryWriteStatus}},
	Streams: []grpc.StreamDesc{
		{StreamName: "Read", Handler: handleRead, ServerStreams: true},
		{StreamName: "Write", Handler: handleWrite, ClientStreams: true},
	},
	Metadata: "google/bytestream/bytestream.proto",
}

func handleRead(srv any, stream grpc.ServerStream) error {
	m := new(bspb.ReadRequest)
	if err := stream.RecvMsg(m); err != nil {
		return err
	}
	return srv.(bspb.ByteStreamServer).Read(m, &grpc.GenericServerStream[bspb.ReadRequest, bspb.ReadResponse]{ServerStream: stream})
}

func handleWrite(srv any, stream grpc.ServerStream) error {
	return srv.(bspb.ByteStreamServer).Write(&grpc.GenericServerStream[bspb.WriteRequest, bspb.WriteResponse]{ServerStream: stream})
}

func handleQueryWriteStatus(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
	m := new(bspb.QueryWriteStatusRequest)
	if err := decode(m); err != nil {
		return nil, err
	}
	handle := func(ctx context.Context, req any) (any, error) {
		return srv.(bspb.ByteStreamServer).QueryWriteStatus(ctx, req.(*bspb.QueryWriteStatusRequest))
	}
	if interceptor == nil {
		return handle(ctx, m)
	}
	info := &grpc.UnaryServerInfo{Server: srv, FullMethod: "/google.bytestream.ByteStream/QueryWriteStatus"}
	return interceptor(ctx, m, info, handle)
}
