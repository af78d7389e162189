// SPDX-License-Identifier: Apache-2.0

package gate

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/localrun"
)

// metrics is the content of volatile.json: what differs between two runs of one commit. Times are in nanoseconds.
type metrics struct {
	Format  string    `json:"format"`
	Started time.Time `json:"started"`
	Ended   time.Time `json:"ended"`
	Host    string    `json:"host"`
	PID     int       `json:"pid"`

	// Times of the steps: before the command starts, while it runs, and until everything is removed.
	SetUp   localrun.Spread `json:"set_up"`
	Run     localrun.Spread `json:"run"`
	CleanUp localrun.Spread `json:"clean_up"`
	Steps   []timing        `json:"steps"`
	// Expiring lists the exceptions that expire within expiringDays.
	Expiring []expiry `json:"expiring"`

	report *Report
}

type timing struct {
	ID      string        `json:"id"`
	SetUp   time.Duration `json:"set_up_ns"`
	Run     time.Duration `json:"run_ns"`
	CleanUp time.Duration `json:"clean_up_ns"`
}

type expiry struct {
	Step      string `json:"step"`
	Exception string `json:"exception"`
	Owner     string `json:"owner"`
	Days      int    `json:"days"` // left, negative after the last day
}

const (
	metricsFormat = "cloister-gate-metrics v1"
	expiringDays  = 30
	day           = 24 * time.Hour
)

// finish completes the metrics and announces exceptions that expire soon.
func (m *metrics) finish(g *gate) {
	m.Format, m.Ended, m.PID, m.report = metricsFormat, time.Now().UTC(), os.Getpid(), &g.report
	m.Host, _ = os.Hostname()
	of := func(value func(*timing) time.Duration) localrun.Spread {
		var all []time.Duration
		for i := range m.Steps {
			all = append(all, value(&m.Steps[i]))
		}
		return localrun.SpreadOf(all)
	}
	m.SetUp = of(func(t *timing) time.Duration { return t.SetUp })
	m.Run = of(func(t *timing) time.Duration { return t.Run })
	m.CleanUp = of(func(t *timing) time.Duration { return t.CleanUp })
	m.Steps, m.Expiring = append([]timing{}, m.Steps...), []expiry{}
	for _, s := range g.steps {
		for _, list := range [][]*exception{s.hosts, s.ports} {
			for _, e := range list {
				days := int(e.expires.Sub(g.today) / day)
				if days > expiringDays {
					continue
				}
				m.Expiring = append(m.Expiring, expiry{s.id, e.name(), e.owner, days})
				if on := e.expires.Format(time.DateOnly); days >= 0 {
					g.note("step %s: the exception for %s (owner %s) expires after %s", s.id, e.name(), e.owner, on)
				}
			}
		}
	}
}

// prometheus returns the metrics in the text format of Prometheus.
func (m *metrics) prometheus() string {
	var b strings.Builder
	family := func(name, help string) { fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s gauge\n", name, help, name) }
	for _, f := range []struct {
		name, help string
		of         localrun.Spread
	}{
		{"cloister_gate_set_up_seconds", "Time from the request of a step to the start of its command.", m.SetUp},
		{"cloister_gate_run_seconds", "Time that the command of a step ran.", m.Run},
		{"cloister_gate_clean_up_seconds", "Time from the end of a step's command until everything is removed.", m.CleanUp},
	} {
		family(f.name, f.help)
		fmt.Fprintf(&b, "%s{quantile=\"0.5\"} %g\n", f.name, f.of.P50.Seconds())
		fmt.Fprintf(&b, "%s{quantile=\"0.95\"} %g\n", f.name, f.of.P95.Seconds())
	}
	name := "cloister_gate_info"
	family(name, "The tier of the sandbox, or what observes the steps instead.")
	fmt.Fprintf(&b, "%s{tier=%q,observer=%q} 1\n", name, m.report.Sandbox.Tier, m.report.Sandbox.Observer)
	name = "cloister_gate_violations"
	family(name, "Violations of a step.")
	for i := range m.report.Steps {
		fmt.Fprintf(&b, "%s{step=%q} %d\n", name, m.report.Steps[i].ID, len(m.report.Steps[i].Violations))
	}
	name = "cloister_gate_exception_connections"
	family(name, "Connections that an exception authorised.")
	for i := range m.report.Steps {
		for _, u := range m.report.Steps[i].Exceptions {
			step := m.report.Steps[i].ID
			fmt.Fprintf(&b, "%s{step=%q,endpoint=\"%s:%d\"} %d\n", name, step, u.Host, u.Port, u.Connections)
		}
	}
	name = "cloister_gate_exception_days_left"
	family(name, "Days until an exception expires, of those that expire within 30 days.")
	for _, e := range m.Expiring {
		fmt.Fprintf(&b, "%s{step=%q,exception=%q,owner=%q} %d\n", name, e.Step, e.Exception, e.Owner, e.Days)
	}
	return b.String()
}
