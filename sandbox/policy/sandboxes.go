// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox/policy/strict"
)

// backends are the values of the property for the backend, and kernels those that a rule may require: they give a run a
// kernel of its own, so that no rule weakens a sandbox.
var (
	backends = []string{"namespace", "gvisor", "microvm", "qemu", "qemu-tcg", "seatbelt", "jobobject"}
	kernels  = []string{"gvisor", "microvm", "qemu"}
)

// A sandboxRule requires a backend for the actions that it matches.
type sandboxRule struct {
	at      string
	when    condition // without properties
	backend string
}

// required is the property with which an action would require the same.
func (u *sandboxRule) required() Property { return Property{prefix + "sandbox", u.backend} }

// Properties returns the platform properties in force for an action: its own, cloister-sandbox for each sandbox that
// the policy requires for its instance, target or mnemonic, and the operator's defaults for its instance. A default is
// omitted if there is a property of that name, compared without case unless it is a sandbox setting.
func (p *Policy) Properties(r Request) []Property {
	all := slices.Clip(r.Properties)
	if p == nil {
		return all
	}
	for _, u := range p.sandboxes {
		if q := u.required(); u.when.holds(r) && !slices.Contains(all, q) {
			all = append(all, q)
		}
	}
	stated := all
	for _, d := range p.defaults[r.Instance] {
		if !slices.ContainsFunc(stated, func(q Property) bool {
			return q.Name == d.Name || strings.EqualFold(q.Name, d.Name) && !strings.HasPrefix(d.Name, prefix)
		}) {
			all = append(all, d)
		}
	}
	return all
}

// requiredBy returns the position of the rule that requires this sandbox for the action, or "".
func (c *compilation) requiredBy(backend string) string {
	for _, u := range c.policy.sandboxes {
		if u.backend == backend && u.when.holds(c.request) {
			return u.at
		}
	}
	return ""
}

// backend records which backend the action requires. That needs no permission: a worker without it refuses.
func (c *compilation) backend() error {
	text, ok := c.asked["sandbox"]
	if !ok {
		return nil
	}
	if !slices.Contains(backends, text) {
		return c.refuse("sandbox", "refuses it: unknown sandbox %+q: write %s", text, strings.Join(backends, ", "))
	}
	c.grant.Sandbox = text
	if at := c.requiredBy(text); at != "" {
		c.because("sandbox %s: required (%s)", text, at)
	} else {
		c.because("sandbox %s: property cloister-sandbox", text)
	}
	return nil
}

// readSandboxes reads the rules that require a sandbox.
func (r *reader) readSandboxes(n *strict.Node) error {
	return r.Sequence(n, func(n *strict.Node) error {
		u := sandboxRule{at: r.At(n)}
		err := r.Mapping(n, strict.Keys{
			"when": func(n *strict.Node) error { return r.Mapping(n, r.conditions(&u.when)) },
			"require": func(n *strict.Node) (err error) {
				if u.backend, err = r.Scalar(n); err == nil && !slices.Contains(kernels, u.backend) {
					err = r.Unknown(n, "sandbox to require", u.backend, kernels)
				}
				return err
			},
		})
		if err == nil && u.backend == "" {
			err = r.Errorf(n, "the rule requires no sandbox: write require: %s", strings.Join(kernels, " or "))
		}
		r.policy.sandboxes = append(r.policy.sandboxes, u)
		return err
	})
}

// sandboxes writes the rules that require a sandbox.
func (w *textWriter) sandboxes(rules []sandboxRule) {
	if len(rules) > 0 {
		w.line(0, "sandboxes:")
	}
	for i := range rules {
		w.line(1, "- require: %s", rules[i].backend)
		w.condition(&rules[i].when)
	}
}
