// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// A level is what a violation does to its action. Levels ascend.
type level uint8

const (
	levelReport level = iota
	levelFail
	levelKill
)

var levels = []string{"report", "fail", "kill"}

func (l level) String() string { return levels[l] }

func parseLevel(s string) (level, error) {
	i := slices.Index(levels, s)
	if i < 0 {
		return 0, fmt.Errorf("invalid level %q: write report, fail or kill", s)
	}
	return level(i), nil
}

// violationKinds are the kinds of violations that have a level of their own, with their events.
var violationKinds = [...]struct {
	name   string
	events []sandbox.EventKind
}{
	{"network", []sandbox.EventKind{sandbox.EventConnect}},
	{"write", []sandbox.EventKind{sandbox.EventWrite}},
	{"read", []sandbox.EventKind{sandbox.EventRead}},
	{"exec", []sandbox.EventKind{sandbox.EventExec}},
	{"syscall", []sandbox.EventKind{sandbox.EventSyscall}},
	{"limit", []sandbox.EventKind{sandbox.EventLimit}},
}

// violationNames are the names of violationKinds.
var violationNames = func() []string {
	var names []string
	for _, k := range violationKinds {
		names = append(names, k.name)
	}
	return names
}()

// A levelSet has a level for each of violationKinds.
type levelSet [len(violationKinds)]setting[level]

// set reports whether the file sets a level.
func (s *levelSet) set() bool {
	return slices.ContainsFunc(s[:], func(l setting[level]) bool { return l.at != "" })
}

// text returns the levels that the file sets.
func (s *levelSet) text() string {
	var entries []string
	for i, l := range s {
		if l.at != "" {
			entries = append(entries, violationNames[i]+": "+l.v.String())
		}
	}
	return "{" + strings.Join(entries, ", ") + "}"
}

// readLevels reads a level for all kinds, or levels by kind, which leave the other kinds alone.
func (r *reader) readLevels(n *strict.Node, to *levelSet) error {
	if !n.IsMapping() {
		var all setting[level]
		err := value(r.Decoder, &all, parseLevel)(n)
		for i := range to {
			to[i] = all
		}
		return err
	}
	known := strict.Keys{}
	for i, name := range violationNames {
		known[name] = value(r.Decoder, &to[i], parseLevel)
	}
	return r.Mapping(n, known)
}

// parseLevels parses the value of a property: a level for all kinds, or levels by kind, such as
// "network:fail,write:kill".
func parseLevels(s string) (map[string]level, error) {
	asked := map[string]level{}
	if !strings.Contains(s, ":") {
		l, err := parseLevel(s)
		for _, name := range violationNames {
			asked[name] = l
		}
		return asked, err
	}
	for entry := range strings.SplitSeq(s, ",") {
		name, text, _ := strings.Cut(strings.TrimSpace(entry), ":")
		l, err := parseLevel(text)
		switch _, twice := asked[name]; {
		case !slices.Contains(violationNames, name):
			return nil, fmt.Errorf("unknown kind %q: the kinds are %s", name, strings.Join(violationNames, ", "))
		case twice:
			return nil, fmt.Errorf("%s occurs twice", name)
		case err != nil:
			return nil, err
		}
		asked[name] = l
	}
	return asked, nil
}

// violations decides which violations make the action fail and which kill it. The operator sets the minimum. Unless
// they are limits, the action is monitored for them.
func (c *compilation) violations() error {
	var asked map[string]level
	if text, ok := c.asked["on-violation"]; ok {
		var err error
		if asked, err = parseLevels(text); err != nil {
			return c.refuse("on-violation", "refuses it: %v", err)
		}
	}
	for i, kind := range violationKinds {
		given := c.profile.onViolation[i]
		v, by := given.v, c.profileText(given.from())
		if want, ok := asked[kind.name]; ok {
			if want < v {
				return c.refuse("on-violation", "requires at least %s: %s (profile %s, %s); ask the operator for a profile with on_violation: {%s: %s}",
					kind.name, v, c.profile.name, given.from(), kind.name, want)
			}
			v, by = want, "property cloister-on-violation"
		}
		switch v {
		case levelReport:
			continue
		case levelFail:
			c.grant.Fail = append(c.grant.Fail, kind.events...)
		case levelKill:
			c.grant.Kill = append(c.grant.Kill, kind.events...)
		}
		c.because("on_violation %s %s: %s", kind.name, v, by)
		if c.grant.Audit == sandbox.AuditOff && kind.name != "limit" {
			c.grant.Audit = sandbox.AuditViolations
			c.because("audit %s: on_violation needs it", c.grant.Audit.String())
		}
	}
	return nil
}
