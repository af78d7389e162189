// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// A Report is what Run has measured. It marshals as JSON.
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

// A Result is what was measured of one server.
type Result struct {
	Name    string    `json:"name"`
	Address string    `json:"address"`
	Watched bool      `json:"watched"` // whether CPU time and memory are known
	Steps   []Measure `json:"steps"`
	// PeakRSS is the most bytes of memory that were resident at once since the process began, and
	// Anonymous the most at the end of a step that belonged to no file.
	PeakRSS   int64 `json:"peak_rss_bytes,omitempty"`
	Anonymous int64 `json:"anonymous_bytes,omitempty"`
}

// A Measure is what was measured of one step: a value for each round, and the median of them.
type Measure struct {
	Step  string    `json:"step"`
	Unit  string    `json:"unit"` // blobs, digests or bytes
	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"`           // units a second
	CPUs  []float64 `json:"cpus,omitempty"` // of the server
	CPU   float64   `json:"cpu_seconds,omitempty"`
}

func newReport(c *Config, servers []*Server) *Report {
	r := &Report{Salt: c.Salt, Blobs: c.Blobs, Size: c.Size, Large: c.Large, Chunk: c.Chunk, Parallel: c.Parallel, Rounds: c.Rounds}
	for _, s := range servers {
		r.Servers = append(r.Servers, Result{Name: s.Name, Address: s.Address, Watched: len(s.pids) > 0})
	}
	return r
}

// add adds what one step took.
func (r *Result) add(st step, elapsed time.Duration, before, after usage) {
	i := slices.IndexFunc(r.Steps, func(m Measure) bool { return m.Step == st.name })
	if i < 0 {
		i = len(r.Steps)
		r.Steps = append(r.Steps, Measure{Step: st.name, Unit: st.unit})
	}
	m := &r.Steps[i]
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

// rate returns a rate as text.
func (m *Measure) rate() string {
	if m.Unit == "bytes" {
		return fmt.Sprintf("%.0f MiB/s", m.Rate/(1<<20))
	}
	return fmt.Sprintf("%.0f /s", m.Rate)
}

// step returns what was measured of a step, or nil.
func (r *Result) step(name string) *Measure {
	for i := range r.Steps {
		if r.Steps[i].Step == name {
			return &r.Steps[i]
		}
	}
	return nil
}

// nameWidth is that of the first column: of the longest name of a row.
const nameWidth = len("CPU of large stream write")

// Text writes the medians as a table, a column for each server. Behind those of the second and later ones
// stands how many times as fast the first one is.
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
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name string, cell func(s *Result) string) {
		fmt.Fprintf(w, "%-*s", nameWidth, name)
		for i := range r.Servers {
			fmt.Fprintf(w, "\t%s", cell(&r.Servers[i]))
		}
		fmt.Fprint(w, "\t\n")
	}
	row("", func(s *Result) string { return s.Name })
	for _, name := range names {
		row(name, func(s *Result) string {
			m, first := s.step(name), r.Servers[0].step(name)
			switch {
			case m == nil:
				return "not served"
			case m == first || first == nil:
				return m.rate()
			}
			return fmt.Sprintf("%s %6.2fx", m.rate(), first.Rate/m.Rate)
		})
	}
	if !watched {
		return w.Flush()
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
	row("of no file, at most", func(s *Result) string { return memory(s.Anonymous) })
	return w.Flush()
}
