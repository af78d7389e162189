// SPDX-License-Identifier: Apache-2.0

package sandbox_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// unusual has, for each condition, Conditions that change it and how Spec.Text shows it.
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
	sandbox.ConditionFiles:       {sandbox.Conditions{InputTime: 1, InputOwner: 2, OutputOrder: 3}, "1 2 3"},
}

// TestEachConditionIsInTextAndCovers: Text shows each condition, and Covers refuses those that Features lack.
func TestEachConditionIsInTextAndCovers(t *testing.T) {
	// User and UID are one condition, and so are InputTime, InputOwner and OutputOrder.
	if n := reflect.TypeFor[sandbox.Conditions]().NumField() - 3; n != len(sandbox.AllConditions) || n != len(unusual) {
		t.Fatalf("got %d fields, %d listed and %d tested conditions", n, len(sandbox.AllConditions), len(unusual))
	}
	usual := valid()
	able := sandbox.Features{
		Limits: sandbox.AllLimits, Audits: []sandbox.Audit{sandbox.AuditViolations}, Endpoints: true, ListenControl: true,
	}
	must.Succeed(t, able.Covers(usual))
	for i, name := range sandbox.AllConditions {
		s := valid()
		s.Conditions = unusual[name].given
		expect.Error(t, s.Validate(), nil, "%s", name)
		line := `condition "` + string(name) + `" ` + unusual[name].text + "\n"
		if got := s.Text(); strings.Replace(got, line, "", 1) != usual.Text() || got == usual.Text() {
			t.Errorf("%s: got\n%s\nwant the line %q", name, got, line)
		}
		f := able
		f.Conditions = slices.Concat(sandbox.AllConditions[:i], sandbox.AllConditions[i+1:])
		if err := f.Covers(s); !errors.Is(err, sandbox.ErrUnsupported) || !strings.Contains(err.Error(), string(name)) {
			t.Errorf("%s: got %v, want ErrUnsupported that names it", name, err)
		}
		f.Conditions = []sandbox.Condition{name}
		expect.Error(t, f.Covers(s), nil, "%s: Covers with this feature", name)
	}
}

func TestValidateRefusesConditions(t *testing.T) {
	for name, c := range map[string]sandbox.Conditions{
		"host name with a newline":    {Hostname: "a\nb"},
		"upper-case host name":        {Hostname: "A"},
		"host name too long":          {Hostname: strings.Repeat("a", 64)},
		"user without a number":       {User: "mallory"},
		"number without a user":       {UID: 4711},
		"user with a colon":           {User: "a:b", UID: 4711},
		"root":                        {User: "root", UID: 4711},
		"nobody":                      {User: "nobody", UID: 4711},
		"system user number":          {User: "mallory", UID: 999},
		"user number too high":        {User: "mallory", UID: 60_000},
		"umask with more bits":        {Umask: 0o1000},
		"negative processors":         {CPUs: -1},
		"negative process IDs":        {SkippedPIDs: -1},
		"too many process IDs":        {SkippedPIDs: 1001},
		"negative uptime":             {Uptime: -1},
		"before 1970":                 {FrozenClock: -1},
		"frozen clock with an offset": {FrozenClock: 1, ClockOffset: 1},
		"inputs before 1970":          {InputTime: -1},
		"negative order":              {OutputOrder: -1},
	} {
		s := valid()
		s.Conditions = c
		expect.Error(t, s.Validate(), sandbox.ErrSpec, "%s", name)
	}
}
