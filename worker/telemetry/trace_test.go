// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"errors"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/telemetry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

const traceID = "0af7651916cd43dd8448eb211c80319c"

// traced returns a task of a client's trace, with flags "01" if it is sampled.
func traced(flags string) *worker.Task {
	return &worker.Task{
		Instance: "main", Target: "//a:b", Queued: time.Now().Add(-time.Minute),
		Trace: map[string]string{"traceparent": "00-" + traceID + "-b7ad6b7169203331-" + flags},
	}
}

func TestStagesAreSpansOfTheirAction(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	r := prometheus.NewRegistry()
	m := must.Get(telemetry.New(r, sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("")))(t)
	failing := m.Executor(&ends{err: errors.New("broken\x1b" + strings.Repeat("x", 5000))})
	_, err := failing.Execute(t.Context(), traced("00"), nil)
	expect.That(t, err != nil && len(spans.Ended()) == 0, "a trace that is not sampled has %d spans", len(spans.Ended()))
	expect.That(t, !strings.Contains(scrape(t, r), "trace_id"), "an exemplar of a trace that is not sampled")

	task := traced("01")
	_, err = failing.Execute(t.Context(), task, nil)
	expect.That(t, err != nil, "got no error")
	ended := spans.Ended()
	var names []string
	for _, s := range ended {
		names = append(names, s.Name())
	}
	expect.Slices(t, names, []string{"action.queue", "action.fetch", "action.run", "action"}, "spans")
	action := ended[len(ended)-1]
	for _, s := range ended[:3] {
		expect.Equal(t, s.Parent().SpanID(), action.SpanContext().SpanID(), "parent of %s", s.Name())
		expect.That(t, !s.StartTime().Before(action.StartTime()) && !s.EndTime().Before(s.StartTime()), "%s: wrong times", s.Name())
	}
	expect.Equal(t, action.Parent().SpanID().String(), "b7ad6b7169203331", "parent of the action")
	expect.That(t, action.StartTime().Equal(task.Queued), "the action starts at %s, want %s", action.StartTime(), task.Queued)
	text := action.Status().Description
	expect.That(t, strings.HasPrefix(text, "broken") && len(text) <= telemetry.MaxStatus && !strings.Contains(text, "\x1b"), "status %q", text)
	expect.Text(t, scrape(t, r), `# {trace_id="`+traceID+`"}`, "exemplar")
}

// scrape returns the metrics in the format that has exemplars.
func scrape(t *testing.T, r *prometheus.Registry) string {
	request, answer := httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil), httptest.NewRecorder()
	request.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
	promhttp.HandlerFor(r, promhttp.HandlerOpts{EnableOpenMetrics: true}).ServeHTTP(answer, request)
	return answer.Body.String()
}

// TestTracingCostsNothingWhenOff compares the allocations of a traced client's action with those of any other.
func TestTracingCostsNothingWhenOff(t *testing.T) {
	m := must.Get(telemetry.New(prometheus.NewRegistry(), nil))(t)
	e := m.Executor(&ends{out: &worker.Outcome{Result: &repb.ActionResult{}}})
	count := func(task *worker.Task) float64 {
		return testing.AllocsPerRun(100, func() {
			expect.Error(t, expect.Err(e.Execute(t.Context(), task, nil)), nil)
		})
	}
	counts := []float64{count(&worker.Task{}), count(traced("01"))}
	expect.That(t, slices.Max(counts) <= withoutTracing, "got %v allocations for an action, want at most %d", counts, withoutTracing)
}

// withoutTracing is the number of allocations of Execute before it could record spans.
const withoutTracing = 4
