// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"
)

// A Report is the result of Run.
type Report struct {
	Servers []Result
}

// A Result contains the measurements of one server.
type Result struct {
	Name    string
	Watched bool // CPU time and memory are known
	Steps   []Measure
	PeakRSS int64 // bytes since the process began
}

// A Measure contains the measurements of one step in each round.
type Measure struct {
	Step  string
	Unit  string    // blobs, digests or bytes
	Rates []float64 // units per second
	CPUs  []float64 // seconds of CPU time of the server, if it is watched
}

func newReport(servers []*Server) *Report {
	r := &Report{}
	for _, s := range servers {
		r.Servers = append(r.Servers, Result{Name: s.Name, Watched: len(s.pids) > 0})
	}
	return r
}

// add adds one run of a step.
func (r *Result) add(st step, elapsed time.Duration, before, after usage) {
	i := slices.IndexFunc(r.Steps, func(m Measure) bool { return m.Step == st.name })
	if i < 0 {
		i = len(r.Steps)
		r.Steps = append(r.Steps, Measure{Step: st.name, Unit: st.unit})
	}
	m := &r.Steps[i]
	m.Rates = append(m.Rates, float64(st.count)/max(elapsed, 1).Seconds())
	if r.Watched {
		m.CPUs = append(m.CPUs, (after.cpu - before.cpu).Seconds())
		r.PeakRSS = max(r.PeakRSS, after.peak)
	}
}

// median returns the median of values, NaN if nothing was measured.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// rate formats the median rate.
func (m *Measure) rate() string {
	if m.Unit == "bytes" {
		return fmt.Sprintf("%.0f MiB/s", median(m.Rates)/(1<<20))
	}
	return perSecond(median(m.Rates))
}

// mebibytes returns NaN for 0, which was not measured.
func mebibytes(bytes int64) float64 {
	if bytes == 0 {
		return math.NaN()
	}
	return float64(bytes >> 20)
}

// cell formats a measurement.
func cell(format string, value float64) string {
	if math.IsNaN(value) {
		return "-"
	}
	return fmt.Sprintf(format, value)
}

// A grid prints a table of right-aligned columns after a column of names.
type grid struct {
	*tabwriter.Writer
	width int // of the names
}

func newGrid(out io.Writer, width int) grid {
	return grid{tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight), width}
}

func (g grid) row(name string, cells ...string) {
	fmt.Fprintf(g, "%-*s\t", g.width, name)
	for _, cell := range cells {
		fmt.Fprintf(g, "%s\t", cell)
	}
	fmt.Fprintln(g)
}

// Text writes the medians as a table with a column for each server. The second and later columns also show the ratio of
// the first server's rate to this one.
func (r *Report) Text(out io.Writer) error {
	g := newGrid(out, len("CPU of large stream write"))
	row := func(name string, cell func(s *Result) string) {
		cells := make([]string, len(r.Servers))
		for i := range r.Servers {
			cells[i] = cell(&r.Servers[i])
		}
		g.row(name, cells...)
	}
	row("", func(s *Result) string { return s.Name })
	first := &r.Servers[0]
	for i := range first.Steps {
		row(first.Steps[i].Step, func(s *Result) string {
			m := &s.Steps[i]
			if s == first {
				return m.rate()
			}
			return fmt.Sprintf("%s %6.2fx", m.rate(), median(first.Steps[i].Rates)/median(m.Rates))
		})
	}
	if slices.ContainsFunc(r.Servers, func(s Result) bool { return s.Watched }) {
		for i, m := range first.Steps {
			row("CPU of "+m.Step, func(s *Result) string { return cell("%.2f s", median(s.Steps[i].CPUs)) })
		}
		row("peak memory", func(s *Result) string { return cell("%.0f MiB", mebibytes(s.PeakRSS)) })
	}
	return g.Flush()
}
