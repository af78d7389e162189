// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"slices"
	"strings"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A Factor is one named thing that a run can notice and that is no input of it. It can be varied: a run then notices
// something else than the usual run, and than every other run that varies it. And it can be held: all runs then notice
// the same. What has neither a vary nor a hold of its own is other in each run, or the same in each, by itself.
type Factor struct {
	// Name is what a person chooses it by.
	Name string
	// Changes says what is other in a varied run, in a few words.
	Changes string
	// Cause is why outputs differ that only this factor changes, where the outputs themselves do not tell.
	Cause compare.Cause

	causes []compare.Cause // others that it can have, by what outputs look like

	needs []sandbox.Condition // of the sandbox, to vary it
	holds []sandbox.Condition // of the sandbox, to hold it
	// unfit says why it cannot be varied for the action of a scene, "" if it can.
	unfit func(s *scene) string
	// vary sets what run i, from 1, notices.
	vary func(v *worker.Variation, i int, s *scene)
	hold func(v *worker.Variation)
	// copies is how many further runs are made beside a varied one.
	copies int
}

// explains reports whether a factor can be why things differ for which a cause is likely by what they look like.
func (f *Factor) explains(c compare.Cause) bool {
	return c == f.Cause || slices.Contains(f.causes, c)
}

// shows reports whether what a factor changes may look as if it had a cause: a local time looks like any other.
func (f *Factor) shows(c compare.Cause) bool {
	return f.explains(c) || f.Cause == compare.Zone && c == compare.Timestamp
}

// factorOf returns the factor of a name, which is one of Names.
func factorOf(name string) *Factor {
	i := slices.IndexFunc(factors, func(f Factor) bool { return f.Name == name })
	return &factors[i]
}

// A scene is what is known of the action and of the host where it is varied.
type scene struct {
	command  *repb.Command
	features *sandbox.Features
	host     Host
	seed     *uint64 // of the task
}

// Host is what of this host decides on how runs can be varied. Its zero value is a host of which nothing is known.
type Host struct {
	CPUs    int      // that runs may use
	Locales []string // that are installed, besides C and POSIX
	Zones   []string // names of time zones that programs find, of those in zones
}

// heldTime is when a run begins whose clock is held: a moment at which it is another day in each of zones.
const heldTime = 1_700_046_000 // 2023-11-15 11:00:00 UTC

// zones are where it is another day than in UTC for ten hours or more of each day, and for all for one hour.
var zones = []string{"Etc/GMT-14", "Etc/GMT+12", "Etc/GMT-13"}

// posixZones are the same for programs that find no names of zones (POSIX.1-2017, section 8.3).
var posixZones = []string{"CLA-14", "CLB+12", "CLC-13"}

