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
		r.add(st, took, usage{cpu: time.Second}, usage{cpu: time.Second + took/2, peak: int64(took), anonymous: int64(took / 2)})
	}
	m := r.Steps[0]
	if len(r.Steps) != 1 || len(m.Rates) != 3 || m.Rate != 500 || m.CPU != 1 {
		t.Errorf("three rounds of one step are %+v", r.Steps)
	}
	if want := int64(4 * time.Second); r.PeakRSS != want || r.Anonymous != want/2 {
		t.Errorf("memory is %d and %d, want the most of any step", r.PeakRSS, r.Anonymous)
	}
	for _, c := range []struct {
		values []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 9, 2}, 3}} {
		if got := median(c.values); got != c.want {
			t.Errorf("the median of %v is %v, want %v", c.values, got, c.want)
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
			t.Errorf("percentile %d of %d values is %d, want %d", c.p, len(c.sorted), got, c.want)
		}
	}
}

// TestConclude: ratios are of each round, and the time of a phase that nobody states is rest.
func TestConclude(t *testing.T) {
	at := func(ms int64) *timestamppb.Timestamp { return timestamppb.New(time.UnixMilli(ms)) }
	m := &repb.ExecutedActionMetadata{
		QueuedTimestamp: at(0), WorkerStartTimestamp: at(1),
		InputFetchStartTimestamp: at(1), InputFetchCompletedTimestamp: at(3),
		ExecutionStartTimestamp: at(4), ExecutionCompletedTimestamp: at(8),
	}
	r := ExecReport{Works: []WorkReport{{
		Local:   Bare{Spawns: []float64{1000, 500, 100}, Rates: []float64{100, 100, 100}, P50s: []float64{10, 10, 10}, CPUs: []float64{1, 2, 3}},
		Servers: []ExecResult{{Watched: true}},
	}}}
	s := &r.Works[0].Servers[0]
	for _, took := range []time.Duration{20, 10, 40} {
		took *= time.Millisecond
		s.add([]answer{{took: 9 * took}, {took: took}}, []answer{{took: took}, {took: took}}, []*repb.ExecutedActionMetadata{m, m}, 2*took,
			observation{living: time.Second, ended: time.Second, machine: time.Second, known: time.Second},
			observation{living: time.Second + took, ended: time.Second + 2*took, machine: time.Second + 5*took, known: time.Second + 3*took, usage: usage{peak: int64(took)}})
	}
	r.conclude()
	// Rates are 50, 100 and 25 a second.
	if l := r.Works[0].Local; l.Spawn != 500 || l.CPU != 2 || s.Rate != 50 || s.OfSpawn != 0.2 || s.OfLocal != 0.5 || s.Times != 2 {
		t.Errorf("ratios are %+v of %+v", s, l)
	}
	if s.P50 != 20 || s.P99 != 40 || s.First != 180 || s.Next != 20 || s.More != 160 {
		t.Errorf("times are %+v", s)
	}
	if want := (Phases{Queue: 1, Fetch: 2, Run: 4, Upload: 0, Rest: 13}); s.Phases != want {
		t.Errorf("phases are %+v, want %+v", s.Phases, want)
	}
	// Of an action: half of what the processes have used; of the machine: one processor.
	if s.CPU != 10 || s.AllCPU != 30 || s.Other != 1 || s.PeakRSS != int64(40*time.Millisecond) {
		t.Errorf("usage is %+v", s)
	}
}

func TestChart(t *testing.T) {
	var out strings.Builder
	if err := chart(&out, []bar{{"one", 100}, {"other", 51}, {"none", 0}}); err != nil {
		t.Fatal(err)
	}
	for i, line := range strings.Split(strings.TrimSpace(out.String()), "\n") {
		if got, want := strings.Count(line, "#"), []int{50, 26, 0}[i]; got != want {
			t.Errorf("%d of 50 in %q, want %d", got, line, want)
		}
	}
}
