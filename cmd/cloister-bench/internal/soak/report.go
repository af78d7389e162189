// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"
)

// A Measure is one quantity that must not grow.
type Measure struct {
	Name  string
	Bytes bool    // shown in MiB
	Most  float64 // maximum of every sample
	Slope float64 // maximum growth per hour
}

// Names of Measures.
const (
	memory      = "memory"
	helpers     = "memory of the sandbox"
	descriptors = "descriptors"
	goroutines  = "goroutines"
	processes   = "processes"
	mounts      = "mounts"
	groups      = "control groups"
	stored      = "disk"
	logs        = "logs"
)

const mib = 1 << 20

// Bounds returns the Measures with their bounds for a server whose store has storeBytes. A slot that is being replaced
// briefly adds a process and some 25 mounts, and cached images, each with a descriptor or two, come and go. The slopes
// allow for these, but a leak in every tenth round of three seconds exceeds them.
func Bounds(storeBytes int64) []Measure {
	return []Measure{
		{memory, true, 320 * mib, 12 * mib},
		{helpers, true, 160 * mib, 12 * mib},
		{descriptors, false, 1200, 120},
		{goroutines, false, 400, 20},
		{processes, false, 20, 4},
		{mounts, false, 600, 100},
		{groups, false, 40, 1},
		{stored, true, float64(storeBytes) * 1.02, float64(storeBytes) * 0.1},
		{logs, true, 4 * mib, mib},
	}
}

// minFit is the shortest run whose slopes are checked. The store begins to evict in the first minutes, but the heap
// levels off only after twenty, when every cache is full.
const minFit = 40 * time.Minute

// slope returns the slope per hour of the line that fits the second half of the samples best.
func slope(samples []Sample, name string) float64 {
	half := samples[len(samples)/2:]
	var meanX, meanY float64
	for _, s := range half {
		meanX += s.At.Hours() / float64(len(half))
		meanY += s.Values[name] / float64(len(half))
	}
	var xy, xx float64
	for _, s := range half {
		x := s.At.Hours() - meanX
		xy += x * (s.Values[name] - meanY)
		xx += x * x
	}
	if xx == 0 {
		return 0
	}
	return xy / xx
}

// Text writes a table of start, end, peak and slope of each measure with its bounds, and returns the names of those that
// exceed them. samples has at least one sample.
func Text(out io.Writer, samples []Sample, measures []Measure) (exceeded []string, err error) {
	first, last := samples[0], samples[len(samples)-1]
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "\tstart\tend\tpeak\tat most\tper hour\tat most\t\n")
	for _, m := range measures {
		rise, peak := slope(samples, m.Name), 0.0
		for _, s := range samples {
			peak = max(peak, s.Values[m.Name])
		}
		mark := ""
		if peak > m.Most || last.At >= minFit && rise > m.Slope {
			exceeded = append(exceeded, m.Name)
			mark = "  EXCEEDED"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", m.Name, m.text(first.Values[m.Name]),
			m.text(last.Values[m.Name]), m.text(peak), m.text(m.Most), m.change(rise), m.change(m.Slope), mark)
	}
	if err := w.Flush(); err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(out, "%d samples in %s; the slope is fitted to the second half", len(samples), last.At.Round(time.Second))
	if last.At < minFit {
		_, err = fmt.Fprintf(out, ", and checked only from %s on", minFit)
	}
	fmt.Fprintln(out)
	return exceeded, err
}

func (m *Measure) text(v float64) string {
	if m.Bytes {
		return fmt.Sprintf("%.1f MiB", v/mib)
	}
	return fmt.Sprintf("%.0f", v)
}

func (m *Measure) change(v float64) string {
	if m.Bytes {
		return fmt.Sprintf("%+.1f MiB", v/mib)
	}
	return fmt.Sprintf("%+.1f", math.Round(v*10)/10)
}
