// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	cloisterpb "github.com/cloister-build/cloister/proto/cloister/v1"
	"github.com/cloister-build/cloister/sandbox/printable"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// callTimeout is the time limit of an answer.
const callTimeout = 20 * time.Second

// A State is the state of a server and its workers at one moment, as status --json prints it.
type State struct {
	Name    string        `json:"name"`
	Version string        `json:"version"`
	Time    string        `json:"time"`
	Up      float64       `json:"up_seconds"`
	Ready   bool          `json:"ready"`
	Unready []string      `json:"unready,omitempty"` // why
	Notes   []string      `json:"notes,omitempty"`
	Slots   int           `json:"slots"` // including drained workers
	Queued  int64         `json:"queued"`
	Running int64         `json:"running"`
	Oldest  float64       `json:"oldest_seconds,omitempty"`
	Done    int64         `json:"done"`
	Cached  int64         `json:"cached"`
	Failed  int64         `json:"failed"`
	Again   int64         `json:"again"`
	Demands []demandState `json:"demands,omitempty"`
	Workers []workerState `json:"workers,omitempty"`
	// Elsewhere sums up the instances that the caller may not see.
	Elsewhere *elsewhereState `json:"elsewhere,omitempty"`
}

type elsewhereState struct {
	Queued  int64 `json:"queued"`
	Workers int64 `json:"workers"`
	Slots   int64 `json:"slots"`
	Busy    int64 `json:"busy"`
}

type demandState struct {
	Properties []string `json:"properties,omitempty"`
	Queued     int64    `json:"queued"`
	Unmet      string   `json:"unmet,omitempty"`
}

type workerState struct {
	Name       string      `json:"name"`
	Prefix     string      `json:"instance_name_prefix,omitempty"`
	Properties []string    `json:"properties,omitempty"`
	State      string      `json:"state"` // working, draining, drained, gone
	Since      float64     `json:"state_seconds,omitempty"`
	Reason     string      `json:"reason,omitempty"`
	Slots      int         `json:"slots"`
	Busy       int         `json:"busy"`
	Silent     float64     `json:"silent_seconds,omitempty"` // since its last call
	Done       int64       `json:"done"`
	Lost       int64       `json:"lost"`
	Running    []slotState `json:"running,omitempty"`
}

// A slotState is a busy slot.
type slotState struct {
	Slot       string  `json:"slot"`
	Stage      string  `json:"stage,omitempty"`
	For        float64 `json:"for_seconds"`
	Action     string  `json:"action,omitempty"`
	Instance   string  `json:"instance,omitempty"`
	Target     string  `json:"target,omitempty"`
	Mnemonic   string  `json:"mnemonic,omitempty"`
	Invocation string  `json:"invocation,omitempty"`
}

// States of a worker.
const (
	workerWorks    = "working"
	workerDraining = "draining" // finishing its actions
	workerDrained  = "drained"
	workerGone     = "gone"
)

// stateOf converts the state of a server.
func stateOf(m *cloisterpb.StatusResponse) *State {
	now := m.Time.AsTime()
	since := func(t *timestamppb.Timestamp) float64 {
		if t == nil {
			return 0
		}
		return max(now.Sub(t.AsTime()), 0).Round(time.Millisecond).Seconds()
	}
	s := &State{
		Name: m.Name, Version: m.Version, Time: now.Format(time.RFC3339), Up: since(m.Started), Ready: len(m.Unready) == 0, Unready: m.Unready, Notes: m.Notes,
		Queued: m.Queued, Running: m.Running, Oldest: m.Oldest.AsDuration().Round(time.Millisecond).Seconds(),
		Done: m.Done, Cached: m.Cached, Failed: m.Failed, Again: m.Again,
	}
	if e := m.Elsewhere; e != nil {
		s.Elsewhere = &elsewhereState{e.Queued, e.Workers, e.Slots, e.Busy}
		s.Slots = int(e.Slots)
	}
	for _, d := range m.Demands {
		s.Demands = append(s.Demands, demandState{d.Properties, d.Queued, d.Unmet})
	}
	for _, w := range m.Workers {
		row := workerState{
			Name: w.Name, Prefix: w.InstanceNamePrefix, Properties: w.Properties, State: workerWorks, Slots: len(w.Slots),
			Silent: since(w.Seen), Done: w.Done, Lost: w.Lost,
		}
		for _, slot := range w.Slots {
			if slot.Began == nil {
				continue
			}
			row.Running = append(row.Running, slotState{
				slot.Name, slot.Stage, since(slot.Began), slot.Action, slot.InstanceName, slot.TargetId, slot.ActionMnemonic, slot.InvocationId,
			})
		}
		row.Busy = len(row.Running)
		switch {
		case w.Gone != nil:
			row.State, row.Since = workerGone, since(w.Gone)
		case w.Drained != nil:
			row.State, row.Since, row.Reason = workerDrained, since(w.Drained), w.Reason
			if row.Busy > 0 {
				row.State = workerDraining
			}
		}
		s.Slots += row.Slots
		s.Workers = append(s.Workers, row)
	}
	return s
}

