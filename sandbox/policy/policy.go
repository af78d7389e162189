// SPDX-License-Identifier: Apache-2.0

// Package policy decides what an action may use. A Policy is parsed from an operator's file or built in. Compile turns
// the platform properties of an action into a Grant, or refuses them. The package does not depend on the remote
// execution API and reads no file, clock or environment: the same policy and request always give the same answer.
package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
	"github.com/cloister-build/cloister/sandbox/printable"
)

// A Request describes an action.
type Request struct {
	// Instance is the instance name of the client's request.
	Instance string
	// Properties are the platform properties, in order; a name may occur several times.
	Properties []Property
	// Target and Mnemonic are the client's description of the action, or "". Nobody verifies them, so a rule that
	// matches on them is not access control.
	Target, Mnemonic string
}

// A Property is a platform property that an action demands or a worker has.
type Property struct{ Name, Value string }

// Compare orders properties by name, then by value.
func (p Property) Compare(q Property) int {
	return cmp.Or(strings.Compare(p.Name, q.Name), strings.Compare(p.Value, q.Value))
}

// String returns name=value as printable text of bounded length, quoted unless it is a single word.
func (p Property) String() string { return printable.Quote(p.Name+"="+p.Value, 200) }

// maxProperty bounds the value of a sandbox setting, in bytes.
const maxProperty = 4096

// A Grant is what an action may use.
type Grant struct {
	// Profile is the profile that applies, and Rule the rule that chose it, "default" if none matched.
	Profile, Rule string

	Network sandbox.Network
	Limits  sandbox.Limits
	// Stated are the limits as decided, including those that the worker cannot enforce. They do not depend on the host:
	// the built-in process limit, which grows with it, has its minimum.
	Stated sandbox.Limits
	Audit  sandbox.Audit
	// Fail are the kinds of events that make the action fail, and Kill those that kill it at the first one: see Spec.Kill.
	// The result of an action with a violation of either is not cached.
	Fail, Kill []sandbox.EventKind
	// Superuser reports whether the command is user 0 in its user namespace.
	Superuser bool
	// Sandbox is the only backend (sandbox.Features.Backend) that may run the action, or "" for any.
	Sandbox string
	// RemoteAPIs is the path at which the action wants a socket for remote APIs, as it wrote it, or "" for none.
	RemoteAPIs string
	// PersistentWorkers reports whether the action may be a request to a process that earlier actions used.
	PersistentWorkers bool
	// TempBytes is the size of /tmp.
	TempBytes int64
	// MaxTimeout is the longest timeout of the action. Zero leaves it to the worker.
	MaxTimeout time.Duration
	// Cache reports whether results may be cached. Results of an action with network access or remote APIs are not, unless
	// its profile permits it.
	Cache bool
	// Hermetic reports whether the action has neither network access nor remote APIs.
	Hermetic bool
	// Ask returns the platform property with which an action requests a value of a limit, or of room in /tmp if l is "".
	Ask func(l sandbox.Limit, value int64) Property
	// Why explains each decision in a line that names its origin in the file.
	Why []string
}

var errNilPolicy = errors.New("the policy is nil: use policy.Default")

// ErrRefused is the error for an action that requests more than the policy grants.
var ErrRefused = errors.New("refused by the policy")

// A RefusedError is the refusal of one property. It wraps ErrRefused.
type RefusedError struct {
	Property Property
	Rule     string // the rule that applied
	Reason   string // a verb phrase about the rule, such as "grants at most 4GiB", and what to do
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("property %s: rule %q %s", e.Property, e.Rule, e.Reason)
}

// Unwrap returns ErrRefused.
func (*RefusedError) Unwrap() error { return ErrRefused }

// A Policy decides what actions may use. It is immutable, so concurrent use is safe. The zero Policy is Default.
type Policy struct {
	profiles        map[string]*profile
	rules           []*rule // the first that matches applies
	allowUnenforced []sandbox.Limit
	defaults        map[string][]Property // by instance name; sorted
	sandboxes       []sandboxRule         // each that matches applies
	images          Images
	file            bool // it is from a file
	host            Host
}

// A setting is a value and its position in the file, such as "policy.yaml:3", or "" for a built-in value.
type setting[T any] struct {
	v  T
	at string
}

