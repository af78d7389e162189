// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/cloister-build/cloister/sandbox"
)

func TestCheckListsConditions(t *testing.T) {
	for _, c := range []struct {
		given []sandbox.Condition
		mark  string
		says  string
	}{
		{sandbox.AllConditions, "ok", "runs can vary hostname, user, umask, cpus, fixed layout, skipped pids, uptime, clock shift, clock held, random"},
		{[]sandbox.Condition{sandbox.ConditionUser, sandbox.ConditionUmask}, "off", "runs can vary user, umask; but not hostname, cpus, "},
		{nil, "off", "runs cannot vary any"},
	} {
		line := conditionsLine(c.given)
		if !strings.HasPrefix(line, c.mark+" ") || !strings.Contains(line, c.says) || strings.Contains(line, "\n") {
			t.Errorf("%q: got %q, want the mark %s and %q", c.given, line, c.mark, c.says)
		}
	}
}
