// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// A SyntaxError is an error at a position in a policy file, with the fields File, Line, Column, Message and Hint.
type SyntaxError = strict.SyntaxError

// Parse parses a policy in the format of docs/policy.md. The file's name appears only in messages. Every error is a
// SyntaxError.
func Parse(file string, text []byte) (*Policy, error) {
	r := &reader{Decoder: strict.NewDecoder(file, "a policy", text), policy: Default(), profiles: map[string]*strict.Node{}}
	r.policy.file = true
	root, err := r.Parse(text)
	if err != nil {
		return nil, err
	}
	var version bool
	var names []string
	var rules *strict.Node
	err = r.Mapping(root, strict.Keys{
		"version": func(n *strict.Node) error {
			version = true
			if v, err := r.Scalar(n); err != nil || v != "1" {
				return r.Errorf(n, "this version of Cloister reads version 1")
			}
			return nil
		},
		"profiles": func(n *strict.Node) error {
			return r.Entries(n, func(name string, key, value *strict.Node) error {
				names = append(names, name)
				r.profiles[name] = value
				_, err := r.name(key)
				return err
			})
		},
		"rules":            func(n *strict.Node) error { rules = n; return nil }, // read after all profiles
		"allow_unenforced": r.readUnenforced,
		"images":           r.readImages,
		"sandboxes":        r.readSandboxes,
		"default_properties": func(n *strict.Node) error {
			r.policy.defaults = map[string][]Property{}
			return r.Entries(n, func(instance string, _, value *strict.Node) (err error) {
				r.policy.defaults[instance], err = r.properties(value)
				return err
			})
		},
	})
	if err != nil {
		return nil, err
	}
	if !version {
		return nil, r.Errorf(root, "the version is missing: write version: 1")
	}
	for _, name := range names {
		if err := r.readProfile(name); err != nil {
			return nil, err
		}
	}
	if rules != nil {
		if err := r.Sequence(rules, r.readRule); err != nil {
			return nil, err
		}
	}
	return r.policy, nil
}

// A reader builds a policy from a file.
type reader struct {
	*strict.Decoder
	policy   *Policy
	profiles map[string]*strict.Node // of the file
	done     []string                // profiles that were read
	reading  []string                // the profile being read, and those that inherit from it
}

// wellNamed matches the names of profiles and rules, which need no quotes in a message.
var wellNamed = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

func (r *reader) name(n *strict.Node) (string, error) {
	name, err := r.Scalar(n)
	if err == nil && !wellNamed.MatchString(name) {
		err = r.Errorf(n, "invalid name %q: write at most 64 letters, digits, '.', '_' and '-'", name)
	}
	return name, err
}

// profileName reads the name of a profile that exists.
func (r *reader) profileName(n *strict.Node) (string, error) {
	name, err := r.Scalar(n)
	if err != nil {
		return "", err
	}
	known := slices.Concat(slices.Collect(maps.Keys(r.profiles)), slices.Collect(maps.Keys(builtin())))
	slices.Sort(known)
	if known = slices.Compact(known); !slices.Contains(known, name) {
		return "", r.Unknown(n, "profile", name, known)
	}
	return name, nil
}

// readProfile reads a profile of the file, after the one from which it inherits.
func (r *reader) readProfile(name string) error {
	if slices.Contains(r.done, name) {
		return nil
	}
	own := map[string]*strict.Node{}
	err := r.Entries(r.profiles[name], func(key string, _, value *strict.Node) error { own[key] = value; return nil })
	if err != nil {
		return err
	}
	parent := profileBuild
	if _, ok := builtin()[name]; ok {
		parent = name
	}
	if n, ok := own["inherits"]; ok {
		if parent == name {
			return r.Errorf(n, "the built-in profile %s cannot inherit", name)
		}
		if parent, err = r.profileName(n); err != nil {
			return err
		}
		r.reading = append(r.reading, name)
		if slices.Contains(r.reading, parent) {
			return r.Errorf(n, "profiles inherit from each other: %s", strings.Join(append(r.reading, parent), ", "))
		}
		if _, ok := r.profiles[parent]; ok {
			if err := r.readProfile(parent); err != nil {
				return err
			}
		}
		r.reading = r.reading[:len(r.reading)-1]
	}
	p := *r.policy.profiles[parent]
	p.name = name
	if err := r.Mapping(r.profiles[name], r.settings(&p)); err != nil {
		return err
	}
	if !p.loopback.v {
		if n, ok := own["listen"]; ok && p.listen.v {
			return r.Errorf(n, "profile %s cannot listen without loopback (%s)", name, p.loopback.from())
		}
		p.listen = setting[bool]{false, p.loopback.at}
		if n := own["network"]; len(p.allow.v) > 0 {
			if n == nil {
				n = own["loopback"]
			}
			return r.Errorf(n, "profile %s permits endpoints (%s), which need loopback (%s)",
				name, p.allow.from(), p.loopback.from())
		}
	}
	r.policy.profiles[name] = &p
	r.done = append(r.done, name)
	return nil
}

