// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/tests/must"
)

// series returns samples of a run of minutes, one a minute.
func series(minutes int, value func(minute int) float64) []Sample {
	var samples []Sample
	for i := range minutes + 1 {
		samples = append(samples, Sample{time.Duration(i) * time.Minute, map[string]float64{memory: value(i)}})
	}
	return samples
}

func TestSlope(t *testing.T) {
	for _, c := range []struct {
		name    string
		minutes int
		value   func(minute int) float64
		want    float64
	}{
		{"constant", 60, func(int) float64 { return 7 }, 0},
		{"two a minute", 60, func(i int) float64 { return 2 * float64(i) }, 120},
		{"only the second half", 60, func(i int) float64 { return max(0, 30-float64(i)) }, 0},
		{"alternating", 60, func(i int) float64 { return float64(i + 10*(i%2)) }, 60},
		{"one sample", 0, func(int) float64 { return 7 }, 0},
	} {
		if got := slope(series(c.minutes, c.value), memory); math.Abs(got-c.want) > 2 {
			t.Errorf("%s: got %v per hour, want %v", c.name, got, c.want)
		}
	}
}

func TestTextReportsWhatExceedsABound(t *testing.T) {
	measures := []Measure{{memory, true, 100 * mib, 10 * mib}}
	grow := func(perMinute float64) func(int) float64 {
		return func(i int) float64 { return mib * (50 + perMinute*float64(i)) }
	}
	for _, c := range []struct {
		name    string
		samples []Sample
		want    bool
	}{
		{"flat", series(60, grow(0)), false},
		{"below the slope", series(60, grow(0.1)), false},
		{"beyond the slope", series(60, grow(0.2)), true},
		{"beyond the slope in a short run", series(10, grow(0.2)), false},
		{"beyond the level in a short run", series(2, grow(30)), true},
		{"a peak", series(60, func(i int) float64 { return mib * float64(50+51*(i%31/30)) }), true},
	} {
		var text strings.Builder
		exceeded := must.Get(Text(&text, c.samples, measures))(t)
		if slices.Contains(exceeded, memory) != c.want || strings.Contains(text.String(), "EXCEEDED") != c.want {
			t.Errorf("%s: got %v, want %v\n%s", c.name, exceeded, c.want, &text)
		}
	}
}
