// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// An ExecReport is the result of Execute. It marshals as JSON. Lists have a value per round; the value beside a list is
// its median. Times are in milliseconds and rates in actions per second.
type ExecReport struct {
	Salt       string           `json:"salt"`
	Rounds     int              `json:"rounds"`
	Processors int              `json:"processors"`
	Workloads  []WorkloadReport `json:"works"`
}

// A WorkloadReport contains the measurements of a workload.
type WorkloadReport struct {
	Workload
	Local   LocalResult  `json:"local"`
	Servers []ExecResult `json:"servers"`
}

// A LocalResult contains the measurements of the bare machine.
type LocalResult struct {
	Parallel int       `json:"parallel"` // commands at a time
	Spawns   []float64 `json:"spawn_rates"`
	Spawn    float64   `json:"spawn_rate"` // of starting the program that does nothing and waiting for it
	Rates    []float64 `json:"rates"`
	Rate     float64   `json:"rate"` // of the actions' commands
	P50s     []float64 `json:"p50s"`
	P50      float64   `json:"p50"`
	CPUs     []float64 `json:"cpus"`
	CPU      float64   `json:"cpu"` // per command
}

// An ExecResult contains the measurements of a server.
type ExecResult struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Watched bool   `json:"watched"` // CPU time and memory are known

	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"`
	// Medians of the ratio to the bare machine in each round.
	SpawnRatio float64 `json:"rate_to_spawn_rate"`
	LocalRatio float64 `json:"rate_to_local_rate"`
	P50Ratio   float64 `json:"p50_to_local_p50"`

	P50s []float64 `json:"p50s"`
	P50  float64   `json:"p50"` // percentiles are over all rounds
	P95  float64   `json:"p95"`
	P99  float64   `json:"p99"`
	// Times of the two actions that run alone. The input tree is new to the server in the first one only.
	Firsts     []float64 `json:"firsts"`
	First      float64   `json:"first"`
	Nexts      []float64 `json:"nexts"`
	Next       float64   `json:"next"`
	FirstExtra float64   `json:"first_more_than_next"`
	Phases     Phases    `json:"phases"` // medians of all actions

	CPUs    []float64 `json:"cpus,omitempty"`
	CPU     float64   `json:"cpu,omitempty"` // of live processes, per action
	AllCPUs []float64 `json:"all_cpus,omitempty"`
	AllCPU  float64   `json:"all_cpu,omitempty"` // also of exited processes, such as the action's own
	PeakRSS int64     `json:"peak_rss_bytes,omitempty"`
	Clients []float64 `json:"client_cpus"`
	Client  float64   `json:"client_cpu"`  // CPU time of this process, per action
	Others  []float64 `json:"others_busy"` // processors used by other processes than this one and the watched ones
	Other   float64   `json:"other_busy"`  // 0 if unknown

	took   []time.Duration
	phases []Phases
}

// Phases are the phases of an action in milliseconds, as the server reports them.
type Phases struct {
	Queue  float64 `json:"queue"`
	Fetch  float64 `json:"input_fetch"`
	Run    float64 `json:"execution"`
	Upload float64 `json:"output_upload"`
	Rest   float64 `json:"rest"` // of the client's wait
}

func newExecReport(c *ExecConfig, servers []*Server) *ExecReport {
	r := &ExecReport{Salt: c.Salt, Rounds: c.Rounds, Processors: runtime.NumCPU()}
	for _, w := range c.Workloads {
		m := WorkloadReport{Workload: w}
		for _, s := range servers {
			m.Servers = append(m.Servers, ExecResult{Name: s.Name, Address: s.Address, Watched: len(s.pids) > 0})
		}
		r.Workloads = append(r.Workloads, m)
	}
	return r
}

