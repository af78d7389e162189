// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/identity"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// testConditions change everything that a slot can change.
var testConditions = sandbox.Conditions{
	Hostname: "elsewhere", User: "someone", UID: 4321, Umask: 0o027, CPUs: 1, FixedLayout: true, SkippedPIDs: 3, Uptime: 1000 * time.Hour,
}

// probeConditions finds which conditions can be changed here, by running under all of them at once and, if that fails,
// under each alone.
func (b *Backend) probeConditions(ctx context.Context) {
	able := slices.Clone(slotConditions)
	b.conditions.Store(&able)
	if b.tryConditions(ctx, able) == nil {
		return
	}
	found := slices.DeleteFunc(slices.Clone(able), func(c sandbox.Condition) bool {
		return b.tryConditions(ctx, []sandbox.Condition{c}) != nil
	})
	b.conditions.Store(&found)
}

// tryConditions performs a run under some of testConditions and returns what it found different.
func (b *Backend) tryConditions(ctx context.Context, names []sandbox.Condition) error {
	c := subset(&testConditions, names)
	var before unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before); err != nil {
		return err
	}
	facts, err := b.probeRun(ctx, c)
	if err != nil {
		return err
	}
	id := identity.Of(&c)
	for _, row := range []struct {
		name sandbox.Condition
		ok   bool
	}{
		{sandbox.ConditionHostname, facts.Hostname == id.Hostname && (c.Hostname == "" || facts.Domain == c.Hostname)},
		{sandbox.ConditionUser, facts.UID == id.UID && facts.GID == id.GID},
		{sandbox.ConditionUmask, c.Umask == 0 || facts.Umask == int(c.Umask)},
		{sandbox.ConditionCPUs, c.CPUs == 0 || facts.CPUs == c.CPUs},
		{sandbox.ConditionFixedLayout, !c.FixedLayout || facts.FixedLayout},
		{sandbox.ConditionSkippedPIDs, c.SkippedPIDs == 0 || facts.PID == usualPID+c.SkippedPIDs},
		{sandbox.ConditionUptime, facts.Monotonic >= before.Nano()+int64(c.Uptime)},
	} {
		if !row.ok {
			return fmt.Errorf("the %s did not take effect: %+v", row.name, facts)
		}
	}
	return nil
}

// usualPID is the process ID of the command.
const usualPID = 2

// subset returns the named conditions of c.
func subset(c *sandbox.Conditions, names []sandbox.Condition) sandbox.Conditions {
	var p sandbox.Conditions
	for _, name := range names {
		switch name {
		case sandbox.ConditionHostname:
			p.Hostname = c.Hostname
		case sandbox.ConditionUser:
			p.User, p.UID = c.User, c.UID
		case sandbox.ConditionUmask:
			p.Umask = c.Umask
		case sandbox.ConditionCPUs:
			p.CPUs = c.CPUs
		case sandbox.ConditionFixedLayout:
			p.FixedLayout = c.FixedLayout
		case sandbox.ConditionSkippedPIDs:
			p.SkippedPIDs = c.SkippedPIDs
		case sandbox.ConditionUptime:
			p.Uptime = c.Uptime
		}
	}
	return p
}

// supportedConditions returns what Probe found; before it, none.
func (b *Backend) supportedConditions() []sandbox.Condition {
	if able := b.conditions.Load(); able != nil {
		return slices.Clip(*able) // callers append
	}
	return nil
}

// checkCPUs returns ErrUnsupported if a run needs more processors than this worker may use.
func checkCPUs(c *sandbox.Conditions) error {
	if c.CPUs == 0 {
		return nil
	}
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return fmt.Errorf("processors: %w", err)
	}
	if n := mine.Count(); n < c.CPUs {
		return fmt.Errorf("%w: the run needs %d processors, this worker may use %d", sandbox.ErrUnsupported, c.CPUs, n)
	}
	return nil
}

// userNamespace returns the descriptor of a user namespace for a run in s with another user than the default, which the
// caller closes; -1 for other runs.
func (b *Backend) userNamespace(s *slot, p *zygote.Plan) (int, error) {
	if p.Conditions == nil || !p.Conditions.OtherUser() {
		return -1, nil
	}
	text, err := json.Marshal(zygote.UserNamespace{Slot: s.number, UID: p.Conditions.UID, Nested: !b.config.has(NoNesting)})
	if err != nil {
		return -1, err
	}
	return b.request(append([]byte{zygote.ReqUserNamespace}, text...), true)
}