// settings returns the keys of a profile.
func (r *reader) settings(p *profile) strict.Keys {
	known := r.quantities(&p.amounts)
	known["inherits"] = func(*strict.Node) error { return nil } // read by readProfile
	known["max_timeout"] = value(r.Decoder, &p.maxTimeout, func(s string) (time.Duration, error) {
		v, err := maxTimeout.read(s)
		return time.Duration(v), err
	})
	known["loopback"] = value(r.Decoder, &p.loopback, parseBool)
	known["listen"] = value(r.Decoder, &p.listen, parseBool)
	known["superuser"] = value(r.Decoder, &p.superuser, parseBool)
	known["persistent_workers"] = value(r.Decoder, &p.persistent, parseBool)
	known["remote_apis"] = func(n *strict.Node) error {
		return r.Mapping(n, strict.Keys{
			"allow": value(r.Decoder, &p.remote, parseBool), "cache": value(r.Decoder, &p.remoteCache, parseBool),
		})
	}
	known["audit"] = value(r.Decoder, &p.audit, parseAudit)
	known["on_violation"] = func(n *strict.Node) error { return r.readLevels(n, &p.onViolation) }
	known["network"] = func(n *strict.Node) error {
		return r.Mapping(n, strict.Keys{
			"allow": func(n *strict.Node) error {
				p.allow = setting[[]sandbox.Endpoint]{at: r.At(n)}
				err := r.Sequence(n, func(n *strict.Node) error {
					var e setting[sandbox.Endpoint]
					err := value(r.Decoder, &e, sandbox.ParseEndpoint)(n)
					p.allow.v = append(p.allow.v, e.v)
					return err
				})
				p.allow.v = sortEndpoints(p.allow.v)
				return err
			},
			"cache": value(r.Decoder, &p.cache, parseBool),
		})
	}
	return known
}

// quantities returns the keys that profiles and max share.
func (r *reader) quantities(to *[len(quantities)]setting[int64]) strict.Keys {
	known := strict.Keys{}
	for i, q := range quantities {
		known[q.key] = value(r.Decoder, &to[i], q.read)
	}
	return known
}

// readRule reads the next rule.
func (r *reader) readRule(n *strict.Node) error {
	u := &rule{at: r.At(n)}
	var max *strict.Node
	err := r.Mapping(n, strict.Keys{
		"name": func(n *strict.Node) (err error) {
			if u.name, err = r.name(n); err != nil {
				return err
			}
			for _, other := range slices.Concat(r.policy.rules, []*rule{defaultRule}) {
				if other.name == u.name {
					return r.Errorf(n, "duplicate rule name %q (%s)", u.name, setting[bool]{at: other.at}.from())
				}
			}
			return nil
		},
		"when":    func(n *strict.Node) error { return r.readCondition(n, &u.when) },
		"profile": func(n *strict.Node) (err error) { u.profile, err = r.profileName(n); return err },
		"max":     func(n *strict.Node) error { max = n; return r.Mapping(n, r.quantities(&u.max)) },
	})
	if err != nil {
		return err
	}
	if u.name == "" {
		return r.Errorf(n, "the rule has no name, which refusals need: write name: NAME")
	}
	if len(r.policy.rules) > 0 {
		if last := r.policy.rules[len(r.policy.rules)-1]; last.when.always() {
			return r.Errorf(n, "rule %q is never reached: rule %q before it (%s) matches everything",
				u.name, last.name, last.at)
		}
	}
	profiles := []string{u.profile}
	if u.profile == "" {
		profiles = []string{profileBuild, profileTest}
	}
	for _, name := range profiles {
		for i, q := range quantities {
			given := r.policy.profiles[name].amounts[i]
			if most := u.max[i]; most.at != "" && (most.v < given.v || given.v == sandbox.Unlimited) {
				return r.Errorf(max, "max: {%s: %s} is less than what profile %s grants anyway: %s (%s)",
					q.key, q.format(most.v), name, q.format(given.v), given.from())
			}
		}
	}
	r.policy.rules = append(r.policy.rules, u)
	return nil
}

// conditions returns the keys of a condition on what describes a request, without its properties.
func (r *reader) conditions(w *condition) strict.Keys {
	text := func(to **string) func(*strict.Node) error {
		return func(n *strict.Node) error {
			s, err := r.Scalar(n)
			*to = &s
			return err
		}
	}
	return strict.Keys{
		"target": func(n *strict.Node) error {
			var p setting[*pattern]
			err := value(r.Decoder, &p, parsePattern)(n)
			w.target = p.v
			return err
		},
		"mnemonic": text(&w.mnemonic),
		"instance": text(&w.instance),
	}
}

func (r *reader) readCondition(n *strict.Node, w *condition) error {
	known := r.conditions(w)
	known["property"] = func(n *strict.Node) (err error) {
		w.properties, err = r.properties(n)
		return err
	}
	return r.Mapping(n, known)
}

// properties reads a mapping of property names to values.
func (r *reader) properties(n *strict.Node) ([]Property, error) {
	var all []Property
	err := r.Entries(n, func(name string, _, value *strict.Node) error {
		v, err := r.Scalar(value)
		all = append(all, Property{name, v})
		return err
	})
	slices.SortFunc(all, Property.Compare)
	return all, err
}

// always reports whether the condition holds for every action.
func (w *condition) always() bool {
	return w.target == nil && w.mnemonic == nil && w.instance == nil && len(w.properties) == 0
}

func (r *reader) readUnenforced(n *strict.Node) error {
	limits := map[string]sandbox.Limit{}
	for _, q := range quantities {
		if q.limit != "" {
			limits[q.key] = q.limit
		}
	}
	return r.Sequence(n, func(n *strict.Node) error {
		key, err := r.Scalar(n)
		if err != nil {
			return err
		}
		l, ok := limits[key]
		if !ok {
			return r.Unknown(n, "limit", key, slices.Sorted(maps.Keys(limits)))
		}
		r.policy.allowUnenforced = append(r.policy.allowUnenforced, l)
		return nil
	})
}

// value returns a function that parses a scalar into to.
func value[T any](d *strict.Decoder, to *setting[T], parse func(string) (T, error)) func(*strict.Node) error {
	return func(n *strict.Node) error {
		text, err := d.Scalar(n)
		if err != nil {
			return err
		}
		v, err := parse(text)
		if err != nil {
			return d.Errorf(n, "%v", err)
		}
		*to = setting[T]{v, d.At(n)}
		return nil
	}
}