func (s setting[T]) from() string {
	if s.at == "" {
		return "built in"
	}
	return s.at
}

// A profile is what one kind of action may use, including what it inherits.
type profile struct {
	name             string
	base             string // the built-in profile it descends from, or is
	amounts          [len(quantities)]setting[int64]
	processesPerCPU  int64 // for the built-in limit of processes
	maxTimeout       setting[time.Duration]
	loopback, listen setting[bool]
	allow            setting[[]sandbox.Endpoint] // that actions may request; sorted, without duplicates
	cache            setting[bool]               // cache results despite network access
	audit            setting[sandbox.Audit]
	superuser        setting[bool] // actions may be user 0
	persistent       setting[bool] // actions may be requests to persistent workers
	remote           setting[bool] // actions may have a socket for remote APIs
	remoteCache      setting[bool] // cache results despite remote APIs
	onViolation      levelSet
}

// A rule chooses a profile for the actions that it matches.
type rule struct {
	name, at string
	when     condition
	profile  string // "": build or test, by mnemonic
	// max bounds what properties may request. Without a value, the profile does.
	max [len(quantities)]setting[int64]
}

// A condition holds if all of its parts do. The zero condition always holds.
type condition struct {
	target             *pattern
	mnemonic, instance *string
	properties         []Property // sorted by name
}

// defaultRule applies if no other rule does.
var defaultRule = &rule{name: "default"}

// The built-in profiles.
const (
	profileBuild = "build"
	profileTest  = "test"
)

// processesPerCPU is the growth of the built-in process limit per processor: compilers, virtual machines and tests of
// servers start processes or threads for each processor.
var processesPerCPU = map[string]int64{profileBuild: 64, profileTest: 256}

// mnemonicTest is the mnemonic of Bazel's actions that run tests.
const mnemonicTest = "TestRunner"

// builtin returns the built-in profiles, whose values are those of sandbox.ForBuild and sandbox.ForTest.
func builtin() map[string]*profile {
	profiles := map[string]*profile{}
	for name, of := range map[string]func(sandbox.Profile) (*sandbox.Spec, error){
		profileBuild: sandbox.ForBuild, profileTest: sandbox.ForTest,
	} {
		spec, err := of(sandbox.Profile{Args: []string{"true"}})
		if err != nil {
			panic(err) // impossible: it has no sources, and its defaults are valid
		}
		p := &profile{name: name, base: name, processesPerCPU: processesPerCPU[name]}
		p.loopback.v, p.listen.v = spec.Network.Loopback, spec.Network.Listen
		for i, q := range quantities {
			if q.limit == "" {
				p.amounts[i].v = spec.Temp[0].Bytes
			} else {
				p.amounts[i].v = spec.Limits.Of(q.limit)
			}
		}
		profiles[name] = p
	}
	return profiles
}

// Default returns the built-in policy: the profile test for Bazel's TestRunner, and build for everything else.
func Default() *Policy { return &Policy{profiles: builtin()} }

// defaultProfiles are those of the zero Policy.
var defaultProfiles = sync.OnceValue(builtin)

// PermitsPersistentWorkers reports whether a profile permits persistent workers.
func (p *Policy) PermitsPersistentWorkers() bool {
	for _, f := range p.all() {
		if f.persistent.v {
			return true
		}
	}
	return false
}

// PermitsRemoteAPIs reports whether a profile permits actions to call remote APIs.
func (p *Policy) PermitsRemoteAPIs() bool {
	for _, f := range p.all() {
		if f.remote.v {
			return true
		}
	}
	return false
}

// all returns the profiles by name.
func (p *Policy) all() map[string]*profile {
	if p.profiles == nil {
		return defaultProfiles()
	}
	return p.profiles
}

// Hash returns the SHA-256 of Text in hexadecimal.
func (p *Policy) Hash() string {
	sum := sha256.Sum256([]byte(p.Text()))
	return hex.EncodeToString(sum[:])
}

// prefix begins the properties that are sandbox settings.
const prefix = "cloister-"

// propertyNames are the sandbox settings, without the prefix.
var propertyNames = func() []string {
	names := []string{"profile", "network", "audit", "listen", "loopback", "on-violation", "sandbox"}
	for _, q := range quantities {
		names = append(names, q.property())
	}
	return names
}()

