// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// An ExecReport is the result of Execute. Lists have a value per round, times are in milliseconds, and rates in actions
// per second.
type ExecReport struct {
	Rounds     int
	Processors int
	Workloads  []WorkloadReport
}

// A WorkloadReport contains the measurements of a workload.
type WorkloadReport struct {
	Workload
	Local   LocalResult
	Servers []ExecResult
}

// A LocalResult contains the measurements of the bare machine.
type LocalResult struct {
	Parallel int       // commands at a time
	Spawns   []float64 // rate of starting the program that does nothing and waiting for it
	Rates    []float64 // of the actions' commands
	P50s     []float64
	CPUs     []float64 // per command
}

// Spawn returns the median of Spawns.
func (l *LocalResult) Spawn() float64 { return median(l.Spawns) }

// P50 returns the median of P50s.
func (l *LocalResult) P50() float64 { return median(l.P50s) }

// CPU returns the median of CPUs.
func (l *LocalResult) CPU() float64 { return median(l.CPUs) }

// An ExecResult contains the measurements of a server.
type ExecResult struct {
	Name    string
	Watched bool // CPU time and memory are known

	Rates   []float64
	P50s    []float64
	Took    []float64 // of each action in all rounds
	Firsts  []float64 // of the action that runs alone on an input tree new to the server
	Nexts   []float64 // of the second action that runs alone
	CPUs    []float64 // of live processes, per action
	AllCPUs []float64 // also of exited processes, such as the action's own
	PeakRSS int64
	Clients []float64 // CPU time of this process, per action
	Others  []float64 // processors used by other processes than this one and the watched ones; empty if unknown
	Phases  [len(phases)][]float64
}

// phases are the phases of each action as the server reports them, and the rest of the client's wait.
var phases = [...]string{"queue", "input fetch", "execution", "output upload", "rest"}

// Rate returns the median rate.
func (r *ExecResult) Rate() float64 { return median(r.Rates) }

// P50 returns the median time of all actions.
func (r *ExecResult) P50() float64 { return percentile(r.Took, 50) }

// AllCPU returns the median of AllCPUs.
func (r *ExecResult) AllCPU() float64 { return median(r.AllCPUs) }

func divide(a, b float64) float64 { return a / b }

// SpawnRatio returns the median of the ratio of the rate to that of starting processes in each round.
func (r *ExecResult) SpawnRatio(l *LocalResult) float64 { return medianOf(r.Rates, l.Spawns, divide) }

// P50Ratio returns the median of the ratio of median times to those of bare commands.
func (r *ExecResult) P50Ratio(l *LocalResult) float64 { return medianOf(r.P50s, l.P50s, divide) }

// FirstExtra returns the median times of the first action and of the next one, and the median of their differences.
func (r *ExecResult) FirstExtra() (first, next, extra float64) {
	extra = medianOf(r.Firsts, r.Nexts, func(a, b float64) float64 { return a - b })
	return median(r.Firsts), median(r.Nexts), extra
}

func newExecReport(c *ExecConfig, servers []*Server) *ExecReport {
	r := &ExecReport{Rounds: c.Rounds, Processors: runtime.NumCPU()}
	for _, w := range c.Workloads {
		m := WorkloadReport{Workload: w}
		for _, s := range servers {
			m.Servers = append(m.Servers, ExecResult{Name: s.Name, Watched: len(s.pids) > 0})
		}
		r.Workloads = append(r.Workloads, m)
	}
	return r
}

// addRun adds the times of a round: of the two actions that ran alone, and of the measured ones.
func (r *ExecResult) addRun(alone, answers []answer, metadata []*repb.ExecutedActionMetadata) {
	took := make([]float64, len(answers))
	for i, a := range answers {
		took[i] = milliseconds(a.took)
		for k, phase := range phasesOf(metadata[i], a.took) {
			r.Phases[k] = append(r.Phases[k], phase)
		}
	}
	r.Took = append(r.Took, took...)
	r.P50s = append(r.P50s, percentile(took, 50))
	r.Firsts = append(r.Firsts, milliseconds(alone[0].took))
	r.Nexts = append(r.Nexts, milliseconds(alone[1].took))
}

