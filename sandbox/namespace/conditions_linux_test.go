// SPDX-License-Identifier: Apache-2.0

package namespace_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/namespace"
	"github.com/cloister-build/cloister/sandbox/sandboxtest"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// TestConditionsEndInTheirSlot: a slot applies conditions to one run and to no other.
func TestConditionsEndInTheirSlot(t *testing.T) {
	t.Parallel()
	b, f := backend(t, namespace.Config{})
	for _, c := range sandbox.AllConditions[:7] {
		if err := f.Covers(under(c)); err != nil {
			sandboxtest.Unavailable(t, requirement(c), err)
		}
	}
	const script = "uname -n; id -u; umask; echo $$; cat /etc/hosts /etc/passwd; cat /proc/self/uid_map /proc/self/timens_offsets; grep Cpus_allowed: /proc/self/status"
	say := func(c sandbox.Conditions) string {
		t.Helper()
		r := sandboxtest.Run{Script: script, Spec: func(s *sandbox.Spec) { s.Conditions = c }}
		r.Do(t, b)
		must.Be(t, r.Result.ExitCode == 0, "exit code %d: %s", r.Result.ExitCode, r.Stderr)
		return r.Stdout
	}
	usual := say(sandbox.Conditions{})
	for _, c := range []sandbox.Conditions{
		all, {Hostname: "other"}, {User: "other", UID: 59_999}, {Umask: 0o077}, {CPUs: 1}, {FixedLayout: true}, {SkippedPIDs: 1000}, {Uptime: time.Hour}, all,
	} {
		if say(c) == usual && c.CPUs == 0 && !c.FixedLayout {
			t.Errorf("under %+v a run is as usual", c)
		}
		expect.Equal(t, say(sandbox.Conditions{}), usual, "a usual run after one under %+v", c)
	}
	expect.Equal(t, b.Slots(), 1, "slots; more show nothing")
}

// requirement is the word of CLOISTER_REQUIRE for a condition.
func requirement(c sandbox.Condition) string {
	if c == sandbox.ConditionUptime {
		return "timens" // which not every kernel has that has the others
	}
	return "namespaces"
}

// all changes every condition that a slot implements.
var all = sandbox.Conditions{
	Hostname: "elsewhere", User: "mallory", UID: 4711, Umask: 0o027, CPUs: 1, FixedLayout: true, SkippedPIDs: 7, Uptime: 100 * time.Hour,
}

// under returns a spec with one changed condition.
func under(name sandbox.Condition) *sandbox.Spec {
	s := &sandbox.Spec{Limits: sandboxtest.Limits()}
	switch name {
	case sandbox.ConditionHostname:
		s.Conditions.Hostname = all.Hostname
	case sandbox.ConditionUser:
		s.Conditions.User, s.Conditions.UID = all.User, all.UID
	case sandbox.ConditionUmask:
		s.Conditions.Umask = all.Umask
	case sandbox.ConditionCPUs:
		s.Conditions.CPUs = all.CPUs
	case sandbox.ConditionFixedLayout:
		s.Conditions.FixedLayout = true
	case sandbox.ConditionSkippedPIDs:
		s.Conditions.SkippedPIDs = all.SkippedPIDs
	case sandbox.ConditionUptime:
		s.Conditions.Uptime = all.Uptime
	}
	return s
}

// TestUsersComeLast: the descriptor of a run's user namespace is the last, however the plan travels and sources are
// attached.
func TestUsersComeLast(t *testing.T) {
	t.Parallel()
	b := namespace.NewAttached(namespace.Config{})
	t.Cleanup(func() { b.Close() })
	f, err := b.Probe(t.Context())
	if err == nil {
		err = f.Covers(under(sandbox.ConditionUser))
	}
	if err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	for _, more := range []int{0, 10} {
		r := sandboxtest.Run{Spec: func(s *sandbox.Spec) {
			s.Conditions = under(sandbox.ConditionUser).Conditions
			s.Args = []string{"/bin/sh", "-c", "id -u; touch made && stat -c %u made"}
			for range more {
				s.Args = append(s.Args, strings.Repeat("x", 50_000)) // which no packet has room for
			}
		}}
		if r.Do(t, b); r.Stdout != "4711\n4711\n" {
			t.Errorf("with %d long arguments: %q, %q", more, r.Stdout, r.Stderr)
		}
	}
}

// TestConditionsThatNobodyCanGive: unsupported conditions are refused.
func TestConditionsThatNobodyCanGive(t *testing.T) {
	t.Parallel()
	b, _ := backend(t, namespace.Config{})
	unprobed := namespace.New(namespace.Config{})
	defer unprobed.Close()
	for name, c := range map[string]struct {
		b     *namespace.Backend
		given sandbox.Conditions
	}{
		"more processors than there are": {b, sandbox.Conditions{CPUs: 100_000}},
		"before it was probed":           {unprobed, sandbox.Conditions{Hostname: "other"}},
	} {
		r := sandboxtest.Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Conditions = c.given }}
		expect.Error(t, r.Try(t.Context(), t, c.b), sandbox.ErrUnsupported, "%s", name)
	}
	// What cannot be is found out in pid 1, and says where.
	r := sandboxtest.Run{Script: "true", Spec: func(s *sandbox.Spec) { s.Conditions.Uptime = 1<<63 - 1 }}
	if err := r.Try(t.Context(), t, b); err == nil {
		t.Error("a run began 292 years after it could")
	} else {
		t.Log(err)
	}
	r = sandboxtest.Run{Script: "exit 3"}
	if r.Do(t, b); r.Result.ExitCode != 3 {
		t.Errorf("the next run: got exit code %d, want 3", r.Result.ExitCode)
	}
}

// TestConditionsThatTheHostDenies: if the host denies one condition, the others still work.
func TestConditionsThatTheHostDenies(t *testing.T) {
	t.Parallel()
	_, f := backend(t, namespace.Config{})
	if err := f.Covers(under(sandbox.ConditionFixedLayout)); err != nil {
		sandboxtest.Unavailable(t, "namespaces", err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), deniedVariable+"=all personality")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "tier "+f.Tier+": <nil>\n") || !strings.Contains(string(out), `"hostname" "user" "umask" "cpus" "skipped pids"`) {
		t.Errorf("got %q, %v; want all conditions but the fixed layout", out, err)
	}
}
