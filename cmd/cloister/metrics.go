// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// serveMetrics serves where --metrics says, if it does, the registry, with what the store, what is behind it and more say
// of the moment, and whether the node lives and is ready, until the node is closed.
func (n *node) serveMetrics(more ...reading) error {
	if n.metrics == "" {
		return nil
	}
	register(n.registry, append(n.readings(), more...))
	listener, err := listen(n.metrics, "--metrics")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(n.registry, promhttp.HandlerOpts{}))
	mux.Handle("GET /ready", n.ready)
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "alive\n") })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go server.Serve(listener) // ends with Close
	n.stopMetrics = func() { server.Close() }
	return nil
}

// A reading is a metric that is read when somebody asks. A name that ends with _total is of a counter.
type reading struct {
	name, help string
	value      func() float64
}

// ofQueue are the readings of a queue. The workers, which have a label, it adds to the registry.
func ofQueue(registry *prometheus.Registry, work *queue.Queue) []reading {
	for _, state := range []string{"working", "drained", "gone"} {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "cloister_workers", Help: "Workers, this server with slots of its own among them: working, drained, or gone of late.",
			ConstLabels: prometheus.Labels{"state": state},
		}, func() float64 { return float64(countWorkers(work, state)) }))
	}
	queued := func(f func(queue.Stats) float64) func() float64 {
		return func() float64 { return f(work.Stats()) }
	}
	return []reading{
		{"cloister_actions_queued", "Actions that wait for a slot, of whichever worker.", queued(func(s queue.Stats) float64 { return float64(s.Queued) })},
		{"cloister_actions_running", "Actions that have a slot, of whichever worker.", queued(func(s queue.Stats) float64 { return float64(s.Running) })},
		{"cloister_actions_again_total", "Actions that were run again since their worker was lost.", queued(func(s queue.Stats) float64 { return float64(s.Again) })},
		{"cloister_actions_lost_total", "Runs that were lost with their worker.", queued(func(s queue.Stats) float64 { return float64(s.Lost) })},
		{"cloister_slots", "Slots of all workers that are there, drained ones included.", queued(func(s queue.Stats) float64 { return float64(s.Slots) })},
		{"cloister_queue_oldest_seconds", "For how long the action has waited for a slot that has waited longest; 0 if none waits.", queued(func(s queue.Stats) float64 {
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

// readings are those of the store, and of what is behind it.
func (n *node) readings() []reading {
	stored := func(f func(disk.Stats) int64) func() float64 {
		return func() float64 { return float64(f(n.store.Stats())) }
	}
	readings := []reading{
		{"cloister_ready", "1 if the server should be given work, as /ready says.", func() float64 { return truth(len(n.ready.why()) == 0) }},
		{"cloister_cas_bytes", "Size of the store.", stored(func(s disk.Stats) int64 { return s.Bytes })},
		{"cloister_cas_limit_bytes", "Size at which the store evicts.", stored(func(s disk.Stats) int64 { return s.MaxBytes })},
		{"cloister_cas_blobs", "Blobs in the store.", stored(func(s disk.Stats) int64 { return int64(s.Blobs) })},
		{"cloister_cas_files", "Files of the store.", stored(func(s disk.Stats) int64 { return s.Files })},
		{"cloister_cas_limit_files", "Number of files at which the store evicts; 0 is none.", stored(func(s disk.Stats) int64 { return s.MaxFiles })},
		{"cloister_cas_segments", "Segments of small blobs.", stored(func(s disk.Stats) int64 { return int64(s.Segments) })},
		{"cloister_cas_lease_seconds", "How long a blob stays at least after it was used; 0 is no promise.", func() float64 { return max(n.store.Stats().Lease, 0).Seconds() }},
		{"cloister_cas_evicted_blobs_total", "Blobs and results that were evicted.", stored(func(s disk.Stats) int64 { return s.EvictedBlobs })},
		{"cloister_cas_evicted_bytes_total", "Bytes that were evicted.", stored(func(s disk.Stats) int64 { return s.EvictedBytes })},
		{"cloister_cas_held_bytes", "Bytes of removed segments that images of inputs keep on the disk.", stored(func(s disk.Stats) int64 { return s.HeldBytes })},
		{"cloister_cas_corrupt_total", "Blobs that were found damaged.", stored(func(s disk.Stats) int64 { return s.Corrupt })},
	}
	if n.front != nil {
		moved := func(f func(overlay.Stats) int64) func() float64 {
			return func() float64 { return float64(f(n.front.Stats())) }
		}
		readings = append(readings,
			reading{"cloister_cas_upstream_up", "1 if the upstream answers.", func() float64 { return truth(n.behind.down() == "") }},
			reading{"cloister_cas_upstream_fetched_total", "Blobs that were fetched from the upstream.", moved(func(s overlay.Stats) int64 { return s.Fetched })},
			reading{"cloister_cas_upstream_sent_total", "Blobs and results that were written to the upstream after their write was answered.", moved(func(s overlay.Stats) int64 { return s.Sent })},
			reading{"cloister_cas_upstream_unasked_total", "Questions that were answered without the upstream, since it did not.", moved(func(s overlay.Stats) int64 { return s.Unanswered })},
			reading{"cloister_cas_upstream_refused_total", "Results that the upstream did not take.", moved(func(s overlay.Stats) int64 { return s.Refused })},
			reading{"cloister_cas_upstream_pending", "Blobs and results that are still to be written to the upstream.", moved(func(s overlay.Stats) int64 { return int64(s.Pending) })},
			reading{"cloister_cas_upstream_lost_total", "Blobs and results that were gone before they could be written to the upstream.", moved(func(s overlay.Stats) int64 { return s.Lost })},
		)
	}
	return readings
}

// register adds what is read at the moment.
func register(registry *prometheus.Registry, readings []reading) {
	for _, r := range readings {
		if strings.HasSuffix(r.name, "_total") {
			registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: r.name, Help: r.help}, r.value))
		} else {
			registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: r.name, Help: r.help}, r.value))
		}
	}
}

// truth is a condition as Prometheus has it.
func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
