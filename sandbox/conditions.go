// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"regexp"
	"time"
)

// Conditions are properties that a run can observe but that are neither inputs nor permissions, such as its host name.
// The zero value is what every run gets by default. Other values serve to repeat a run and see whether its result
// depends on them, or to give two runs the same conditions.
type Conditions struct {
	// Hostname is the host name and, if it is not the default, also the domain name (domainname(1)); "" is the default.
	Hostname string
	// User and UID are the name and number of the run's user; "" and 0 are the default. The group has the same number.
	User string
	UID  uint32
	// Umask is the file mode creation mask; 0 is the default.
	Umask uint32
	// CPUs is the number of processors the run may use; 0 is all.
	CPUs int
	// FixedLayout disables address space randomization (ADDR_NO_RANDOMIZE of personality(2)).
	FixedLayout bool
	// SkippedPIDs is how many process IDs are used up before the command gets its own.
	SkippedPIDs int
	// Uptime is added to the monotonic clocks and to the time since boot (time_namespaces(7)).
	Uptime time.Duration
	// ClockOffset is added to the time of day.
	ClockOffset time.Duration
	// FrozenClock, if not 0, is the time of day, in seconds since 1970, at which the run begins. Each reading then
	// advances the clock by a microsecond, however fast the run is, and by a millisecond after 100,000 readings.
	FrozenClock int64
	// RandomSeed, if not 0, seeds all random numbers from the kernel: two runs that ask for them in the same order get
	// the same.
	RandomSeed uint64
	// InputTime, if not 0, is the modification time, in seconds since 1970, that the run sees of inputs that state none.
	InputTime int64
	// InputOwner, if not 0, is the user and group to which files of others, such as inputs, seem to belong.
	InputOwner uint32
	// OutputOrder, if not 0, selects another order in which directories list what the run has created in them.
	OutputOrder int
}

// A Condition names one of the Conditions.
type Condition string

// The conditions.
const (
	ConditionHostname    Condition = "hostname"
	ConditionUser        Condition = "user"
	ConditionUmask       Condition = "umask"
	ConditionCPUs        Condition = "cpus"
	ConditionFixedLayout Condition = "fixed layout"
	ConditionSkippedPIDs Condition = "skipped pids"
	ConditionUptime      Condition = "uptime"
	ConditionClockOffset Condition = "clock shift"
	ConditionFrozenClock Condition = "clock held"
	ConditionRandomSeed  Condition = "random"
	ConditionFiles       Condition = "files" // InputTime, InputOwner and OutputOrder
)

// AllConditions are the conditions, in the order of the fields of Conditions.
var AllConditions = []Condition{
	ConditionHostname, ConditionUser, ConditionUmask, ConditionCPUs, ConditionFixedLayout, ConditionSkippedPIDs,
	ConditionUptime, ConditionClockOffset, ConditionFrozenClock, ConditionRandomSeed,
	ConditionFiles,
}

// Of returns one condition for people, "" if it is the default.
func (c *Conditions) Of(name Condition) string {
	var value any
	unusual := false
	switch name {
	case ConditionHostname:
		value, unusual = fmt.Sprintf("%q", c.Hostname), c.Hostname != ""
	case ConditionUser:
		value, unusual = fmt.Sprintf("%q %d", c.User, c.UID), c.User != "" || c.UID != 0
	case ConditionUmask:
		value, unusual = fmt.Sprintf("%04o", c.Umask), c.Umask != 0
	case ConditionCPUs:
		value, unusual = c.CPUs, c.CPUs != 0
	case ConditionFixedLayout:
		value, unusual = c.FixedLayout, c.FixedLayout
	case ConditionSkippedPIDs:
		value, unusual = c.SkippedPIDs, c.SkippedPIDs != 0
	case ConditionUptime:
		value, unusual = c.Uptime, c.Uptime != 0
	case ConditionClockOffset:
		value, unusual = c.ClockOffset, c.ClockOffset != 0
	case ConditionFrozenClock:
		value, unusual = c.FrozenClock, c.FrozenClock != 0
	case ConditionRandomSeed:
		value, unusual = c.RandomSeed, c.RandomSeed != 0
	case ConditionFiles:
		value = fmt.Sprintf("%d %d %d", c.InputTime, c.InputOwner, c.OutputOrder)
		unusual = c.InputTime != 0 || c.InputOwner != 0 || c.OutputOrder != 0
	}
	if !unusual {
		return ""
	}
	return fmt.Sprint(value)
}

// userName matches user names (useradd(8)).
var userName = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

func (c *Conditions) validate() error {
	switch {
	case c.Hostname != "" && (len(c.Hostname) > 63 || !hostName.MatchString(c.Hostname)):
		return fmt.Errorf("%q is not a lower-case host name", c.Hostname)
	case (c.User != "") != (c.UID != 0):
		return fmt.Errorf("user %q with number %d: set both or neither", c.User, c.UID)
	case c.User != "" && !userName.MatchString(c.User):
		return fmt.Errorf("invalid user name %q", c.User)
	case c.User == "root" || c.User == "nobody":
		return fmt.Errorf("user name %q is taken in every run", c.User)
	case c.UID != 0 && (c.UID < 1000 || c.UID > 59_999):
		return fmt.Errorf("user number %d is not between 1000 and 59999", c.UID)
	case c.Umask > 0o777:
		return fmt.Errorf("umask %o is more than 777", c.Umask)
	case c.CPUs < 0:
		return fmt.Errorf("%d processors: the number must not be negative", c.CPUs)
	case c.SkippedPIDs < 0 || c.SkippedPIDs > 1000:
		return fmt.Errorf("%d skipped process IDs are not between 0 and 1000", c.SkippedPIDs)
	case c.Uptime < 0:
		return fmt.Errorf("uptime is reduced by %v: it can only be increased", -c.Uptime)
	case c.FrozenClock < 0:
		return fmt.Errorf("the clock is frozen at %d seconds, before 1970", c.FrozenClock)
	case c.FrozenClock != 0 && c.ClockOffset != 0:
		return fmt.Errorf("a frozen clock cannot have an offset")
	case c.InputTime < 0:
		return fmt.Errorf("inputs are from %d seconds before 1970", -c.InputTime)
	case c.OutputOrder < 0:
		return fmt.Errorf("output order %d: the number must not be negative", c.OutputOrder)
	}
	return nil
}
