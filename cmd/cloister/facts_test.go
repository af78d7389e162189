// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cmd/cloister/internal/confinement"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestFactsAsJSON: what check and version print for a person is also JSON, whether or not this machine can run actions.
func TestFactsAsJSON(t *testing.T) {
	text, _ := runCLI(t, "check", "--json")
	var r confinement.Report
	must.Succeed(t, json.NewDecoder(strings.NewReader(text)).Decode(&r)) // an error may follow
	expect.That(t, r.Tier != "" && len(r.Checks) > 3 && r.Checks[0].Result != "" && r.Checks[0].Name != "", "got %s", text)

	backends := 0
	known := map[string]bool{}
	for _, e := range explanations() {
		known[e.Code] = true
	}
	for _, c := range r.Checks {
		if name, other := strings.CutPrefix(c.Name, "backend "); other {
			backends++
			expect.That(t, c.Result == "ok" || name == "qemu-tcg" || known[c.Code], "%s: got result %q and code %q, want a code", c.Name, c.Result, c.Code)
			expect.That(t, c.Result != "ok" || strings.Contains(c.Detail, " enforces "), "%s: got %q, want what it enforces", c.Name, c.Detail)
		}
		expect.That(t, c.Result != "FAIL" || known[c.Code], "%s: got code %q of a failure", c.Name, c.Code)
	}
	expect.Equal(t, backends, 6, "other backends")

	text, code := runCLI(t, "version", "--json")
	var v version
	must.Succeed(t, json.Unmarshal([]byte(text), &v))
	expect.Equal(t, code, 0, "exit code")
	expect.Equal(t, v, version{v.Version, v.Revision, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
	expect.That(t, v.Version != "" && strings.Contains(versionLine(), v.Version), "got %+v", v)
}
