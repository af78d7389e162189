// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/telemetry"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// ends is an Executor with a fixed outcome.
type ends struct {
	out *worker.Outcome
	err error
}

func (e *ends) Execute(_ context.Context, _ *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	report(worker.StageFetch)
	report(worker.StageRun)
	return e.out, e.err
}

func TestActionsAreCountedByResult(t *testing.T) {
	exit := func(code int32) *repb.ActionResult { return &repb.ActionResult{ExitCode: code} }
	for want, e := range map[string]*ends{
		"ok":             {out: &worker.Outcome{Result: exit(0)}},
		"nonzero":        {out: &worker.Outcome{Result: exit(1)}},
		"signal":         {out: &worker.Outcome{Result: exit(139)}},
		"timeout":        {out: &worker.Outcome{Result: exit(143), Status: worker.StatusTimedOut}},
		"oom":            {out: &worker.Outcome{Result: exit(137), Exceeded: sandbox.LimitMemory}},
		"limit":          {out: &worker.Outcome{Result: exit(137), Exceeded: sandbox.LimitCPU}},
		"violation_fail": {out: &worker.Outcome{Result: exit(4), OnViolation: "fail", Exceeded: sandbox.LimitProcesses}},
		"violation_kill": {out: &worker.Outcome{Result: exit(137), OnViolation: "kill"}},
		"cached":         {out: &worker.Outcome{Result: exit(0), Cached: true}},
		"rejected":       {err: &worker.Fault{Kind: worker.FaultUnmet, Err: errors.New("x")}},
		"cancelled":      {err: &worker.Fault{Kind: worker.FaultCancelled, Err: errors.New("x")}},
		"infra":          {err: &worker.Fault{Kind: worker.FaultInternal, Err: errors.New("x")}},
	} {
		r := prometheus.NewRegistry()
		m := must.Get(telemetry.New(r, nil))(t)
		var stages []worker.Stage
		out, err := m.Executor(e).Execute(t.Context(), &worker.Task{}, func(s worker.Stage) { stages = append(stages, s) })
		expect.That(t, out == e.out && err == e.err && len(stages) == 2,
			"%s: got %v, %v, stages %v, want those of the executor", want, out, err, stages)
		text := `
# HELP cloister_actions_total Completed actions by result.
# TYPE cloister_actions_total counter
cloister_actions_total{result="` + want + `"} 1
`
		must.Succeed(t, testutil.GatherAndCompare(r, strings.NewReader(text), "cloister_actions_total"))
		if n, err := testutil.GatherAndCount(r, "cloister_action_stage_duration_seconds"); n != 2 || err != nil {
			t.Errorf("%s: got %d timed stages, %v, want 2", want, n, err)
		}
	}
}

func TestViolationsAreCountedByKind(t *testing.T) {
	r := prometheus.NewRegistry()
	m := must.Get(telemetry.New(r, nil))(t)
	expect.That(t, expect.Err(telemetry.New(r, nil)) != nil, "New registered the same names twice")
	m.Violations(&worker.Violations{
		Events: []sandbox.Event{
			{Kind: sandbox.EventConnect, Subject: "tcp 10.0.0.1:1", Count: 3},
			{Kind: sandbox.EventConnect, Subject: "tcp 10.0.0.2:1", Count: 1},
			{Kind: sandbox.EventWrite, Subject: "/x", Count: 1},
		},
		Unrecorded: 7,
	})
	const want = `
# HELP cloister_sandbox_violations_total Operations that the sandbox denied, and limits that actions hit, by kind of event.
# TYPE cloister_sandbox_violations_total counter
cloister_sandbox_violations_total{kind="connect"} 4
cloister_sandbox_violations_total{kind="unrecorded"} 7
cloister_sandbox_violations_total{kind="write"} 1
`
	must.Succeed(t, testutil.GatherAndCompare(r, strings.NewReader(want), "cloister_sandbox_violations_total"))
}