// factors are all factors, in the order in which a person is told of them and of which the first wins that explains a
// difference.
var factors = []Factor{
	{
		Name: "time", Changes: "time of day, by more than a year", Cause: compare.Timestamp,
		causes: []compare.Cause{compare.BuildDate},
		needs:  []sandbox.Condition{sandbox.ConditionClockOffset}, holds: []sandbox.Condition{sandbox.ConditionFrozenClock},
		vary: func(v *worker.Variation, i int, _ *scene) { v.Conditions.ClockOffset = clockShift(i) },
		hold: func(v *worker.Variation) { v.Conditions.FrozenClock = heldTime },
	},
	{
		Name: "zone", Changes: "time zone (TZ)", Cause: compare.Zone,
		causes: []compare.Cause{compare.BuildDate},
		unfit:  declares("TZ"),
		vary: func(v *worker.Variation, i int, s *scene) {
			names := s.host.Zones
			if len(names) == 0 {
				names = posixZones
			}
			v.Env = append(v.Env, "TZ="+cycle(names, i))
		},
	},
	{
		Name: "user", Changes: "name and number of the user", Cause: compare.Owner,
		causes: []compare.Cause{compare.Path}, // of a home
		needs:  []sandbox.Condition{sandbox.ConditionUser},
		vary: func(v *worker.Variation, i int, _ *scene) {
			v.Conditions.User, v.Conditions.UID = fmt.Sprintf("somebody%d", i), uint32(20_000+i)
		},
	},
	{
		Name: "hostname", Changes: "name of the host", Cause: compare.Hostname,
		needs: []sandbox.Condition{sandbox.ConditionHostname},
		vary:  func(v *worker.Variation, i int, _ *scene) { v.Conditions.Hostname = fmt.Sprintf("elsewhere%d", i) },
	},
	{
		Name: "locale", Changes: "language and sorting (LC_ALL, LANG)", Cause: compare.Locale,
		// Shells and Perl complain, to stderr, of a locale that is not there: no fault of the action's.
		unfit: declares("LANG", "LANGUAGE", "LC_*"),
		vary: func(v *worker.Variation, i int, s *scene) {
			names := s.host.Locales
			if len(names) == 0 {
				names = []string{"C.UTF-8"} // which C libraries have built in
			}
			name := cycle(names, i)
			v.Env = append(v.Env, "LANG="+name, "LC_ALL="+name)
		},
	},
	{
		Name: "umask", Changes: "mask of modes of new files", Cause: compare.Mode,
		needs: []sandbox.Condition{sandbox.ConditionUmask},
		vary: func(v *worker.Variation, i int, _ *scene) {
			v.Conditions.Umask = cycle([]uint32{0o077, 0o002, 0o027, 0o007}, i)
		},
	},
	{
		Name: "cpus", Changes: "number of processors", Cause: compare.Processors,
		causes: []compare.Cause{compare.Parallel},
		needs:  []sandbox.Condition{sandbox.ConditionCPUs},
		unfit: func(s *scene) string {
			if s.host.CPUs == 1 {
				return "this host has one processor"
			}
			return ""
		},
		vary: func(v *worker.Variation, i int, s *scene) {
			v.Conditions.CPUs = 1 + (i-1)%max(1, min(s.host.CPUs-1, 4))
		},
	},
	{
		Name: "readdir", Changes: "order in which directories of inputs list their entries", Cause: compare.MemberOrder,
		vary: func(v *worker.Variation, i int, _ *scene) { v.Order = heldOrder + uint64(i) },
		hold: func(v *worker.Variation) { v.Order = heldOrder },
	},
	{
		Name: "path", Changes: "path of the working directory", Cause: compare.Path,
		vary: func(v *worker.Variation, i int, _ *scene) {
			v.Root = "/b/" + strings.Repeat("x", (i-1)%40+1) + "/build"
		},
	},
	{
		Name: "aslr", Changes: "where in memory things lie", Cause: compare.Address,
		causes: []compare.Cause{compare.HashSeed}, // tables of things by where they lie
		holds:  []sandbox.Condition{sandbox.ConditionFixedLayout},
		hold:   func(v *worker.Variation) { v.Conditions.FixedLayout = true },
	},
	{
		Name: "random", Changes: "what the kernel gives as random", Cause: compare.Random,
		causes: []compare.Cause{compare.HashSeed, compare.BuildID, compare.Path}, // of a temporary file
		holds:  []sandbox.Condition{sandbox.ConditionRandomSeed},
		unfit: func(s *scene) string {
			if s.seed != nil {
				return "the seed of it is stated"
			}
			return ""
		},
		hold: func(v *worker.Variation) { v.Conditions.RandomSeed = 1 },
	},
	{
		Name: "pids", Changes: "numbers of processes", Cause: compare.ProcessID,
		causes: []compare.Cause{compare.Random, compare.Path}, // of a temporary file
		needs:  []sandbox.Condition{sandbox.ConditionSkippedPIDs},
		vary:   func(v *worker.Variation, i int, _ *scene) { v.Conditions.SkippedPIDs = (i*117-1)%1000 + 1 },
	},
	{
		Name: "uptime", Changes: "time since boot", Cause: compare.Uptime,
		needs: []sandbox.Condition{sandbox.ConditionUptime},
		vary:  func(v *worker.Variation, i int, _ *scene) { v.Conditions.Uptime = time.Duration(i) * 2191 * time.Hour },
	},
	{
		Name: "environment", Changes: "a variable that is none of the command's", Cause: compare.Environment,
		unfit: declares(padding),
		vary: func(v *worker.Variation, i int, _ *scene) {
			v.Env = append(v.Env, padding+"="+strings.Repeat("x", 100+(i*37)%1000))
		},
	},
	{
		Name: "parallel", Changes: "another run of the action at the same time", Cause: compare.Parallel,
		copies: 1,
	},
}

const (
	padding   = "CLOISTER_PADDING"
	heldOrder = 1
)

// clockShift is by how much the clock of run i is fast: more than a year and less than eleven, so that clocks of 32 bits
// last, and never by whole days or hours.
func clockShift(i int) time.Duration {
	return time.Duration((i-1)%9+1)*400*24*time.Hour + time.Duration(i)*(7*time.Hour+13*time.Minute+29*time.Second)
}

