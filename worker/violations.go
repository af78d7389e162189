// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/sandbox/violation"
)

const (
	// maxUndeclared is the number of undeclared files of one action that become events.
	maxUndeclared = 100
	// maxField bounds, in bytes, each text of an event.
	maxField = 500
	// maxText bounds, in bytes, a line about one event.
	maxText = 10 * maxField
	// maxUnread is the number of unread inputs that the audit log names.
	maxUnread = 10_000
)

// Violations are what the sandbox denied to one run and the limits that the run hit, or the property for which the
// policy refused an action.
type Violations struct {
	ExitCode int // sandbox.NeverRan if the action was refused
	// OnViolation is "fail" or "kill" if the policy made the action fail for a violation or killed it at one.
	OnViolation string
	// Events are in the order of Event.Compare. Their texts are printable, and paths in the input root relative to it.
	Events []sandbox.Event
	// Unrecorded counts further events.
	Unrecorded int
}

// NewViolations returns the violations of a run with the input root at an absolute path. Paths in it become relative.
func NewViolations(r *sandbox.Result, root string) *Violations { return newViolations(r, root, nil, 0) }

// newViolations returns the violations of a run that left the files undeclared and more of them behind. All text that
// the action chose is made printable here.
func newViolations(r *sandbox.Result, root string, undeclared []string, more int) *Violations {
	events := slices.Clone(r.Events)
	if e := r.Exceeded; e != nil {
		if !slices.ContainsFunc(events, func(f sandbox.Event) bool { return sameLimit(e, f) }) {
			events = append(events, *e)
		}
	}
	for _, p := range undeclared {
		events = append(events, sandbox.Event{Kind: sandbox.EventOutput, Subject: p, Count: 1})
	}
	for i := range events {
		e := &events[i]
		if e.Kind == sandbox.EventWrite || e.Kind == sandbox.EventRead || e.Kind == sandbox.EventExec {
			e.Subject = strings.TrimPrefix(e.Subject, root+"/") // with the root / it stays absolute
		}
		for _, text := range []*string{&e.Subject, &e.Syscall, &e.Process, &e.Actual, &e.Limit, &e.Detail} {
			*text = printable.Head(*text, maxField)
		}
	}
	slices.SortFunc(events, sandbox.Event.Compare)
	return &Violations{ExitCode: r.ExitCode, Events: events, Unrecorded: r.Unrecorded + more}
}

// Lines returns a line of printable ASCII for each event, the most important first, and one that counts the unrecorded
// events.
func (v *Violations) Lines() []string {
	var lines []string
	for _, e := range v.byImportance() {
		lines = append(lines, printable.Head(fmt.Sprintf("%-8s %s", e.Kind, e), maxText))
	}
	if v.Unrecorded > 0 {
		lines = append(lines, fmt.Sprintf("and %d more that were not recorded", v.Unrecorded))
	}
	return lines
}

// First returns the most important event, or the zero Event.
func (v *Violations) First() sandbox.Event {
	if len(v.Events) == 0 {
		return sandbox.Event{}
	}
	return v.byImportance()[0]
}

// Harmless reports whether the violations explain no failure and need no attention: the run only used permitted
// connections, or it succeeded and only left temporary files, as many tests do, or failed to cache Python modules.
func (v *Violations) Harmless() bool {
	first := rank(v.First())
	return v.Unrecorded == 0 && first >= rank(sandbox.Event{Kind: sandbox.EventOutput}) &&
		(v.ExitCode == 0 || first == rank(sandbox.Event{Kind: sandbox.EventAllowed}))
}

// importance lists the kinds of events, the most important first.
var importance = []sandbox.EventKind{
	sandbox.EventRefused, sandbox.EventLimit, sandbox.EventUnreachable, sandbox.EventConnect, sandbox.EventWrite, sandbox.EventExec,
	sandbox.EventSyscall, sandbox.EventRead, sandbox.EventOutput, sandbox.EventAllowed,
}

// byImportance returns the events, the most important first.
func (v *Violations) byImportance() []sandbox.Event {
	events := slices.Clone(v.Events)
	slices.SortStableFunc(events, func(e, f sandbox.Event) int { return rank(e) - rank(f) })
	return events
}

// rank orders events. Python tries to cache each module that it imports and continues when it cannot, so these events
// follow all others that may explain a failure.
func rank(e sandbox.Event) int {
	if violation.CachesModule(e) || ownLoopback(e) {
		return 2*slices.Index(importance, sandbox.EventOutput) + 1
	}
	return 2 * slices.Index(importance, e.Kind)
}

// ownLoopback reports whether e is a connection to the run's own loopback, where nothing listened. It explains a
// failure, but nothing was denied.
func ownLoopback(e sandbox.Event) bool { return e.Kind == sandbox.EventUnreachable && e.Syscall != "" }

// sameLimit reports whether f is about the limit of e, which may be nil.
func sameLimit(e *sandbox.Event, f sandbox.Event) bool {
	return e != nil && f.Kind == sandbox.EventLimit && f.Subject == e.Subject
}

// audit passes v to the operator's audit log, unless it is empty.
func (l *Local) audit(t *Task, v *Violations) {
	if l.cfg.Audit != nil && len(v.Events)+v.Unrecorded > 0 {
		l.cfg.Audit(t, v)
	}
}

// auditRefusal passes to the audit log the property for which the policy refused t, if err says so.
func (l *Local) auditRefusal(t *Task, err error) {
	if r, ok := errors.AsType[*policy.RefusedError](err); ok {
		event := sandbox.Event{
			Kind: sandbox.EventRefused, Subject: r.Property.String(), Count: 1,
			Detail: fmt.Sprintf("rule %q %s", r.Rule, r.Reason),
		}
		l.audit(t, NewViolations(&sandbox.Result{ExitCode: sandbox.NeverRan, Events: []sandbox.Event{event}}, ""))
	}
}

// addViolations adds to c the violations and, if the run was watched closely enough, the inputs that it did not read.
// It writes to the audit log before anything can fail.
func (l *Local) addViolations(t *Task, req *request, box *confined, s *staged, r *ran, c *collected) error {
	var undeclared []string
	var more int
	var err error
	if box.spec.Audit != sandbox.AuditOff {
		undeclared, more, err = req.Layout.Undeclared(s.out, maxUndeclared)
		for _, v := range req.Command.EnvironmentVariables {
			if v.Name == "TEST_TMPDIR" { // Bazel's tests may leave anything there
				undeclared = slices.DeleteFunc(undeclared, func(p string) bool {
					return strings.HasSuffix(p, "/") && strings.HasPrefix(v.Value+"/", p) || strings.HasPrefix(p, v.Value+"/")
				})
			}
		}
	}
	c.Violations = r.violations(box, undeclared, more)
	l.audit(t, c.Violations)
	if box.spec.Audit == sandbox.AuditFull {
		for f := range req.Input.AllFiles() {
			if _, ok := slices.BinarySearch(r.Opened, path.Join(box.root, f.Path)); !ok && !f.Symlink {
				c.unread = append(c.unread, f.Path)
			}
		}
	}
	return err
}

// auditText returns the text of the execution's audit log, or "" if there is nothing to report.
func (c *collected) auditText(t *Task, req *request, box *confined) string {
	if len(c.Events)+c.Unrecorded+len(c.unread) == 0 {
		return ""
	}
	var b strings.Builder
	line := func(format string, args ...any) {
		b.WriteString(printable.Head(fmt.Sprintf(format, args...), maxText) + "\n")
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
	if c.OnViolation != "" {
		line("on violation %s", c.OnViolation)
	}
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
