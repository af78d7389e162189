// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"context"
	"log/slog"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// maxHeaders is the most bytes of headers of a call: a token, what a client says of itself, and more than that of others.
const maxHeaders = 256 << 10

// ServerOptions returns what a gRPC server of the Remote Execution API needs:
//   - it receives messages of 16 MiB, since a WriteRequest may carry as much data as a batch, and
//     clients with raised limits send larger lists of digests (rule 9);
//   - it receives 256 KiB of headers with a call, and not gRPC's 16 MiB: nobody has been asked who calls by then;
//   - it tolerates a ping every 5 s, also on an idle connection, since clients wait long for an
//     execution and behind proxies (rule 91);
//   - it asks a client that has been silent for 30 s whether it lives, and drops one that does not
//     answer for 20 s: a dead client must not hold an upload or a wait for an execution;
//   - it serves 1000 calls at once on a connection, and lets the client wait with more: the memory of a
//     connection is bounded, and the hundreds of actions and uploads of a large build pass;
//   - it neither copies nor clears memory for the data of ByteStream beyond what gRPC itself needs;
//   - it turns a panic of a call into INTERNAL for that call, and logs it with its stack.
func ServerOptions(log *slog.Logger) []grpc.ServerOption {
	unary := func(ctx context.Context, req any, call *grpc.UnaryServerInfo, next grpc.UnaryHandler) (_ any, err error) {
		defer survive(log, call.FullMethod, &err)
		return next(ctx, req)
	}
	stream := func(srv any, s grpc.ServerStream, call *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
		defer survive(log, call.FullMethod, &err)
		return next(srv, s)
	}
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(16 << 20),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.MaxConcurrentStreams(1000),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.ChainUnaryInterceptor(unary),
		grpc.ChainStreamInterceptor(stream),
	}
}

// survive is deferred around a call of method: one defective call must not end the actions of others.
func survive(log *slog.Logger, method string, err *error) {
	if p := recover(); p != nil {
		log.Error("panic in a call", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = status.Errorf(codes.Internal, "%s failed by a defect of the server; its log says more", method)
	}
}
