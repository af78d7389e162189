// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"
)

// RunLocal measures the bare machine: it starts processes, runs the commands of two workloads, and materializes the
// input tree by links and by copies. tree is of the kind Trees and read; outputs is of the kind Outputs.
func RunLocal(ctx context.Context, c ExecConfig, tree, outputs *Workload) (*LocalReport, error) {
	report := &LocalReport{Salt: c.Salt, Rounds: c.Rounds, Processors: runtime.NumCPU()}
	for round := range c.Rounds {
		if c.Progress != nil {
			c.Progress(round+1, tree)
		}
		for _, w := range []*Workload{tree, outputs} {
			j, err := newJob(w, nil, fmt.Sprintf("%s/%d", c.Salt, round))
			if err != nil {
				return nil, err
			}
			if err := report.measure(ctx, w, j, &c); err != nil {
				return nil, err
			}
		}
	}
	return report, nil
}

// measure measures one workload.
func (r *LocalReport) measure(ctx context.Context, w *Workload, j *job, c *ExecConfig) error {
	s, err := newScratch(j, c)
	if s != nil {
		defer os.RemoveAll(s.dir) // contains only plain files
	}
	if err != nil {
		return err
	}
	for _, parallel := range []int{1, runtime.NumCPU()} {
		at := fmt.Sprintf(", %d at a time", parallel)
		if w.Kind == Trees {
			spawns, err := s.spawns(ctx, w, parallel)
			if err != nil {
				return err
			}
			r.add("start "+w.Program+at, spawns)
		}
		commands, err := s.commands(ctx, w, parallel)
		if err != nil {
			return err
		}
		if w.Kind == Trees {
			r.add(fmt.Sprintf("read %d files%s", w.Tree.Files, at), commands)
		} else {
			r.add(fmt.Sprintf("write %d files%s", w.Files+w.InDirectory, at), commands)
		}
	}
	if w.Kind != Trees {
		return nil
	}
	return r.measureTree(s, w.Tree.Files)
}

// measureTree materializes and removes the tree, by links and by copies.
func (r *LocalReport) measureTree(s *scratch, files int) error {
	for _, way := range []struct {
		name  string
		write func(data []byte, path, to string) error
	}{
		{"link", func(_ []byte, path, to string) error { return os.Link(filepath.Join(s.dir, "tree", path), to) }},
		{"copy", func(data []byte, _, to string) error { return os.WriteFile(to, data, 0o444) }},
	} {
		start := time.Now()
		if err := s.materialize(way.name, way.write); err != nil {
			return err
		}
		made := time.Now()
		if err := os.RemoveAll(filepath.Join(s.dir, way.name)); err != nil {
			return err
		}
		r.add(fmt.Sprintf("%s %d files", way.name, files), once(made.Sub(start)))
		r.add(fmt.Sprintf("remove %d files of a %s", files, way.name), once(time.Since(made)))
	}
	return nil
}

// once returns a series of one repetition.
func once(took time.Duration) *series { return &series{[]time.Duration{took}, took} }

// A LocalReport is the result of RunLocal. It marshals as JSON.
type LocalReport struct {
	Salt       string         `json:"salt"`
	Rounds     int            `json:"rounds"`
	Processors int            `json:"processors"`
	Measures   []LocalMeasure `json:"measures"`
}

// A LocalMeasure contains the measurements of one operation: a value per round, and their median.
type LocalMeasure struct {
	Name  string    `json:"name"`
	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"` // per second
	P50s  []float64 `json:"p50s"`
	P50   float64   `json:"p50"` // milliseconds
}

// add adds a round of one operation.
func (r *LocalReport) add(name string, s *series) {
	i := slices.IndexFunc(r.Measures, func(m LocalMeasure) bool { return m.Name == name })
	if i < 0 {
		i = len(r.Measures)
		r.Measures = append(r.Measures, LocalMeasure{Name: name})
	}
	m := &r.Measures[i]
	m.Rates, m.P50s = append(m.Rates, s.rate()), append(m.P50s, s.p50())
	m.Rate, m.P50 = median(m.Rates), median(m.P50s)
}

// Text writes the medians as a table.
func (r *LocalReport) Text(out io.Writer) error {
	width := 0
	for _, m := range r.Measures {
		width = max(width, len(m.Name))
	}
	g := newGrid(out, width)
	for _, m := range r.Measures {
		g.row(m.Name, fmt.Sprintf("%.1f /s", m.Rate), fmt.Sprintf("%.2f ms", m.P50))
	}
	return g.Flush()
}
