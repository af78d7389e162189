// SPDX-License-Identifier: Apache-2.0

package casserver

import (
	"cmp"
	"context"
	"log/slog"
	"runtime/debug"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// maxHeaders limits the headers of a call in bytes. It leaves room for a token and the client's metadata.
const maxHeaders = 256 << 10

// ServerOptions returns the options of a gRPC server for the Remote Execution API:
//   - Messages of up to 16 MiB: a WriteRequest may carry as much data as a batch, and clients with raised limits send
//     larger lists of digests (rule 9).
//   - Headers of up to 256 KiB instead of gRPC's 16 MiB, because they arrive before authentication.
//   - A ping every 5 s is permitted, even on an idle connection: clients behind proxies wait long for executions
//     (rule 91).
//   - A client that is silent for 30 s is pinged and dropped after another 20 s: a dead client must not hold an upload
//     or wait for an execution.
//   - 1000 concurrent calls per connection: this bounds its memory and suffices for the hundreds of actions and uploads
//     of a large build.
//   - A panic fails only its call, with INTERNAL, and is logged with its stack; a nil log discards.
//
// Interceptors see messages of ByteStream that embed bspb.ReadResponse and bspb.WriteRequest; each is a proto.Message.
func ServerOptions(log *slog.Logger) []grpc.ServerOption {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	unary := func(ctx context.Context, req any, call *grpc.UnaryServerInfo, next grpc.UnaryHandler) (_ any, err error) {
		defer recoverPanic(log, call.FullMethod, &err)
		return next(ctx, req)
	}
	stream := func(srv any, s grpc.ServerStream, call *grpc.StreamServerInfo, next grpc.StreamHandler) (err error) {
		defer recoverPanic(log, call.FullMethod, &err)
		return next(srv, s)
	}
	return []grpc.ServerOption{
		grpc.MaxRecvMsgSize(16 << 20),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: 5 * time.Second, PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 20 * time.Second}),
		grpc.MaxConcurrentStreams(1000),
		grpc.ChainUnaryInterceptor(unary),
		grpc.ChainStreamInterceptor(stream),
	}
}

// Codec returns a server option that avoids copying and clearing the data of ByteStream. Without it the services work,
// too, with more CPU time per byte. It replaces the codec of every service of the server, so it suits only servers
// whose services all use protocol buffers.
func Codec() grpc.ServerOption { return grpc.ForceServerCodecV2(newCodec()) }

// recoverPanic turns a panic into an error of the call, so that it does not end the actions of other clients.
func recoverPanic(log *slog.Logger, method string, err *error) {
	if p := recover(); p != nil {
		log.Error("panic in a call", "method", method, "panic", p, "stack", string(debug.Stack()))
		*err = status.Errorf(codes.Internal, "%s: internal server error; see the server's log", method)
	}
}
