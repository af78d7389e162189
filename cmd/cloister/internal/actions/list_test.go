// SPDX-License-Identifier: Apache-2.0

package actions

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
)

// Finding one failed action among 100,000 queued ones must not take as many calls.
func TestFailedUsesLargePages(t *testing.T) {
	for name, test := range map[string]struct {
		c      List
		filter string
		size   int32
	}{
		"few":            {List{Limit: 3}, ``, 3},
		"many":           {List{Limit: 1 << 40}, ``, 1000},
		"failed":         {List{Limit: 1, Failed: true, Target: "//a:*"}, `target="//a:*" stage="COMPLETED"`, 1000},
		"failed, stated": {List{Limit: 1, Failed: true, Stage: "QUEUED"}, `stage="QUEUED"`, 1000},
	} {
		if r := test.c.request("in"); r.Name != "in" || r.Filter != test.filter || r.PageSize != test.size {
			t.Errorf("%s: asks for %v", name, r)
		}
	}
}

// TestLines: cache hits and misses have these words, and on a terminal failures and differences are red.
func TestLines(t *testing.T) {
	zero, three := int32(0), int32(3)
	digest := strings.Repeat("0123456789abcdef", 4) + "/142"
	for _, c := range []struct {
		row  Execution
		want string
	}{
		{Execution{Stage: "QUEUED", Action: digest}, "queued             -              -  0123456789ab  -           -"},
		{
			Execution{Stage: "QUEUED", Action: digest, Pull: &Pull{Image: "example.com/tools@sha256:1f"}},
			"pulling            -              -  0123456789ab  -           -  image example.com/tools",
		},
		{
			Execution{Stage: "QUEUED", Action: digest, Pull: &Pull{"example.com/tools@sha256:1f", 3 << 40, 4 << 40}},
			"pulling 75%        -              -  0123456789ab  -           -  image example.com/tools",
		},
		{
			Execution{Status: "OK", ExitCode: &zero, Ran: 1.5, Action: "blake3:" + digest, Invocation: "5f1d6c0e-3b0a", Mnemonic: "Copy"},
			"exit 0             miss        1.5s  blake3:0123456789ab  5f1d6c0e    Copy",
		},
		{
			Execution{Status: "OK", ExitCode: &zero, Cached: true, Ran: 1.5, Action: digest, Caller: "ci"},
			"exit 0             hit            -  0123456789ab  -           -  by ci",
		},
		{Execution{Status: "OK", How: "found", ExitCode: &zero, Action: digest}, "exit 0             hit            -  0123456789ab  -           -"},
		{Execution{Status: "OK", How: "absent", Action: digest}, "absent             miss           -  0123456789ab  -           -"},
		{
			Execution{Status: "OK", ExitCode: &three, Ran: 0.0621, Action: digest},
			"\x1b[31mexit 3            \x1b[0m miss        62ms  0123456789ab  -           -",
		},
		{Execution{Status: "Unavailable", Action: digest}, "\x1b[31mUnavailable       \x1b[0m -              -  0123456789ab  -           -"},
		{
			Execution{Status: "OK", How: "checked", Verdict: "differs", Action: digest},
			"\x1b[31mdiffers           \x1b[0m -              -  0123456789ab  -           -",
		},
	} {
		expect.Equal(t, c.row.line(false, true), c.want)
		if got := c.row.line(false, false); strings.Contains(got, "\x1b") {
			t.Errorf("got %q without a terminal, want no colours", got)
		}
	}
}
