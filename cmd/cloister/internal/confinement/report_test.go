// SPDX-License-Identifier: Apache-2.0

package confinement

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
)

func TestReportListsLimitsOnRequest(t *testing.T) {
	for _, c := range []struct {
		given []sandbox.Limit
		want  Check
	}{
		{sandbox.AllLimits, Check{"ok", "limits on request", "processors, disk rate", "", ""}},
		{[]sandbox.Limit{sandbox.LimitMilliCPUs}, Check{"off", "limits on request", "processors; not disk rate: an action that requests it is refused", "", ""}},
		{nil, Check{"off", "limits on request", "none; not processors, disk rate: an action that requests it is refused", "", ""}},
	} {
		expect.Equal(t, onRequest(c.given), c.want, "%q", c.given)
	}
}

// TestReportHasCodes: the code of a reason has a field of its own.
func TestReportHasCodes(t *testing.T) {
	r, _ := NewReport(t.Context(), sandbox.Features{Checks: []sandbox.Check{
		{Name: "memory limit", Detail: "no control groups (cgroup_unavailable)"},
		{Name: "seccomp", Detail: "missing (seccomp)"},
		{Name: "overlay", Detail: "this is an option (index_off)"},
		{Name: "control groups", OK: true, Detail: "no reason (cgroup_unavailable)"},
	}}, false)
	for i, want := range []string{"cgroup_unavailable", "", "", ""} {
		expect.Equal(t, r.Checks[i].Code, want, r.Checks[i].Name)
	}
}

func TestReportListsConditions(t *testing.T) {
	for _, c := range []struct {
		given  []sandbox.Condition
		result string
		says   string
	}{
		{sandbox.AllConditions, "ok", "runs can vary hostname, user, umask, cpus, fixed layout, skipped pids, uptime, clock shift, clock held, random, files"},
		{[]sandbox.Condition{sandbox.ConditionUser, sandbox.ConditionUmask}, "off", "runs can vary user, umask; but not hostname, cpus, "},
		{nil, "off", "runs cannot vary any"},
	} {
		got := conditions(c.given)
		if got.Result != c.result || !strings.Contains(got.Detail, c.says) || strings.Contains(got.Detail, "\n") {
			t.Errorf("%q: got %+v, want the result %s and %q", c.given, got, c.result, c.says)
		}
	}
}
