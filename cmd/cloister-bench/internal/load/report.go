// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// A Report is the result of Run. It marshals as JSON.
type Report struct {
	Salt     string   `json:"salt"`
	Blobs    int      `json:"blobs"`
	Size     int64    `json:"blob_bytes"`
	Large    int64    `json:"large_bytes"`
	Chunk    int64    `json:"chunk_bytes"`
	Parallel int      `json:"parallel"`
	Rounds   int      `json:"rounds"`
	Servers  []Result `json:"servers"`
}

// A Result contains the measurements of one server.
type Result struct {
	Name      string    `json:"name"`
	Address   string    `json:"address"`
	Watched   bool      `json:"watched"` // CPU time and memory are known
	Steps     []Measure `json:"steps"`
	PeakRSS   int64     `json:"peak_rss_bytes,omitempty"`  // since the process began
	Anonymous int64     `json:"anonymous_bytes,omitempty"` // belong to no file; maximum over the ends of steps
}

// A Measure contains the measurements of one step: a value per round, and their median.
type Measure struct {
	Step  string    `json:"step"`
	Unit  string    `json:"unit"` // blobs, digests or bytes
	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"`           // units per second
	CPUs  []float64 `json:"cpus,omitempty"` // of the server
	CPU   float64   `json:"cpu_seconds,omitempty"`
}

func newReport(c *Config, servers []*Server) *Report {
	r := &Report{
		Salt: c.Salt, Blobs: c.Blobs, Size: c.Size, Large: c.Large, Chunk: c.Chunk,
		Parallel: c.Parallel, Rounds: c.Rounds,
	}
	for _, s := range servers {
		r.Servers = append(r.Servers, Result{Name: s.Name, Address: s.Address, Watched: len(s.pids) > 0})
	}
	return r
}

// add adds one run of a step.
func (r *Result) add(st step, elapsed time.Duration, before, after usage) {
	m := r.step(st.name)
	if m == nil {
		r.Steps = append(r.Steps, Measure{Step: st.name, Unit: st.unit})
		m = &r.Steps[len(r.Steps)-1]
	}
	m.Rates = append(m.Rates, float64(st.count)/max(elapsed, 1).Seconds())
	m.Rate = median(m.Rates)
	if r.Watched {
		m.CPUs = append(m.CPUs, (after.cpu - before.cpu).Seconds())
		m.CPU = median(m.CPUs)
		r.PeakRSS = max(r.PeakRSS, after.peak)
		r.Anonymous = max(r.Anonymous, after.anonymous)
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// rate formats the rate.
func (m *Measure) rate() string {
	if m.Unit == "bytes" {
		return fmt.Sprintf("%.0f MiB/s", m.Rate/(1<<20))
	}
	return perSecond(m.Rate)
}

// step returns the measurements of a step, or nil.
func (r *Result) step(name string) *Measure {
	i := slices.IndexFunc(r.Steps, func(m Measure) bool { return m.Step == name })
	if i < 0 {
		return nil
	}
	return &r.Steps[i]
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
	var names []string
	watched := false
	for _, s := range r.Servers {
		watched = watched || s.Watched
		for _, m := range s.Steps {
			if !slices.Contains(names, m.Step) {
				names = append(names, m.Step)
			}
		}
	}
	g := newGrid(out, len("CPU of large stream write"))
	row := func(name string, cell func(s *Result) string) {
		cells := make([]string, len(r.Servers))
		for i := range r.Servers {
			cells[i] = cell(&r.Servers[i])
		}
		g.row(name, cells...)
	}
	row("", func(s *Result) string { return s.Name })
	for _, name := range names {
		first := r.Servers[0].step(name)
		row(name, func(s *Result) string {
			m := s.step(name)
			switch {
			case m == nil:
				return "unsupported"
			case m == first || first == nil:
				return m.rate()
			}
			return fmt.Sprintf("%s %6.2fx", m.rate(), first.Rate/m.Rate)
		})
	}
	if !watched {
		return g.Flush()
	}
	for _, name := range names {
		row("CPU of "+name, func(s *Result) string {
			m := s.step(name)
			if m == nil || !s.Watched {
				return "-"
			}
			return fmt.Sprintf("%.2f s", m.CPU)
		})
	}
	memory := func(bytes int64) string {
		if bytes == 0 {
			return "-"
		}
		return fmt.Sprintf("%d MiB", bytes>>20)
	}
	row("peak memory", func(s *Result) string { return memory(s.PeakRSS) })
	row("peak anonymous memory", func(s *Result) string { return memory(s.Anonymous) })
	return g.Flush()
}
