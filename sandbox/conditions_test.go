// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
)

// unusual are Conditions that are unusual in one way each, and how the text of a Spec says that.
var unusual = map[sandbox.Condition]struct {
	given sandbox.Conditions
	text  string
}{
	sandbox.ConditionHostname:    {sandbox.Conditions{Hostname: "a-host"}, `"a-host"`},
	sandbox.ConditionUser:        {sandbox.Conditions{User: "mallory", UID: 4711}, `"mallory" 4711`},
	sandbox.ConditionUmask:       {sandbox.Conditions{Umask: 0o27}, "0027"},
	sandbox.ConditionCPUs:        {sandbox.Conditions{CPUs: 1}, "1"},
	sandbox.ConditionFixedLayout: {sandbox.Conditions{FixedLayout: true}, "true"},
	sandbox.ConditionSkippedPIDs: {sandbox.Conditions{SkippedPIDs: 7}, "7"},
	sandbox.ConditionUptime:      {sandbox.Conditions{Uptime: time.Hour}, "1h0m0s"},
	sandbox.ConditionClockOffset: {sandbox.Conditions{ClockOffset: -time.Nanosecond}, "-1ns"},
	sandbox.ConditionFrozenClock: {sandbox.Conditions{FrozenClock: 1}, "1"},
	sandbox.ConditionRandomSeed:  {sandbox.Conditions{RandomSeed: 1<<64 - 1}, "18446744073709551615"},
}

// TestEachConditionIsSaidAndCovered: what a run is given otherwise stands in its text, and nobody gives it who does not say
// that he can.
func TestEachConditionIsSaidAndCovered(t *testing.T) {
	// Name and number of the user are one.
	if n := reflect.TypeFor[sandbox.Conditions]().NumField() - 1; n != len(sandbox.AllConditions) || n != len(unusual) {
		t.Fatalf("there are %d conditions, of which %d are listed and %d are tried", n, len(sandbox.AllConditions), len(unusual))
	}
	usual := valid()
	able := sandbox.Features{
		Limits: sandbox.AllLimits, Audits: []sandbox.Audit{sandbox.AuditViolations}, Endpoints: true, ListenControl: true,
	}
	if err := able.Covers(usual); err != nil {
		t.Fatal(err)
	}
	for i, name := range sandbox.AllConditions {
		s := valid()
		s.Conditions = unusual[name].given
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		line := `condition "` + string(name) + `" ` + unusual[name].text + "\n"
		if got := s.Text(); strings.Replace(got, line, "", 1) != usual.Text() || got == usual.Text() {
			t.Errorf("%s: got\n%s\nwant the line %q", name, got, line)
		}
		f := able
		f.Conditions = append(append([]sandbox.Condition{}, sandbox.AllConditions[:i]...), sandbox.AllConditions[i+1:]...)
		if err := f.Covers(s); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), string(name)) {
			t.Errorf("%s: who cannot give it says %v", name, err)
		}
		f.Conditions = []sandbox.Condition{name}
		if err := f.Covers(s); err != nil {
			t.Errorf("%s: who can give it says %v", name, err)
		}
	}
}

func TestConditionsThatCannotBe(t *testing.T) {
	for name, c := range map[string]sandbox.Conditions{
		"a host of two lines":        {Hostname: "a\nb"},
		"a host in upper case":       {Hostname: "A"},
		"a host too long":            {Hostname: strings.Repeat("a", 64)},
		"a user without a number":    {User: "mallory"},
		"a number without a user":    {UID: 4711},
		"a user with a colon":        {User: "a:b", UID: 4711},
		"root":                       {User: "root", UID: 4711},
		"nobody":                     {User: "nobody", UID: 4711},
		"a number of the system's":   {User: "mallory", UID: 999},
		"a number beyond the usual":  {User: "mallory", UID: 60_000},
		"a umask of more bits":       {Umask: 0o1000},
		"less than no processor":     {CPUs: -1},
		"less than no process":       {SkippedPIDs: -1},
		"too many processes":         {SkippedPIDs: 1001},
		"before the boot":            {Uptime: -1},
		"before 1970":                {FrozenClock: -1},
		"a clock that is held twice": {FrozenClock: 1, ClockOffset: 1},
	} {
		s := valid()
		s.Conditions = c
		if err := s.Validate(); !errors.Is(err, sandbox.ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
}
