// SPDX-License-Identifier: Apache-2.0

// Package telemetry counts what workers do, for Prometheus: as a decorator of an Executor and as the hook that is
// told of attempts. It decides nothing, and no label is a client's word.
package telemetry

import (
	"context"
	"errors"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the counters of one server. They are safe for concurrent use.
type Metrics struct {
	actions  *prometheus.CounterVec
	stages   *prometheus.HistogramVec
	attempts *prometheus.CounterVec
	checks   *prometheus.CounterVec
}

// New registers the counters.
func New(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		actions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloister_actions_total", Help: "Actions that ended, by result.",
		}, []string{"result"}),
		stages: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cloister_action_stage_duration_seconds", Help: "Time that executed actions spent in a stage.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 12),
		}, []string{"stage"}),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloister_sandbox_violations_total", Help: "What actions tried and may not, and limits that they met, by kind of event.",
		}, []string{"kind"}),
		checks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cloister_repro_checks_total", Help: "Actions that were to be run again, by what that came to.",
		}, []string{"result"}),
	}
	r.MustRegister(m.actions, m.stages, m.attempts, m.checks)
	return m
}

// Check counts what it came to that an action was to be run again: same, differs, flaky_exit or skipped.
func (m *Metrics) Check(result string) { m.checks.WithLabelValues(result).Inc() }

// Violations counts what a run tried.
func (m *Metrics) Violations(a *worker.Violations) {
	for _, e := range a.Events {
		m.attempts.WithLabelValues(string(e.Kind)).Add(float64(max(e.Count, 1)))
	}
	if a.Unrecorded > 0 {
		m.attempts.WithLabelValues("unrecorded").Add(float64(a.Unrecorded))
	}
}

// Executor returns an Executor that counts what e executes.
func (m *Metrics) Executor(e worker.Executor) worker.Executor { return &counted{e, m} }

type counted struct {
	worker.Executor
	*Metrics
}

// Execute counts the action, and the time that it spends in each stage.
func (c *counted) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	var stage worker.Stage
	var began time.Time
	left := func() {
		if stage != 0 {
			c.stages.WithLabelValues(stage.String()).Observe(time.Since(began).Seconds())
		}
	}
	out, err := c.Executor.Execute(ctx, t, func(s worker.Stage) {
		left()
		stage, began = s, time.Now()
		report(s)
	})
	left()
	c.actions.WithLabelValues(result(out, err)).Inc()
	return out, err
}

// result returns the label of how an action ended.
func result(out *worker.Outcome, err error) string {
	var f *worker.Fault
	switch {
	case errors.As(err, &f) && f.Kind == worker.Cancelled:
		return "cancelled"
	case errors.As(err, &f) && f.Kind <= worker.Unmet:
		return "rejected"
	case err != nil:
		return "infra"
	case out.Cached:
		return "cached"
	case out.Status == worker.TimedOut:
		return "timeout"
	case out.Exceeded != "":
		if out.Exceeded == sandbox.LimitMemory {
			return "oom"
		}
		return "limit"
	case out.Result.ExitCode > 128:
		return "signal"
	case out.Status != worker.OK || out.Result.ExitCode != 0:
		return "nonzero"
	}
	return "ok"
}
