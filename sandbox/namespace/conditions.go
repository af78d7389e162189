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

// An identity is the user and host name of a run.
type identity struct {
	user, hostname string
	uid, gid       int
}

// identityOf returns the identity of a run under these conditions.
func identityOf(c *sandbox.Conditions) identity {
	id := identity{"build", zygote.Hostname, zygote.UID, zygote.GID}
	if c.User != "" {
		id.user, id.uid, id.gid = c.User, int(c.UID), int(c.UID)
	}
	if c.Hostname != "" {
		id.hostname = c.Hostname
	}
	return id
}
