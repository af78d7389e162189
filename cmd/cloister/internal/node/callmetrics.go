// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/genproto/googleapis/bytestream"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// callMetrics counts the calls of clients and workers, and the bytes that calls of the store transfer. Call metrics
// have the names of gRPC's Prometheus middleware, so that existing dashboards for gRPC servers show them.
type callMetrics struct {
	calls *grpcprom.ServerMetrics
	bytes map[string]*transfers // by the full name of a method of the store
}

// transfers counts the bytes of one method.
type transfers struct{ received, sent prometheus.Counter }

// newCallMetrics registers the metrics with r.
func newCallMetrics(r *prometheus.Registry) *callMetrics {
	c := &callMetrics{
		calls: grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram(
			grpcprom.WithHistogramBuckets(prometheus.ExponentialBuckets(0.001, 4, 9)))),
		bytes: map[string]*transfers{},
	}
	bytes := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "cloister_cas_transferred_bytes_total",
		Help: "Bytes of messages that clients and workers sent to the store and received from it, by method.",
	}, []string{"grpc_service", "grpc_method", "direction"})
	api := repb.File_build_bazel_remote_execution_v2_remote_execution_proto.Services()
	for _, service := range []protoreflect.ServiceDescriptor{
		api.ByName("ContentAddressableStorage"), api.ByName("ActionCache"),
		bytestream.File_google_bytestream_bytestream_proto.Services().ByName("ByteStream"),
	} {
		for i := range service.Methods().Len() {
			name, method := string(service.FullName()), string(service.Methods().Get(i).Name())
			c.bytes["/"+name+"/"+method] = &transfers{
				received: bytes.WithLabelValues(name, method, "received"), sent: bytes.WithLabelValues(name, method, "sent"),
			}
		}
	}
	r.MustRegister(c.calls, bytes)
	return c
}

// ServerOptions returns options that make a gRPC server trace its calls and, if metrics are exported, count them. They
// must precede all other options, so that refused calls and panics count as well.
func (n *Node) ServerOptions() []grpc.ServerOption {
	options := n.tracing.ServerOptions()
	if !n.counted {
		return options
	}
	return append(options,
		grpc.ChainUnaryInterceptor(n.calls.calls.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(n.calls.calls.StreamServerInterceptor()),
		grpc.StatsHandler(n.calls),
	)
}

// transfersKey is the context key of the transfers of a call's method.
type transfersKey struct{}

// TagRPC implements stats.Handler.
func (c *callMetrics) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	if t := c.bytes[info.FullMethodName]; t != nil {
		return context.WithValue(ctx, transfersKey{}, t)
	}
	return ctx
}

// HandleRPC implements stats.Handler.
func (c *callMetrics) HandleRPC(ctx context.Context, s stats.RPCStats) {
	switch s := s.(type) {
	case *stats.InPayload:
		if t, ok := ctx.Value(transfersKey{}).(*transfers); ok {
			t.received.Add(float64(s.Length))
		}
	case *stats.OutPayload:
		if t, ok := ctx.Value(transfersKey{}).(*transfers); ok {
			t.sent.Add(float64(s.Length))
		}
	}
}

// TagConn implements stats.Handler.
func (c *callMetrics) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (c *callMetrics) HandleConn(context.Context, stats.ConnStats) {}
