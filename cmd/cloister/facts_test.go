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

	text, code := runCLI(t, "version", "--json")
	var v version
	must.Succeed(t, json.Unmarshal([]byte(text), &v))
	expect.Equal(t, code, 0, "exit code")
	expect.Equal(t, v, version{v.Version, v.Revision, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
	expect.That(t, v.Version != "" && strings.Contains(versionLine(), v.Version), "got %+v", v)
}
