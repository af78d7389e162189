// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/prometheus/client_golang/prometheus"
)

// queueMetrics returns the metrics of a queue, and registers those of its workers, which have a label.
func queueMetrics(registry *prometheus.Registry, work *queue.Queue) []node.Metric {
	for _, state := range []string{"working", "drained", "gone"} {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloister_workers", Help: "Workers, including the slots of this server, by state: working, drained or recently gone.",
			ConstLabels: prometheus.Labels{"state": state},
		}, func() float64 { return float64(countWorkers(work, state)) }))
	}
	queued := func(f func(queue.Stats) float64) func() float64 {
		return func() float64 { return f(work.Stats()) }
	}
	return []node.Metric{
		{Name: "cloister_actions_queued", Help: "Actions waiting for a slot.", Value: queued(func(s queue.Stats) float64 { return float64(s.Queued) })},
		{Name: "cloister_actions_running", Help: "Actions with a slot.", Value: queued(func(s queue.Stats) float64 { return float64(s.Running) })},
		{Name: "cloister_actions_again_total", Help: "Actions rerun after the loss of their worker.", Value: queued(func(s queue.Stats) float64 { return float64(s.Again) })},
		{Name: "cloister_actions_lost_total", Help: "Runs lost with their worker.", Value: queued(func(s queue.Stats) float64 { return float64(s.Lost) })},
		{Name: "cloister_slots", Help: "Slots of all connected workers, including drained ones.", Value: queued(func(s queue.Stats) float64 { return float64(s.Slots) })},
		{Name: "cloister_queue_oldest_seconds", Help: "Waiting time of the oldest queued action; 0 if none waits.", Value: queued(func(s queue.Stats) float64 {
			if s.Oldest.IsZero() {
				return 0
			}
			return max(time.Since(s.Oldest), 0).Seconds()
		})},
	}
}

// countWorkers returns the number of workers in a state.
func countWorkers(work *queue.Queue, state string) (n int) {
	for _, w := range work.Workers() {
		is := "working"
		switch {
		case !w.Left.IsZero():
			is = "gone"
		case !w.Drained.IsZero():
			is = "drained"
		}
		if is == state {
			n++
		}
	}
	return n
}
