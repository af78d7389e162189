// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// An ExecReport is what Execute has measured. It marshals as JSON. Lists have a value for each round; without a list,
// it is their median. Times are in milliseconds and rates in actions a second, unless it is said otherwise.
type ExecReport struct {
	Salt       string       `json:"salt"`
	Rounds     int          `json:"rounds"`
	Processors int          `json:"processors"`
	Works      []WorkReport `json:"works"`
}

// A WorkReport is what was measured of a work.
type WorkReport struct {
	Work
	Local   Bare         `json:"local"`
	Servers []ExecResult `json:"servers"`
}

// Bare is what this machine itself does.
type Bare struct {
	Parallel int       `json:"parallel"` // how many at a time
	Spawns   []float64 `json:"spawn_rates"`
	Spawn    float64   `json:"spawn_rate"` // of starting the program that does nothing, and waiting for it
	Rates    []float64 `json:"rates"`
	Rate     float64   `json:"rate"` // of the commands of the actions
	P50s     []float64 `json:"p50s"`
	P50      float64   `json:"p50"`
	CPUs     []float64 `json:"cpus"`
	CPU      float64   `json:"cpu"` // of a command
}

// An ExecResult is what was measured of a server.
type ExecResult struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Watched bool   `json:"watched"` // whether CPU time and memory are known

	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"`
	// OfSpawn and OfLocal say how this rate compares with those of Bare, and Times how long an action takes, to the
	// time of the bare command: medians of what was so in each round.
	OfSpawn float64 `json:"rate_to_spawn_rate"`
	OfLocal float64 `json:"rate_to_local_rate"`
	Times   float64 `json:"p50_to_local_p50"`

	P50s []float64 `json:"p50s"`
	P50  float64   `json:"p50"` // these three are of all rounds together
	P95  float64   `json:"p95"`
	P99  float64   `json:"p99"`
	// Of the first two actions, which are alone. No earlier one had this input tree; the second one has it.
	Firsts []float64 `json:"firsts"`
	First  float64   `json:"first"`
	Nexts  []float64 `json:"nexts"`
	Next   float64   `json:"next"`
	More   float64   `json:"first_more_than_next"`
	Phases Phases    `json:"phases"` // medians of all actions

	CPUs    []float64 `json:"cpus,omitempty"`
	CPU     float64   `json:"cpu,omitempty"` // for an action, of processes that stay
	AllCPUs []float64 `json:"all_cpus,omitempty"`
	AllCPU  float64   `json:"all_cpu,omitempty"` // and of those that have ended, such as the action's own
	PeakRSS int64     `json:"peak_rss_bytes,omitempty"`
	Clients []float64 `json:"client_cpus"`
	Client  float64   `json:"client_cpu"` // of this process, for an action
	// Others is how many processors were busy with neither this process nor a server that is watched; 0 where the
	// operating system does not say.
	Others []float64 `json:"others_busy"`
	Other  float64   `json:"other_busy"`

	took   []time.Duration
	phases []Phases
}

// Phases say what an action spends its time with, in milliseconds, as the server tells it.
type Phases struct {
	Queue  float64 `json:"queue"`
	Fetch  float64 `json:"input_fetch"`
	Run    float64 `json:"execution"`
	Upload float64 `json:"output_upload"`
	Rest   float64 `json:"rest"` // of what the client sees
}

func newExecReport(c *ExecConfig, servers []*Server) *ExecReport {
	r := &ExecReport{Salt: c.Salt, Rounds: c.Rounds, Processors: runtime.NumCPU()}
	for _, w := range c.Works {
		m := WorkReport{Work: w}
		for _, s := range servers {
			m.Servers = append(m.Servers, ExecResult{Name: s.Name, Address: s.Address, Watched: len(s.pids) > 0})
		}
		r.Works = append(r.Works, m)
	}
	return r
}

// add adds a round.
func (r *ExecResult) add(alone, answers []answer, metadata []*repb.ExecutedActionMetadata, elapsed time.Duration, before, after observation) {
	n := float64(len(answers))
	took := make([]time.Duration, len(answers))
	for i, a := range answers {
		took[i] = a.took
		r.phases = append(r.phases, phasesOf(metadata[i], a.took))
	}
	r.took = append(r.took, took...)
	slices.Sort(took)
	r.Rates = append(r.Rates, n/max(elapsed, 1).Seconds())
	r.P50s = append(r.P50s, milliseconds(percentile(took, 50)))
	r.Firsts = append(r.Firsts, milliseconds(alone[0].took))
	r.Nexts = append(r.Nexts, milliseconds(alone[1].took))
	r.Clients = append(r.Clients, milliseconds(after.self-before.self)/n)
	if after.machine > 0 {
		r.Others = append(r.Others, max(0, (after.machine-before.machine-(after.known-before.known)).Seconds()/elapsed.Seconds()))
	}
	if r.Watched {
		living := after.living - before.living
		r.CPUs = append(r.CPUs, milliseconds(living)/n)
		r.AllCPUs = append(r.AllCPUs, milliseconds(living+after.ended-before.ended)/n)
		r.PeakRSS = max(r.PeakRSS, after.peak)
	}
}

// conclude makes one value of those of all rounds.
func (r *ExecReport) conclude() {
	for i := range r.Works {
		l := &r.Works[i].Local
		l.Spawn, l.Rate, l.P50, l.CPU = median(l.Spawns), median(l.Rates), median(l.P50s), median(l.CPUs)
		for k := range r.Works[i].Servers {
			r.Works[i].Servers[k].conclude(l)
		}
	}
}

