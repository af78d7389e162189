// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/cas/overlay"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// ServeMetrics completes the metrics, and serves /metrics, /ready and /live at the address of --metrics, if it is set,
// until the node is closed.
func (n *Node) ServeMetrics() error {
	if n.counted {
		register(n.Registry, n.storeMetrics())
	}
	if n.metrics == "" {
		return nil
	}
	listener, err := Listen(n.metrics, "--metrics")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(n.Registry, promhttp.HandlerOpts{EnableOpenMetrics: true}))
	mux.Handle("GET /ready", n.Ready)
	mux.HandleFunc("GET /live", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "alive\n") })
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			n.Log.Error("metrics and /ready are no longer served", "err", err)
		}
	}()
	n.stopMetrics = func() { server.Close() }
	return nil
}

// A metric is read when it is scraped. A name that ends in _total is that of a counter.
type metric struct {
	name, help string
	value      func() float64
}

// storeMetrics returns the metrics of the store and its upstream.
func (n *Node) storeMetrics() []metric {
	stored := func(f func(disk.Stats) int64) func() float64 {
		return func() float64 { return float64(f(n.Store.Stats())) }
	}
	metrics := []metric{
		{"cloister_ready", "1 if the server is ready for work, like /ready.", func() float64 { return boolValue(len(n.Ready.Reasons()) == 0) }},
		{"cloister_cas_bytes", "Size of the store.", stored(func(s disk.Stats) int64 { return s.Bytes })},
		{"cloister_cas_limit_bytes", "Size at which the store evicts.", stored(func(s disk.Stats) int64 { return s.MaxBytes })},
		{"cloister_cas_blobs", "Blobs in the store.", stored(func(s disk.Stats) int64 { return int64(s.Blobs) })},
		{"cloister_cas_files", "Files of the store.", stored(func(s disk.Stats) int64 { return s.Files })},
		{"cloister_cas_limit_files", "Number of files at which the store evicts; 0 means no limit.", stored(func(s disk.Stats) int64 { return s.MaxFiles })},
		{"cloister_cas_segments", "Segments of small blobs.", stored(func(s disk.Stats) int64 { return int64(s.Segments) })},
		{"cloister_cas_lease_seconds", "Minimum time that a used blob is kept; 0 means no lease.", func() float64 { return max(n.Store.Stats().Lease, 0).Seconds() }},
		{"cloister_cas_evicted_blobs_total", "Evicted blobs and results.", stored(func(s disk.Stats) int64 { return s.EvictedBlobs })},
		{"cloister_cas_evicted_bytes_total", "Evicted bytes.", stored(func(s disk.Stats) int64 { return s.EvictedBytes })},
		{"cloister_cas_held_bytes", "Bytes of removed segments that mounted inputs keep on the disk.", stored(func(s disk.Stats) int64 { return s.HeldBytes })},
		{"cloister_cas_writable", "1 if the file system of the store accepts writes.", func() float64 { return boolValue(n.Store.CheckWritable() == nil) }},
		{"cloister_cas_failed_flushes_total", "Attempts to make the store durable that failed.", stored(func(s disk.Stats) int64 { return s.FailedFlushes })},
		{"cloister_cas_corrupt_total", "Damaged blobs found.", stored(func(s disk.Stats) int64 { return s.Corrupt })},
		{"cloister_cas_start_lost", "Blobs, results and segments found damaged or unreadable at the start.", stored(func(s disk.Stats) int64 { return s.LogLost + s.LostSegments })},
		{"cloister_cas_start_damaged_bytes", "Unreadable or missing bytes of the store's logs at the start.", stored(func(s disk.Stats) int64 { return s.LogDamage })},
		{"cloister_audit_lost_total", "Entries missing from the audit log because they could not be written.", func() float64 { return float64(n.record.Lost()) }},
	}
	if n.Ready.Callers != nil {
		metrics = append(metrics, metric{"cloister_auth_stale", "1 if the current file of --auth is invalid or unreadable, so that the previous rights or none are in force.", func() float64 {
			text, _ := n.Ready.Callers()
			return boolValue(text != "")
		}})
	}
	if n.Ready.Certificate != nil {
		metrics = append(metrics, metric{"cloister_tls_stale", "1 if the current file of --tls-cert or --tls-key is invalid or unreadable, so that the previous certificate is in use.", func() float64 {
			return boolValue(n.Ready.Certificate() != "")
		}})
	}
	if n.overlay != nil {
		moved := func(f func(overlay.Stats) int64) func() float64 {
			return func() float64 { return float64(f(n.overlay.Stats())) }
		}
		metrics = append(metrics,
			metric{"cloister_cas_upstream_up", "1 if the upstream answers.", func() float64 { return boolValue(n.Upstream.Down() == "") }},
			metric{"cloister_cas_upstream_fetched_total", "Blobs fetched from the upstream.", moved(func(s overlay.Stats) int64 { return s.Fetched })},
			metric{"cloister_cas_upstream_sent_total", "Blobs and results sent to the upstream after their write was answered.", moved(func(s overlay.Stats) int64 { return s.Sent })},
			metric{"cloister_cas_upstream_unasked_total", "Queries answered without the upstream because it was down or slow, or refused them.", moved(func(s overlay.Stats) int64 { return s.Unanswered })},
			metric{"cloister_cas_upstream_refused_total", "Results that the upstream rejected, and blobs that it rejected as too large or invalid.", moved(func(s overlay.Stats) int64 { return s.Refused })},
			metric{"cloister_cas_upstream_pending", "Blobs and results waiting to be sent to the upstream.", moved(func(s overlay.Stats) int64 { return int64(s.Pending) })},
			metric{"cloister_cas_upstream_pending_bytes", "Size of the blobs waiting to be sent to the upstream.", moved(func(s overlay.Stats) int64 { return s.PendingBytes })},
			metric{"cloister_cas_upstream_pending_age_seconds", "Time since the oldest blob or result waiting to be sent to the upstream was written; 0 if none is.", func() float64 { return age(n.overlay.Stats().Oldest).Seconds() }},
			metric{"cloister_cas_upstream_renewed_total", "Blobs and results renewed in the upstream because they were used here.", moved(func(s overlay.Stats) int64 { return s.Renewed })},
			metric{"cloister_cas_upstream_restored_total", "Blobs that the upstream had lost or could not renew, sent again.", moved(func(s overlay.Stats) int64 { return s.Restored })},
			metric{"cloister_cas_upstream_unreadable_total", "Blobs that the upstream listed but could not deliver.", moved(func(s overlay.Stats) int64 { return s.Unreadable })},
			metric{"cloister_cas_upstream_lost_total", "Blobs and results lost before they could be sent to the upstream.", moved(func(s overlay.Stats) int64 { return s.Lost })},
		)
	}
	return metrics
}

// age returns the time since t, or 0 for the zero time.
func age(t time.Time) time.Duration {
	if t.IsZero() {
		return 0
	}
	return time.Since(t)
}

// register registers metrics that are read when scraped.
func register(registry *prometheus.Registry, metrics []metric) {
	for _, r := range metrics {
		if strings.HasSuffix(r.name, "_total") {
			registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: r.name, Help: r.help}, r.value))
		} else {
			registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: r.name, Help: r.help}, r.value))
		}
	}
}

// boolValue returns 1 for true and 0 for false.
func boolValue(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
