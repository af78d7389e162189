// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/internal/zygote"
	"golang.org/x/sys/unix"
)

// tried is a run that is unusual in all that a slot can make so.
var tried = sandbox.Conditions{
	Hostname: "elsewhere", User: "someone", UID: 4321, Umask: 0o027, CPUs: 1, FixedLayout: true, SkippedPIDs: 3, Uptime: 1000 * time.Hour,
}

// probeConditions finds out which conditions can be given here, by giving them: all to one run, and if that fails,
// each to one of its own.
func (b *Backend) probeConditions(ctx context.Context) {
	able := slices.Clone(surroundings)
	b.able.Store(&able)
	if b.probeGiven(ctx, able) == nil {
		return
	}
	found := slices.DeleteFunc(slices.Clone(able), func(c sandbox.Condition) bool {
		return b.probeGiven(ctx, []sandbox.Condition{c}) != nil
	})
	b.able.Store(&found)
}

// probeGiven performs a run under some of the conditions tried, and says what it found otherwise.
func (b *Backend) probeGiven(ctx context.Context, names []sandbox.Condition) error {
	c := pick(&tried, names)
	var before unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &before); err != nil {
		return err
	}
	facts, err := b.probeRun(ctx, c)
	if err != nil {
		return err
	}
	who := identityOf(&c)
	for _, row := range []struct {
		name sandbox.Condition
		ok   bool
	}{
		{sandbox.ConditionHostname, facts.Hostname == who.hostname},
		{sandbox.ConditionUser, facts.UID == who.uid && facts.GID == who.gid},
		{sandbox.ConditionUmask, c.Umask == 0 || facts.Umask == int(c.Umask)},
		{sandbox.ConditionCPUs, c.CPUs == 0 || facts.CPUs == c.CPUs},
		{sandbox.ConditionFixedLayout, !c.FixedLayout || facts.FixedLayout},
		{sandbox.ConditionSkippedPIDs, c.SkippedPIDs == 0 || facts.PID == usualPID+c.SkippedPIDs},
		{sandbox.ConditionUptime, facts.Monotonic >= before.Nano()+int64(c.Uptime)},
	} {
		if !row.ok {
			return fmt.Errorf("the %s was not as given: %+v", row.name, facts)
		}
	}
	return nil
}

// usualPID is the number of the command's process.
const usualPID = 2

// pick returns what c says of the named conditions.
func pick(c *sandbox.Conditions, names []sandbox.Condition) sandbox.Conditions {
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

// conditionsGiven returns what Probe found of conditions; before it, none.
func (b *Backend) conditionsGiven() []sandbox.Condition {
	if able := b.able.Load(); able != nil {
		return slices.Clip(*able) // more are appended
	}
	return nil
}

// enoughCPUs returns ErrUnsupported if a run is to have more processors than this worker.
func enoughCPUs(c *sandbox.Conditions) error {
	if c.CPUs == 0 {
		return nil
	}
	var mine unix.CPUSet
	if err := unix.SchedGetaffinity(0, &mine); err != nil {
		return fmt.Errorf("processors: %w", err)
	}
	if n := mine.Count(); n < c.CPUs {
		return fmt.Errorf("%w: a run cannot have %d processors: this worker may use %d", sandbox.ErrUnsupported, c.CPUs, n)
	}
	return nil
}

// users returns the descriptor of a user namespace for a run in s that is another user than usual, which the caller
// closes; -1 for a run that is not.
func (b *Backend) users(s *slot, p *zygote.Plan) (int, error) {
	if p.Conditions == nil || p.Conditions.UID == 0 {
		return -1, nil
	}
	text, err := json.Marshal(zygote.Users{Slot: s.number, UID: p.Conditions.UID, Nested: !b.config.has(NoNesting)})
	if err != nil {
		return -1, err
	}
	return b.request(append([]byte{zygote.ReqUsers}, text...), true)
}