// PropertySuperuser is the platform property with which an action asks for user 0.
const PropertySuperuser = "dockerRunAsRoot"

// propertyRemoteAPIs is the platform property that requests a socket for remote APIs. Its value is the socket's path,
// absolute or relative to the input root.
const propertyRemoteAPIs = "remoteApisSocketPath"

// Compile decides what an action may use on a worker that can enforce the given limits. It returns a RefusedError for a
// property that does not exist or requests more than the policy grants. It returns sandbox.ErrUnsupported for a limit
// that the file or the action sets and the worker cannot enforce. A built-in limit becomes Unlimited there.
func (p *Policy) Compile(r Request, enforceable []sandbox.Limit) (*Grant, error) {
	if p == nil {
		return nil, errNilPolicy
	}
	r.Properties = p.Properties(r)
	c := &compilation{
		policy: p, request: r, rule: defaultRule, enforceable: enforceable, asked: map[string]string{}, grant: &Grant{Ask: limitProperty},
	}
	if i := slices.IndexFunc(p.rules, func(u *rule) bool { return u.when.holds(r) }); i >= 0 {
		c.rule = p.rules[i]
	}
	if err := c.read(r.Properties); err != nil {
		return nil, err
	}
	if err := c.choose(r.Mnemonic); err != nil {
		return nil, err
	}
	for _, decide := range []func() error{c.amounts, c.network, c.audit, c.violations, c.backend} {
		if err := decide(); err != nil {
			return nil, err
		}
	}
	if err := c.superuser(r.Properties); err != nil {
		return nil, err
	}
	if err := c.remoteAPIs(r.Properties); err != nil {
		return nil, err
	}
	if given := c.profile.persistent; given.at != "" {
		c.grant.PersistentWorkers = given.v
		c.because("persistent_workers %t: %s", given.v, c.profileText(given.from()))
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
	request     Request // with the properties in force
	rule        *rule
	profile     *profile
	enforceable []sandbox.Limit
	asked       map[string]string // settings of the action, without the prefix
	grant       *Grant

	// The property dockerNetwork asks for the network that the profile allows, or for none, which wins.
	standardNetwork, noNetwork bool
}

func (c *compilation) because(format string, args ...any) {
	c.grant.Why = append(c.grant.Why, fmt.Sprintf(format, args...))
}

// refuse returns the error for a property. The format is a verb phrase about the rule.
func (c *compilation) refuse(name, format string, args ...any) error {
	return &RefusedError{Property{prefix + name, c.asked[name]}, c.rule.name, fmt.Sprintf(format, args...)}
}

// profileText names the profile and the position of a setting in it.
func (c *compilation) profileText(from string) string {
	return fmt.Sprintf("profile %s (%s)", c.profile.name, from)
}

// read collects the settings of the action.
func (c *compilation) read(properties []Property) error {
	for _, p := range properties {
		name, ours := strings.CutPrefix(p.Name, prefix)
		if !ours {
			if strings.EqualFold(p.Name, "dockerNetwork") {
				c.standardNetwork = c.standardNetwork || strings.EqualFold(p.Value, "standard")
				c.noNetwork = c.noNetwork || strings.EqualFold(p.Value, "off")
			}
			continue
		}
		if len(p.Value) > maxProperty {
			return &RefusedError{p, c.rule.name, fmt.Sprintf("refuses it: the value has %d bytes, more than the maximum of %d", len(p.Value), maxProperty)}
		}
		before, twice := c.asked[name]
		switch {
		case name == "network" && twice:
			c.asked[name] = before + "," + p.Value
		case name == "sandbox" && twice && before != p.Value && c.requiredBy(p.Value) != "":
			return c.refuse(name, "refuses it: the sandbox %s is required (%s), and an action runs in one; change the property or the policy",
				p.Value, c.requiredBy(p.Value))
		case twice && before != p.Value:
			return c.refuse(name, "refuses it: it is also set to %q; set it once", p.Value)
		default:
			c.asked[name] = p.Value
		}
		if !slices.Contains(propertyNames, name) {
			reason := "refuses it: unknown property"
			if nearest := strict.Nearest(name, propertyNames); nearest != "" {
				reason += fmt.Sprintf("; did you mean %s%s?", prefix, nearest)
			}
			return c.refuse(name, "%s", reason)
		}
	}
	return nil
}

// choose selects the profile.
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
			return c.refuse("profile", "grants only %s; ask the operator for a rule that matches this property and chooses the profile",
				strings.Join(offers, " or "))
		}
		if want != name {
			why += ", and property cloister-profile requests it"
		}
		name = want
	}
	c.profile = c.policy.all()[name]
	c.grant.Profile, c.grant.Rule = name, c.rule.name
	c.because("profile %s: %s", name, why)
	return nil
}