// Lines returns s for a person, with text chosen by others quoted.
func (s *State) Lines() []string {
	readiness := "ready"
	if !s.Ready {
		readiness = "NOT READY"
	}
	all := []string{fmt.Sprintf("%s  cloister %s  up %s  %s", render.Quote(s.Name), render.Quote(s.Version), render.Age(s.Up), readiness)}
	for _, why := range slices.Concat(s.Unready, s.Notes) {
		all = append(all, "         "+printable.Text(why))
	}
	all = append(all, "queue    "+s.Summary())
	for _, d := range s.Demands {
		line := fmt.Sprintf("         %d for %s", d.Queued, properties(d.Properties, "any worker"))
		if d.Unmet != "" {
			line += ": " + printable.Text(d.Unmet)
		}
		all = append(all, line)
	}
	workers := ""
	if e := s.Elsewhere; e != nil {
		if e.Queued > 0 {
			all = append(all, fmt.Sprintf("         %d of %s", e.Queued, others))
		}
		if e.Workers > 0 {
			workers = fmt.Sprintf("%d of %s, %d/%d busy", e.Workers, others, e.Busy, e.Slots)
		}
	}
	if len(s.Workers) == 0 {
		return append(all, "workers  "+cmp.Or(workers, "none"))
	}
	width := len("WORKER")
	for _, w := range s.Workers {
		width = min(max(width, len(render.Quote(w.Name))), 40)
	}
	row := func(name, state, slots, done, lost, rest string) {
		all = append(all, strings.TrimRight(fmt.Sprintf("%-*s  %-8s %9s %9s %5s  %s", width, name, state, slots, done, lost, rest), " "))
	}
	row("WORKER", "STATE", "BUSY", "DONE", "LOST", "")
	for _, w := range s.Workers {
		var rest []string
		if w.Prefix != "" {
			rest = append(rest, "instances "+render.Quote(w.Prefix))
		}
		if len(w.Properties) > 0 {
			rest = append(rest, properties(w.Properties, ""))
		}
		switch w.State {
		case workerGone:
			rest = append(rest, "since "+render.Age(w.Since))
		case workerDraining, workerDrained:
			text := "since " + render.Age(w.Since)
			if w.Reason != "" {
				text += ": " + printable.Text(w.Reason)
			}
			rest = append(rest, text)
		}
		if w.Silent > silence.Seconds() && w.State != workerGone {
			rest = append(rest, "silent for "+render.Age(w.Silent))
		}
		row(render.Quote(w.Name), w.State, fmt.Sprintf("%d/%d", w.Busy, w.Slots), fmt.Sprint(w.Done), fmt.Sprint(w.Lost), strings.Join(rest, ", "))
		for _, slot := range w.Running {
			all = append(all, slot.line())
		}
	}
	if workers != "" {
		all = append(all, "and "+workers)
	}
	return all
}

// others describes the instances of which only totals are known.
const others = "instances that you may not execute in"

// silence is the time after which an idle worker counts as silent: it asks for work and is answered within two minutes.
const silence = 3 * time.Minute

// Summary describes how much work waits, runs and is done.
func (s *State) Summary() string {
	waiting := fmt.Sprintf("%d waiting", s.Queued)
	if s.Queued > 0 {
		waiting += fmt.Sprintf(" (the oldest for %s)", render.Age(s.Oldest))
	}
	text := fmt.Sprintf("%s, %d running on %s, %d done, %s, %s", waiting, s.Running, render.Count(s.Slots, "slot"), s.Done,
		render.Count(s.Cached, "hit"), render.Count(s.Failed, "error"))
	if s.Again > 0 {
		text += fmt.Sprintf(", %d run again", s.Again)
	}
	return text
}

// line describes what a slot executes.
func (r *slotState) line() string {
	what := "an action of an instance that you may not execute in"
	if r.Action != "" {
		what = render.Quote(r.Action)
		if text := strings.TrimSpace(r.Mnemonic + " " + r.Target); text != "" {
			what = render.Quote(text) + "  " + what
		}
		if r.Instance != "" {
			what += "  " + render.Quote(r.Instance)
		}
	}
	stage := r.Stage
	if stage == "" {
		stage = "-"
	}
	return fmt.Sprintf("  %-4s %-8s %7s  %s", render.Quote(r.Slot), render.Quote(stage), render.Age(r.For), what)
}

// properties returns NAME=VALUE texts for a person, or none.
func properties(all []string, none string) string {
	if len(all) == 0 {
		return none
	}
	return render.QuoteAll(all)
}
