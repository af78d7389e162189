// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"regexp"
	"time"
)

// Conditions are what a run can notice of its surroundings and that is neither an input of it nor a permission. Their
// zero value is what every run has. Anything else is for a run that is made again, to see whether its result depends
// on it; and where a condition is held, two runs notice the same.
type Conditions struct {
	// Hostname is what the host is called; "" is the usual name.
	Hostname string
	// User and UID are who the run is, in number and name; "" and 0 are the usual ones. The group's number is the
	// user's.
	User string
	UID  uint32
	// Umask is the mask of modes of new files; 0 is the usual one.
	Umask uint32
	// CPUs is how many processors the run may use; 0 is all.
	CPUs int
	// FixedLayout ends the randomness of where in memory things lie (ADDR_NO_RANDOMIZE of personality(2)).
	FixedLayout bool
	// SkippedPIDs is how many numbers of processes are used up before the command gets its own.
	SkippedPIDs int
	// Uptime is added to the monotonic clocks and to the time since boot (time_namespaces(7)).
	Uptime time.Duration
	// ClockOffset is added to what the time of day is.
	ClockOffset time.Duration
	// FrozenClock, if not 0, is the time of day, in seconds since 1970, at which the run begins; it then goes on by
	// a millisecond each time that it is asked for, however fast the run is.
	FrozenClock int64
	// RandomSeed, if not 0, is the seed of all that the kernel gives as random: two runs that ask for it in the same
	// order get the same.
	RandomSeed uint64
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
)

// AllConditions are the conditions, in the order of the fields of Conditions.
var AllConditions = []Condition{
	ConditionHostname, ConditionUser, ConditionUmask, ConditionCPUs, ConditionFixedLayout, ConditionSkippedPIDs,
	ConditionUptime, ConditionClockOffset, ConditionFrozenClock, ConditionRandomSeed,
}

// Of returns one condition as a person writes it, "" if it is the usual one.
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
	}
	if !unusual {
		return ""
	}
	return fmt.Sprint(value)
}

// userName is what a user may be called (useradd(8)).
var userName = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

func (c *Conditions) validate() error {
	switch {
	case c.Hostname != "" && (len(c.Hostname) > 63 || !hostName.MatchString(c.Hostname)):
		return fmt.Errorf("%q is no name of a host in lower case", c.Hostname)
	case (c.User != "") != (c.UID != 0):
		return fmt.Errorf("user %q with the number %d: both or neither are to be set", c.User, c.UID)
	case c.User != "" && !userName.MatchString(c.User):
		return fmt.Errorf("%q is no name of a user", c.User)
	case c.User == "root" || c.User == "nobody":
		return fmt.Errorf("%q is another user's name in every run", c.User)
	case c.UID != 0 && (c.UID < 1000 || c.UID > 59_999):
		return fmt.Errorf("user number %d is not between 1000 and 59999", c.UID)
	case c.Umask > 0o777:
		return fmt.Errorf("umask %o is more than 777", c.Umask)
	case c.CPUs < 0:
		return fmt.Errorf("%d processors are too few", c.CPUs)
	case c.SkippedPIDs < 0 || c.SkippedPIDs > 1000:
		return fmt.Errorf("%d skipped process numbers are not between 0 and 1000", c.SkippedPIDs)
	case c.Uptime < 0:
		return fmt.Errorf("an uptime that is shorter by %v may lie before the boot", -c.Uptime)
	case c.FrozenClock < 0:
		return fmt.Errorf("a clock is held at %d seconds, before 1970", c.FrozenClock)
	case c.FrozenClock != 0 && c.ClockOffset != 0:
		return fmt.Errorf("a clock that is held cannot be shifted as well")
	}
	return nil
}
