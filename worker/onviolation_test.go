// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/sandbox/policy"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// setPolicy makes b follow a policy with this built-in profile.
func (b *bench) setPolicy(build string) {
	b.t.Helper()
	p := must.Get(policy.Parse("policy.yaml", []byte("version: 1\nprofiles: {build: "+build+"}\n")))(b.t)
	b.cfg.Policy = p
}

// TestViolationsThatCount: they make an action fail or kill it, wherever the policy or the action says so and for these
// kinds only. The result is never cached, and every record says which it was.
func TestViolationsThatCount(t *testing.T) {
	write := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/x", Syscall: "openat", Process: "sh", Count: 1}
	module := sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/__pycache__", Syscall: "mkdir", Process: "python3", Count: 1}
	forks := sandbox.Event{Kind: sandbox.EventLimit, Subject: string(sandbox.LimitProcesses), Actual: "128", Limit: "128", LimitValue: 128, Count: 1}
	const profile, property = `, by on_violation of profile "build"`, ", by property cloister-on-violation"
	for _, c := range []struct {
		name, build, property string
		result                sandbox.Result
		did                   string
		code                  int32
		line                  string // the first of the message
	}{
		{"report", "{on_violation: report}", "", sandbox.Result{Events: []sandbox.Event{connect, write}}, "", 0, connect.String()},
		{
			"fail", "{on_violation: fail}", "",
			sandbox.Result{Events: []sandbox.Event{connect}},
			"fail", 4,
			"failed for its violations" + profile + ": exit code 4 instead of 0",
		},
		{
			"a failure", "{on_violation: fail}", "",
			sandbox.Result{ExitCode: 3, Events: []sandbox.Event{connect}},
			"fail", 3,
			"; its violations count" + profile,
		},
		{
			"property", "{}", "fail",
			sandbox.Result{Events: []sandbox.Event{write}},
			"fail", 4,
			"failed for its violations" + property + ": exit code 4 instead of 0",
		},
		{"another kind", "{on_violation: {network: fail}}", "", sandbox.Result{Events: []sandbox.Event{write}}, "", 0, write.String()},
		{"another kind by property", "{}", "write:fail,exec:kill", sandbox.Result{Events: []sandbox.Event{connect}}, "", 0, connect.String()},
		{"a cached module", "{on_violation: fail}", "", sandbox.Result{Events: []sandbox.Event{module}}, "", 0, module.String()},
		{"no violation", "{on_violation: kill}", "", sandbox.Result{}, "", 0, ""},
		{
			"killed", "{on_violation: {network: kill}}", "",
			sandbox.Result{ExitCode: 137, Signal: 9, KilledForViolation: true, Events: []sandbox.Event{connect}},
			"kill", 137, "killed at its first violation" + profile,
		},
		{
			"a stricter property", "{on_violation: fail}", "kill",
			sandbox.Result{ExitCode: 137, Signal: 9, KilledForViolation: true, Events: []sandbox.Event{connect}},
			"kill", 137, "killed at its first violation" + property,
		},
		{
			"known at the end", "{on_violation: kill}", "",
			sandbox.Result{Events: []sandbox.Event{{Kind: sandbox.EventExec, Subject: "/x", Count: 1}}},
			"fail", 4, "failed for its violations" + profile + ": exit code 4 instead of 0",
		},
		{
			"a limit", "{on_violation: {limit: fail}}", "",
			sandbox.Result{Exceeded: &forks, Events: []sandbox.Event{forks}},
			"fail", 4,
			`reached the limit of 128 processes (profile build); raise it with exec_properties = {"cloister-processes": "256"}; its violations count` + profile,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var kill []sandbox.EventKind
			b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
				kill = spec.Kill
				return &c.result
			})
			b.setPolicy(c.build)
			action := b.action(command(func(cmd *repb.Command) {
				if cmd.OutputPaths = nil; c.property != "" {
					cmd.Platform = platform("cloister-on-violation", c.property)
				}
			}))
			out := b.do(&Task{Action: action})
			if out.OnViolation != c.did || out.Result.ExitCode != c.code || b.execution(out).OnViolation != c.did {
				t.Errorf("got %q, exit code %d, metadata %q; want %q, %d", out.OnViolation, out.Result.ExitCode, b.execution(out).OnViolation, c.did, c.code)
			}
			if cached := c.did == "" && c.code == 0; out.Uncacheable == cached || b.recorded(action) != cached {
				t.Errorf("got uncacheable %t, recorded %t, want cached: %t", out.Uncacheable, b.recorded(action), cached)
			}
			if first, rest, _ := strings.Cut(out.Message, "\n"); !strings.HasSuffix(first, c.line) || c.did != "" && rest == "" && c.name != "a limit" {
				t.Errorf("got message %q, want the first line to end with %q, and a line for each violation", out.Message, c.line)
			}
			if len(c.result.Events) > 0 {
				if len(b.audited) != 1 || b.audited[0].OnViolation != c.did || b.audited[0].ExitCode != int(c.code) {
					t.Errorf("got audit %+v, want one entry with %q and exit code %d", b.audited, c.did, c.code)
				}
				if says := strings.Contains(b.text(out), "\non violation "+c.did+"\n"); says != (c.did != "") {
					t.Errorf("got server log\n%s", b.text(out))
				}
			}
			expect.That(t, !c.result.KilledForViolation || slices.Contains(kill, sandbox.EventConnect),
				"the Spec kills for %v", kill)
		})
	}
}

