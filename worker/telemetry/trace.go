// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"time"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// MaxStatus bounds the description of a span's status, in bytes.
const MaxStatus = 1024

// start begins the span of an action, which is below the client's, and records how long the action was queued. Calls
// with the context are part of the trace.
func (m *Metrics) start(ctx context.Context, t *worker.Task) (context.Context, trace.Span) {
	if m.tracer == nil || t == nil {
		return ctx, noop.Span{}
	}
	ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier(t.Trace))
	now := time.Now()
	queued := t.Queued
	if queued.IsZero() || queued.After(now) { // by the clock of another machine
		queued = now
	}
	ctx, span := m.tracer.Start(ctx, "action", trace.WithTimestamp(queued), trace.WithAttributes(Attributes(t)...))
	_, wait := m.tracer.Start(ctx, "action.queue", trace.WithTimestamp(queued))
	wait.End(trace.WithTimestamp(now))
	return ctx, span
}

// end ends the span of an action. label is that of its result.
func end(span trace.Span, label string, out *worker.Outcome, err error) {
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(attribute.String("cloister.result", label))
	if err != nil {
		span.SetStatus(codes.Error, printable.Head(err.Error(), MaxStatus))
	} else {
		span.SetAttributes(attribute.Int64("process.exit.code", int64(out.Result.GetExitCode())))
	}
	span.End()
}

// Attributes returns the attributes with which spans identify an action and the build that it belongs to.
func Attributes(t *worker.Task) []attribute.KeyValue {
	attributes := []attribute.KeyValue{attribute.String("reapi.instance", t.Instance)}
	if !t.Action.IsZero() {
		attributes = append(attributes, attribute.String("reapi.action.digest", t.Action.String()))
	}
	for _, a := range []struct{ key, value string }{
		{"reapi.mnemonic", t.Mnemonic}, {"reapi.target", t.Target}, {"reapi.invocation", t.Invocation},
	} {
		if a.value != "" {
			attributes = append(attributes, attribute.String(a.key, a.value))
		}
	}
	return attributes
}
