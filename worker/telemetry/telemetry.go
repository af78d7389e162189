// SPDX-License-Identifier: Apache-2.0

// Package telemetry counts what workers do, for Prometheus, and records it as spans of OpenTelemetry. No label is text
// from a client.
//
// Metric names follow the conventions of Prometheus and are an interface: users depend on them. Metrics are off by
// default, since serving them has no authentication. Text format, histograms and registry come from Prometheus' own
// client.
package telemetry

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/violation"
	"github.com/cloister-build/cloister/worker"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
)

// Metrics are the counters of one server. They are safe for concurrent use.
type Metrics struct {
	actions    *prometheus.CounterVec
	stages     *prometheus.HistogramVec
	violations *prometheus.CounterVec
	checks     *prometheus.CounterVec
	tracer     trace.Tracer // nil without spans
}

// New registers the counters, and fails if r has metrics of the same names. tracer, which may be nil, records spans.
func New(r prometheus.Registerer, tracer trace.Tracer) (*Metrics, error) {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	m := &Metrics{
		actions: counter("cloister_actions_total", "Completed actions by result.", "result"),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloister_action_stage_duration_seconds", Help: "Time that executed actions spent in a stage.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 12),
		}, []string{"stage"}),
		violations: counter("cloister_sandbox_violations_total",
			"Operations that the sandbox denied, and limits that actions hit, by kind of event.", "kind"),
		checks: counter("cloister_repro_checks_total", "Reproducibility checks by result.", "result"),
		tracer: tracer,
	}
	for _, c := range []prometheus.Collector{m.actions, m.stages, m.violations, m.checks} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Check counts a reproducibility check, whose result is same, differs, flaky_exit or skipped.
func (m *Metrics) Check(result string) { m.checks.WithLabelValues(result).Inc() }

// Violations counts the violations of a run.
func (m *Metrics) Violations(v *worker.Violations) {
	for _, e := range v.Events {
		m.violations.WithLabelValues(string(e.Kind)).Add(float64(max(e.Count, 1)))
	}
	if v.Unrecorded > 0 {
		m.violations.WithLabelValues("unrecorded").Add(float64(v.Unrecorded))
	}
}

// Executor returns an Executor that counts what e executes, and records its spans.
func (m *Metrics) Executor(e worker.Executor) worker.Executor { return &counted{e, m} }

type counted struct {
	worker.Executor
	*Metrics
}

// Execute counts the action and measures its stages.
func (c *counted) Execute(
	ctx context.Context, t *worker.Task, report func(worker.Stage),
) (*worker.Outcome, error) {
	ctx, span := c.start(ctx, t)
	var stage worker.Stage
	var began time.Time
	observe := func() {
		if stage != 0 {
			c.observe(ctx, stage, began)
		}
	}
	out, err := c.Executor.Execute(ctx, t, func(s worker.Stage) {
		observe()
		stage, began = s, time.Now()
		if report != nil {
			report(s)
		}
	})
	observe()
	label := result(out, err)
	c.actions.WithLabelValues(label).Inc()
	end(span, label, out, err)
	return out, err
}

// observe measures a stage that ends now. If the action is traced, an exemplar of the histogram leads to its trace.
func (m *Metrics) observe(ctx context.Context, stage worker.Stage, began time.Time) {
	now := time.Now()
	seconds, histogram := now.Sub(began).Seconds(), m.stages.WithLabelValues(stage.String())
	exemplars, ok := histogram.(prometheus.ExemplarObserver)
	parent := trace.SpanContextFromContext(ctx)
	if m.tracer == nil || !parent.IsSampled() || !ok {
		histogram.Observe(seconds)
		return
	}
	exemplars.ObserveWithExemplar(seconds, prometheus.Labels{"trace_id": parent.TraceID().String()})
	_, span := m.tracer.Start(ctx, "action."+stage.String(), trace.WithTimestamp(began))
	span.End(trace.WithTimestamp(now))
}

// result returns the label for the end of an action.
func result(out *worker.Outcome, err error) string {
	if err != nil {
		switch f, ok := errors.AsType[*worker.Fault](err); {
		case ok && f.Kind == worker.FaultCancelled:
			return "cancelled"
		case ok && f.Kind <= worker.FaultUnmet:
			return "rejected"
		}
		return "infra"
	}
	switch {
	case out.Cached:
		return "cached"
	case out.Status == worker.StatusTimedOut:
		return "timeout"
	case out.OnViolation == violation.Failed:
		return "violation_fail"
	case out.OnViolation == violation.Killed:
		return "violation_kill"
	case out.Exceeded == sandbox.LimitMemory:
		return "oom"
	case out.Exceeded != "":
		return "limit"
	case out.Result.ExitCode > 128:
		return "signal"
	case out.Status != worker.StatusOK || out.Result.ExitCode != 0:
		return "nonzero"
	}
	return "ok"
}
