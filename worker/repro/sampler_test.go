// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
)

// A book is a Recorder that also counts results.
type book struct {
	mu        sync.Mutex
	summaries []*repro.Summary
	counts    map[string]int
}

func (b *book) Record(s *repro.Summary) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.summaries = append(b.summaries, s)
}

func (b *book) count(result string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.counts == nil {
		b.counts = map[string]int{}
	}
	b.counts[result]++
}

// commandOn returns a SamplerConfig.Command for a server on a port.
func commandOn(port string) func(string, cas.Digest) string {
	return func(instance string, action cas.Digest) string {
		return fmt.Sprintf("cloister repro %s --cas grpc://127.0.0.1:%s --instance %s", action, port, instance)
	}
}

func (s *script) instances(name string) (*cas.Instance, error) {
	return &cas.Instance{Name: name, Store: s.store, Actions: s.store}, nil
}

// sampler returns a Sampler of s; the changes apply to its configuration.
func (s *script) sampler(b *book, gate bool, changes ...func(*repro.SamplerConfig)) *repro.Sampler {
	c := repro.SamplerConfig{
		Executor: s, Instances: s.instances, Name: "w", Features: *able, Host: host, SampleRate: 1, Gate: gate, Command: commandOn("1"),
		Salt: func() uint64 { return 1 }, Count: b.count, Recorder: b,
	}
	for _, change := range changes {
		change(&c)
	}
	e := must.Get(repro.NewSampler(c))(s.t)
	return e
}

func execute(t *testing.T, e worker.Executor, task *worker.Task) *worker.Outcome {
	t.Helper()
	out := must.Get(e.Execute(t.Context(), task, func(worker.Stage) {}))(t)
	return out
}

func TestGateRecordsOnlyReproducibleResults(t *testing.T) {
	for _, c := range []struct {
		name     string
		act      func(n int, v *worker.Variation) made
		fail     error
		recorded int
		count    string
		line     string
	}{
		{"same", func(int, *worker.Variation) made { return file("x") }, nil, 1, "same", ""},
		{
			"differs", func(_ int, v *worker.Variation) made { return file(v.Conditions.Hostname) }, nil, 0, "differs",
			"not cached: not reproducible: out differs",
		},
		{
			"flaky", func(n int, _ *worker.Variation) made { return made{exit: int32(n - 1)} }, nil, 0, "flaky_exit",
			"exit codes differ: exit 0, exit 1",
		},
		{
			"cannot be run again", func(int, *worker.Variation) made { return file("x") }, &worker.Fault{Kind: worker.FaultExhausted, Err: errors.New("no\x1broom")}, 0, "skipped",
			`not cached: the action could not be run again: no\x1broom`,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, b := newScript(t, c.act), &book{}
			s.fail = func(n int) error {
				if n > 1 {
					return c.fail
				}
				return nil
			}
			task := s.action()
			task.Instance = "i"
			e := s.sampler(b, true)
			execute(t, e, task)
			if s.recorded != c.recorded || s.runs() != 2 || b.counts[c.count] != 1 {
				t.Errorf("got %d recorded, %d runs, counts %v", s.recorded, s.runs(), b.counts)
			}
			line := e.Remark("i", task.Action)
			expect.That(t, strings.Contains(line, c.line) && (c.line == "") == (line == ""), "got remark %q", line)
			if c.count == "differs" && !strings.HasSuffix(line, "see: cloister repro "+task.Action.String()+" --cas grpc://127.0.0.1:1 --instance i") {
				t.Errorf("remark %q lacks the command", line)
			}
			expect.That(t, e.Remark("", task.Action) == "", "another instance has the remark")
		})
	}
}

// irreproducible returns a script whose actions differ until *fixed.
func irreproducible(t *testing.T) (s *script, fixed *bool) {
	fixed = new(bool)
	return newScript(t, func(_ int, v *worker.Variation) made {
		if *fixed {
			return file("x")
		}
		return file(v.Conditions.Hostname)
	}), fixed
}

// The gate always checks actions with a verdict, even if they are not in the day's sample.
func TestGateKeepsCheckingIrreproducibleActions(t *testing.T) {
	s, fixed := irreproducible(t)
	b := &book{}
	known := must.Get(repro.OpenVerdicts(repro.VerdictsConfig{}))(t)
	keep := func(c *repro.SamplerConfig) { c.Verdicts = known }
	task := s.action()
	execute(t, s.sampler(b, true, keep), task)
	e := s.sampler(b, true, keep, func(c *repro.SamplerConfig) { c.SampleRate = 0 }) // not in the sample
	execute(t, e, task)
	if s.recorded != 0 || b.counts["differs"] != 2 {
		t.Errorf("got %d recorded, counts %v, remark %q", s.recorded, b.counts, e.Remark("", task.Action))
	}
	execute(t, e, s.action("A=1"))
	expect.That(t, s.recorded == 1, "other action: got %d recorded, want 1", s.recorded)
	*fixed = true
	execute(t, e, task)
	if s.recorded != 2 || e.Remark("", task.Action) != "" {
		t.Errorf("got %d recorded, remark %q", s.recorded, e.Remark("", task.Action))
	}
	expect.Equal(t, s.runs(), 7, "runs")
}

