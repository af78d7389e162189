// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestSandboxesAreRequired: every rule that matches applies, so what a client states about target and mnemonic may add a
// requirement and removes none, whatever profile it selects. Default properties yield to the action and to rules.
func TestSandboxesAreRequired(t *testing.T) {
	p := parse(t, `version: 1
profiles:
  large: {memory: 8GiB}
rules:
  - {name: large, when: {target: "//app/..."}, profile: large}
sandboxes:
  - {require: gvisor, when: {instance: guests}}
  - {require: gvisor, when: {target: "//third_party/..."}}
  - {require: qemu, when: {mnemonic: Fuzz, instance: main}}
default_properties:
  main: {cloister-sandbox: gvisor}
`)
	for _, c := range []struct {
		instance, target, mnemonic, asks string
		want                             string // the sandbox, or a part of the refusal
	}{
		{"", "//app:a", "", "", ""},
		{"guests", "", "", "", "gvisor"},
		{"guests", "//app:a", "CppCompile", "", "gvisor"}, // of another rule's profile
		{"guests", "//app:a", "", "cloister-sandbox=gvisor", "gvisor"},
		{"guests", "//app:a", "", "cloister-sandbox=namespace", "sandbox gvisor is required (policy.yaml:7), and an action runs in one"},
		{"guests/team", "", "", "", ""},
		{"", "//third_party/zlib:z", "", "", "gvisor"},
		{"", "@@other//third_party/zlib:z", "", "", ""},
		{"", "//third_party/zlib:z", "", "cloister-sandbox=qemu", "sandbox gvisor is required (policy.yaml:8)"},
		{"", "//app:a", "Fuzz", "", ""},
		{"main", "//app:a", "", "", "gvisor"},
		{"main", "//app:a", "", "cloister-sandbox=namespace", "namespace"},
		{"main", "//app:a", "", "Cloister-Sandbox=namespace", "gvisor"}, // which is no setting
		{"main", "//app:a", "Fuzz", "", "qemu"},
		{"main", "//third_party/zlib:z", "Fuzz", "", "sandbox qemu is required (policy.yaml:9)"},
	} {
		r := policy.Request{Instance: c.instance, Target: c.target, Mnemonic: c.mnemonic}
		if c.asks != "" {
			r.Properties = properties(c.asks)
		}
		for _, p := range []*policy.Policy{p, parse(t, p.Text())} {
			g, err := p.Compile(r, sandbox.AllLimits)
			if err != nil {
				expect.Error(t, err, policy.ErrRefused, "%+v", r)
				text, _, refused := strings.Cut(c.want, " (") // the canonical text has other lines
				if !refused || !strings.Contains(err.Error(), text) {
					t.Errorf("%+v: got %v, want %q", r, err, c.want)
				}
				continue
			}
			expect.Equal(t, g.Sandbox, c.want, "%+v", r)
			if large := c.target == "//app:a"; (g.Profile == "large") != large {
				t.Errorf("%+v: got profile %s, want large: %t", r, g.Profile, large)
			}
		}
	}
	_, err := p.Compile(policy.Request{Instance: "guests", Properties: properties("cloister-sandbox=qemu")}, sandbox.AllLimits)
	expect.Message(t, err, "(policy.yaml:7)")
	why := compile(t, p, policy.Request{Target: "//third_party/zlib:z"}).Why
	expect.That(t, slices.Contains(why, "sandbox gvisor: required (policy.yaml:8)"), "got reasons %q", why)
	expect.That(t, p.Hash() != parse(t, strings.ReplaceAll(p.Text(), "require: qemu", "require: microvm")).Hash(),
		"the required sandbox is not in the hash")
}
