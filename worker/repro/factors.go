// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A Factor names a condition that a run can observe although it is not an input.
type Factor string

// The factors.
const (
	factorTime        Factor = "time"         // time of day, by more than a year
	factorZone        Factor = "zone"         // time zone (TZ)
	factorUser        Factor = "user"         // name and ID of the user
	factorHostname    Factor = "hostname"     // host name
	factorLocale      Factor = "locale"       // language and sorting (LC_ALL, LANG)
	factorUmask       Factor = "umask"        // umask
	factorCPUs        Factor = "cpus"         // number of processors
	factorReaddir     Factor = "readdir"      // order of entries in input directories
	factorInputTimes  Factor = "input-times"  // modification times of inputs
	factorInputOwner  Factor = "input-owner"  // owner of inputs
	factorOutputOrder Factor = "output-order" // order in which directories list what the action creates
	factorPath        Factor = "path"         // path of the working directory
	factorASLR        Factor = "aslr"         // memory layout
	factorRandom      Factor = "random"       // random numbers of the kernel
	factorPIDs        Factor = "pids"         // process IDs
	factorUptime      Factor = "uptime"       // time since boot
	factorEnvironment Factor = "environment"  // a variable that the command does not set
	factorHome        Factor = "home"         // path of the home directory (HOME)
	factorSearchPath  Factor = "search-path"  // where programs are looked up (PATH)
	factorParallel    Factor = "parallel"     // another run of the action at the same time
)

// AllFactors are the factors, in the order of messages.
var AllFactors = []Factor{
	factorTime, factorZone, factorUser, factorHostname, factorLocale, factorUmask, factorCPUs, factorReaddir,
	factorInputTimes, factorInputOwner, factorOutputOrder, factorPath, factorASLR, factorRandom, factorPIDs, factorUptime, factorEnvironment, factorHome, factorSearchPath,
	factorParallel,
}

// A factor is how a Factor is varied and held. A varied factor has a different value in every run, a held one the same
// value. A factor without vary changes on its own unless it is held; one without hold stays the same unless it is
// varied.
type factor struct {
	name Factor
	// cause is the cause of differences that only this factor makes, if the outputs themselves do not show it.
	cause compare.Cause

	causes []compare.Cause // further causes that its differences may show

	varyNeeds sandbox.Condition // "" if it needs none
	holdNeeds sandbox.Condition // "" if it needs none
	// unfit returns why it cannot be varied for the planner's action, "" if it can.
	unfit func(p *planner) string
	// vary sets the value of run i, counted from 1.
	vary func(v *worker.Variation, i int, p *planner)
	hold func(v *worker.Variation, p *planner)
	// copies is the number of further runs in parallel with a varied one.
	copies int
}

// explains reports whether differences by the factor may show a cause.
func (f *factor) explains(c compare.Cause) bool {
	return c == f.cause || slices.Contains(f.causes, c)
}

// shows is explains, but local times of other zones also show Timestamp.
func (f *factor) shows(c compare.Cause) bool {
	return f.explains(c) || f.cause == compare.Zone && c == compare.Timestamp
}

// factorOf returns the factor of a name, which must be factorWorker or one of AllFactors.
func factorOf(name Factor) *factor {
	if name == factorWorker {
		return &workerFactor
	}
	i := slices.IndexFunc(factors, func(f factor) bool { return f.name == name })
	return &factors[i]
}

// Host describes what limits variation on a host. The zero value is valid.
type Host struct {
	CPUs    int      // available to runs
	Locales []string // installed, except C and POSIX
	Zones   []string // installed time zones of zones
}

// defaultHeldTime is the usual planner.heldTime. At this time each of zones has a different date.
const defaultHeldTime = 1_700_046_000 // 2023-11-15 11:00:00 UTC

// zones have another date than UTC for at least ten hours of each day, and all of them during the same hour.
var zones = []string{"Etc/GMT-14", "Etc/GMT+12", "Etc/GMT-13"}

// posixZones are the same zones for hosts without names of zones (POSIX.1-2017, section 8.3).
var posixZones = []string{"CLA-14", "CLB+12", "CLC-13"}

