// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/prometheus/client_golang/prometheus"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/grpc"
)

// A receiver receives metrics over OTLP.
type receiver struct {
	collectorpb.UnimplementedMetricsServiceServer
	received chan *metricspb.ResourceMetrics
}

// Export implements MetricsService.
func (r *receiver) Export(_ context.Context, m *collectorpb.ExportMetricsServiceRequest) (*collectorpb.ExportMetricsServiceResponse, error) {
	for _, of := range m.ResourceMetrics {
		r.received <- of
	}
	return &collectorpb.ExportMetricsServiceResponse{}, nil
}

// TestMetricsAreThoseOfPrometheus: names, labels and values arrive as /metrics has them, at the latest when it stops.
func TestMetricsAreThoseOfPrometheus(t *testing.T) {
	listener := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	r, s := &receiver{received: make(chan *metricspb.ResourceMetrics, 100)}, grpc.NewServer()
	collectorpb.RegisterMetricsServiceServer(s, r)
	go s.Serve(listener)
	t.Cleanup(s.Stop)
	t.Setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://"+listener.Addr().String())
	t.Setenv("OTEL_SERVICE_NAME", "head")
	registry := prometheus.NewRegistry()
	stop := must.Get(ExportMetrics(t.Context(), slog.New(slog.DiscardHandler), registry))(t)
	total := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cloister_actions_total"}, []string{"result"})
	registry.MustRegister(total) // later than the exporter
	total.WithLabelValues("ok").Add(3)
	stop()
	close(r.received)
	var last *metricspb.ResourceMetrics
	for last = range r.received {
	}
	must.Be(t, last != nil, "no metrics arrived")
	name := ""
	for _, a := range last.Resource.Attributes {
		if a.Key == "service.name" {
			name = a.Value.GetStringValue()
		}
	}
	expect.Equal(t, name, "head", "service.name")
	m := last.ScopeMetrics[len(last.ScopeMetrics)-1].Metrics
	must.Be(t, len(m) == 1 && m[0].Name == "cloister_actions_total" && len(m[0].GetSum().GetDataPoints()) == 1, "got %v", m)
	p := m[0].GetSum().DataPoints[0]
	expect.That(t, p.GetAsDouble() == 3 && m[0].GetSum().IsMonotonic && p.Attributes[0].Key == "result" &&
		p.Attributes[0].Value.GetStringValue() == "ok", "got %v", m)
}

// TestNoMetricsWithoutRequest: nothing runs.
func TestNoMetricsWithoutRequest(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	for _, value := range []string{"none", "console"} {
		t.Setenv("OTEL_METRICS_EXPORTER", value)
		stop, err := ExportMetrics(t.Context(), slog.New(slog.DiscardHandler), prometheus.GathererFunc(nil))
		expect.That(t, stop == nil && err == nil, "OTEL_METRICS_EXPORTER=%s: metrics are exported, or %v", value, err)
	}
}