func cycle[T any](of []T, i int) T { return of[(i-1)%len(of)] }

// declares returns a Factor.unfit for variables: what a command sets itself is an input of it, and to vary it would not be
// fair. A name that ends in "*" stands for all that begin so.
func declares(names ...string) func(*scene) string {
	return func(s *scene) string {
		for _, v := range s.command.GetEnvironmentVariables() {
			for _, name := range names {
				if begin, all := strings.CutSuffix(name, "*"); v.Name == name || all && strings.HasPrefix(v.Name, begin) {
					return "the command sets " + v.Name
				}
			}
		}
		return ""
	}
}

// Factors returns all factors.
func Factors() []Factor { return slices.Clone(factors) }

// Choose returns the names of the factors that a list of names, divided by commas, means: "all", "none", or some. "uid"
// and "tz" are what people call two of them. That the list is empty is a mistake, lest a variable of a shell that is not set finds everything the
// same.
func Choose(list string) ([]string, error) {
	if strings.Trim(list, ", ") == "" {
		return nil, fmt.Errorf("nothing is chosen: choose from %s, all, none", strings.Join(Names(), ", "))
	}
	names := []string{}
	for name := range strings.SplitSeq(list, ",") {
		switch name = strings.TrimSpace(name); name {
		case "none", "":
			continue
		case "all":
			for _, f := range factors {
				names = append(names, f.Name)
			}
			continue
		case "uid":
			name = "user"
		case "tz":
			name = "zone"
		}
		if !slices.ContainsFunc(factors, func(f Factor) bool { return f.Name == name }) {
			return nil, fmt.Errorf("%+.100q is nothing that can be varied: choose from %s, all, none", name, strings.Join(Names(), ", "))
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Names returns the names of all factors.
func Names() []string {
	var names []string
	for _, f := range factors {
		names = append(names, f.Name)
	}
	return names
}

// A Skipped is a factor that was not varied, and why.
type Skipped struct {
	Factor string `json:"factor"`
	Why    string `json:"why"`
}

// fit returns those of the named factors, nil being all, that can be varied in a scene, and those that cannot. What can
// neither be varied nor held is left out as well: nothing about it can be found out.
func (s *scene) fit(names []string) (fit []Factor, skipped []Skipped) {
	for _, f := range factors {
		if names != nil && !slices.Contains(names, f.Name) {
			continue
		}
		why := s.lacks(f.needs)
		if why == "" && f.unfit != nil {
			why = f.unfit(s)
		}
		if why != "" {
			skipped = append(skipped, Skipped{f.Name, why})
			continue
		}
		fit = append(fit, f)
	}
	return fit, skipped
}

// lacks says which of the conditions the host cannot give, "" if none.
func (s *scene) lacks(conditions []sandbox.Condition) string {
	for _, c := range conditions {
		if s.features == nil || !slices.Contains(s.features.Conditions, c) {
			return "this worker cannot vary it"
		}
	}
	return ""
}

// usual returns what a run is given of which nothing is varied: its randomness, if it is stated.
func (s *scene) usual() *worker.Variation {
	v := &worker.Variation{}
	if s.seed != nil && s.lacks([]sandbox.Condition{sandbox.ConditionRandomSeed}) == "" {
		v.Conditions.RandomSeed = *s.seed + 1 // zero is the kernel's own, and a seed may be zero
	}
	return v
}

// varied returns what run i, from 1, is given if the factors vary, and how many copies run beside it.
func (s *scene) varied(fs []Factor, i int) (v *worker.Variation, copies int) {
	v = s.usual()
	for _, f := range fs {
		if f.vary != nil {
			f.vary(v, i, s)
		}
		copies += f.copies
	}
	return v, copies
}

// held returns what a run is given of which only the factor vary, which may be nil, is not held, and of all other factors
// those that can be. Random numbers and addresses vary by not being held.
func (s *scene) held(vary *Factor, i int) (v *worker.Variation, copies int) {
	v = s.usual()
	for _, f := range factors {
		switch {
		case vary != nil && f.Name == vary.Name:
			if f.vary != nil {
				f.vary(v, i, s)
			}
			copies += f.copies
		case f.hold != nil && (s.seed == nil || f.Name != "random") && s.lacks(f.holds) == "":
			f.hold(v)
		}
	}
	return v, copies
}