// factors are all factors in the order of messages. The first one that explains a difference wins.
var factors = []factor{
	{
		name:      factorTime,
		cause:     compare.Timestamp,
		causes:    []compare.Cause{compare.BuildDate, compare.Duration},
		varyNeeds: sandbox.ConditionClockOffset, holdNeeds: sandbox.ConditionFrozenClock,
		vary: func(v *worker.Variation, i int, _ *planner) { v.Conditions.ClockOffset = clockOffset(i) },
		hold: func(v *worker.Variation, p *planner) { v.Conditions.FrozenClock = p.heldTime },
	},
	{
		name:   factorZone,
		cause:  compare.Zone,
		causes: []compare.Cause{compare.BuildDate},
		unfit:  declares("TZ"),
		vary: func(v *worker.Variation, i int, p *planner) {
			names := p.host.Zones
			if len(names) == 0 {
				names = posixZones
			}
			v.Env = append(v.Env, "TZ="+cycle(names, i))
		},
	},
	{
		name:      factorUser,
		cause:     compare.Owner,
		causes:    []compare.Cause{compare.Path}, // of a home directory
		varyNeeds: sandbox.ConditionUser,
		vary: func(v *worker.Variation, i int, _ *planner) {
			v.Conditions.User, v.Conditions.UID = fmt.Sprintf("somebody%d", i), uint32(20_000+i)
		},
	},
	{
		name:      factorHostname,
		cause:     compare.Hostname,
		varyNeeds: sandbox.ConditionHostname,
		vary:      func(v *worker.Variation, i int, _ *planner) { v.Conditions.Hostname = fmt.Sprintf("elsewhere%d", i) },
	},
	{
		name:  factorLocale,
		cause: compare.Locale,
		// Only installed locales: shells and Perl complain about others on stderr.
		unfit: declares("LANG", "LANGUAGE", "LC_*"),
		vary: func(v *worker.Variation, i int, p *planner) {
			names := p.host.Locales
			if len(names) == 0 {
				names = []string{"C.UTF-8"} // built into C libraries
			}
			name := cycle(names, i)
			v.Env = append(v.Env, "LANG="+name, "LC_ALL="+name)
		},
	},
	{
		name:      factorUmask,
		cause:     compare.Mode,
		varyNeeds: sandbox.ConditionUmask,
		vary: func(v *worker.Variation, i int, _ *planner) {
			v.Conditions.Umask = cycle([]uint32{0o077, 0o002, 0o027, 0o007}, i)
		},
	},
	{
		name:      factorCPUs,
		cause:     compare.Processors,
		causes:    []compare.Cause{compare.Parallel},
		varyNeeds: sandbox.ConditionCPUs,
		unfit: func(p *planner) string {
			if p.host.CPUs == 1 {
				return "this host has one processor"
			}
			return ""
		},
		vary: func(v *worker.Variation, i int, p *planner) {
			v.Conditions.CPUs = 1 + (i-1)%max(1, min(p.host.CPUs-1, 4))
		},
	},
	{
		name:  factorReaddir,
		cause: compare.MemberOrder,
		vary:  func(v *worker.Variation, i int, _ *planner) { v.Order = heldOrder + uint64(i) },
		hold:  func(v *worker.Variation, _ *planner) { v.Order = heldOrder },
	},
	{
		name:      factorInputTimes,
		cause:     compare.Timestamp,
		causes:    []compare.Cause{compare.BuildDate}, // __TIMESTAMP__
		varyNeeds: sandbox.ConditionFiles,
		vary: func(v *worker.Variation, i int, _ *planner) { // in 2002 to 2014
			v.Conditions.InputTime = 1_000_000_000 + int64((i-1)%40+1)*10_000_019
		},
	},
	{
		name:      factorInputOwner,
		cause:     compare.Owner,
		varyNeeds: sandbox.ConditionFiles,
		vary:      func(v *worker.Variation, i int, _ *planner) { v.Conditions.InputOwner = uint32(30_000 + i) },
	},
	{
		name:      factorOutputOrder,
		cause:     compare.MemberOrder,
		varyNeeds: sandbox.ConditionFiles,
		vary:      func(v *worker.Variation, i int, _ *planner) { v.Conditions.OutputOrder = i },
	},
	{
		name:  factorPath,
		cause: compare.Path,
		vary: func(v *worker.Variation, i int, _ *planner) {
			v.Root = fmt.Sprintf("/b/%s/work%d", strings.Repeat("x", (i-1)%40+1), i)
		},
	},
	{
		name:      factorASLR,
		cause:     compare.Address,
		causes:    []compare.Cause{compare.HashSeed}, // hash tables with pointers as keys
		holdNeeds: sandbox.ConditionFixedLayout,
		unfit:     seeded,
		hold:      func(v *worker.Variation, _ *planner) { v.Conditions.FixedLayout = true },
	},
	{
		name:      factorRandom,
		cause:     compare.Random,
		causes:    []compare.Cause{compare.HashSeed, compare.BuildID, compare.Path}, // of a temporary file
		holdNeeds: sandbox.ConditionRandomSeed,
		unfit:     seeded,
		hold:      func(v *worker.Variation, _ *planner) { v.Conditions.RandomSeed = 1 },
	},
	{
		name:      factorPIDs,
		cause:     compare.ProcessID,
		causes:    []compare.Cause{compare.Random, compare.Path}, // of a temporary file
		varyNeeds: sandbox.ConditionSkippedPIDs,
		vary:      func(v *worker.Variation, i int, _ *planner) { v.Conditions.SkippedPIDs = (i*117-1)%1000 + 1 },
	},
	{
		name:      factorUptime,
		cause:     compare.Uptime,
		varyNeeds: sandbox.ConditionUptime,
		vary: func(v *worker.Variation, i int, _ *planner) {
			v.Conditions.Uptime = time.Duration(i) * 2191 * time.Hour
		},
	},
	{
		name:  factorEnvironment,
		cause: compare.Environment,
		unfit: declares(padding),
		vary: func(v *worker.Variation, i int, _ *planner) {
			v.Env = append(v.Env, padding+"="+strings.Repeat("x", 100+(i*37)%1000))
		},
	},
	{
		name:   factorHome,
		cause:  compare.Environment,
		causes: []compare.Cause{compare.Path},
		unfit:  declares("HOME"),
		vary: func(v *worker.Variation, i int, _ *planner) { // another path of the same directory
			v.Env = append(v.Env, "HOME=/proc/self/root"+strings.Repeat("/.", (i-1)%40)+"/tmp")
		},
	},
	{
		name:   factorSearchPath,
		cause:  compare.Environment,
		causes: []compare.Cause{compare.Path},
		unfit:  declares("PATH"),
		vary: func(v *worker.Variation, i int, _ *planner) { // nothing else is found there
			for _, kv := range sandbox.Environment() {
				if strings.HasPrefix(kv, "PATH=") {
					v.Env = append(v.Env, kv+":/usr/bin"+strings.Repeat("/.", (i-1)%40+1))
				}
			}
		},
	},
	{
		name:   factorParallel,
		cause:  compare.Parallel,
		copies: 1,
	},
}

