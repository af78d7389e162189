// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
)

const (
	// maxLeft is how many paths that an action left undeclared are events.
	maxLeft = 100
	// maxField bounds, in bytes, each text of an event.
	maxField = 500
	// maxUnread is how many inputs that were never read are named in the audit log.
	maxUnread = 10_000
)

// attempts returns what a run tried: what the backend saw, the limit that ended it, and the paths that it
// left undeclared, of which there are more. All of it is made printable here, once.
func attempts(r *sandbox.Result, left []string, more int) *Violations {
	events := slices.Clone(r.Events)
	if e := r.Exceeded; e != nil && !slices.ContainsFunc(events, func(f sandbox.Event) bool { return sameLimit(e, f) }) {
		events = append(events, *e)
	}
	for _, p := range left {
		events = append(events, sandbox.Event{Kind: sandbox.EventOutput, Subject: p, Count: 1})
	}
	for i := range events {
		e := &events[i]
		for _, text := range []*string{&e.Subject, &e.Syscall, &e.Process, &e.Actual, &e.Limit, &e.Detail} {
			*text = printable(*text, maxField)
		}
	}
	slices.SortFunc(events, sandbox.Event.Compare)
	return &Violations{ExitCode: r.ExitCode, Events: events, Unrecorded: r.Unrecorded + more}
}

// NewViolations returns what a run tried, for whoever has it run without an action.
func NewViolations(r *sandbox.Result) *Violations { return attempts(r, nil, 0) }

// Lines says what was tried, a line of printable ASCII for each event, the most important first, and one for those of
// which no record was kept.
func (a *Violations) Lines() []string {
	var lines []string
	for _, e := range a.byImportance() {
		lines = append(lines, printable(fmt.Sprintf("%-8s %s", e.Kind, e), 10*maxField))
	}
	if a.Unrecorded > 0 {
		lines = append(lines, fmt.Sprintf("and %d more, of which no record was kept", a.Unrecorded))
	}
	return lines
}

func sameLimit(e *sandbox.Event, f sandbox.Event) bool {
	return e != nil && f.Kind == sandbox.EventLimit && f.Subject == e.Subject
}

// audit tells the operator's log.
func (l *Local) audit(t *Task, a *Violations) {
	if l.Audit != nil && len(a.Events)+a.Unrecorded > 0 {
		l.Audit(t, a)
	}
}

// refused tells the operator's log of a property for which the policy refused t, if err says so.
func (l *Local) refused(t *Task, err error) {
	var r *policy.RefusedError
	if errors.As(err, &r) {
		event := sandbox.Event{Kind: sandbox.EventRefused, Subject: r.Property.String(), Count: 1, Detail: fmt.Sprintf("rule %q %s", r.Rule, r.Reason)}
		l.audit(t, attempts(&sandbox.Result{ExitCode: sandbox.NeverRan, Events: []sandbox.Event{event}}, nil, 0))
	}
}

// attempted adds to c what the action tried, and what it left unread of its inputs if it was watched so
// closely. The operator's log has it before anything can fail.
func (l *Local) attempted(t *Task, req *Request, box *confined, s *staged, r *ran, c *collected) error {
	var left []string
	var more int
	var err error
	if box.spec.Audit != sandbox.AuditOff {
		left, more, err = req.Layout.Undeclared(s.out, maxLeft)
		for _, v := range req.Command.EnvironmentVariables {
			if v.Name == "TEST_TMPDIR" { // Bazel's own, which its tests may use as they like
				left = slices.DeleteFunc(left, func(p string) bool {
					return strings.HasSuffix(p, "/") && strings.HasPrefix(v.Value+"/", p) || strings.HasPrefix(p, v.Value+"/")
				})
			}
		}
	}
	c.Violations = attempts(r.Result, left, more)
	l.audit(t, c.Violations)
	if box.spec.Audit == sandbox.AuditFull {
		for p := range req.Input.FilePaths() {
			if _, ok := slices.BinarySearch(r.Opened, box.root+"/"+p); !ok {
				c.unread = append(c.unread, p)
			}
		}
	}
	return err
}

// First returns the most important event, or the zero Event.
func (a *Violations) First() sandbox.Event {
	if len(a.Events) == 0 {
		return sandbox.Event{}
	}
	return a.byImportance()[0]
}

// importance is the order in which a person wants to be told of events.
var importance = []sandbox.EventKind{
	sandbox.EventRefused, sandbox.EventLimit, sandbox.EventConnect, sandbox.EventWrite, sandbox.EventExec, sandbox.EventSyscall,
	sandbox.EventRead, sandbox.EventOutput, sandbox.EventAllowed,
}

// byImportance returns the events, the most important first.
func (a *Violations) byImportance() []sandbox.Event {
	events := slices.Clone(a.Events)
	slices.SortStableFunc(events, func(e, f sandbox.Event) int {
		return slices.Index(importance, e.Kind) - slices.Index(importance, f.Kind)
	})
	return events
}

// auditText says all that the action tried, for a person to read, or "" if there is nothing to say.
func (c *collected) auditText(t *Task, req *Request, box *confined) string {
	if len(c.Events)+c.Unrecorded+len(c.unread) == 0 {
		return ""
	}
	var b strings.Builder
	line := func(format string, args ...any) {
		b.WriteString(printable(fmt.Sprintf(format, args...), 10*maxField))
		b.WriteByte('\n')
	}
	line("action %s", req.Digest)
	for _, row := range []struct{ name, value string }{
		{"instance", t.Instance}, {"target", t.Target}, {"mnemonic", t.Mnemonic}, {"invocation", t.Invocation},
	} {
		if row.value != "" {
			line("%s %s", row.name, row.value)
		}
	}
	line("profile %q, chosen by rule %q", box.grant.Profile, box.grant.Rule)
	line("exit code %d", c.ExitCode)
	for _, text := range c.Lines() {
		line("%s", text)
	}
	if n := len(c.unread); n > 0 {
		line("%d of %d inputs were never read", n, req.Input.Files())
		for _, p := range c.unread[:min(n, maxUnread)] {
			line("unread   %s", p)
		}
		if n > maxUnread {
			line("and %d more", n-maxUnread)
		}
	}
	return b.String()
}

// printable returns s as one line of ASCII, with other characters as Go's escapes, cut after most bytes:
// what an action or a client names must not be able to forge a line of ours.
func printable(s string, most int) string {
	var b []byte
	for _, r := range s {
		if len(b) >= most {
			return string(b) + "[cut]"
		}
		if ' ' <= r && r <= '~' {
			b = append(b, byte(r))
			continue
		}
		quoted := strconv.QuoteRuneToASCII(r)
		b = append(b, quoted[1:len(quoted)-1]...)
	}
	return string(b)
}