// amounts decides limits and sizes.
func (c *compilation) amounts() error {
	for i, q := range quantities {
		given := c.profile.amounts[i]
		v, by, explicit := given.v, c.profileText(given.from()), given.at != ""
		stated := v
		if _, asked := c.asked[q.property()]; v == sandbox.Unlimited && !asked {
			c.grant.Limits.Set(q.limit, v)
			c.grant.Stated.Set(q.limit, v)
			continue
		}
		if !explicit {
			v = c.policy.host.builtinAmount(c.profile, &q, v, c.rule.max[i].v)
		}
		if v > stated {
			by += fmt.Sprintf(", for %d processors", c.policy.host.CPUs)
		}
		most, bound := c.most(i, v)
		if text, ok := c.asked[q.property()]; ok {
			want, err := q.read(text)
			if err != nil {
				return c.refuse(q.property(), "refuses it: %v", err)
			}
			switch {
			case want > most && bound == thisHost:
				return c.refuse(q.property(), "grants at most %s (%s); lower the property", q.format(most), bound)
			case want > most:
				return c.refuse(q.property(), "grants at most %s (%s); lower the property, or ask the operator for a rule with max: {%s: %s}",
					q.format(most), bound, q.key, q.format(want))
			}
			v, stated, explicit = want, want, true
			by = fmt.Sprintf("property %s%s, of at most %s (%s)", prefix, q.property(), q.format(most), bound)
		} else if bound == thisHost {
			by += fmt.Sprintf("; a property may request up to %s (%s)", q.format(most), bound)
		}
		if q.limit != "" {
			c.grant.Stated.Set(q.limit, stated)
		}
		if q.limit == "" {
			c.grant.TempBytes = v
		} else if slices.Contains(c.enforceable, q.limit) {
			c.grant.Limits.Set(q.limit, v)
		} else if explicit && !slices.Contains(c.policy.allowUnenforced, q.limit) {
			return fmt.Errorf("%w: this worker cannot enforce %s %s, set by %s; enable it (see cloister check), or add allow_unenforced: [%s] to the policy",
				sandbox.ErrUnsupported, q.key, q.format(v), by, q.key)
		} else {
			c.grant.Limits.Set(q.limit, sandbox.Unlimited)
			c.because("%s unlimited: this worker cannot enforce %s, set by %s", q.key, q.format(v), by)
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

// thisHost names the host as the origin of a bound.
const thisHost = "this machine"

// most returns how much of a quantity a property may request where the profile grants v, and the origin of that bound.
func (c *compilation) most(i int, v int64) (most int64, origin string) {
	if m := c.rule.max[i]; m.v > 0 {
		return m.v, m.from()
	}
	if v == sandbox.Unlimited {
		return quantities[i].max, c.profile.amounts[i].from()
	}
	if has := min(c.policy.host.most(&quantities[i]), quantities[i].max); !c.policy.file && has > v {
		return has, thisHost
	}
	return v, c.profile.amounts[i].from()
}

// network decides about network access and whether results may be cached.
func (c *compilation) network() error {
	n := &c.grant.Network
	var err error
	if n.Loopback, err = c.flag("loopback", c.profile.loopback); err != nil {
		return err
	}
	listen := c.profile.listen
	if listen.v && !n.Loopback {
		if c.asked["listen"] == "true" {
			return c.refuse("listen", "refuses it: listening needs loopback, and cloister-loopback is false")
		}
		listen.v = false
	}
	if n.Listen, err = c.flag("listen", listen); err != nil {
		return err
	}
	text, asked := c.asked["network"]
	if !asked && c.standardNetwork && !c.noNetwork && n.Loopback {
		n.Allow = sortEndpoints(slices.Clone(c.profile.allow.v))
		for _, e := range n.Allow {
			c.because("network %s: property dockerNetwork=standard, permitted by %s", e, c.profileText(c.profile.allow.from()))
		}
	}
	if asked {
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
				return c.refuse("network", "refuses it: endpoints are reached through loopback, and cloister-loopback is false")
			}
			n.Allow = append(n.Allow, e)
			c.because("network %s: property cloister-network, permitted by %s", e, c.profileText(c.profile.allow.from()))
		}
		n.Allow = sortEndpoints(n.Allow)
	}
	c.grant.Hermetic = len(n.Allow) == 0
	c.grant.Cache = c.grant.Hermetic || c.profile.cache.v
	if c.grant.Hermetic {
		c.because("results are cached: no network access")
	} else {
		c.because("results are cached %t: %s, with network access", c.grant.Cache, c.profileText(c.profile.cache.from()))
	}
	return nil
}

// flag decides about a permission of the profile, which an action may decline.
func (c *compilation) flag(name string, given setting[bool]) (bool, error) {
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

// audit decides about the audit level, of which the operator sets the minimum.
func (c *compilation) audit() error {
	given := c.profile.audit
	c.grant.Audit = given.v
	by := c.profileText(given.from())
	if of := c.policy.host.Audit; given.at == "" && of != "" {
		c.grant.Audit, by = of, "this server audits all actions at this level"
	}
	if text, ok := c.asked["audit"]; ok {
		want, err := parseAudit(text)
		if err != nil {
			return c.refuse("audit", "refuses it: %v", err)
		}
		if slices.Index(audits, want) < slices.Index(audits, given.v) {
			return c.refuse("audit", "requires an audit level of at least %s (profile %s, %s); ask the operator for a profile with audit: %s",
				given.v.String(), c.profile.name, given.from(), text)
		}
		c.grant.Audit, by = want, "property cloister-audit"
	}
	c.because("audit %s: %s", c.grant.Audit.String(), by)
	return nil
}

// superuser decides whether the command is user 0.
func (c *compilation) superuser(properties []Property) error {
	for _, p := range properties {
		if !strings.EqualFold(p.Name, PropertySuperuser) {
			continue
		}
		given := c.profile.superuser
		want, err := parseBool(strings.ToLower(p.Value))
		switch {
		case err != nil:
			return &RefusedError{p, c.rule.name, fmt.Sprintf("refuses it: %v", err)}
		case want && !given.v:
			return &RefusedError{p, c.rule.name, fmt.Sprintf("does not permit it (profile %s, %s); "+
				"ask the operator for a profile with superuser: true", c.profile.name, given.from())}
		}
		c.grant.Superuser = want
		c.because("superuser %t: property %s", want, p.Name)
	}
	return nil
}

// remoteAPIs decides whether the command can call remote APIs, and whether its results are cached nevertheless.
func (c *compilation) remoteAPIs(properties []Property) error {
	for _, p := range properties {
		if p.Name != propertyRemoteAPIs || p.Value == "" {
			continue
		}
		given := c.profile.remote
		switch {
		case len(p.Value) > maxProperty:
			return &RefusedError{p, c.rule.name, fmt.Sprintf("refuses it: the value has %d bytes, more than the maximum of %d", len(p.Value), maxProperty)}
		case c.grant.RemoteAPIs != "" && c.grant.RemoteAPIs != p.Value:
			return &RefusedError{p, c.rule.name, fmt.Sprintf("refuses it: it is also set to %q; set it once", c.grant.RemoteAPIs)}
		case !given.v:
			return &RefusedError{p, c.rule.name, fmt.Sprintf("does not permit it (profile %s, %s); "+
				"ask the operator for a profile with remote_apis: {allow: true}", c.profile.name, given.from())}
		}
		c.grant.RemoteAPIs = p.Value
	}
	if c.grant.RemoteAPIs != "" {
		c.grant.Hermetic, c.grant.Cache = false, c.grant.Cache && c.profile.remoteCache.v
		c.because("remote APIs at %q: property %s, permitted by %s", c.grant.RemoteAPIs, propertyRemoteAPIs, c.profileText(c.profile.remote.from()))
		c.because("results are cached %t: %s, with remote APIs", c.grant.Cache, c.profileText(c.profile.remoteCache.from()))
	}
	return nil
}
