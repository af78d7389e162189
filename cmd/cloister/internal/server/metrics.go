// SPDX-License-Identifier: Apache-2.0

package server

import (
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/node"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/prometheus/client_golang/prometheus"
)

// queueMetrics are the readings of a queue. The workers, which have a label, it adds to the registry.
func queueMetrics(registry *prometheus.Registry, work *queue.Queue) []node.Metric {
	for _, state := range []string{"working", "drained", "gone"} {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloister_workers", Help: "Workers, this server with slots of its own among them: working, drained, or gone of late.",
			ConstLabels: prometheus.Labels{"state": state},
		}, func() float64 { return float64(countWorkers(work, state)) }))
	}
	queued := func(f func(queue.Stats) float64) func() float64 {
		return func() float64 { return f(work.Stats()) }
	}
	return []node.Metric{
		{Name: "cloister_actions_queued", Help: "Actions that wait for a slot, of whichever worker.", Value: queued(func(s queue.Stats) float64 { return float64(s.Queued) })},
		{Name: "cloister_actions_running", Help: "Actions that have a slot, of whichever worker.", Value: queued(func(s queue.Stats) float64 { return float64(s.Running) })},
		{Name: "cloister_actions_again_total", Help: "Actions that were run again since their worker was lost.", Value: queued(func(s queue.Stats) float64 { return float64(s.Again) })},
		{Name: "cloister_actions_lost_total", Help: "Runs that were lost with their worker.", Value: queued(func(s queue.Stats) float64 { return float64(s.Lost) })},
		{Name: "cloister_slots", Help: "Slots of all workers that are there, drained ones included.", Value: queued(func(s queue.Stats) float64 { return float64(s.Slots) })},
		{Name: "cloister_queue_oldest_seconds", Help: "For how long the action has waited for a slot that has waited longest; 0 if none waits.", Value: queued(func(s queue.Stats) float64 {
			if s.Oldest.IsZero() {
				return 0
			}
			return max(time.Since(s.Oldest), 0).Seconds()
		})},
	}
}

// countWorkers returns how many workers are in a state.
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
