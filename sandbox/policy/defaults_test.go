// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

const defaultsFile = `version: 1
profiles:
  elements: {superuser: true}
rules:
  - name: elements
    when: {instance: bst, property: {chroot-path: /}}
    profile: elements
default_properties:
  bst: {chroot-path: /, dockerRunAsRoot: "true"}
  none: {}
`

// TestDefaultPropertiesCompleteAnAction: an instance's defaults count like properties of the action, which override
// them.
func TestDefaultPropertiesCompleteAnAction(t *testing.T) {
	p, err := policy.Parse("p.yaml", []byte(defaultsFile))
	must.Succeed(t, err)
	for _, c := range []struct {
		name, instance string
		asked, want    []policy.Property
		superuser      bool
	}{
		{"another instance", "", properties("a=b"), properties("a=b"), false},
		{"an instance without", "none", nil, nil, false},
		{"defaults", "bst", properties("OSFamily=linux"), properties("OSFamily=linux", "chroot-path=/", "dockerRunAsRoot=true"), true},
		{"overridden, in another case", "bst", properties("DockerRunAsRoot=false"), properties("DockerRunAsRoot=false", "chroot-path=/"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			expect.Slices(t, p.Properties(policy.Request{Instance: c.instance, Properties: c.asked}), c.want)
			g := compile(t, p, policy.Request{Instance: c.instance, Properties: c.asked})
			expect.That(t, g.Superuser == c.superuser && (g.Rule == "elements") == (c.instance == "bst"),
				"got rule %s, superuser %t; want superuser %t", g.Rule, g.Superuser, c.superuser)
		})
	}
	again, err := policy.Parse("again.yaml", []byte(p.Text()))
	if err != nil || again.Text() != p.Text() {
		t.Errorf("the canonical text is not the same policy: %v\n%s", err, p.Text())
	}
	expect.That(t, !strings.Contains(policy.Default().Text(), "superuser") && policy.Default().Hash() != p.Hash(),
		"the built-in policy's text has a new line")
}

// TestSuperuserNeedsAGrant: no action is user 0 without the operator's permission.
func TestSuperuserNeedsAGrant(t *testing.T) {
	p := policy.Default()
	_, err := p.Compile(policy.Request{Properties: properties("dockerRunAsRoot=true")}, nil)
	if !errors.Is(err, policy.ErrRefused) || !strings.Contains(err.Error(), "property dockerRunAsRoot=true") || !strings.Contains(err.Error(), "superuser: true") {
		t.Errorf("got %v, want a refusal that names the property and what to change", err)
	}
	if _, err := p.Compile(policy.Request{Properties: properties("dockerRunAsRoot=perhaps")}, nil); !errors.Is(err, policy.ErrRefused) {
		t.Errorf("a malformed value: got %v, want a refusal", err)
	}
	if g := compile(t, p, policy.Request{Properties: properties("dockerRunAsRoot=False")}); g.Superuser {
		t.Error("False was taken for true")
	}
}

// TestPersistentWorkersNeedAGrant: only a profile that says so permits them, and a profile that inherits from it may
// not.
func TestPersistentWorkersNeedAGrant(t *testing.T) {
	p := must.Get(policy.Parse("p.yaml", []byte(`version: 1
profiles:
  warm: {persistent_workers: true}
  cold: {inherits: warm, persistent_workers: false}
rules:
  - {name: warm, when: {mnemonic: Javac}, profile: warm}
  - {name: cold, when: {mnemonic: Scalac}, profile: cold}
`)))(t)
	for mnemonic, want := range map[string]bool{"Javac": true, "Scalac": false, "": false} {
		g := compile(t, p, policy.Request{Mnemonic: mnemonic})
		if g.PersistentWorkers != want || strings.Contains(strings.Join(g.Why, "\n"), "persistent_workers") != (mnemonic != "") {
			t.Errorf("%q: got %t, %q", mnemonic, g.PersistentWorkers, g.Why)
		}
	}
	again := must.Get(policy.Parse("again.yaml", []byte(p.Text())))(t)
	if again.Text() != p.Text() {
		t.Errorf("the canonical text is not the same policy:\n%s", p.Text())
	}
	expect.That(t, !strings.Contains(policy.Default().Text(), "persistent_workers"),
		"the built-in policy's text has a new line")
}
