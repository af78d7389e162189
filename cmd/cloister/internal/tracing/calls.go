// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"strconv"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/telemetry"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// w3c reads and writes the headers traceparent and tracestate.
var w3c propagation.TraceContext

// maxMethod bounds the names of spans, in bytes. Callers may name methods that do not exist, before they are known.
const maxMethod = 256

// start begins the span of a call.
func start(ctx context.Context, tracer trace.Tracer, kind trace.SpanKind, info *stats.RPCTagInfo) (context.Context, trace.Span) {
	name := printable.Head(strings.TrimPrefix(info.FullMethodName, "/"), maxMethod)
	return tracer.Start(ctx, name, trace.WithSpanKind(kind),
		trace.WithAttributes(attribute.String("rpc.system.name", "grpc"), attribute.String("rpc.method", name)))
}

// writeTrace sets the headers of md to the span of ctx.
func writeTrace(ctx context.Context, md metadata.MD) metadata.MD {
	headers := propagation.MapCarrier{}
	w3c.Inject(ctx, headers)
	md.Delete("tracestate")
	for name, value := range headers {
		md.Set(name, value)
	}
	return md
}

// serverCalls records the calls of a server's clients, as a gRPC stats.Handler: Execute, and every call with a trace
// context. Other calls have no span, since most clients send no trace context and a build makes thousands of calls.
type serverCalls struct {
	ended
	tracer trace.Tracer
}

// TagRPC implements stats.Handler. Handlers find the span in place of the client's trace context.
func (c serverCalls) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	md, _ := metadata.FromIncomingContext(ctx)
	parent := worker.ParseTrace(func(name string) string { return strings.Join(md.Get(name), ",") })
	if parent == nil && info.FullMethodName != repb.Execution_Execute_FullMethodName {
		return ctx
	}
	ctx, _ = start(w3c.Extract(ctx, propagation.MapCarrier(parent)), c.tracer, trace.SpanKindServer, info)
	return metadata.NewIncomingContext(ctx, writeTrace(ctx, md))
}

// HandleRPC implements stats.Handler.
func (c serverCalls) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if in, ok := s.(*stats.InPayload); ok {
		if r, ok := in.Payload.(*repb.ExecuteRequest); ok && trace.SpanFromContext(ctx).IsRecording() {
			trace.SpanFromContext(ctx).SetAttributes(
				attribute.String("reapi.instance", worker.Sanitize(r.InstanceName)),
				attribute.String("reapi.action.digest", worker.Sanitize(r.ActionDigest.GetHash())+"/"+strconv.FormatInt(r.ActionDigest.GetSizeBytes(), 10)))
		}
	}
	c.ended.HandleRPC(ctx, s)
}

// clientCalls records calls to other servers that are part of a trace, as a gRPC stats.Handler.
type clientCalls struct {
	ended
	tracer trace.Tracer
}

// TagRPC implements stats.Handler.
func (c clientCalls) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	ctx, _ = start(ctx, c.tracer, trace.SpanKindClient, info)
	md, _ := metadata.FromOutgoingContext(ctx)
	return metadata.NewOutgoingContext(ctx, writeTrace(ctx, md.Copy()))
}

// BucketCall records a call of a bucket that has ended and is part of a trace. ctx is that of the caller.
func (t *Tracing) BucketCall(ctx context.Context, c object.Call) {
	if t == nil || !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	_, span := t.tracer.Start(ctx, "bucket."+c.Kind, trace.WithSpanKind(trace.SpanKindClient), trace.WithTimestamp(c.Began), trace.WithAttributes(
		attribute.String("cloister.outcome", c.Outcome), attribute.Int("cloister.requests", c.Requests),
		attribute.Int64("cloister.sent_bytes", c.Sent), attribute.Int64("cloister.received_bytes", c.Received)))
	if c.Err != nil && c.Outcome != "not_found" && c.Outcome != "canceled" {
		span.SetStatus(codes.Error, printable.Head(c.Err.Error(), telemetry.MaxStatus))
	}
	span.End()
}

// ended ends the spans of calls.
type ended struct{}

// HandleRPC implements stats.Handler.
func (ended) HandleRPC(ctx context.Context, s stats.RPCStats) {
	end, ok := s.(*stats.End)
	if !ok {
		return
	}
	span, st := trace.SpanFromContext(ctx), status.Convert(end.Error)
	span.SetAttributes(attribute.String("rpc.response.status_code", st.Code().String()))
	switch st.Code() {
	case grpccodes.Unknown, grpccodes.DeadlineExceeded, grpccodes.Unimplemented, grpccodes.Internal, grpccodes.Unavailable, grpccodes.DataLoss:
		span.SetStatus(codes.Error, printable.Head(st.Message(), telemetry.MaxStatus))
	}
	span.End(trace.WithTimestamp(end.EndTime))
}

// TagConn implements stats.Handler.
func (ended) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (ended) HandleConn(context.Context, stats.ConnStats) {}