// TestShellSurvivesItsViolations: a person can find out in the action's sandbox why it was killed.
func TestShellSurvivesItsViolations(t *testing.T) {
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		return &sandbox.Result{Events: []sandbox.Event{connect}, KilledForViolation: len(spec.Kill) > 0}
	})
	b.setPolicy("{on_violation: {network: kill, write: fail}}")
	out := b.do(&Task{Action: b.action(nil), Args: []string{"/bin/sh", "-i"}})
	expect.That(t, out.OnViolation == "" && out.Result.ExitCode == 0,
		"got %q, exit code %d; want no effect and 0", out.OnViolation, out.Result.ExitCode)
}

// TestCountedViolationsComeFirst: the message, which is short, does not hide the violation that made the action fail.
func TestCountedViolationsComeFirst(t *testing.T) {
	events := []sandbox.Event{{Kind: sandbox.EventRead, Subject: "secret", Count: 1}}
	for _, p := range []string{"1", "2", "3", "4", "5", "6"} {
		events = append(events, sandbox.Event{Kind: sandbox.EventWrite, Subject: "/usr/" + p, Count: 1})
	}
	b := newBench(t, ended(0, events...))
	b.setPolicy("{on_violation: {read: fail}, audit: full}")
	out := b.do(&Task{Action: b.action(nil)})
	if lines := strings.Split(out.Message, "\n"); len(lines) < 2 || lines[1] != "cloister: "+events[0].String() {
		t.Errorf("got message %q, want the read first", out.Message)
	}
}

// TestPropertyCannotWeakenThePolicy: the refusal names what the policy requires, before anything runs.
func TestPropertyCannotWeakenThePolicy(t *testing.T) {
	b := newBench(t, ended(0))
	b.setPolicy("{on_violation: {network: kill, write: fail}}")
	for value, need := range map[string]string{
		"report": "network: kill", "fail": "network: kill", "network:report": "network: kill", "write:report,network:kill": "write: fail",
	} {
		action := b.action(command(func(c *repb.Command) { c.Platform = platform("cloister-on-violation", value) }))
		b.want(value, action, FaultUnmet, "property cloister-on-violation="+value, "requires at least "+need)
	}
}

// TestViolationsThatCountNeedTheirMonitor: a worker that cannot notice them refuses the action.
func TestViolationsThatCountNeedTheirMonitor(t *testing.T) {
	for _, c := range []struct {
		build string
		ok    bool
	}{
		{"{on_violation: fail}", false},
		{"{on_violation: {write: kill}}", false},
		{"{on_violation: {syscall: fail}, audit: off}", false},
		{"{on_violation: {limit: fail}}", true},
		{"{on_violation: report}", true},
	} {
		b := newBench(t, ended(0))
		b.cfg.Features.Audits = []sandbox.Audit{sandbox.AuditOff}
		b.setPolicy(c.build)
		if action := b.action(nil); c.ok {
			b.do(&Task{Action: action})
		} else {
			b.want(c.build, action, FaultUnmet, "audit level attempts")
		}
	}
}

// TestCancelledRunRecordsItsViolations: the audit log says what they did, even though nobody gets the result.
func TestCancelledRunRecordsItsViolations(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
		cancel()
		return &sandbox.Result{Events: []sandbox.Event{connect}}
	})
	b.setPolicy("{on_violation: fail}")
	_, err := b.Execute(ctx, &Task{Action: b.action(nil)}, nil)
	wantFault(t, "a cancelled run", err, FaultCancelled)
	expect.That(t, len(b.audited) == 1 && b.audited[0].OnViolation == "fail",
		"got audit %+v, want one entry with \"fail\"", b.audited)
}
