// SPDX-License-Identifier: Apache-2.0

package violation_test

import (
	"testing"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/violation"
)

func TestCounts(t *testing.T) {
	kinds := []sandbox.EventKind{sandbox.EventWrite, sandbox.EventConnect}
	for _, c := range []struct {
		kind    sandbox.EventKind
		subject string
		want    bool
	}{
		{sandbox.EventWrite, "/usr/x", true},
		{sandbox.EventConnect, "tcp 192.0.2.1:443", true},
		{sandbox.EventSyscall, "mount", false},
		{sandbox.EventAllowed, "example.org:443", false},
		{sandbox.EventWrite, "lib/__pycache__/a.pyc", false},
		{sandbox.EventWrite, "__pycache__", false},
		{sandbox.EventWrite, "a__pycache__/x", true},
		{sandbox.EventConnect, "dns /__pycache__.example.com", true},
		{sandbox.EventConnect, "unix /run/__pycache__/socket", true},
	} {
		if got := violation.Counts(sandbox.Event{Kind: c.kind, Subject: c.subject}, kinds); got != c.want {
			t.Errorf("%s %s: got %t, want %t", c.kind, c.subject, got, c.want)
		}
	}
}

func TestApply(t *testing.T) {
	write := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/x"}
	limit := sandbox.Event{Kind: sandbox.EventLimit, Subject: "processes"}
	writes, limits := []sandbox.EventKind{sandbox.EventWrite}, []sandbox.EventKind{sandbox.EventLimit}
	for _, c := range []struct {
		name       string
		result     sandbox.Result
		fail, kill []sandbox.EventKind
		did        string
		code       int
	}{
		{"nothing counts", sandbox.Result{Events: []sandbox.Event{write, limit}}, nil, nil, "", 0},
		{"another kind counts", sandbox.Result{Events: []sandbox.Event{write}}, limits, limits, "", 0},
		{"no violation", sandbox.Result{ExitCode: 3}, writes, limits, "", 3},
		{"success fails", sandbox.Result{Events: []sandbox.Event{limit, write}}, writes, nil, violation.Failed, violation.ExitCode},
		{"failure keeps its code", sandbox.Result{ExitCode: 3, Events: []sandbox.Event{write}}, writes, nil, violation.Failed, 3},
		{"a limit", sandbox.Result{Exceeded: &limit}, limits, nil, violation.Failed, violation.ExitCode},
		{"killed", sandbox.Result{ExitCode: 137, KilledForViolation: true, Events: []sandbox.Event{write}}, nil, writes, violation.Killed, 137},
		{"killed as it ended", sandbox.Result{KilledForViolation: true, Events: []sandbox.Event{write}}, nil, writes, violation.Killed, violation.ExitCode},
		{"noticed at the end", sandbox.Result{Events: []sandbox.Event{write}}, nil, writes, violation.Failed, violation.ExitCode},
	} {
		if did := violation.Apply(&c.result, c.fail, c.kill); did != c.did || c.result.ExitCode != c.code {
			t.Errorf("%s: got %q, exit code %d; want %q, %d", c.name, did, c.result.ExitCode, c.did, c.code)
		}
	}
}

func TestLimitsNeedNoMonitor(t *testing.T) {
	for _, c := range []struct {
		kinds []sandbox.EventKind
		want  bool
	}{
		{nil, false},
		{[]sandbox.EventKind{sandbox.EventLimit}, false},
		{[]sandbox.EventKind{sandbox.EventLimit, sandbox.EventRead}, true},
	} {
		if got := violation.NeedMonitor(c.kinds); got != c.want {
			t.Errorf("%v: got %t, want %t", c.kinds, got, c.want)
		}
	}
}
