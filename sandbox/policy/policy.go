// SPDX-License-Identifier: Apache-2.0

// Package policy is an operator's rules: what an action may be given. A Policy is read from a file, or is
// the one that is built in; Compile turns what an action asks for into a Grant, or refuses it. The package
// knows neither the remote execution API nor what a worker can enforce, which it is told. It reads no file,
// no clock and no environment: one policy and one request give one answer.
package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// A Request is what is known of an action when it is decided what it may have.
type Request struct {
	// Instance is the instance name of the client's request.
	Instance string
	// Properties are the platform properties, in order; a name may occur several times.
	Properties []Property
	// Target and Mnemonic are what the client says of the action, or "". Nobody checks them: a rule that
	// matches on them sorts actions, and keeps nobody out.
	Target, Mnemonic string
}

// A Property is one platform property of an action.
type Property struct{ Name, Value string }

// String returns name=value, quoted as in Go where it is more than printable ASCII, and shortened.
func (p Property) String() string {
	s := p.Name + "=" + p.Value
	if len(s) > 200 {
		s = s[:200] + "..."
	}
	if q := strconv.QuoteToASCII(s); q != `"`+s+`"` {
		return q
	}
	return s
}

// maxProperty is the most bytes that the value of a property of ours may have.
const maxProperty = 4096

// A Grant is what an action is given.
type Grant struct {
	// Profile is the profile that applies, Rule the rule that chose it; "default" if none matched.
	Profile, Rule string

	Network sandbox.Network
	Limits  sandbox.Limits
	// Stated are the limits as they are decided, those that the worker cannot enforce included.
	Stated sandbox.Limits
	Audit  sandbox.Audit
	// TempBytes is the size of /tmp.
	TempBytes int64
	// MaxTimeout is the longest timeout that the action may have. Zero leaves it to the worker.
	MaxTimeout time.Duration
	// Cache says that results may be recorded. Those of an action with exceptions of the network are not,
	// unless its profile says otherwise.
	Cache bool
	// Hermetic says that the network has no exception.
	Hermetic bool
	// Why explains the grant to a person: a line for each decision, with the line of the file it is from.
	Why []string
}

// ErrRefused says that an action asks for what the policy does not grant.
var ErrRefused = errors.New("refused by the policy")

// A RefusedError is one property that was refused. It is an ErrRefused.
type RefusedError struct {
	Property Property
	Rule     string // the rule that applied
	Reason   string // what the rule does: "grants at most 4GiB", "refuses it: ..."; and what to do
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("property %s: rule %q %s", e.Property, e.Rule, e.Reason)
}

// Unwrap returns ErrRefused.
func (*RefusedError) Unwrap() error { return ErrRefused }

// A Policy is what actions may be given. It does not change, so concurrent use is safe.
type Policy struct {
	profiles        map[string]*profile
	rules           []*rule // the first that matches applies
	allowUnenforced []sandbox.Limit
}

// said is a value, and where it is said: "policy.yaml:3", or "" if only this package says so.
type said[T any] struct {
	v  T
	at string
}

func (s said[T]) from() string {
	if s.at == "" {
		return "built in"
	}
	return s.at
}

// A profile is what actions of one kind are given, whatever its parents say included.
type profile struct {
	name             string
	base             string // the built-in profile it descends from, or is
	amounts          [len(quantities)]said[int64]
	maxTimeout       said[time.Duration]
	loopback, listen said[bool]
	allow            said[[]sandbox.Endpoint] // what an action may ask for; sorted, each once
	cache            said[bool]               // also with exceptions of the network
	audit            said[sandbox.Audit]
}

// A rule chooses a profile for the actions that it matches.
type rule struct {
	name, at string
	when     condition
	profile  string // "": build or test, by mnemonic
	// max is what properties may ask for; where nothing is said, no more than the profile gives.
	max [len(quantities)]said[int64]
}

// A condition holds if all that it states does. The zero condition always holds.
type condition struct {
	target             *pattern
	mnemonic, instance *string
	properties         []Property // sorted by name
}

// defaultRule applies where no other does.
var defaultRule = &rule{name: "default"}

// The built-in profiles.
const (
	profileBuild = "build"
	profileTest  = "test"
)

// mnemonicTest is what Bazel calls the action that runs a test.
const mnemonicTest = "TestRunner"

func builtin() map[string]*profile {
	build := &profile{name: profileBuild, base: profileBuild, loopback: said[bool]{v: true}, listen: said[bool]{v: true}}
	limits := sandbox.DefaultLimits()
	for i, q := range quantities {
		if q.limit != "" {
			build.amounts[i].v = limits.Of(q.limit)
		}
	}
	build.amounts[index("tmp")].v = 4 << 30
	test := *build
	test.name, test.base = profileTest, profileTest
	test.amounts[index("processes")].v = 1024
	test.amounts[index("tmp")].v = 8 << 30
	return map[string]*profile{profileBuild: build, profileTest: &test}
}

// Default returns the policy without a file: the profile test for Bazel's TestRunner, build for all else,
// and nothing beyond them.
func Default() *Policy { return &Policy{profiles: builtin()} }

