// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/sandbox/violation"
)

const (
	// maxShown is the number of events in a message; the audit log lists all of them.
	maxShown = 5
	// MaxMessageLines bounds a message: the status, omitted outputs, the events, the number of further events, the
	// network, and ignored properties.
	MaxMessageLines = 2 + maxShown + 3
	// maxLine bounds each line, in bytes.
	maxLine = 1000
)

// AuditLogName is the key of the audit log in the server logs of an execution.
const AuditLogName = "audit"

// status returns the status of the action, a line that explains it ("" if there is nothing to explain), and the limit
// that the line mentions, if any.
func (e *execution) status() (status Status, line string, limit *sandbox.Event) {
	status, line, limit = e.ended()
	if e.ran.violated == "" {
		return status, line, limit
	}
	by := e.policyOnViolations()
	switch explained := status != StatusOK || limit != nil; {
	case explained || e.ran.violated == violation.Failed && e.ran.exited != 0:
		line += "; its violations count, by " + by
	case e.ran.violated == violation.Failed:
		line = fmt.Sprintf("failed for its violations, by %s: exit code %d instead of 0", by, e.ran.ExitCode)
	default:
		line = "killed at its first violation, by " + by
	}
	return status, line, limit
}

// policyOnViolations names the origin of what violations do.
func (e *execution) policyOnViolations() string {
	if slices.ContainsFunc(e.req.properties(), func(p Property) bool { return p.Name == "cloister-on-violation" }) {
		return "property cloister-on-violation"
	}
	return fmt.Sprintf("on_violation of profile %q", e.box.grant.Profile)
}

// ended is status without what the policy does about violations.
func (e *execution) ended() (status Status, line string, limit *sandbox.Event) {
	r := e.ran
	switch {
	case r.failure != "" && r.Exceeded == nil && !r.timedOut:
		return StatusOK, "the persistent worker failed: " + r.failure, nil
	case r.timedOut && e.req.Action.GetTimeout().AsDuration() == 0:
		line = fmt.Sprintf("killed: exceeded the default timeout of %v, because the action sets none; set a longer one in the client", e.box.spec.Timeout)
		return StatusTimedOut, line, nil
	case r.timedOut:
		line = fmt.Sprintf(`killed: exceeded its timeout of %v; raise it; for a Bazel test, set timeout = "long" in BUILD or pass --test_timeout`,
			e.box.spec.Timeout)
		return StatusTimedOut, line, nil
	case r.Exceeded != nil && r.ExitCode != 0:
		return StatusOK, e.exceeded(), r.Exceeded
	case e.collected.bad != nil && r.ExitCode == 0: // if the command failed, its own failure matters more
		return StatusBadOutput, e.collected.bad.Error(), nil
	case r.Signal != 0:
		return StatusOK, fmt.Sprintf("killed by signal %d (%v), exit code %d", int(r.Signal), r.Signal, r.ExitCode), nil
	case r.ExitCode != 0:
		took := r.End.Sub(r.Start).Round(time.Millisecond)
		return StatusOK, fmt.Sprintf("exit code %d after %v, action %s", r.ExitCode, took, e.req.Digest), nil
	}
	if limit = e.limit(); limit != nil {
		return StatusOK, fmt.Sprintf("succeeded, but reached the %s, so its result is not cached; %s", e.nameLimit(limit), e.raise(limit)), limit
	}
	return StatusOK, e.noOutputs(), nil
}

// noOutputs returns a warning about an action that succeeded without producing any declared output, which some clients
// take for a failure (rule 123), or "".
func (e *execution) noOutputs() string {
	cmd, r := e.req.Command, e.collected.result
	declared := slices.Concat(cmd.GetOutputPaths(), cmd.GetOutputFiles(), cmd.GetOutputDirectories())
	links := len(r.OutputSymlinks) + len(r.OutputFileSymlinks) + len(r.OutputDirectorySymlinks)
	if len(declared) == 0 || len(r.OutputFiles)+len(r.OutputDirectories)+links > 0 {
		return ""
	}
	return fmt.Sprintf("succeeded but produced none of its declared outputs (%d, first %q)", len(declared), declared[0])
}

// limit returns a limit that the action hit, or nil.
func (e *execution) limit() *sandbox.Event {
	if e.ran.Exceeded != nil {
		return e.ran.Exceeded
	}
	events := e.collected.Events
	if i := slices.IndexFunc(events, func(v sandbox.Event) bool { return v.Kind == sandbox.EventLimit }); i >= 0 {
		return &events[i]
	}
	return nil
}

