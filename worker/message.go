// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

const (
	// maxTold is how many events a message names; the audit log names all.
	maxTold = 5
	// MaxMessageLines is how many lines a message has at most: the end, what was left out, the events, how many more, the
	// network.
	MaxMessageLines = 2 + maxTold + 2
	// maxLine bounds each of them, in bytes.
	maxLine = 1000
)

// end says how the action ended: the code of the API for it, the line for a person, "" if there is nothing
// to say, and the limit that the line speaks of, if any.
func (c *execution) end() (status Status, line string, limit *sandbox.Event) {
	r := c.ran
	status = OK
	switch {
	case r.timedOut && c.req.Action.GetTimeout().AsDuration() == 0:
		status, line = TimedOut, fmt.Sprintf("killed after %v, which is the time of an action that states none", c.box.spec.Timeout)
	case r.timedOut:
		status, line = TimedOut, fmt.Sprintf("killed after its timeout of %v", c.box.spec.Timeout)
	case r.Exceeded != nil && r.ExitCode != 0:
		limit = r.Exceeded
		line = fmt.Sprintf("%s: %s%s", c.fate(), limit, c.peak())
	case c.collected.bad != nil && r.ExitCode == 0:
		// Where the action failed of itself, that is what its client needs to see.
		status, line = BadOutput, c.collected.bad.Error()
	case r.Signal != 0:
		line = fmt.Sprintf("killed by signal %d (%v), exit code %d", int(r.Signal), r.Signal, r.ExitCode)
	case r.ExitCode != 0:
		line = fmt.Sprintf("exit code %d after %v, action %s", r.ExitCode, r.End.Sub(r.Start).Round(time.Millisecond), c.req.Digest)
	default:
		if limit = c.limit(); limit != nil {
			line = fmt.Sprintf("ended well but met a limit, so that its result is not cached: %s%s", limit, c.peak())
		} else {
			line = c.barren()
		}
	}
	return status, line, limit
}

// barren warns of an action that ended well and made none of the outputs that its command declares, which some clients
// take for a failure (rule 123); "" if it made one.
func (c *execution) barren() string {
	cmd, r := c.req.Command, c.collected.result
	declared := slices.Concat(cmd.GetOutputPaths(), cmd.GetOutputFiles(), cmd.GetOutputDirectories())
	made := len(r.OutputFiles) + len(r.OutputSymlinks) + len(r.OutputFileSymlinks) + len(r.OutputDirectorySymlinks) + len(r.OutputDirectories)
	if len(declared) == 0 || made > 0 {
		return ""
	}
	return fmt.Sprintf("ended well without any output that its command declares: none of %d, first %q", len(declared), declared[0])
}

// limit returns a limit that the action met, or nil.
func (c *execution) limit() *sandbox.Event {
	if e := c.ran.Exceeded; e != nil {
		return e
	}
	for i, e := range c.collected.Events {
		if e.Kind == sandbox.EventLimit {
			return &c.collected.Events[i]
		}
	}
	return nil
}

// fate says what a limit does to those that exceed it: of memory and time it kills, others refuse.
func (c *execution) fate() string {
	switch sandbox.Limit(c.ran.Exceeded.Subject) {
	case sandbox.LimitMemory, sandbox.LimitCPU:
		return "killed"
	}
	return fmt.Sprintf("exit code %d after a limit was exceeded", c.ran.ExitCode)
}

// peak says how much memory there was in use, if memory is what was short.
func (c *execution) peak() string {
	if e := c.limit(); e.Subject != string(sandbox.LimitMemory) || c.ran.Usage.PeakMemory == 0 {
		return ""
	}
	return ", peak " + sandbox.Bytes(c.ran.Usage.PeakMemory)
}

// message says to a person how the action ended, if line says so, and what it tried, but for limit, of
// which line speaks.
func (c *execution) message(line string, limit *sandbox.Event) string {
	var lines []string
	say := func(format string, args ...any) {
		lines = append(lines, "cloister: "+printable(fmt.Sprintf(format, args...), maxLine))
	}
	if line != "" {
		say("%s", line)
	}
	if left := c.collected.left; left != "" {
		say("left out of the outputs, which are files, directories and symlinks: %s", left)
	}
	told := slices.DeleteFunc(c.collected.byImportance(), func(e sandbox.Event) bool {
		return e.Kind == sandbox.EventAllowed || sameLimit(limit, e)
	})
	more := max(0, len(told)-maxTold)
	for _, e := range told[:len(told)-more] {
		say("%s", e)
	}
	switch lost := c.collected.Unrecorded; {
	case more > 0 && lost > 0:
		say("and %d more (server log %q), and %d of which no record was kept", more, AuditLogName, lost)
	case more > 0:
		say("and %d more (server log %q)", more, AuditLogName)
	case lost > 0:
		say("and %d more, of which no record was kept", lost)
	}
	if g := c.box.grant; !g.Hermetic {
		kept := "is not cached"
		if g.Cache {
			kept = "is cached all the same"
		}
		say("not hermetic, so that its result %s: profile %q by rule %q permits %s", kept, g.Profile, g.Rule, endpoints(g.Network.Allow))
	}
	return strings.Join(lines, "\n")
}

// AuditLogName is the name under which the server log of an execution says all that the action tried.
const AuditLogName = "audit"

func endpoints(allow []sandbox.Endpoint) string {
	var names []string
	for _, e := range allow {
		names = append(names, e.String())
	}
	return strings.Join(names, ", ")
}