// addUsage adds the rate and the resource usage of a round.
func (r *ExecResult) addUsage(actions int, elapsed time.Duration, before, after observation) {
	n := float64(actions)
	r.Rates = append(r.Rates, n/max(elapsed, 1).Seconds())
	r.Clients = append(r.Clients, milliseconds(after.self-before.self)/n)
	if after.machine > 0 {
		others := (after.machine - before.machine) - (after.known - before.known)
		r.Others = append(r.Others, max(0, others.Seconds()/elapsed.Seconds()))
	}
	if !r.Watched {
		return
	}
	live := after.live - before.live
	r.CPUs = append(r.CPUs, milliseconds(live)/n)
	r.AllCPUs = append(r.AllCPUs, milliseconds(live+after.exited-before.exited)/n)
	r.PeakRSS = max(r.PeakRSS, after.peak)
}

// medianOf returns the median of f(as[i], bs[i]).
func medianOf(as, bs []float64, f func(a, b float64) float64) float64 {
	all := make([]float64, len(as))
	for i := range as {
		all[i] = f(as[i], bs[i])
	}
	return median(all)
}

// percentile returns the smallest of the values such that p percent of them are not above it.
func percentile(values []float64, p int) float64 {
	return slices.Sorted(slices.Values(values))[max(0, (len(values)*p+99)/100-1)]
}

// Text writes for each workload a table with columns for the bare machine and each server.
func (r *ExecReport) Text(out io.Writer) error {
	for i := range r.Workloads {
		m := &r.Workloads[i]
		fmt.Fprintln(out, &m.Workload)
		if err := m.printTable(out); err != nil {
			return err
		}
	}
	return nil
}

func perSecond(rate float64) string { return fmt.Sprintf("%.0f /s", rate) }

func (m *WorkloadReport) printTable(out io.Writer) error {
	const ms = "%.2f ms"
	l, g := &m.Local, newGrid(out, len("CPU time with commands"))
	row := func(name, local, format string, value func(s *ExecResult) float64) {
		cells := []string{local}
		for i := range m.Servers {
			cells = append(cells, cell(format, value(&m.Servers[i])))
		}
		g.row(name, cells...)
	}
	names := []string{"bare"}
	for _, s := range m.Servers {
		names = append(names, s.Name)
	}
	g.row("", names...)
	row("rate", perSecond(median(l.Rates)), "%.0f /s", (*ExecResult).Rate)
	if !m.idle() {
		row("to bare command", "", "%.3f", func(s *ExecResult) float64 { return medianOf(s.Rates, l.Rates, divide) })
	}
	row("to fork+exec", perSecond(l.Spawn()), "%.3f", func(s *ExecResult) float64 { return s.SpawnRatio(l) })
	row("p50", fmt.Sprintf(ms, l.P50()), ms, (*ExecResult).P50)
	if m.Parallel == l.Parallel { // otherwise the processors per command differ
		row("to bare command", "", "%.2f", func(s *ExecResult) float64 { return s.P50Ratio(l) })
	}
	row("p95", "", ms, func(s *ExecResult) float64 { return percentile(s.Took, 95) })
	row("p99", "", ms, func(s *ExecResult) float64 { return percentile(s.Took, 99) })
	if m.Kind == Trees {
		row("first on the tree", "", ms, func(s *ExecResult) float64 { return median(s.Firsts) })
		row("next", "", ms, func(s *ExecResult) float64 { return median(s.Nexts) })
	}
	for i, phase := range phases {
		row(phase, "", ms, func(s *ExecResult) float64 { return median(s.Phases[i]) })
	}
	row("CPU time of server", "", ms, func(s *ExecResult) float64 { return median(s.CPUs) })
	row("CPU time with commands", fmt.Sprintf(ms, l.CPU()), ms, (*ExecResult).AllCPU)
	row("peak memory", "", "%.0f MiB", func(s *ExecResult) float64 { return mebibytes(s.PeakRSS) })
	row("CPU time of client", "", ms, func(s *ExecResult) float64 { return median(s.Clients) })
	row("others busy", "", "%.2f processors", func(s *ExecResult) float64 { return median(s.Others) })
	return g.Flush()
}
