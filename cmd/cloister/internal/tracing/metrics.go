// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/sdk/metric"
)

// ExportMetrics exports the metrics of g periodically over OTLP/gRPC if the environment requests it; otherwise stop is
// nil. stop exports them one last time, for at most flushTime, and ends the export. A failed export loses nothing but
// resolution, because the next one has the same counters.
func ExportMetrics(ctx context.Context, log *slog.Logger, g prometheus.Gatherer) (stop func(), err error) {
	if wanted, err := wanted(os.Getenv, "METRICS"); err != nil {
		log.Warn("metrics are not exported", "err", err)
		return nil, nil
	} else if !wanted {
		return nil, nil
	}
	logFailures(log)
	// No retries: the next export has everything that a failed one had.
	exporter, err := otlpmetricgrpc.New(ctx, otlpmetricgrpc.WithRetry(otlpmetricgrpc.RetryConfig{}))
	if err != nil {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT: %w", err)
	}
	reader := metric.NewPeriodicReader(exporter, metric.WithProducer(bridge.NewMetricProducer(bridge.WithGatherer(g))))
	provider := metric.NewMeterProvider(metric.WithReader(reader), metric.WithResource(process(ctx, log)))
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			otel.Handle(err)
		}
	}, nil
}