// Hash returns the SHA-256 of Text in hexadecimal.
func (p *Policy) Hash() string {
	sum := sha256.Sum256([]byte(p.Text()))
	return hex.EncodeToString(sum[:])
}

// prefix begins the properties that are ours.
const prefix = "cloister-"

// propertyNames are the properties that an action may have, without the prefix.
var propertyNames = func() []string {
	names := []string{"profile", "network", "audit", "listen", "loopback"}
	for _, q := range quantities {
		names = append(names, q.property())
	}
	return names
}()

// Compile decides what the action r is given by a worker that can enforce the limits named. It returns a
// RefusedError for a property that asks for more than the policy grants or that does not exist, and
// sandbox.ErrUnsupported for a limit that somebody asks for, the file or the action, and the worker cannot
// enforce. A limit that only the built-in profiles have is Unlimited there.
func (p *Policy) Compile(r Request, enforceable []sandbox.Limit) (*Grant, error) {
	c := &compilation{policy: p, rule: defaultRule, enforceable: enforceable, asked: map[string]string{}, grant: &Grant{}}
	if i := slices.IndexFunc(p.rules, func(u *rule) bool { return u.when.holds(r) }); i >= 0 {
		c.rule = p.rules[i]
	}
	if err := c.read(r.Properties); err != nil {
		return nil, err
	}
	if err := c.choose(r.Mnemonic); err != nil {
		return nil, err
	}
	for _, decide := range []func() error{c.amounts, c.network, c.audit} {
		if err := decide(); err != nil {
			return nil, err
		}
	}
	return c.grant, nil
}

func (w *condition) holds(r Request) bool {
	return (w.target == nil || w.target.matches(r.Target)) &&
		(w.mnemonic == nil || *w.mnemonic == r.Mnemonic) &&
		(w.instance == nil || *w.instance == r.Instance) &&
		!slices.ContainsFunc(w.properties, func(p Property) bool { return !slices.Contains(r.Properties, p) })
}

// A compilation is one call of Compile.
type compilation struct {
	policy      *Policy
	rule        *rule
	profile     *profile
	enforceable []sandbox.Limit
	asked       map[string]string // our properties, without the prefix
	grant       *Grant
}

func (c *compilation) because(format string, args ...any) {
	c.grant.Why = append(c.grant.Why, fmt.Sprintf(format, args...))
}

// refuse returns the error for a property. What is formatted goes on from the name of the rule.
func (c *compilation) refuse(name, format string, args ...any) error {
	return &RefusedError{Property{prefix + name, c.asked[name]}, c.rule.name, fmt.Sprintf(format, args...)}
}

// profileText names the profile, and where it says what is decided.
func (c *compilation) profileText(from string) string {
	return fmt.Sprintf("profile %s (%s)", c.profile.name, from)
}

// read sorts out which properties are ours.
func (c *compilation) read(properties []Property) error {
	for _, p := range properties {
		name, ours := strings.CutPrefix(p.Name, prefix)
		if !ours {
			continue
		}
		if len(p.Value) > maxProperty {
			return &RefusedError{p, c.rule.name, fmt.Sprintf("refuses it: the value has %d bytes, and at most %d make sense", len(p.Value), maxProperty)}
		}
		before, twice := c.asked[name]
		switch {
		case name == "network" && twice:
			c.asked[name] = before + "," + p.Value
		case twice && before != p.Value:
			return c.refuse(name, "refuses it: it is also given as %q; give it once", p.Value)
		default:
			c.asked[name] = p.Value
		}
		if !slices.Contains(propertyNames, name) {
			reason := "refuses it: there is no such property"
			if near := strict.Nearest(name, propertyNames); near != "" {
				reason += fmt.Sprintf(", did you mean %s%s?", prefix, near)
			}
			return c.refuse(name, "%s", reason)
		}
	}
	return nil
}

// choose finds the profile.
func (c *compilation) choose(mnemonic string) error {
	name, offers := c.rule.profile, []string{c.rule.profile}
	why := fmt.Sprintf("rule %q matches (%s)", c.rule.name, c.rule.at)
	if c.rule == defaultRule {
		why = "no rule matches"
	}
	if name == "" {
		name, offers = profileBuild, []string{profileBuild, profileTest}
		if mnemonic == mnemonicTest {
			name = profileTest
			why += ", and the mnemonic is " + mnemonicTest
		}
	}
	if want, ok := c.asked["profile"]; ok {
		if !slices.Contains(offers, want) {
			return c.refuse("profile", "grants %s; ask the operator for a rule that matches this property and chooses the profile",
				strings.Join(offers, " or "))
		}
		if want != name {
			why += ", and property cloister-profile asks for it"
		}
		name = want
	}
	c.profile = c.policy.profiles[name]
	c.grant.Profile, c.grant.Rule = name, c.rule.name
	c.because("profile %s: %s", name, why)
	return nil
}