// A restarted server reports and withholds what the last one found, until the action is reproducible.
func TestVerdictsSurviveRestarts(t *testing.T) {
	s, fixed := irreproducible(t)
	b := &book{}
	dir := t.TempDir()
	// begin starts a server without stopping the one before.
	begin := func(rate float64, gate bool, port string) (*repro.Sampler, cas.Instances) {
		v := must.Get(repro.OpenVerdicts(repro.VerdictsConfig{Dir: dir}))(t)
		t.Cleanup(func() { v.Close() })
		e := s.sampler(b, gate, func(c *repro.SamplerConfig) { c.Verdicts, c.SampleRate, c.Command = v, rate, commandOn(port) })
		return e, v.Withhold(s.instances)
	}
	task := s.action()
	task.Instance = "i"
	see := "not reproducible: out differs (hostname); see: cloister repro " + task.Action.String() + " --cas grpc://127.0.0.1:%s --instance i"
	served := func(instances cas.Instances, name string) bool {
		t.Helper()
		in, err := instances(name)
		must.Succeed(t, err)
		_, err = in.Actions.Lookup(t.Context(), task.Action)
		if err != nil && !errors.Is(err, cas.ErrNotFound) {
			t.Error(err)
		}
		return err == nil
	}
	if err := s.store.Record(t.Context(), task.Action, &repb.ActionResult{}); err != nil { // by a server without a gate
		t.Fatal(err)
	}

	first, instances := begin(1, true, "1")
	expect.That(t, served(instances, "i"), "the gate withholds an unchecked action")
	execute(t, first, task)
	second, instances := begin(0, true, "2")
	expect.Equal(t, second.Remark("i", task.Action), "not cached: "+fmt.Sprintf(see, "2"), "remark")
	expect.That(t, !served(instances, "i") && served(instances, "other"),
		"the gate serves an irreproducible action, or withholds it from another instance")
	execute(t, second, task)
	if s.recorded != 0 || b.counts["differs"] != 2 {
		t.Errorf("got %d recorded, counts %v", s.recorded, b.counts)
	}
	third, _ := begin(0, false, "3")
	expect.Equal(t, third.Remark("i", task.Action), fmt.Sprintf(see, "3"), "remark without the gate")
	*fixed = true
	fourth, instances := begin(0, true, "4")
	execute(t, fourth, task)
	fifth, _ := begin(0, true, "5")
	if s.recorded != 1 || !served(instances, "i") || fourth.Remark("i", task.Action)+fifth.Remark("i", task.Action) != "" {
		t.Errorf("fixed action: got %d recorded, remarks %q, %q", s.recorded, fourth.Remark("i", task.Action), fifth.Remark("i", task.Action))
	}
}

func TestRemarkWithLongNamesEndsWithCommand(t *testing.T) {
	s, b := newScript(t, func(_ int, v *worker.Variation) made {
		m := made{files: map[string]string{}}
		for i := range 5 {
			m.files[strings.Repeat("x", 5000)+fmt.Sprint(i)] = v.Conditions.Hostname
		}
		return m
	}), &book{}
	e := s.sampler(b, true)
	task := s.action()
	execute(t, e, task)
	line := e.Remark("", task.Action)
	const limit = 2000
	expect.That(t, len(line) <= limit && strings.Contains(line, "see: cloister repro "+task.Action.String()),
		"got %d bytes: %s", len(line), line)
}

func TestGateDoesNotPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
		e, began := s.sampler(b, true, func(c *repro.SamplerConfig) {
			c.Features = sandbox.Features{Audits: []sandbox.Audit{sandbox.AuditOff}} // cannot shift the clock
		}), time.Now()
		if execute(t, e, s.action()); s.runs() != 2 || time.Now() != began {
			t.Errorf("got %d runs in %v", s.runs(), time.Since(began))
		}
	})
}

func TestGateSkipsUnrecordedResults(t *testing.T) {
	s, b := newScript(t, func(int, *worker.Variation) made { return made{exit: 1} }), &book{}
	execute(t, s.sampler(b, true), s.action())
	if s.runs() != 1 || len(b.counts) > 0 {
		t.Errorf("got %d runs, counts %v", s.runs(), b.counts)
	}
}

