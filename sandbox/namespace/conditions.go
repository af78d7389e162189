// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
)

// slotConditions are the conditions that pid 1 and the command set for themselves before the command executes.
var slotConditions = []sandbox.Condition{
	sandbox.ConditionHostname, sandbox.ConditionUser, sandbox.ConditionUmask, sandbox.ConditionCPUs,
	sandbox.ConditionFixedLayout, sandbox.ConditionSkippedPIDs, sandbox.ConditionUptime,
}

// slotConditionsOf returns the conditions that the slot implements, or nil if they are the default.
func slotConditionsOf(c *sandbox.Conditions, superuser bool) *zygote.Conditions {
	g := zygote.Conditions{
		Hostname: c.Hostname, UID: int(c.UID), Umask: c.Umask, CPUs: c.CPUs, FixedLayout: c.FixedLayout,
		SkippedPIDs: c.SkippedPIDs, Uptime: int64(c.Uptime), Superuser: superuser,
	}
	if g == (zygote.Conditions{}) {
		return nil
	}
	return &g
}