// addRun adds the times of a round: of the two actions that ran alone, and of the measured ones.
func (r *ExecResult) addRun(alone, answers []answer, metadata []*repb.ExecutedActionMetadata) {
	took := make([]time.Duration, len(answers))
	for i, a := range answers {
		took[i] = a.took
		r.phases = append(r.phases, phasesOf(metadata[i], a.took))
	}
	r.took = append(r.took, took...)
	slices.Sort(took)
	r.P50s = append(r.P50s, milliseconds(percentile(took, 50)))
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
	if r.Watched {
		live := after.live - before.live
		r.CPUs = append(r.CPUs, milliseconds(live)/n)
		r.AllCPUs = append(r.AllCPUs, milliseconds(live+after.exited-before.exited)/n)
		r.PeakRSS = max(r.PeakRSS, after.peak)
	}
}

// summarize computes the medians over all rounds.
func (r *ExecReport) summarize() {
	for i := range r.Workloads {
		l := &r.Workloads[i].Local
		l.Spawn, l.Rate, l.P50, l.CPU = median(l.Spawns), median(l.Rates), median(l.P50s), median(l.CPUs)
		for k := range r.Workloads[i].Servers {
			r.Workloads[i].Servers[k].summarize(l)
		}
	}
}

func (r *ExecResult) summarize(l *LocalResult) {
	slices.Sort(r.took)
	percent := func(p int) float64 { return milliseconds(percentile(r.took, p)) }
	divide := func(a, b float64) float64 { return a / b }
	subtract := func(a, b float64) float64 { return a - b }
	r.P50, r.P95, r.P99 = percent(50), percent(95), percent(99)
	r.Rate, r.First, r.Next, r.Client = median(r.Rates), median(r.Firsts), median(r.Nexts), median(r.Clients)
	r.SpawnRatio, r.LocalRatio = medianOf(r.Rates, l.Spawns, divide), medianOf(r.Rates, l.Rates, divide)
	r.P50Ratio, r.FirstExtra = medianOf(r.P50s, l.P50s, divide), medianOf(r.Firsts, r.Nexts, subtract)
	if len(r.Others) > 0 {
		r.Other = median(r.Others)
	}
	if r.Watched {
		r.CPU, r.AllCPU = median(r.CPUs), median(r.AllCPUs)
	}
	phase := func(of func(Phases) float64) float64 {
		all := make([]float64, len(r.phases))
		for i, p := range r.phases {
			all[i] = of(p)
		}
		return median(all)
	}
	r.Phases = Phases{
		Queue:  phase(func(p Phases) float64 { return p.Queue }),
		Fetch:  phase(func(p Phases) float64 { return p.Fetch }),
		Run:    phase(func(p Phases) float64 { return p.Run }),
		Upload: phase(func(p Phases) float64 { return p.Upload }),
		Rest:   phase(func(p Phases) float64 { return p.Rest }),
	}
}

// medianOf returns the median of f(as[i], bs[i]).
func medianOf(as, bs []float64, f func(a, b float64) float64) float64 {
	all := make([]float64, len(as))
	for i := range as {
		all[i] = f(as[i], bs[i])
	}
	return median(all)
}

// percentile returns the smallest of the sorted values such that p percent of them are not above it.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

// Text writes for each workload a table, with columns for the bare machine and each server, and a chart of the rates.
func (r *ExecReport) Text(out io.Writer) error {
	for i := range r.Workloads {
		if i > 0 {
			fmt.Fprintln(out)
		}
		m := &r.Workloads[i]
		fmt.Fprintln(out, &m.Workload)
		if err := m.printTable(out); err != nil {
			return err
		}
		if err := m.printChart(out); err != nil {
			return err
		}
	}
	return nil
}