func TestCancelledGateRecordsNothing(t *testing.T) {
	s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := make(chan struct{})
	close(open)
	s.wait = func(n int) <-chan struct{} {
		if n == 1 {
			return open
		}
		cancel()
		return nil
	}
	e, task := s.sampler(b, true), s.action()
	must.Get(e.Execute(ctx, task, func(worker.Stage) {}))(t)
	if s.runs() != 2 || s.recorded != 0 || len(b.counts)+len(b.summaries) > 0 || e.Remark("", task.Action) != "" {
		t.Errorf("got %d runs, %d recorded, counts %v, remark %q", s.runs(), s.recorded, b.counts, e.Remark("", task.Action))
	}
}

// idle runs Sampler.Idle until all goroutines block.
func idle(t *testing.T, e *repro.Sampler) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { e.Idle(ctx); close(done) }()
	time.Sleep(time.Minute) // in the bubble: checks may pause
	synctest.Wait()
	cancel()
	<-done
}

// TestToolchainThatChangesIsNoVerdict checks that a change of the toolchain between two runs is not blamed on the
// action: a sample is checked anew, and the gate records nothing.
func TestToolchainThatChangesIsNoVerdict(t *testing.T) {
	const changed = "not cached: the toolchain of this machine changed between both runs"
	for _, gate := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			toolchain := func(n int) string { return fmt.Sprint(min(n, 2)) }
			s, b := newScript(t, func(n int, _ *worker.Variation) made { return file(toolchain(n)) }), &book{}
			s.toolchain = toolchain
			e, task := s.sampler(b, gate), s.action()
			execute(t, e, task)
			if gate {
				if line := e.Remark("", task.Action); line != changed || s.recorded != 0 || b.counts["skipped"] != 1 {
					t.Errorf("gate: got remark %q, %d recorded, counts %v", line, s.recorded, b.counts)
				}
				execute(t, e, task)
				if s.recorded != 1 || s.runs() != 4 {
					t.Errorf("gate, second request: got %d recorded, %d runs, want 1 and 4", s.recorded, s.runs())
				}
			}
			idle(t, e)
			if s.runs() != 4 || b.counts["same"] != 1 || b.counts["differs"] > 0 || len(b.summaries) != 1 || e.Remark("", task.Action) != "" {
				t.Errorf("gate %t: got %d runs, counts %v, remark %q, want 4 runs and one verdict: same", gate, s.runs(), b.counts,
					e.Remark("", task.Action))
			}
		})
	}
}

func TestSamplesAreCheckedWhenIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := newScript(t, func(_ int, v *worker.Variation) made { return file(v.Conditions.Hostname) }), &book{}
		e := s.sampler(b, false)
		task := s.action()
		execute(t, e, task)
		execute(t, e, task) // is in the backlog already
		if s.runs() != 2 || s.recorded != 2 || e.Waiting() != 1 || e.Remark("", task.Action) != "" {
			t.Fatalf("before Idle: got %d runs, %d recorded, %d waiting", s.runs(), s.recorded, e.Waiting())
		}
		idle(t, e)
		if s.runs() != 3 || s.recorded != 2 || b.counts["differs"] != 1 || e.Waiting() != 0 {
			t.Errorf("got %d runs, %d recorded, %d waiting, counts %v", s.runs(), s.recorded, e.Waiting(), b.counts)
		}
		if line := e.Remark("", task.Action); !strings.HasPrefix(line, "not reproducible: out differs") {
			t.Errorf("got remark %q", line)
		}
		if len(b.summaries) != 1 || b.summaries[0].Action != task.Action || b.summaries[0].Result != repro.Differs {
			t.Errorf("got summaries %+v", b.summaries)
		}
	})
}

// The report of a check that found a difference is a blob from which the same page can be made later.
func TestReportsOfDifferencesAreStored(t *testing.T) {
	for name, act := range map[repro.Result]func(int, *worker.Variation) made{
		repro.Differs: func(_ int, v *worker.Variation) made { return file(v.Conditions.Hostname) },
		repro.Same:    func(int, *worker.Variation) made { return file("x") },
	} {
		s, b := newScript(t, act), &book{}
		execute(t, s.sampler(b, true), s.action())
		must.Be(t, len(b.summaries) == 1 && b.summaries[0].Result == name, "got summaries %+v", b.summaries)
		d := b.summaries[0].Report
		if name == repro.Same {
			expect.That(t, d.IsZero(), "equal runs have the report %s", d)
			continue
		}
		var v repro.Verdict
		must.Succeed(t, json.Unmarshal(must.Get(cas.ReadAll(t.Context(), s.store, d, 1<<20))(t), &v))
		page := must.Get(repro.Report{&v}.HTML())(t)
		expect.Texts(t, string(page), []string{"differs", "run 2", "hostname"})
	}
}

func TestInterruptedChecksAreRepeatedTenTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
		e := s.sampler(b, false)
		execute(t, e, s.action())
		open := make(chan struct{})
		s.wait = func(int) <-chan struct{} { return open }
		for i := range 5 {
			idle(t, e) // ends during the run
			if e.Waiting() != 1 || len(b.counts) > 0 || s.runs() != i+2 {
				t.Fatalf("got %d waiting, counts %v, %d runs", e.Waiting(), b.counts, s.runs())
			}
		}
		close(open)
		idle(t, e)
		if e.Waiting() != 0 || b.counts["same"] != 1 {
			t.Errorf("got %d waiting, counts %v", e.Waiting(), b.counts)
		}
		execute(t, e, s.action("A=1"))
		s.wait = func(int) <-chan struct{} { return make(chan struct{}) }
		for range 10 {
			idle(t, e)
		}
		if e.Waiting() != 0 || b.counts["skipped"] != 1 {
			t.Errorf("got %d waiting, counts %v", e.Waiting(), b.counts)
		}
	})
}

func TestEvictedInputsAreSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
		e := s.sampler(b, false)
		execute(t, e, s.action())
		s.fail = func(int) error { return &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("gone")} }
		idle(t, e)
		if b.counts["skipped"] != 1 || e.Waiting() != 0 {
			t.Errorf("got counts %v, %d waiting", b.counts, e.Waiting())
		}
	})
}

func TestPanicsAreSkippedChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, gate := range []bool{false, true} {
			s, b := newScript(t, func(n int, _ *worker.Variation) made {
				if n > 1 {
					panic("a defect")
				}
				return file("x")
			}), &book{}
			e := s.sampler(b, gate)
			execute(t, e, s.action())
			idle(t, e)
			if b.counts["skipped"] != 1 || gate && s.recorded != 0 {
				t.Errorf("gate %v: got counts %v, %d recorded", gate, b.counts, s.recorded)
			}
		}
	})
}

func TestBacklogIsLimited(t *testing.T) {
	s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
	e := s.sampler(b, false)
	for i := range 1003 {
		execute(t, e, s.action(fmt.Sprint("A=", i)))
	}
	if e.Waiting() != 1000 || b.counts["skipped"] != 3 {
		t.Errorf("got %d waiting, counts %v", e.Waiting(), b.counts)
	}
}

func TestSampleIsChosenByDigestAndSalt(t *testing.T) {
	s, b := newScript(t, func(int, *worker.Variation) made { return file("x") }), &book{}
	// chosen returns which of 500 actions are in the sample.
	chosen := func(salt uint64) (which [500]bool, n int) {
		e := s.sampler(b, false, func(c *repro.SamplerConfig) { c.SampleRate, c.Salt = 0.1, func() uint64 { return salt } })
		for i := range which {
			before := e.Waiting()
			execute(t, e, s.action(fmt.Sprint("A=", i)))
			if which[i] = e.Waiting() > before; which[i] {
				n++
			}
		}
		return which, n
	}
	first, n := chosen(1)
	expect.That(t, n >= 25 && n <= 85, "got %d of 500 actions at a rate of 10%%", n)
	if again, _ := chosen(1); again != first {
		t.Error("the same salt chooses different actions")
	}
	if other, _ := chosen(2); other == first {
		t.Error("another salt chooses the same actions")
	}
}

func TestNewSamplerNamesTheMissingField(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	whole := repro.SamplerConfig{Executor: s, Instances: s.instances, Name: "w", Features: *able}
	for want, change := range map[string]func(*repro.SamplerConfig){
		"Executor":   func(c *repro.SamplerConfig) { c.Executor = nil },
		"Instances":  func(c *repro.SamplerConfig) { c.Instances = nil },
		"Name":       func(c *repro.SamplerConfig) { c.Name = "" },
		"Features":   func(c *repro.SamplerConfig) { c.Features = sandbox.Features{} },
		"SampleRate": func(c *repro.SamplerConfig) { c.SampleRate = 20 },
	} {
		c := whole
		change(&c)
		if _, err := repro.NewSampler(c); err == nil || !strings.Contains(err.Error(), "SamplerConfig."+want) {
			t.Errorf("got %v, want an error that names %s", err, want)
		}
	}
	e, err := repro.NewSampler(whole)
	must.Succeed(t, err)
	_, err = e.Execute(t.Context(), nil, nil)
	if f, ok := errors.AsType[*worker.Fault](err); !ok || f.Kind != worker.FaultInvalid || !strings.Contains(err.Error(), "the Task is missing") {
		t.Errorf("Execute: got %v, want a fault that names the Task", err)
	}
}
