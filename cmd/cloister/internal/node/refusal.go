// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A refusal explains the errors with which an upstream server refuses our credentials. Clients see the errors, too.
type refusal struct {
	credentials string // names where they come from
}

// dialOptions returns options with which the errors of all calls are explained.
func (r refusal) dialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(r.unary), grpc.WithChainStreamInterceptor(r.stream)}
}

// explain adds to the status of a refusal what the operator must correct. Other errors are returned unchanged.
func (r refusal) explain(err error) error {
	var advice string
	switch status.Code(err) {
	case codes.Unauthenticated:
		advice = "correct " + r.credentials
	case codes.PermissionDenied:
		advice = "grant the caller of " + r.credentials + " the rights to read and write blobs and results"
	default:
		return err
	}
	p := status.Convert(err).Proto()
	p.Message = advice + "; the server responded " + p.GetMessage()
	return status.FromProto(p).Err()
}

func (r refusal) unary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	return r.explain(invoke(ctx, method, req, reply, cc, opts...))
}

func (r refusal) stream(
	ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil {
		return nil, r.explain(err)
	}
	return explainedStream{s, r}, nil
}

// An explainedStream is a stream whose errors a refusal explains.
type explainedStream struct {
	grpc.ClientStream
	refusal refusal
}

// RecvMsg implements grpc.ClientStream.
func (s explainedStream) RecvMsg(m any) error { return s.refusal.explain(s.ClientStream.RecvMsg(m)) }
