// SPDX-License-Identifier: Apache-2.0

package load

import (
	"strings"
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestAdd(t *testing.T) {
	r := Result{Watched: true}
	st := step{name: "step", unit: "blobs", count: 1000}
	for _, took := range []time.Duration{4 * time.Second, time.Second, 2 * time.Second} {
		after := usage{cpu: time.Second + took/2, peak: int64(took), anonymous: int64(took / 2)}
		r.add(st, took, usage{cpu: time.Second}, after)
	}
	m := r.Steps[0]
	if len(r.Steps) != 1 || len(m.Rates) != 3 || m.Rate != 500 || m.CPU != 1 {
		t.Errorf("got %+v, want one step with median rate 500 and CPU time 1", r.Steps)
	}
	if want := int64(4 * time.Second); r.PeakRSS != want || r.Anonymous != want/2 {
		t.Errorf("got memory %d and %d, want the maxima %d and %d", r.PeakRSS, r.Anonymous, want, want/2)
	}
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 9, 2}, 3}} {
		if got := median(c.values); got != c.want {
			t.Errorf("median of %v: got %v, want %v", c.values, got, c.want)
		}
	}
}

func TestPercentile(t *testing.T) {
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	for _, c := range []struct {
		sorted []time.Duration
		p      int
		want   time.Duration
	}{
		{hundred, 50, 50},
		{hundred, 95, 95},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{hundred, 0, 1},
		{hundred[:1], 99, 1},
		{hundred[:3], 50, 2},
		{hundred[:4], 50, 2},
		{hundred[:10], 95, 10},
	} {
		if got := percentile(c.sorted, c.p); got != c.want {
			t.Errorf("percentile %d of %d values: got %d, want %d", c.p, len(c.sorted), got, c.want)
		}
	}
}

// TestSummarize checks that ratios are those of each round, and that unreported phases count as rest.
func TestSummarize(t *testing.T) {
	at := func(ms int64) *timestamppb.Timestamp { return timestamppb.New(time.UnixMilli(ms)) }
	m := &repb.ExecutedActionMetadata{
		QueuedTimestamp: at(0), WorkerStartTimestamp: at(1),
		InputFetchStartTimestamp: at(1), InputFetchCompletedTimestamp: at(3),
		ExecutionStartTimestamp: at(4), ExecutionCompletedTimestamp: at(8),
	}
	hundred, ten := []float64{100, 100, 100}, []float64{10, 10, 10}
	r := ExecReport{Workloads: []WorkloadReport{{
		Local:   LocalResult{Spawns: []float64{1000, 500, 100}, Rates: hundred, P50s: ten, CPUs: []float64{1, 2, 3}},
		Servers: []ExecResult{{Watched: true}},
	}}}
	s := &r.Workloads[0].Servers[0]
	for _, took := range []time.Duration{20, 10, 40} {
		took *= time.Millisecond
		alone, measured := []answer{{took: 9 * took}, {took: took}}, []answer{{took: took}, {took: took}}
		s.addRun(alone, measured, []*repb.ExecutedActionMetadata{m, m})
		before := observation{live: time.Second, exited: time.Second, machine: time.Second, known: time.Second}
		s.addUsage(2, 2*took, before, observation{
			live: time.Second + took, exited: time.Second + 2*took, machine: time.Second + 5*took, known: time.Second + 3*took,
			usage: usage{peak: int64(took)},
		})
	}
	r.summarize()
	// The rates are 50, 100 and 25 per second.
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"local spawn rate", r.Workloads[0].Local.Spawn, 500},
		{"local CPU time", r.Workloads[0].Local.CPU, 2},
		{"rate", s.Rate, 50},
		{"spawn ratio", s.SpawnRatio, 0.2},
		{"local ratio", s.LocalRatio, 0.5},
		{"p50 ratio", s.P50Ratio, 2},
		{"p50", s.P50, 20},
		{"p99", s.P99, 40},
		{"first", s.First, 180},
		{"next", s.Next, 20},
		{"first extra", s.FirstExtra, 160},
		{"CPU time", s.CPU, 10},
		{"CPU time with commands", s.AllCPU, 30},
		{"others busy", s.Other, 1},
		{"peak memory", float64(s.PeakRSS), 40e6},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, c.got, c.want)
		}
	}
	if want := (Phases{Queue: 1, Fetch: 2, Run: 4, Upload: 0, Rest: 13}); s.Phases != want {
		t.Errorf("phases: got %+v, want %+v", s.Phases, want)
	}
}

func TestChart(t *testing.T) {
	var out strings.Builder
	if err := chart(&out, []bar{{"one", 100}, {"other", 51}, {"none", 0}}); err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(out.String()), "\n") {
		if got, want := strings.Count(line, "#"), []int{50, 26, 0}[i]; got != want {
			t.Errorf("bar %q has length %d, want %d", line, got, want)
		}
	}
}
