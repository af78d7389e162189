// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/tests/expect"
	"google.golang.org/protobuf/types/known/timestamppb"
)

func TestAdd(t *testing.T) {
	r := Result{Watched: true}
	st := step{name: "step", unit: "blobs", count: 1000}
	for _, took := range []time.Duration{4 * time.Second, time.Second, 2 * time.Second} {
		after := usage{cpu: time.Second + took/2, peak: int64(took)}
		r.add(st, took, usage{cpu: time.Second}, after)
	}
	m := r.Steps[0]
	expect.That(t, len(r.Steps) == 1 && len(m.Rates) == 3 && median(m.Rates) == 500 && median(m.CPUs) == 1,
		"got %+v, want one step with median rate 500 and CPU time 1", r.Steps)
	expect.Equal(t, r.PeakRSS, int64(4*time.Second), "memory")
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 9, 2}, 3}} {
		expect.Equal(t, median(c.values), c.want, "median of %v", c.values)
	}
}

func TestPercentile(t *testing.T) {
	var hundred []float64
	for i := range 100 {
		hundred = append(hundred, float64(100-i))
	}
	for _, c := range []struct {
		values []float64
		p      int
		want   float64
	}{
		{hundred, 50, 50},
		{hundred, 95, 95},
		{hundred, 100, 100},
		{hundred, 0, 1},
		{hundred[:1], 99, 100},
		{hundred[97:], 50, 2},
		{hundred[96:], 50, 2},
		{hundred[90:], 95, 10},
	} {
		expect.Equal(t, percentile(c.values, c.p), c.want, "percentile %d of %d values", c.p, len(c.values))
	}
}

// TestMedians checks that ratios are those of each round, and that unreported phases count as rest.
func TestMedians(t *testing.T) {
	at := func(ms int64) *timestamppb.Timestamp { return timestamppb.New(time.UnixMilli(ms)) }
	m := &repb.ExecutedActionMetadata{
		QueuedTimestamp: at(0), WorkerStartTimestamp: at(1),
		InputFetchStartTimestamp: at(1), InputFetchCompletedTimestamp: at(3),
		ExecutionStartTimestamp: at(4), ExecutionCompletedTimestamp: at(8),
	}
	ten := []float64{10, 10, 10}
	l := LocalResult{Spawns: []float64{1000, 500, 100}, P50s: ten, CPUs: []float64{1, 2, 3}}
	s := &ExecResult{Watched: true}
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
	first, next, extra := s.FirstExtra()
	// The rates are 50, 100 and 25 per second.
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"local spawn rate", l.Spawn(), 500},
		{"local CPU time", l.CPU(), 2},
		{"rate", s.Rate(), 50},
		{"spawn ratio", s.SpawnRatio(&l), 0.2},
		{"p50 ratio", s.P50Ratio(&l), 2},
		{"p50", s.P50(), 20},
		{"first", first, 180},
		{"next", next, 20},
		{"first extra", extra, 160},
		{"CPU time", median(s.CPUs), 10},
		{"CPU time with commands", s.AllCPU(), 30},
		{"others busy", median(s.Others), 1},
		{"peak memory", float64(s.PeakRSS), 40e6},
		{"queue", median(s.Phases[0]), 1},
		{"input fetch", median(s.Phases[1]), 2},
		{"execution", median(s.Phases[2]), 4},
		{"output upload", median(s.Phases[3]), 0},
		{"rest", median(s.Phases[4]), 13},
	} {
		expect.Equal(t, c.got, c.want, "%s", c.name)
	}
}
