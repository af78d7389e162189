// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
)

// TestRemoteAPIs: a profile grants them, a rule or default properties ask for them, and results are cached only if the
// profile permits that, too. The canonical text keeps the setting.
func TestRemoteAPIs(t *testing.T) {
	p := parse(t, `version: 1
profiles:
  open: {remote_apis: {allow: true}}
  cached: {inherits: open, remote_apis: {cache: true}}
  shut: {inherits: open, remote_apis: {allow: false}}
rules:
  - {name: open, when: {instance: open}, profile: open}
  - {name: cached, when: {instance: cached}, profile: cached}
  - {name: shut, when: {instance: shut}, profile: shut}
default_properties:
  cached: {remoteApisSocketPath: apis}
`)
	for _, c := range []struct {
		instance, asks, want string // of the grant: path, or a part of the error
		cache                bool
	}{
		{"", "remoteApisSocketPath=s", "ask the operator for a profile with remote_apis: {allow: true}", false},
		{"shut", "remoteApisSocketPath=s", "does not permit it (profile shut, policy.yaml:", false},
		{"open", "remoteApisSocketPath=tmp/s", "tmp/s", false},
		{"open", "remoteApisSocketPath=", "", true},
		{"open", "remoteapissocketpath=s", "", true}, // another server's
		{"cached", "", "apis", true},
		{"cached", "remoteApisSocketPath=own", "own", true},
		{"open", "remoteApisSocketPath=" + strings.Repeat("x", 5000), "more than the maximum", false},
	} {
		r := policy.Request{Instance: c.instance}
		if c.asks != "" {
			r.Properties = properties(c.asks)
		}
		for _, p := range []*policy.Policy{p, parse(t, p.Text())} {
			g, err := p.Compile(r, nil)
			if err != nil {
				expect.Text(t, err.Error(), c.want, "%s %.50s", c.instance, c.asks)
				continue
			}
			expect.That(t, g.RemoteAPIs == c.want && g.Cache == c.cache && g.Hermetic == (c.want == ""),
				"%s %.50s: got path %q, cache %t, hermetic %t, want path %q, cache %t", c.instance, c.asks, g.RemoteAPIs, g.Cache, g.Hermetic, c.want, c.cache)
		}
	}
	expect.That(t, p.PermitsRemoteAPIs() && !policy.Default().PermitsRemoteAPIs(), "PermitsRemoteAPIs")
	_, err := p.Compile(policy.Request{Instance: "open", Properties: properties("remoteApisSocketPath=a", "remoteApisSocketPath=b")}, nil)
	expect.Message(t, err, "set it once")
}
