// SPDX-License-Identifier: Apache-2.0

package load

import (
	"testing"
	"time"
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