func (m *WorkloadReport) printTable(out io.Writer) error {
	g := newGrid(out, len("CPU time with commands"))
	row := func(name, local string, cell func(s *ExecResult) string) {
		cells := []string{local}
		for i := range m.Servers {
			cells = append(cells, cell(&m.Servers[i]))
		}
		g.row(name, cells...)
	}
	number := func(format string, value func(s *ExecResult) float64) func(s *ExecResult) string {
		return func(s *ExecResult) string { return fmt.Sprintf(format, value(s)) }
	}
	const ms = "%.2f ms"
	watched := func(cell func(s *ExecResult) string) func(s *ExecResult) string {
		return func(s *ExecResult) string {
			if !s.Watched {
				return "-"
			}
			return cell(s)
		}
	}
	row("", "bare", func(s *ExecResult) string { return s.Name })
	row("rate", perSecond(m.Local.Rate), func(s *ExecResult) string { return perSecond(s.Rate) })
	if !m.idle() {
		row("to bare command", "", number("%.3f", func(s *ExecResult) float64 { return s.LocalRatio }))
	}
	row("to fork+exec", perSecond(m.Local.Spawn), number("%.3f", func(s *ExecResult) float64 { return s.SpawnRatio }))
	row("p50", fmt.Sprintf(ms, m.Local.P50), number(ms, func(s *ExecResult) float64 { return s.P50 }))
	if m.Parallel == m.Local.Parallel { // otherwise the processors per command differ
		row("to bare command", "", number("%.2f", func(s *ExecResult) float64 { return s.P50Ratio }))
	}
	row("p95", "", number(ms, func(s *ExecResult) float64 { return s.P95 }))
	row("p99", "", number(ms, func(s *ExecResult) float64 { return s.P99 }))
	if m.Kind == Trees {
		row("first on the tree", "", number(ms, func(s *ExecResult) float64 { return s.First }))
		row("next", "", number(ms, func(s *ExecResult) float64 { return s.Next }))
	}
	row("queue", "", number(ms, func(s *ExecResult) float64 { return s.Phases.Queue }))
	row("input fetch", "", number(ms, func(s *ExecResult) float64 { return s.Phases.Fetch }))
	row("execution", "", number(ms, func(s *ExecResult) float64 { return s.Phases.Run }))
	row("output upload", "", number(ms, func(s *ExecResult) float64 { return s.Phases.Upload }))
	row("rest", "", number(ms, func(s *ExecResult) float64 { return s.Phases.Rest }))
	row("CPU time of server", "", watched(number(ms, func(s *ExecResult) float64 { return s.CPU })))
	row("CPU time with commands", fmt.Sprintf(ms, m.Local.CPU),
		watched(number(ms, func(s *ExecResult) float64 { return s.AllCPU })))
	row("peak memory", "", watched(func(s *ExecResult) string { return fmt.Sprintf("%d MiB", s.PeakRSS>>20) }))
	row("CPU time of client", "", number(ms, func(s *ExecResult) float64 { return s.Client }))
	row("others busy", "", func(s *ExecResult) string {
		if len(s.Others) == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f processors", s.Other)
	})
	return g.Flush()
}

func (m *WorkloadReport) printChart(out io.Writer) error {
	bars := []bar{{fmt.Sprintf("fork+exec, %d at a time", m.Local.Parallel), m.Local.Spawn}}
	if !m.idle() {
		bars = append(bars, bar{fmt.Sprintf("bare command, %d at a time", m.Local.Parallel), m.Local.Rate})
	}
	for _, s := range m.Servers {
		bars = append(bars, bar{s.Name, s.Rate})
	}
	return chart(out, bars)
}

func perSecond(rate float64) string { return fmt.Sprintf("%.0f /s", rate) }

// A bar is a rate in a chart.
type bar struct {
	name string
	rate float64
}

// chart prints horizontal bars. The highest rate has the longest one.
func chart(out io.Writer, bars []bar) error {
	const width = 50
	most, name := 0.0, 0
	for _, b := range bars {
		most, name = max(most, b.rate), max(name, len(b.name))
	}
	for _, b := range bars {
		n := 0
		if most > 0 {
			n = int(b.rate/most*width + 0.5)
		}
		_, err := fmt.Fprintf(out, "  %-*s |%-*s %s\n", name, b.name, width, strings.Repeat("#", n), perSecond(b.rate))
		if err != nil {
			return err
		}
	}
	return nil
}