// exceeded describes how the action failed at a limit: those of memory and CPU time kill, the others refuse.
func (e *execution) exceeded() string {
	limit := e.ran.Exceeded
	how := fmt.Sprintf("exit code %d: reached", e.ran.ExitCode)
	if l := sandbox.Limit(limit.Subject); l == sandbox.LimitMemory || l == sandbox.LimitCPU {
		how = "killed: exceeded"
	}
	return fmt.Sprintf("%s the %s; %s", how, e.nameLimit(limit), e.raise(limit))
}

// nameLimit returns "4 GiB memory limit (profile build)" or "limit of 128 processes (profile build)".
func (e *execution) nameLimit(limit *sandbox.Event) string {
	value := strings.Replace(limit.Limit, ".0 ", " ", 1)
	name := fmt.Sprintf("limit of %s %s", value, limit.Subject)
	if sandbox.Limit(limit.Subject).Unit() != "" {
		name = fmt.Sprintf("%s %s limit", value, limit.Subject)
	}
	if profile := e.box.grant.Profile; profile != "" {
		name += fmt.Sprintf(" (profile %s)", profile)
	}
	return name
}

// raise returns the advice to request twice the limit in the BUILD file of the action.
func (e *execution) raise(limit *sandbox.Event) string {
	l, value := sandbox.Limit(limit.Subject), limit.LimitValue
	if !slices.Contains(sandbox.AllLimits, l) {
		l = "" // room in /tmp
	} else if v := e.box.spec.Limits.Of(l); v != sandbox.Unlimited {
		value = v
	}
	p := e.box.grant.Ask(l, 2*value)
	return fmt.Sprintf("raise it with exec_properties = {%q: %q}", p.Name, p.Value)
}

// message returns the message of the outcome. It begins with line, unless that is "", and omits limit, which line
// mentions already. It ends with ignored, unless that is "".
func (e *execution) message(line string, limit *sandbox.Event, ignored string) string {
	var lines []string
	add := func(format string, args ...any) {
		lines = append(lines, "cloister: "+printable.Head(fmt.Sprintf(format, args...), maxLine))
	}
	if line != "" {
		add("%s", line)
	}
	if omitted := e.collected.omitted; omitted != "" {
		add("omitted from the outputs because they are not files, directories or symlinks: %s", omitted)
	}
	events := slices.DeleteFunc(e.collected.byImportance(), func(v sandbox.Event) bool {
		return v.Kind == sandbox.EventAllowed || sameLimit(limit, v)
	})
	slices.SortStableFunc(events, func(v, w sandbox.Event) int { return e.doesNotCount(v) - e.doesNotCount(w) })
	shown := min(len(events), maxShown)
	for _, v := range events[:shown] {
		add("%s", v)
	}
	switch more, unrecorded := len(events)-shown, e.collected.Unrecorded; {
	case more > 0 && unrecorded > 0:
		add("and %d more (server log %q), and %d that were not recorded", more, AuditLogName, unrecorded)
	case more > 0:
		add("and %d more (server log %q)", more, AuditLogName)
	case unrecorded > 0:
		add("and %d more that were not recorded", unrecorded)
	}
	if g := e.box.grant; !g.Hermetic {
		cached := "is not cached"
		if g.Cache {
			cached = "is cached anyway"
		}
		add("not hermetic, so its result %s: profile %q, chosen by rule %q, permits %s",
			cached, g.Profile, g.Rule, strings.Join(exceptions(g), ", "))
	}
	if ignored != "" {
		add("%s", ignored)
	}
	return strings.Join(lines, "\n")
}

// doesNotCount returns 0 for a violation that makes the action fail or kills it, and otherwise 1.
func (e *execution) doesNotCount(v sandbox.Event) int {
	if g := e.box.grant; violation.Counts(v, g.Fail) || violation.Counts(v, g.Kill) {
		return 0
	}
	return 1
}

// exceptions names what the grant permits an action to reach.
func exceptions(g *policy.Grant) (names []string) {
	for _, e := range g.Network.Allow {
		names = append(names, e.String())
	}
	if g.RemoteAPIs != "" {
		names = append(names, "remote APIs")
	}
	return names
}