func (r *ExecResult) conclude(l *Bare) {
	slices.Sort(r.took)
	r.P50, r.P95, r.P99 = milliseconds(percentile(r.took, 50)), milliseconds(percentile(r.took, 95)), milliseconds(percentile(r.took, 99))
	r.Rate, r.First, r.Next = median(r.Rates), median(r.Firsts), median(r.Nexts)
	r.OfSpawn, r.OfLocal, r.Times = ratio(r.Rates, l.Spawns), ratio(r.Rates, l.Rates), ratio(r.P50s, l.P50s)
	more := make([]float64, len(r.Firsts))
	for i := range more {
		more[i] = r.Firsts[i] - r.Nexts[i]
	}
	r.More = median(more)
	r.Client = median(r.Clients)
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

// ratio returns the median of as[i]/bs[i].
func ratio(as, bs []float64) float64 {
	all := make([]float64, len(as))
	for i := range as {
		all[i] = as[i] / bs[i]
	}
	return median(all)
}

// percentile returns the smallest value that p percent of sorted, which has values, are not above.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}

// Text writes for each work a table, a column for the machine itself and one for each server, and the rates as bars.
func (r *ExecReport) Text(out io.Writer) error {
	for i := range r.Works {
		if i > 0 {
			fmt.Fprintln(out)
		}
		if err := r.Works[i].text(out); err != nil {
			return err
		}
	}
	return nil
}

func (m *WorkReport) text(out io.Writer) error {
	fmt.Fprintf(out, "%s\n", &m.Work)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	row := func(name, local string, cell func(s *ExecResult) string) {
		fmt.Fprintf(w, "%-*s\t%s", len("CPU time with commands"), name, local)
		for i := range m.Servers {
			fmt.Fprintf(w, "\t%s", cell(&m.Servers[i]))
		}
		fmt.Fprint(w, "\t\n")
	}
	ms := func(value func(s *ExecResult) float64) func(s *ExecResult) string {
		return func(s *ExecResult) string { return fmt.Sprintf("%.2f ms", value(s)) }
	}
	watched := func(text func(s *ExecResult) string) func(s *ExecResult) string {
		return func(s *ExecResult) string {
			if !s.Watched {
				return "-"
			}
			return text(s)
		}
	}
	row("", "bare", func(s *ExecResult) string { return s.Name })
	row("rate", perSecond(m.Local.Rate), func(s *ExecResult) string { return perSecond(s.Rate) })
	if !m.idle() {
		row("to bare command", "", func(s *ExecResult) string { return fmt.Sprintf("%.3f", s.OfLocal) })
	}
	row("to fork+exec", perSecond(m.Local.Spawn), func(s *ExecResult) string { return fmt.Sprintf("%.3f", s.OfSpawn) })
	row("p50", fmt.Sprintf("%.2f ms", m.Local.P50), ms(func(s *ExecResult) float64 { return s.P50 }))
	if m.Parallel == m.Local.Parallel { // else one has more processors for a command than the other
		row("to bare command", "", func(s *ExecResult) string { return fmt.Sprintf("%.2f", s.Times) })
	}
	row("p95", "", ms(func(s *ExecResult) float64 { return s.P95 }))
	row("p99", "", ms(func(s *ExecResult) float64 { return s.P99 }))
	if m.Kind == Trees {
		row("first on the tree", "", ms(func(s *ExecResult) float64 { return s.First }))
		row("next", "", ms(func(s *ExecResult) float64 { return s.Next }))
	}
	row("queue", "", ms(func(s *ExecResult) float64 { return s.Phases.Queue }))
	row("input fetch", "", ms(func(s *ExecResult) float64 { return s.Phases.Fetch }))
	row("execution", "", ms(func(s *ExecResult) float64 { return s.Phases.Run }))
	row("output upload", "", ms(func(s *ExecResult) float64 { return s.Phases.Upload }))
	row("rest", "", ms(func(s *ExecResult) float64 { return s.Phases.Rest }))
	row("CPU time of server", "", watched(ms(func(s *ExecResult) float64 { return s.CPU })))
	row("CPU time with commands", fmt.Sprintf("%.2f ms", m.Local.CPU), watched(ms(func(s *ExecResult) float64 { return s.AllCPU })))
	row("peak memory", "", watched(func(s *ExecResult) string { return fmt.Sprintf("%d MiB", s.PeakRSS>>20) }))
	row("CPU time of client", "", ms(func(s *ExecResult) float64 { return s.Client }))
	row("others busy", "", func(s *ExecResult) string {
		if len(s.Others) == 0 {
			return "-"
		}
		return fmt.Sprintf("%.2f processors", s.Other)
	})
	if err := w.Flush(); err != nil {
		return err
	}
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

// chart writes bars, the longest of which is of the highest rate.
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
		if _, err := fmt.Fprintf(out, "  %-*s |%-*s %s\n", name, b.name, width, strings.Repeat("#", n), perSecond(b.rate)); err != nil {
			return err
		}
	}
	return nil
}

// A LocalReport is what RunLocal has measured. It marshals as JSON.
type LocalReport struct {
	Salt       string         `json:"salt"`
	Rounds     int            `json:"rounds"`
	Processors int            `json:"processors"`
	Measures   []LocalMeasure `json:"measures"`
}

// A LocalMeasure is what was measured of one thing: a value for each round, and the median of them.
type LocalMeasure struct {
	Name  string    `json:"name"`
	Rates []float64 `json:"rates"`
	Rate  float64   `json:"rate"` // times a second
	P50s  []float64 `json:"p50s"`
	P50   float64   `json:"p50"` // milliseconds
}

// add adds a round of one thing.
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
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	width := 0
	for _, m := range r.Measures {
		width = max(width, len(m.Name))
	}
	for _, m := range r.Measures {
		fmt.Fprintf(w, "%-*s\t%.1f /s\t%.2f ms\t\n", width, m.Name, m.Rate, m.P50)
	}
	return w.Flush()
}