// amounts decides limits and sizes.
func (c *compilation) amounts() error {
	for i, q := range quantities {
		given := c.profile.amounts[i]
		v, by, explicit := given.v, c.profileText(given.from()), given.at != ""
		if text, ok := c.asked[q.property()]; ok {
			want, err := q.read(text)
			if err != nil {
				return c.refuse(q.property(), "refuses it: %v", err)
			}
			most := given
			if c.rule.max[i].v > 0 {
				most = c.rule.max[i]
			}
			if want > most.v {
				return c.refuse(q.property(), "grants at most %s (%s); ask for less, or the operator for a rule with max: {%s: %s}",
					q.format(most.v), most.from(), q.key, q.format(want))
			}
			v, by, explicit = want, fmt.Sprintf("property %s%s, of at most %s (%s)", prefix, q.property(), q.format(most.v), most.from()), true
		}
		if q.limit != "" {
			c.grant.Stated.Set(q.limit, v)
		}
		if q.limit == "" {
			c.grant.TempBytes = v
		} else if slices.Contains(c.enforceable, q.limit) {
			c.grant.Limits.Set(q.limit, v)
		} else if explicit && !slices.Contains(c.policy.allowUnenforced, q.limit) {
			return fmt.Errorf("%w: %s %s, by %s, cannot be enforced by this worker; enable it (cloister check), or permit its absence with allow_unenforced: [%s]",
				sandbox.ErrUnsupported, q.key, q.format(v), by, q.key)
		} else {
			c.grant.Limits.Set(q.limit, sandbox.Unlimited)
			c.because("%s unlimited: this worker cannot enforce %s, by %s", q.key, q.format(v), by)
			continue
		}
		c.because("%s %s: %s", q.key, q.format(v), by)
	}
	if t := c.profile.maxTimeout; t.v > 0 {
		c.grant.MaxTimeout = t.v
		c.because("max_timeout %s: %s", formatDuration(t.v), c.profileText(t.from()))
	}
	return nil
}

// network decides what can be reached, and with that whether results are recorded.
func (c *compilation) network() error {
	n := &c.grant.Network
	var err error
	if n.Loopback, err = c.flag("loopback", c.profile.loopback); err != nil {
		return err
	}
	listen := c.profile.listen
	if listen.v && !n.Loopback {
		if c.asked["listen"] == "true" {
			return c.refuse("listen", "refuses it: there is nothing to listen on: cloister-loopback is false")
		}
		listen.v = false
	}
	if n.Listen, err = c.flag("listen", listen); err != nil {
		return err
	}
	if text, ok := c.asked["network"]; ok {
		for s := range strings.SplitSeq(text, ",") {
			e, err := sandbox.ParseEndpoint(strings.TrimSpace(s))
			if err != nil {
				return c.refuse("network", "refuses it: %v", err)
			}
			if !slices.Contains(c.profile.allow.v, e) {
				return c.refuse("network", "does not permit %s (profile %s, %s); ask the operator for a profile with network: {allow: [%q]}",
					e, c.profile.name, c.profile.allow.from(), e)
			}
			if !n.Loopback {
				return c.refuse("network", "refuses it: an endpoint is reached through loopback, and cloister-loopback is false")
			}
			n.Allow = append(n.Allow, e)
			c.because("network %s: property cloister-network, as %s permits", e, c.profileText(c.profile.allow.from()))
		}
		n.Allow = sortedOnce(n.Allow)
	}
	c.grant.Hermetic = len(n.Allow) == 0
	c.grant.Cache = c.grant.Hermetic || c.profile.cache.v
	if c.grant.Hermetic {
		c.because("results are recorded: the network has no exception")
	} else {
		c.because("results are recorded %t: %s, with exceptions of the network", c.grant.Cache, c.profileText(c.profile.cache.from()))
	}
	return nil
}

// flag decides what the profile permits and an action may give up.
func (c *compilation) flag(name string, given said[bool]) (bool, error) {
	text, asked := c.asked[name]
	if !asked {
		c.because("%s %t: %s", name, given.v, c.profileText(given.from()))
		return given.v, nil
	}
	want, err := parseBool(text)
	if err != nil {
		return false, c.refuse(name, "refuses it: %v", err)
	}
	if want && !given.v {
		return false, c.refuse(name, "does not permit it (profile %s, %s)", c.profile.name, given.from())
	}
	c.because("%s %t: property %s%s", name, want, prefix, name)
	return want, nil
}

// audit decides how closely the run is watched: at least as the operator says.
func (c *compilation) audit() error {
	given := c.profile.audit
	c.grant.Audit = given.v
	by := c.profileText(given.from())
	if text, ok := c.asked["audit"]; ok {
		want, err := parseAudit(text)
		if err != nil {
			return c.refuse("audit", "refuses it: %v", err)
		}
		if slices.Index(audits, want) < slices.Index(audits, given.v) {
			return c.refuse("audit", "watches as closely as %s at least (profile %s, %s); ask the operator for a profile with audit: %s",
				formatAudit(given.v), c.profile.name, given.from(), text)
		}
		c.grant.Audit, by = want, "property cloister-audit"
	}
	c.because("audit %s: %s", formatAudit(c.grant.Audit), by)
	return nil
}
