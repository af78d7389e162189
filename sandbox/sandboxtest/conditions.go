// SPDX-License-Identifier: Apache-2.0

package sandboxtest

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/must"
)

// A surrounding is a condition that a shell can observe.
type surrounding struct {
	name   sandbox.Condition
	given  sandbox.Conditions
	script string
	// want is the script's output under it; "" if check decides.
	want string
	// check evaluates the outputs of a default run and of two runs under the condition; nil
	// if want decides.
	check func(usual, one, two string) bool
}

var surroundings = []surrounding{
	{
		name: sandbox.ConditionHostname, given: sandbox.Conditions{Hostname: "a-host.example"},
		// domainname(1) prints nothing here unless it is wrong, since not every host has it.
		script: "uname -n; ! type domainname >/dev/null || domainname | grep -vx a-host.example; cat /etc/hosts",
		want:   "a-host.example\n127.0.0.1 localhost a-host.example\n::1 localhost a-host.example\n",
	},
	{
		name: sandbox.ConditionUser, given: sandbox.Conditions{User: "mallory", UID: 4711},
		script: "id -un; id -gn; id -u; id -g; echo text >made && stat -c '%U %G %u' made; grep -c 4711 /etc/passwd || :",
		want:   "mallory\nmallory\n4711\n4711\nmallory mallory 4711\n1\n",
	},
	{
		name: sandbox.ConditionUmask, given: sandbox.Conditions{Umask: 0o027},
		script: "umask; echo >made; stat -c %a made", want: "0027\n640\n",
	},
	{
		name: sandbox.ConditionCPUs, given: sandbox.Conditions{CPUs: 1}, script: "nproc",
		check: func(usual, one, two string) bool {
			return usual == strconv.Itoa(runtime.NumCPU())+"\n" && one == "1\n" && two == one
		},
	},
	{
		name: sandbox.ConditionFixedLayout, given: sandbox.Conditions{FixedLayout: true},
		script: "grep stack /proc/self/maps",
		check:  func(usual, one, two string) bool { return one == two && one != usual && one != "" },
	},
	{
		name: sandbox.ConditionSkippedPIDs, given: sandbox.Conditions{SkippedPIDs: 40},
		script: "echo $$; sh -c 'echo $$; :'", want: "42\n43\n",
	},
	{
		name: sandbox.ConditionUptime, given: sandbox.Conditions{Uptime: 1000 * time.Hour},
		// When the shell started, in hundredths of a second since boot (proc_pid_stat(5)).
		script: "cut -d ' ' -f 22 /proc/self/stat",
		check: func(usual, one, two string) bool {
			return ticks(one) >= ticks(usual)+1000*3600*100 && ticks(two) >= ticks(one)
		},
	},
}

func ticks(text string) int {
	n, err := strconv.Atoi(strings.TrimSpace(text))
	if err != nil {
		return -1
	}
	return n
}

// conditions: each supported condition takes effect in a run and in no other of the same slot.
func conditions(t *testing.T, b sandbox.Backend) {
	f := must.Get(b.Probe(t.Context()))(t)
	say := func(t *testing.T, script string, given sandbox.Conditions) string {
		t.Helper()
		r := run(t, b, Run{Script: script, Spec: func(s *sandbox.Spec) { s.Conditions = given }})
		if r.Result.ExitCode != 0 {
			t.Fatalf("%q under %+v: exit code %d\n%s", script, given, r.Result.ExitCode, r.Stderr)
		}
		return r.Stdout
	}
	for _, c := range surroundings {
		t.Run(strings.ReplaceAll(string(c.name), " ", "-"), func(t *testing.T) {
			if !slices.Contains(f.Conditions, c.name) {
				r := Run{Script: c.script, Spec: func(s *sandbox.Spec) { s.Conditions = c.given }}
				if err := r.Try(t.Context(), t, b); !errors.Is(err, sandbox.ErrUnsupported) {
					t.Errorf("got %v, want ErrUnsupported", err)
				}
				need := "namespaces"
				if c.name == sandbox.ConditionUptime {
					need = "timens" // missing on some kernels
				}
				lacks(t, &f, need, fmt.Sprintf("it cannot change the %s", c.name))
			}
			usual := say(t, c.script, sandbox.Conditions{})
			one, two := say(t, c.script, c.given), say(t, c.script, c.given)
			switch {
			case c.check != nil && !c.check(usual, one, two):
				t.Errorf("default run: got %q, under the condition %q and %q", usual, one, two)
			case c.check == nil && (one != c.want || two != c.want || usual == c.want):
				t.Errorf("default run: got %q, under the condition %q and %q; want %q", usual, one, two, c.want)
			}
			// Random or increasing values differ again.
			again := say(t, c.script, sandbox.Conditions{})
			switch c.name {
			case sandbox.ConditionFixedLayout:
				if again == one {
					t.Errorf("the next default run has the fixed layout %q", again)
				}
			case sandbox.ConditionUptime:
				if ticks(again) >= ticks(one) {
					t.Errorf("the next default run began at %q, the one under the condition at %q", again, one)
				}
			default:
				if again != usual {
					t.Errorf("the next default run: got %q, the one before it %q", again, usual)
				}
			}
		})
	}
}

// conditionsTogether: all conditions at once, alternating with default runs.
func conditionsTogether(t *testing.T, b sandbox.Backend) {
	f := must.Get(b.Probe(t.Context()))(t)
	if len(f.Conditions) == 0 {
		Unavailable(t, "namespaces", "this host cannot change any condition")
	}
	var given sandbox.Conditions
	for _, c := range surroundings {
		if slices.Contains(f.Conditions, c.name) {
			given = join(given, c.given)
		}
	}
	script := "id -u; uname -n; umask; nproc"
	if f.Kernel == "" {
		script += "; echo $$" // which a run's own kernel chooses
	}
	usual := shell(t, b, script)
	var first string
	for range 3 {
		r := run(t, b, Run{Script: script, Spec: func(s *sandbox.Spec) { s.Conditions = given }})
		if first == "" {
			first = r.Stdout
		}
		if r.Result.ExitCode != 0 || r.Stdout != first || r.Stdout == usual {
			t.Errorf("got exit code %d, %q, first %q, by default %q", r.Result.ExitCode, r.Stdout, first, usual)
		}
		if got := shell(t, b, script); got != usual {
			t.Errorf("after it, default run: got %q, want %q", got, usual)
		}
	}
}

// join returns the conditions of both, at most one of which sets each.
func join(a, b sandbox.Conditions) sandbox.Conditions {
	return sandbox.Conditions{
		Hostname: a.Hostname + b.Hostname, User: a.User + b.User, UID: a.UID + b.UID,
		Umask: a.Umask + b.Umask, CPUs: a.CPUs + b.CPUs,
		FixedLayout: a.FixedLayout || b.FixedLayout, SkippedPIDs: a.SkippedPIDs + b.SkippedPIDs, Uptime: a.Uptime + b.Uptime,
	}
}
