// SPDX-License-Identifier: Apache-2.0

// Package tracing exports spans and metrics by OTLP/gRPC if the OTEL_ variables of OpenTelemetry enable that.
package tracing

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/buildinfo"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/telemetry"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
)

const (
	// flushTime bounds how long Close waits for a collector.
	flushTime = 5 * time.Second
	// quiet is the time between two log lines about a collector that takes no spans or metrics.
	quiet = 10 * time.Minute
)

// A Tracing exports spans. A nil *Tracing exports none and costs nothing.
type Tracing struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// Start returns the Tracing that the environment asks for, or nil. The caller closes it. The collector need not be
// reachable: spans wait in a bounded queue, and those that it cannot take are lost.
func Start(ctx context.Context, log *slog.Logger) (*Tracing, error) {
	if wanted, err := wanted(os.Getenv, "TRACES"); err != nil {
		log.Warn("traces are not exported", "err", err)
		return nil, nil
	} else if !wanted {
		return nil, nil
	}
	logFailures(log)
	exporter, err := otlptracegrpc.New(ctx)
	if err != nil {
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(process(ctx, log)))
	return &Tracing{provider, provider.Tracer("github.com/cloister-build/cloister")}, nil
}

// process returns the resource that describes this process.
func process(ctx context.Context, log *slog.Logger) *resource.Resource {
	about, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithHost(), resource.WithAttributes(
		attribute.String("service.name", "cloister"), attribute.String("service.version", buildinfo.Version),
	), resource.WithFromEnv())
	if err != nil { // what is valid remains
		log.Warn("OTEL_RESOURCE_ATTRIBUTES is not fully valid", "err", err)
	}
	return about
}

// wanted reports whether the environment asks for a signal, TRACES or METRICS, and fails if it asks for something that
// is not supported.
func wanted(env func(string) string, signal string) (bool, error) {
	name := "OTEL_" + signal + "_EXPORTER"
	exporter := env(name)
	endpoint := cmp.Or(env("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT"), env("OTEL_EXPORTER_OTLP_ENDPOINT"))
	switch {
	case strings.EqualFold(env("OTEL_SDK_DISABLED"), "true"), exporter == "none", exporter == "" && endpoint == "":
		return false, nil
	case exporter != "" && exporter != "otlp":
		return false, fmt.Errorf("%s=%+.64q: write otlp or none", name, exporter)
	}
	if p := cmp.Or(env("OTEL_EXPORTER_OTLP_"+signal+"_PROTOCOL"), env("OTEL_EXPORTER_OTLP_PROTOCOL"), "grpc"); p != "grpc" {
		return false, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%+.64q: write grpc", p)
	}
	return true, nil
}

// Tracer returns the tracer that begins spans, or nil without one.
func (t *Tracing) Tracer() trace.Tracer {
	if t == nil {
		return nil
	}
	return t.tracer
}

// ServerOptions returns the options with which a gRPC server records its calls.
func (t *Tracing) ServerOptions() []grpc.ServerOption {
	if t == nil {
		return nil
	}
	return []grpc.ServerOption{grpc.StatsHandler(serverCalls{tracer: t.tracer})}
}

// DialOptions returns the options with which a gRPC client records its calls.
func (t *Tracing) DialOptions() []grpc.DialOption {
	if t == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithStatsHandler(clientCalls{tracer: t.tracer})}
}

// Close sends the last spans, for at most flushTime.
func (t *Tracing) Close() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		otel.Handle(err)
	}
}

var handler sync.Once

// logFailures makes the process log failed exports. Spans and metrics share the lines.
func logFailures(log *slog.Logger) {
	handler.Do(func() { otel.SetErrorHandler(&failures{log: log}) })
}

// failures logs that the collector takes no spans or no metrics.
type failures struct {
	log  *slog.Logger
	last atomic.Int64 // Unix time of the last line, in seconds
}

// Handle implements otel.ErrorHandler.
func (f *failures) Handle(err error) {
	now, last := time.Now().Unix(), f.last.Load()
	if now-last >= int64(quiet/time.Second) && f.last.CompareAndSwap(last, now) {
		f.log.Warn("spans or metrics are lost: the OTLP collector does not take them", "err", printable.Head(err.Error(), telemetry.MaxStatus))
	}
}
