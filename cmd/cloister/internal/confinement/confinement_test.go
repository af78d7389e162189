// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/jobobject"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestTierTextNamesMissingLimits: the tier must not hide that an action may take all memory.
func TestTierTextNamesMissingLimits(t *testing.T) {
	for _, c := range []struct {
		tier   string
		limits []sandbox.Limit
		want   string
	}{
		{"full", sandbox.AllLimits, "full"},
		{"full", sandbox.AllLimits[:6], "full"}, // without those that are Unlimited by default
		{"partial", sandbox.AllLimits[2:], "partial, without limits of memory, CPU time"},
	} {
		expect.Equal(t, TierText(sandbox.Features{Tier: c.tier, Limits: c.limits}), c.want, "limits %v", c.limits)
	}
}

// TestEndpointsOfFlags: --allow extends the built-in policy and no other.
func TestEndpointsOfFlags(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	must.Succeed(t, os.WriteFile(file, []byte("version: 1\n"), 0o644))
	for _, c := range []struct {
		policy, mnemonic, request string
		ok                        bool
	}{
		{"", "", "example.org:443", true},
		{"", "TestRunner", "192.0.2.1:80", true},
		{"", "", "example.org:80", false},
		{file, "", "example.org:443", false},
	} {
		f := Flags{Policy: c.policy}
		f.AllowEndpoints([]sandbox.Endpoint{{Host: "example.org", Port: 443}, {Host: "192.0.2.1", Port: 80}})
		p := must.Get(f.LoadPolicy())(t)
		request := policy.Request{Mnemonic: c.mnemonic, Properties: []policy.Property{{Name: "cloister-network", Value: c.request}}}
		if _, err := p.Compile(request, sandbox.AllLimits); (err == nil) != c.ok || err != nil && !errors.Is(err, policy.ErrRefused) {
			t.Errorf("policy %q, mnemonic %q, endpoint %s: got %v", c.policy, c.mnemonic, c.request, err)
		}
	}
}

// TestOtherBackendsRunNoImages: sandboxes that mount no images refuse --images at start, not each action.
func TestOtherBackendsRunNoImages(t *testing.T) {
	for tier, want := range map[string]string{
		"full": "", "namespaces": "", gVisor: "--sandbox gvisor runs no container images", qemuKVM: "--sandbox qemu runs no container images",
		qemuTCG: "--sandbox qemu-tcg runs no container images", jobobject.Name: "--sandbox jobobject runs no container images", microVM: "--sandbox microvm runs no container images",
	} {
		f := Flags{Tier: tier, images: []string{"registry.example"}}
		_, err := f.Images(policy.Default())
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", tier, err, want)
		}
	}
}
