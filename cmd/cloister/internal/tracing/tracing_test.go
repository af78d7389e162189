// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas/object"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

func TestEnvironmentAsksForTraces(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://x"
	for _, c := range []struct {
		env   string
		want  bool
		fails string
	}{
		{"", false, ""},
		{endpoint, true, ""},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=http://x", true, ""},
		{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=http://x", false, ""},
		{"OTEL_TRACES_EXPORTER=otlp", true, ""},
		{endpoint + " OTEL_TRACES_EXPORTER=none", false, ""},
		{endpoint + " OTEL_SDK_DISABLED=TRUE", false, ""},
		{endpoint + " OTEL_SDK_DISABLED=false", true, ""},
		{endpoint + " OTEL_TRACES_EXPORTER=console", false, `OTEL_TRACES_EXPORTER="console": write otlp or none`},
		{endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf", false, `OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf": write grpc`},
		{endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc", true, ""},
	} {
		got, err := wanted(func(name string) string {
			for term := range strings.FieldsSeq(c.env) {
				if value, ok := strings.CutPrefix(term, name+"="); ok {
					return value
				}
			}
			return ""
		}, "TRACES")
		text := ""
		if err != nil {
			text = err.Error()
		}
		expect.Equal(t, got, c.want, "%s", c.env)
		expect.Equal(t, text, c.fails, "%s", c.env)
	}
}

// A kept keeps the spans that have ended.
type kept struct{ spans []sdktrace.ReadOnlySpan }

func (*kept) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (k *kept) OnEnd(s sdktrace.ReadOnlySpan)                 { k.spans = append(k.spans, s) }
func (*kept) Shutdown(context.Context) error                  { return nil }
func (*kept) ForceFlush(context.Context) error                { return nil }

const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

func TestServerCallsJoinTheirClientsTrace(t *testing.T) {
	for _, c := range []struct {
		method string
		md     []string
		spans  int    // of the call
		parent string // its span
		state  string
	}{
		{repb.Execution_Execute_FullMethodName, nil, 1, "0000000000000000", ""},
		{repb.Execution_Execute_FullMethodName, []string{"traceparent", parent, "tracestate", "a=b", "tracestate", "c=d"}, 1, "b7ad6b7169203331", "a=b,c=d"},
		{repb.Execution_Execute_FullMethodName, []string{"traceparent", parent, "traceparent", parent, "tracestate", "a=b"}, 1, "0000000000000000", ""},
		{"/x.Store/Get", nil, 0, "", ""},
		{"/x.Store/Get", []string{"traceparent", "00-" + strings.Repeat("0", 32) + "-b7ad6b7169203331-01"}, 0, "", ""},
		{"/x.Store/Get", []string{"traceparent", parent}, 1, "b7ad6b7169203331", ""},
	} {
		k := &kept{}
		calls := serverCalls{tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(k)).Tracer("")}
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(c.md...))
		ctx = calls.TagRPC(ctx, &stats.RPCTagInfo{FullMethodName: c.method})
		calls.HandleRPC(ctx, &stats.End{Error: status.Error(codes.Internal, strings.Repeat("\x1b", 5000))})
		if len(k.spans) != c.spans || c.spans == 0 {
			expect.Equal(t, len(k.spans), c.spans, "%s %q: spans", c.method, c.md)
			continue
		}
		s := k.spans[0]
		expect.Equal(t, s.Parent().SpanID().String(), c.parent, "%s %q: parent", c.method, c.md)
		expect.Equal(t, "/"+s.Name(), c.method, "name")
		text := s.Status().Description
		expect.That(t, text != "" && len(text) <= 1024 && !strings.Contains(text, "\x1b"), "%s: unbounded status %q", c.method, text)
		md, _ := metadata.FromIncomingContext(ctx)
		id := s.SpanContext()
		expect.Equal(t, strings.Join(md.Get("traceparent"), "|"), "00-"+id.TraceID().String()+"-"+id.SpanID().String()+"-01", "%s %q: traceparent", c.method, c.md)
		expect.Equal(t, strings.Join(md.Get("tracestate"), "|"), c.state, "%s %q: tracestate", c.method, c.md)
	}
}

// TestNamesOfSpansAreBounded: gRPC reports calls of unknown methods, too, with names of up to 16 MiB.
func TestNamesOfSpansAreBounded(t *testing.T) {
	k := &kept{}
	calls := serverCalls{tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(k)).Tracer("")}
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("traceparent", parent))
	ctx = calls.TagRPC(ctx, &stats.RPCTagInfo{FullMethodName: "/x/" + strings.Repeat("y\x1b", 5000)})
	calls.HandleRPC(ctx, &stats.End{Error: status.Error(codes.Unimplemented, "unknown method")})
	expect.Equal(t, len(k.spans), 1, "spans")
	texts := []string{k.spans[0].Name()}
	for _, a := range k.spans[0].Attributes() {
		texts = append(texts, a.Value.String())
	}
	for _, text := range texts {
		expect.That(t, len(text) <= 256 && !strings.Contains(text, "\x1b"), "unbounded: %d bytes", len(text))
	}
}

func TestClientCallsContinueTheirTrace(t *testing.T) {
	k := &kept{}
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(k)).Tracer("")
	calls := clientCalls{tracer: tracer}
	info := &stats.RPCTagInfo{FullMethodName: "/x.Store/Get"}
	alone := calls.TagRPC(t.Context(), info)
	calls.HandleRPC(alone, &stats.End{})
	_, sent := metadata.FromOutgoingContext(alone)
	expect.That(t, !sent && len(k.spans) == 0, "a call without a trace has %d spans and metadata: %t, want neither", len(k.spans), sent)

	ctx, action := tracer.Start(t.Context(), "action")
	ctx = calls.TagRPC(metadata.AppendToOutgoingContext(ctx, "traceparent", parent, "other", "x"), info)
	calls.HandleRPC(ctx, &stats.End{Error: status.Error(codes.NotFound, "x")})
	expect.Equal(t, len(k.spans), 1, "spans")
	call := k.spans[0]
	expect.Equal(t, call.Parent().SpanID(), action.SpanContext().SpanID(), "parent")
	expect.Equal(t, call.SpanKind(), trace.SpanKindClient, "kind")
	expect.Equal(t, call.Status().Description, "", "status: an absent blob is no failure")
	md, _ := metadata.FromOutgoingContext(ctx)
	id := call.SpanContext()
	expect.Equal(t, strings.Join(md.Get("traceparent"), "|")+strings.Join(md.Get("other"), "|"), "00-"+id.TraceID().String()+"-"+id.SpanID().String()+"-01x", "metadata")
}

func TestBucketCallsArePartOfATrace(t *testing.T) {
	k := &kept{}
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(k)).Tracer("")
	traced := &Tracing{tracer: tracer}
	began := time.Now().Add(-time.Minute)
	traced.BucketCall(t.Context(), object.Call{Kind: "get", Outcome: "ok", Began: began})
	expect.Equal(t, len(k.spans), 0, "spans of a call without a trace")
	ctx, action := tracer.Start(t.Context(), "action")
	for i, c := range []struct {
		outcome string
		err     error
		status  otelcodes.Code
	}{
		{"ok", nil, otelcodes.Unset},
		{"not_found", errors.New("absent"), otelcodes.Unset},
		{"unavailable", errors.New(strings.Repeat("\x1b", 5000)), otelcodes.Error},
	} {
		traced.BucketCall(ctx, object.Call{Kind: "get", Outcome: c.outcome, Err: c.err, Began: began, Requests: 2, Received: 7})
		must.Be(t, len(k.spans) == i+1, "%d spans after %s", len(k.spans), c.outcome)
		s := k.spans[i]
		expect.Equal(t, s.Parent().SpanID(), action.SpanContext().SpanID(), "%s: parent", c.outcome)
		expect.That(t, s.Name() == "bucket.get" && s.StartTime().Equal(began) && s.EndTime().After(began), "%s: got %v", c.outcome, s)
		expect.Equal(t, s.Status().Code, c.status, "%s: status", c.outcome)
		text := s.Status().Description
		expect.That(t, len(text) <= 1024 && !strings.Contains(text, "\x1b"), "%s: unbounded status %q", c.outcome, text)
		expect.Text(t, fmt.Sprint(s.Attributes()), c.outcome)
	}
}

// TestNothingWithoutTracing checks that a nil Tracing has no effect.
func TestNothingWithoutTracing(t *testing.T) {
	var off *Tracing
	off.Close()
	off.BucketCall(t.Context(), object.Call{})
	expect.That(t, off.Tracer() == nil && off.ServerOptions() == nil && off.DialOptions() == nil, "a nil Tracing has options")
}

func TestFailuresAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	f := &failures{log: slog.New(slog.NewTextHandler(&log, nil))}
	for range 3 {
		f.Handle(errors.New("no collector\x1b"))
	}
	expect.Equal(t, strings.Count(log.String(), "level=WARN msg=\"spans or metrics are lost"), 1, "lines in %s", &log)
	expect.That(t, !strings.Contains(log.String(), "\x1b"), "unprintable: %s", &log)
}
