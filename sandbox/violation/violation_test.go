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
	} {
		if got := violation.Counts(sandbox.Event{Kind: c.kind, Subject: c.subject}, kinds); got != c.want {
			t.Errorf("%s %s: got %t, want %t", c.kind, c.subject, got, c.want)
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
