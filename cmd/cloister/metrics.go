// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/cloister-build/cloister/cas/disk"
	"github.com/cloister-build/cloister/worker/queue"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// serveMetrics serves the registry, with what the queue and the store say of the moment, at addr; at "" it serves
// nothing. The caller calls stop to end it.
func serveMetrics(addr string, registry *prometheus.Registry, work *queue.Queue, store *disk.Cache) (stop func(), err error) {
	if addr == "" {
		return func() {}, nil
	}
	for _, g := range []struct {
		name, help string
		value      func() float64
	}{
		{"cloister_actions_queued", "Actions that wait for a slot.", func() float64 { return float64(work.Stats().Queued) }},
		{"cloister_actions_running", "Actions that have a slot.", func() float64 { return float64(work.Stats().Running) }},
		{"cloister_cas_bytes", "Size of the store.", func() float64 { return float64(store.Stats().Bytes) }},
		{"cloister_cas_limit_bytes", "Size at which the store evicts.", func() float64 { return float64(store.Stats().MaxBytes) }},
		{"cloister_cas_blobs", "Blobs in the store.", func() float64 { return float64(store.Stats().Blobs) }},
	} {
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: g.name, Help: g.help}, g.value))
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, &exit{exitEnvironment, fmt.Errorf("--metrics %s: %w", addr, err)}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go server.Serve(listener) // ends with Close
	return func() { server.Close() }, nil
}
