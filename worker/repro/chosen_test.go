// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
)

// A changed is an Executor that changes outcomes.
type changed struct {
	worker.Executor
	change func(*worker.Task, *worker.Outcome)
}

func (c changed) Execute(ctx context.Context, t *worker.Task, report func(worker.Stage)) (*worker.Outcome, error) {
	out, err := c.Executor.Execute(ctx, t, report)
	if err == nil {
		c.change(t, out)
	}
	return out, err
}

func TestSamplerSkipsCachedFailedAndInteractiveRuns(t *testing.T) {
	for name, c := range map[string]struct {
		task    func(*worker.Task)
		outcome func(*worker.Task, *worker.Outcome)
		waiting int
	}{
		"usual":     {waiting: 1},
		"failed":    {outcome: func(_ *worker.Task, o *worker.Outcome) { o.Result.ExitCode = 1 }, waiting: 1},
		"cached":    {outcome: func(_ *worker.Task, o *worker.Outcome) { o.Cached = true }},
		"limited":   {outcome: func(_ *worker.Task, o *worker.Outcome) { o.Uncacheable = true }},
		"timed out": {outcome: func(_ *worker.Task, o *worker.Outcome) { o.Status = worker.StatusTimedOut }},
		"varied":    {task: func(t *worker.Task) { t.Variation = &worker.Variation{} }},
		"by hand":   {task: func(t *worker.Task) { t.Args = []string{"sh"} }},
		"watched":   {task: func(t *worker.Task) { t.Terminal = os.Stdin }},
	} {
		s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
		e := s.sampler(b, false, func(config *repro.SamplerConfig) {
			if c.outcome != nil {
				config.Executor = changed{s, c.outcome}
			}
		})
		task := s.action()
		if c.task != nil {
			c.task(task)
		}
		execute(t, e, task)
		expect.Equal(t, e.Waiting(), c.waiting, "%s: waiting", name)
	}
}

func TestBacklogBytesAreLimited(t *testing.T) {
	s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
	large := make([]byte, 1<<20)
	e := s.sampler(b, false, func(c *repro.SamplerConfig) {
		c.Executor = changed{s, func(_ *worker.Task, o *worker.Outcome) { o.Result.StdoutRaw = large }}
	})
	for i := range 70 {
		execute(t, e, s.action(fmt.Sprint("A=", i)))
	}
	if e.Waiting() != 63 || b.counts["skipped"] != 7 {
		t.Errorf("got %d waiting, counts %v", e.Waiting(), b.counts)
	}
}

func TestExecutableBitIsADifference(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	o := s.options()
	o.Executors[0].Executor = changed{s, func(t *worker.Task, o *worker.Outcome) {
		o.Result.OutputFiles[0].IsExecutable = t.Variation.Conditions.Umask == 0o077
	}}
	v := check(t, s.action(), o)
	expect.That(t, v.Result == repro.Differs && len(v.Differences) == 1 && v.Differences[0].What == "executable",
		"got %s, %+v", v.Result, v.Differences)
}

func TestFiftyOutputsAreExplained(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		m := made{files: map[string]string{}}
		for i := range 60 {
			m.files[fmt.Sprintf("out%02d", i)] = fmt.Sprint(n)
		}
		return m
	})
	v := check(t, s.action(), s.options())
	differing := 0
	for _, o := range v.Outputs {
		if o.Differ {
			differing++
		}
	}
	outputs := map[string]bool{}
	for _, d := range v.Differences {
		outputs[d.Output] = true
	}
	if differing != 60 || len(outputs) != 50 || !strings.Contains(strings.Join(v.Unexplained, "\n"), "further outputs") {
		t.Errorf("of %d outputs %d are explained; %q", differing, len(outputs), v.Unexplained)
	}
}

func TestEachExecutorHasARun(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	o := s.options()
	for i := range 4 {
		p := o.Executors[0]
		p.Name = fmt.Sprint("place", i)
		o.Executors = append(o.Executors, p)
	}
	if v := check(t, s.action(), o); len(v.Runs) != 5 || v.Runs[4].On != "place3" {
		t.Errorf("got runs %+v", v.Runs)
	}
}