const (
	padding   = "CLOISTER_PADDING"
	heldOrder = 1
)

// clockOffset returns how far the clock of run i is ahead: between one and eleven years, so that 32-bit clocks do not
// overflow, and never whole days or hours.
func clockOffset(i int) time.Duration {
	return time.Duration((i-1)%9+1)*400*24*time.Hour + time.Duration(i)*(7*time.Hour+13*time.Minute+29*time.Second)
}

// seeded is a factor.unfit for what a seed determines.
func seeded(p *planner) string {
	if p.seed != nil {
		return "the action states a seed"
	}
	return ""
}

func cycle[T any](of []T, i int) T { return of[(i-1)%len(of)] }

// declares returns a factor.unfit for variables that the command sets, because these are inputs. A name that ends in
// "*" is a prefix.
func declares(names ...string) func(*planner) string {
	return func(p *planner) string {
		for _, v := range p.command.GetEnvironmentVariables() {
			for _, name := range names {
				if begin, all := strings.CutSuffix(name, "*"); v.Name == name ||
					all && strings.HasPrefix(v.Name, begin) {
					return "the command sets " + v.Name
				}
			}
		}
		return ""
	}
}

// Choose parses a comma-separated list of factors, "all" or "none". "uid" and "tz" are aliases. An empty list is an
// error, because it may be an unset shell variable, and nothing would be varied.
func Choose(list string) ([]Factor, error) {
	if strings.Trim(list, ", ") == "" {
		return nil, fmt.Errorf("no factor: choose from %s, all, none", Join(AllFactors))
	}
	var names []Factor
	for name := range strings.SplitSeq(list, ",") {
		switch name = strings.TrimSpace(name); name {
		case "none", "":
			continue
		case "all":
			names = append(names, AllFactors...)
			continue
		case "uid":
			name = "user"
		case "tz":
			name = "zone"
		}
		if !slices.Contains(AllFactors, Factor(name)) {
			return nil, fmt.Errorf("unknown factor %+.100q: choose from %s, all, none", name, Join(AllFactors))
		}
		names = append(names, Factor(name))
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Join lists factors as Choose parses them.
func Join(names []Factor) string {
	var b strings.Builder
	for i, name := range names {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(name))
	}
	return b.String()
}

// A Skipped is a factor that was not varied, with the reason.
type Skipped struct {
	Factor Factor `json:"factor"` // or "all", or one of unvaried
	Why    string `json:"why"`
}

// unvaried are conditions that no worker varies. They are reported if all factors are to vary.
var unvaried = []Skipped{
	{"memory", notVaried},
	{"free-space", notVaried},
	{"kernel", notVaried},
}

const notVaried = "Cloister does not vary it"

// isUnvaried reports whether s is one of unvaried, which only complete reports need.
func (s *Skipped) isUnvaried() bool { return slices.Contains(unvaried, *s) }
