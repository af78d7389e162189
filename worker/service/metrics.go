// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics registers metrics that are read when they are scraped, and keeps the errors.
type metrics struct {
	to   prometheus.Registerer
	errs []error
}

// add registers a metric. A name that ends in _total is that of a counter.
func (m *metrics) add(name, help string, labels prometheus.Labels, value func() float64) {
	var c prometheus.Collector
	if strings.HasSuffix(name, "_total") {
		c = prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}, value)
	} else {
		c = prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, value)
	}
	m.errs = append(m.errs, m.to.Register(c))
}

// err returns the errors so far.
func (m *metrics) err() error { return errors.Join(m.errs...) }

// cache registers the metrics of a cache in memory.
func (m *metrics) cache(name string, limit int64, size func() int64) {
	labels := prometheus.Labels{"cache": name}
	m.add("cloister_memory_bytes", "Estimated size of a cache in memory.", labels, func() float64 { return float64(size()) })
	m.add("cloister_memory_limit_bytes", "Size at which a cache in memory drops entries, by --memory.", labels,
		func() float64 { return float64(limit) })
}

// lookups counts the calls of GetActionResult by clients.
type lookups struct{ hits, misses atomic.Int64 }

// count returns a casserver.Config.OnLookup that counts a lookup before next, which may be nil.
func (l *lookups) count(next onLookup) onLookup {
	return func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult) {
		if r == nil {
			l.misses.Add(1)
		} else {
			l.hits.Add(1)
		}
		if next != nil {
			next(ctx, instance, action, r)
		}
	}
}

// onLookup is the type of casserver.Config.OnLookup.
type onLookup = func(ctx context.Context, instance string, action cas.Digest, r *repb.ActionResult)

// lookups registers the metrics of lookups in the action cache.
func (m *metrics) lookups(l *lookups) {
	for status, n := range map[string]*atomic.Int64{"hit": &l.hits, "miss": &l.misses} {
		m.add("cloister_action_cache_lookups_total", "Lookups of results by clients (GetActionResult), by status: hit or miss.",
			prometheus.Labels{"status": status}, func() float64 { return float64(n.Load()) })
	}
}

// queue registers the metrics of a queue.
func (m *metrics) queue(work *queue.Queue) {
	c := &queueMetrics{work: work}
	states := map[string]func(queue.Stats) float64{
		"working": func(s queue.Stats) float64 { return float64(s.Working) },
		"drained": func(s queue.Stats) float64 { return float64(s.Drained) },
		"gone":    func(s queue.Stats) float64 { return float64(s.Gone) },
	}
	for state, f := range states {
		c.add("cloister_workers", "Workers, including the slots of this server, by state: working, drained or recently gone.",
			prometheus.Labels{"state": state}, f)
	}
	add := func(name, help string, f func(queue.Stats) float64) { c.add(name, help, nil, f) }
	add("cloister_actions_queued", "Actions waiting for a slot.", func(s queue.Stats) float64 { return float64(s.Queued) })
	add("cloister_actions_running", "Actions with a slot.", func(s queue.Stats) float64 { return float64(s.Running) })
	add("cloister_actions_again_total", "Actions rerun after the loss of their worker.", func(s queue.Stats) float64 { return float64(s.Again) })
	add("cloister_actions_lost_total", "Runs lost with their worker.", func(s queue.Stats) float64 { return float64(s.Lost) })
	add("cloister_slots", "Slots of all connected workers, including drained ones.", func(s queue.Stats) float64 { return float64(s.Slots) })
	add("cloister_queue_oldest_seconds", "Waiting time of the oldest queued action; 0 if none waits.", func(s queue.Stats) float64 {
		if s.Oldest.IsZero() {
			return 0
		}
		return max(time.Since(s.Oldest), 0).Seconds()
	})
	m.errs = append(m.errs, m.to.Register(c))
}

// queueMetrics is the prometheus.Collector of a queue. It reads the queue once per scrape: on a busy server thousands of
// calls wait for the queue's mutex, and a scrape must not join them for each metric.
type queueMetrics struct {
	work   *queue.Queue
	values []queueMetric
}

type queueMetric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(queue.Stats) float64
}

// add adds a metric. A name that ends in _total is that of a counter.
func (c *queueMetrics) add(name, help string, labels prometheus.Labels, of func(queue.Stats) float64) {
	kind := prometheus.GaugeValue
	if strings.HasSuffix(name, "_total") {
		kind = prometheus.CounterValue
	}
	c.values = append(c.values, queueMetric{prometheus.NewDesc(name, help, nil, labels), kind, of})
}

// Describe implements prometheus.Collector.
func (c *queueMetrics) Describe(to chan<- *prometheus.Desc) {
	for _, v := range c.values {
		to <- v.desc
	}
}

// Collect implements prometheus.Collector.
func (c *queueMetrics) Collect(to chan<- prometheus.Metric) {
	stats := c.work.Stats()
	for _, v := range c.values {
		to <- prometheus.MustNewConstMetric(v.desc, v.kind, v.of(stats))
	}
}
