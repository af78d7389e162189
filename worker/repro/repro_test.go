// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// observed returns the value of a factor in a run as text.
func observed(factor repro.Factor, n int, v *worker.Variation) string {
	c := &v.Conditions
	variable := func(name string) string {
		for _, kv := range v.Env {
			if strings.HasPrefix(kv, name+"=") {
				return kv
			}
		}
		return ""
	}
	switch factor {
	case "time":
		if c.FrozenClock != 0 {
			return fmt.Sprint(c.FrozenClock)
		}
		return fmt.Sprint(n, c.ClockOffset)
	case "zone":
		return variable("TZ")
	case "user":
		return c.User
	case "hostname":
		return c.Hostname
	case "locale":
		return variable("LC_ALL")
	case "umask":
		return fmt.Sprint(c.Umask)
	case "cpus":
		return fmt.Sprint(c.CPUs)
	case "readdir":
		return fmt.Sprint(v.Order)
	case "path":
		return v.Root
	case "aslr":
		if c.FixedLayout {
			return ""
		}
		return fmt.Sprint(n)
	case "random":
		return cmp.Or(map[bool]string{true: fmt.Sprint(c.RandomSeed)}[c.RandomSeed != 0], "seed of run "+fmt.Sprint(n))
	case "pids":
		return fmt.Sprint(c.SkippedPIDs)
	case "uptime":
		return fmt.Sprint(c.Uptime)
	case "environment":
		return variable("CLOISTER_PADDING")
	case "home":
		return variable("HOME")
	case "search-path":
		return variable("PATH")
	case "input-times":
		return fmt.Sprint(c.InputTime)
	case "input-owner":
		return fmt.Sprint(c.InputOwner)
	case "output-order":
		return fmt.Sprint(c.OutputOrder)
	}
	return ""
}

func TestBisectFindsEveryFactor(t *testing.T) {
	for _, factor := range repro.AllFactors {
		if factor == "parallel" {
			continue // TestParallelRunsOverlap
		}
		t.Run(string(factor), func(t *testing.T) {
			s := newScript(t, func(n int, v *worker.Variation) made {
				return made{files: map[string]string{"out": "x" + observed(factor, n, v), "steady": "y"}}
			})
			v := bisect(t, s)
			must.Be(t, v.Result == repro.Differs && len(v.Outputs) == 2 && v.Outputs[0].Differ && !v.Outputs[1].Differ,
				"got %s, %+v; want one of two outputs that differs", v.Result, v.Outputs)
			if !slices.Equal(v.Bisection.Factors, []repro.Factor{factor}) || !slices.Equal(v.Outputs[0].Factors, []repro.Factor{factor}) {
				t.Errorf("got bisection %+v and output %+v", v.Bisection, v.Outputs[0])
			}
			must.Be(t, len(v.Differences) != 0, "got no difference")
			if d := v.Differences[0]; !slices.Equal(d.Factors, []repro.Factor{factor}) || d.Cause == compare.Unknown || d.Output != "out" {
				t.Errorf("got %+v, want factor %s", d, factor)
			}
		})
	}
}

// TestCheckReportsProgress: each run is reported before it begins, those of a bisection with the factor.
func TestCheckReportsProgress(t *testing.T) {
	s := newScript(t, func(_ int, v *worker.Variation) made { return file("x" + v.Conditions.Hostname) })
	o := s.options()
	o.Bisect, o.Factors = true, []repro.Factor{"hostname"}
	var purposes []string
	o.Progress = func(purpose string) { purposes = append(purposes, purpose) }
	check(t, s.action(), o)
	for _, want := range []string{"run 1 of 3, local", "run 3 of 3, local", "control 1, local", "varied alone: hostname, local"} {
		expect.That(t, slices.Contains(purposes, want), "got %q, want %q", purposes, want)
	}
	expect.That(t, len(purposes) == len(s.tasks), "got %d reports of %d runs", len(purposes), len(s.tasks))
}

func TestSingleVariedFactorIsTheCause(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return made{files: map[string]string{"out": fmt.Sprintf("%x", len(observed("environment", n, v)))}}
	})
	o := s.options()
	o.Factors = []repro.Factor{"environment"}
	v := check(t, s.action(), o)
	expect.That(t, len(v.Differences) == 1 && v.Differences[0].Cause == compare.Environment, "got %+v", v.Differences)
}

func TestReproducibleActionIsTheSame(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made {
		return made{files: map[string]string{"out": "x"}, stdout: "said", exit: 3, directory: map[string]string{"a": "1"}}
	})
	v := check(t, s.action(), s.options())
	expect.That(t, v.Result == repro.Same && len(v.Differences) == 0 && len(v.Factors) == len(repro.AllFactors),
		"got %+v", v)
	// Only what no worker varies was not varied: JSON, statements and -v tell so.
	var names []repro.Factor
	for _, s := range v.Skipped {
		names = append(names, s.Factor)
	}
	expect.Equal(t, repro.Join(names), "memory, free-space, kernel", "not varied")
	var short, long strings.Builder
	must.Succeed(t, v.Text(&short, repro.TextOptions{}))
	must.Succeed(t, v.Text(&long, repro.TextOptions{Verbose: true}))
	if strings.Contains(short.String(), "not varied") || !strings.Contains(long.String(), "\n  not varied: memory, free-space, kernel: Cloister does not vary it\n") {
		t.Errorf("got\n%s\nand with -v\n%s", &short, &long)
	}
	if len(v.Runs) != repro.DefaultRuns || len(v.Runs[0].Varied) > 0 || len(v.Runs[1].Varied) < 12 || slices.Equal(v.Runs[1].Varied, v.Runs[2].Varied) {
		t.Errorf("got runs %+v", v.Runs)
	}
	for _, task := range s.tasks {
		expect.That(t, task.Variation != nil && task.SkipCacheLookup,
			"a run may be recorded or answered from the cache")
	}
}

func TestVariedRunsHaveDifferentConditions(t *testing.T) {
	for _, factor := range repro.AllFactors {
		if slices.Contains([]repro.Factor{"aslr", "random", "parallel", "cpus", "umask", "zone", "locale"}, factor) {
			continue // vary on their own or repeat
		}
		t.Run(string(factor), func(t *testing.T) {
			s := newScript(t, func(int, *worker.Variation) made { return file("x") })
			o := s.options()
			o.Runs, o.Factors = 30, []repro.Factor{factor}
			seen := map[string]int{}
			for i, r := range check(t, s.action(), o).Runs {
				what := strings.Join(r.Varied, ", ")
				if j, ok := seen[what]; ok {
					t.Errorf("runs %d and %d both have %q", j, i, what)
				}
				seen[what] = i
			}
			for _, task := range s.tasks {
				spec := sandbox.Spec{Conditions: task.Variation.Conditions}
				if err := spec.Validate(); err != nil && strings.Contains(err.Error(), "condition") {
					t.Error(err)
				}
			}
		})
	}
}

func TestCheckFindsEveryKindOfDifference(t *testing.T) {
	for _, c := range []struct {
		name string
		act  func(n int) made
		want repro.Result
		path string // of the output that differs
		what string // of its first difference
	}{
		{"exit code", func(n int) made { return made{exit: int32(n % 2)} }, repro.FlakyExit, "", ""},
		{"timeout", func(n int) made { return made{status: []worker.Status{worker.StatusOK, worker.StatusTimedOut}[n%2]} }, repro.FlakyExit, "", ""},
		{"stdout", func(n int) made { return made{stdout: fmt.Sprint("n ", n)} }, repro.Differs, compare.Stdout, ""},
		{"stderr", func(n int) made { return made{stderr: fmt.Sprint("n ", n)} }, repro.Differs, compare.Stderr, ""},
		{"missing output", func(n int) made {
			return made{files: map[string]string{"a": "x", strings.Repeat("b", n): "y"}}
		}, repro.Differs, "b", "entry"},
		{"content in a directory", func(n int) made { return made{directory: map[string]string{"in": fmt.Sprint(n)}} }, repro.Differs, "dir", ""},
		{"file with the bytes of a Tree", func(n int) made {
			return []made{{files: map[string]string{"dir": "\n\x00"}}, {directory: map[string]string{}}}[n%2]
		}, repro.Differs, "dir", "type"},
		{"name in a directory", func(n int) made { return made{directory: map[string]string{fmt.Sprint(n): "x"}} }, repro.Differs, "dir", "entry"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScript(t, func(n int, _ *worker.Variation) made { return c.act(n) })
			o := s.options()
			o.Factors = []repro.Factor{}
			v := check(t, s.action(), o)
			must.Be(t, v.Result == c.want, "got %s, want %s", v.Result, c.want)
			if c.path == "" {
				return
			}
			i := slices.IndexFunc(v.Outputs, func(o repro.Output) bool { return o.Path == c.path })
			if i < 0 || !v.Outputs[i].Differ || len(v.Outputs[i].Digests) != 3 {
				t.Fatalf("got outputs %+v", v.Outputs)
			}
			if len(v.Differences) == 0 || v.Differences[0].Output != c.path || c.what != "" && v.Differences[0].What != c.what {
				t.Errorf("got differences %+v, unexplained %q", v.Differences, v.Unexplained)
			}
		})
	}
}

func TestDeclaredVariablesAreNotVaried(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	o := s.options()
	v := check(t, s.action("TZ=UTC", "LC_COLLATE=C", "CLOISTER_PADDING=1", "HOME=/", "PATH=/bin"), o)
	for _, name := range []repro.Factor{"zone", "locale", "environment", "home", "search-path"} {
		i := slices.IndexFunc(v.Skipped, func(k repro.Skipped) bool { return k.Factor == name })
		if i < 0 || !strings.Contains(v.Skipped[i].Why, "the command sets") {
			t.Errorf("%s: got skipped %+v", name, v.Skipped)
		}
	}
	for _, task := range s.tasks {
		expect.That(t, len(task.Variation.Env) == 0, "got varied variables %q, want none", task.Variation.Env)
	}
}

// A stated seed is an input.
func TestSeedIsNotVaried(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made { return file(observed("random", n, v)) })
	task, seed := s.action(), uint64(0)
	task.Seed = &seed
	if v := check(t, task, s.options()); v.Result != repro.Same || slices.Contains(v.Factors, "random") {
		t.Errorf("got %s, with %q varied", v.Result, v.Factors)
	}
}

func TestUnsupportedFactorsAreSkipped(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	o := s.options()
	o.Executors[0].Features = &sandbox.Features{Conditions: []sandbox.Condition{sandbox.ConditionHostname}}
	unsupported := []repro.Factor{"umask", "input-times", "input-owner", "output-order"}
	o.Factors = append(unsupported, "hostname")
	v := check(t, s.action(), o)
	expect.That(t, slices.Equal(v.Factors, []repro.Factor{"hostname"}) && len(v.Skipped) == len(unsupported),
		"factors %q, skipped %+v", v.Factors, v.Skipped)
	for i, k := range v.Skipped {
		expect.That(t, k.Factor == unsupported[i] && k.Why == "this worker cannot vary it",
			"skipped %+v, want %s", k, unsupported[i])
	}
	for _, task := range s.tasks {
		if c := task.Variation.Conditions; c != (sandbox.Conditions{Hostname: c.Hostname}) {
			t.Error("a run requested an unsupported condition")
		}
	}
}

func TestBisectReportsNondeterminism(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return made{files: map[string]string{"raced": fmt.Sprint(n), "named": observed("hostname", n, v)}}
	})
	b := bisect(t, s).Bisection
	if !slices.Equal(b.Nondeterministic, []string{"raced"}) || !slices.Equal(b.Factors, []repro.Factor{"hostname"}) ||
		!strings.Contains(b.Summary, "scheduling") || !strings.Contains(b.Summary, "caused by hostname") {
		t.Errorf("got %+v", b)
	}
}

// clockless are the features of a worker that supports every condition but a held clock.
var clockless = &sandbox.Features{Audits: able.Audits, Conditions: slices.DeleteFunc(slices.Clone(sandbox.AllConditions), func(c sandbox.Condition) bool {
	return c == sandbox.ConditionFrozenClock
})}

// An output that is equal in a row, different after a pause, and then equal again contains times, unless the clock is
// held. Other factors are still found.
func TestBisectReportsTimeDependence(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		at := min(8, max(7, n))
		if n == 1 {
			at = 1
		}
		return made{files: map[string]string{"out": fmt.Sprintf("written %d\nthen\nby %s\nat last\n", at, observed("hostname", n, v))}}
	})
	o := s.options()
	o.Bisect, o.Executors[0].Features = true, clockless
	v := check(t, s.action(), o) // the first controls are runs 6 to 8, after three runs with two copies
	if b := v.Bisection; !slices.Equal(b.TimeDependent, []string{"out"}) || !slices.Equal(b.Factors, []repro.Factor{"time", "hostname"}) || len(b.Nondeterministic) > 0 {
		t.Errorf("got %+v", b)
	}
	for i, want := range []repro.Factor{"time", "hostname"} {
		expect.That(t, len(v.Differences) == 2 && slices.Equal(v.Differences[i].Factors, []repro.Factor{want}),
			"difference %d of %+v, want it by %s", i, v.Differences, want)
	}
}

// Values that change again, return, or change while the clock is held are none.
func TestRacesAreNotTimeDependence(t *testing.T) {
	for name, c := range map[string]struct {
		features *sandbox.Features
		value    func(n int) int
	}{
		"new values": {clockless, func(n int) int { return max(7, n) }},
		"old values": {clockless, func(n int) int { return max(7, n) % 2 }},
		"a returning value": {clockless, func(n int) int {
			return map[bool]int{true: 1}[n == 1 || n == 8 || n == 9]
		}},
		"a held clock": {able, func(n int) int { return min(8, max(7, n)) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t, func(n int, _ *worker.Variation) made { return file(fmt.Sprint("x", n > 1, c.value(n))) })
			o := s.options()
			o.Bisect, o.Executors[0].Features = true, c.features
			if b := check(t, s.action(), o).Bisection; b == nil || len(b.TimeDependent) > 0 || !slices.Equal(b.Nondeterministic, []string{"out"}) {
				t.Errorf("got %+v", b)
			}
		})
	}
}

func TestNoiseIsNotAttributedToFactors(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return made{files: map[string]string{"out": fmt.Sprintf("written 2026-11-22 01:45:%02d\nsalt %08x\nby %s\nat last\n", n, n*0x9e3779b9, observed("hostname", n, v))}}
	})
	o := s.options()
	o.Bisect = true
	v := check(t, s.action(), o)
	if b := v.Bisection; !slices.Equal(b.TimeDependent, []string{"out"}) || !slices.Equal(b.Nondeterministic, []string{"out"}) || !slices.Equal(b.Factors, []repro.Factor{"time", "hostname"}) {
		t.Errorf("got %+v", b)
	}
	var got []string
	for _, d := range v.Differences {
		got = append(got, d.What+": "+repro.Join(d.Factors))
	}
	expect.Slices(t, got, []string{"line 1: time", "line 2: ", "line 3: hostname"})
	o.Factors = []repro.Factor{"hostname"}
	for _, d := range check(t, s.action(), o).Differences {
		expect.That(t, !slices.Contains(d.Factors, "time"), "got a factor that was not varied: %+v", d)
	}
}

// A different order is only due to scheduling if everything else was held.
func TestOrderIsSchedulingIfAllFactorsAreHeld(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		parts := []string{"the first part is done\n", "and a second one is done\n", "now the third part as well\n"}
		slices.Reverse(parts[n%2:])
		return file(strings.Join(parts, ""))
	})
	o := s.options()
	o.Bisect = true
	if b := check(t, s.action(), o).Bisection; !slices.Equal(b.Factors, []repro.Factor{"parallel"}) || !slices.Equal(b.Nondeterministic, []string{"out"}) {
		t.Errorf("got %+v", b)
	}
	o.Executors[0].Features = &sandbox.Features{Conditions: []sandbox.Condition{sandbox.ConditionHostname}}
	if b := check(t, s.action(), o).Bisection; slices.Contains(b.Factors, "parallel") {
		t.Errorf("got %+v", b)
	}
}

// Words in a different order look like a hash table, and local times like any other.
func TestProvedFactorsOutweighLooks(t *testing.T) {
	for _, c := range []struct {
		factor repro.Factor
		cause  compare.Cause
		says   func(v *worker.Variation) string
	}{
		{"readdir", compare.MemberOrder, func(v *worker.Variation) string {
			words := strings.Split("alpha beta gamma delta epsilon", " ")
			slices.Reverse(words[v.Order%3:])
			return strings.Join(words, "\n")
		}},
		{"zone", compare.Zone, func(v *worker.Variation) string {
			for _, kv := range v.Env {
				if strings.HasPrefix(kv, "TZ=") {
					return "2001-09-09 15:46"
				}
			}
			return "2001-09-09 01:46"
		}},
		// Of two factors the one that explains the look is the cause.
		{"random", compare.HashSeed, func(v *worker.Variation) string {
			words := strings.Split("alpha beta gamma delta epsilon zeta", " ")
			slices.Reverse(words[v.Conditions.RandomSeed%2*2:])
			slices.Reverse(words[min(v.Conditions.CPUs, 2):])
			return strings.Join(words, "\n") + "\n"
		}},
	} {
		t.Run(string(c.factor), func(t *testing.T) {
			s := newScript(t, func(_ int, v *worker.Variation) made { return file(c.says(v)) })
			v := bisect(t, s)
			if len(v.Differences) == 0 || v.Differences[0].Cause != c.cause || !slices.Contains(v.Differences[0].Factors, c.factor) || v.Differences[0].Fix != compare.FixFor(c.cause, "") {
				t.Errorf("got %+v", v.Differences)
			}
		})
	}
}

// If the clock cannot be shifted the second run waits until times of files change.
func TestCheckPausesToVaryTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScript(t, func(int, *worker.Variation) made { return file(fmt.Sprint("made at ", time.Now().Unix()/2)) })
		o := s.options()
		o.Pause, o.Executors[0].Features = 0, &sandbox.Features{}
		expect.Equal(t, check(t, s.action(), o).Result, repro.Differs)
		for what, change := range map[string]func(){
			"time is not varied":   func() { o.Factors, o.Executors[0].Features = []repro.Factor{"hostname"}, &sandbox.Features{} },
			"negative pause":       func() { o.Factors, o.Pause, o.Executors[0].Features = repro.AllFactors, -1, &sandbox.Features{} },
			"clock can be shifted": func() { o.Factors, o.Pause, o.Executors[0].Features = repro.AllFactors, 0, able },
			"first run is long ago": func() {
				o.Factors, o.Pause, o.Executors[0].Features = repro.AllFactors, 0, &sandbox.Features{}
				task := s.action()
				o.First, _ = s.Execute(t.Context(), task, func(worker.Stage) {})
				o.First.Result.ExecutionMetadata.ExecutionStartTimestamp = timestamppb.New(time.Now().Add(-time.Hour))
			},
		} {
			o.First = nil
			change()
			began := time.Now()
			if check(t, s.action(), o); time.Now() != began {
				t.Errorf("%s: the check paused for %v", what, time.Since(began))
			}
		}
	})
}

func TestUnconfirmedChangesAreNotFactors(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return file("x" + map[bool]string{true: "odd"}[n == 2 || n == 8])
	})
	o := s.options()
	o.Bisect, o.Factors = true, []repro.Factor{"hostname", "umask"}
	expect.Slices(t, check(t, s.action(), o).Bisection.Factors, nil, "factors")
}

func TestHeldFactorsAreNotTheCause(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		order := []string{"123456", "651423", "236451", "124356"}[n%4]
		return file(strings.Join(strings.Split(order, ""), "\n") + "\n")
	})
	if v := bisect(t, s); len(v.Differences) == 0 || v.Differences[0].Cause != compare.Parallel {
		t.Errorf("got %+v", v.Differences)
	}
}

func TestFactorsAreAttributedByLocation(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return file(fmt.Sprintf("by %s\nsame\nmask %s\nsame\n", observed("hostname", n, v), observed("umask", n, v)))
	})
	v := bisect(t, s)
	if len(v.Differences) != 2 || !slices.Equal(v.Differences[0].Factors, []repro.Factor{"hostname"}) || !slices.Equal(v.Differences[1].Factors, []repro.Factor{"umask"}) {
		t.Errorf("got %+v", v.Differences)
	}
}

// A line of ls(1) has a mode, an owner and a time.
func TestEachCauseAtALocationHasItsFactor(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		mode, user := "-rw-r--r--", cmp.Or(v.Conditions.User, "build")
		if v.Conditions.Umask == 0o077 {
			mode = "-rw-------"
		}
		day := map[bool]string{false: "Nov 22 02:13", true: "Nov 22 16:13"}[slices.ContainsFunc(v.Env, func(kv string) bool { return strings.HasPrefix(kv, "TZ=") })]
		return file(fmt.Sprintf("%s 1 %s %s out\nsame\n", mode, user, day))
	})
	v := bisect(t, s)
	var got []string
	for _, d := range v.Differences {
		got = append(got, fmt.Sprintf("%s: %s %s", d.What, d.Cause, d.Factors))
	}
	expect.Slices(t, got, []string{"line 1: file mode [umask]", "line 1: owner [user]", "line 1: time zone [zone]"})
}

// A duration may agree in all controls and differ in two runs in a row by chance.
func TestDurationsAreNotAttributedToFactors(t *testing.T) {
	for name, control := range map[string]func(n int) int{"controls differ": func(n int) int { return n }, "controls agree": func(int) int { return 7 }} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t, func(n int, v *worker.Variation) made {
				user, real := 2, control(n)
				if v.Conditions.User != "" {
					user, real = 3, 8
				}
				return file(fmt.Sprintf("real\t0m0.%03ds\nuser\t0m0.00%ds\nby %s\n", real, user, observed("hostname", n, v)))
			})
			v := bisect(t, s)
			if b := v.Bisection; !slices.Equal(slices.Sorted(slices.Values(b.Factors)), []repro.Factor{"hostname", "time"}) || !slices.Equal(b.TimeDependent, []string{"out"}) {
				t.Errorf("got %+v", b)
			}
			for _, d := range v.Differences {
				if want := map[bool]repro.Factor{false: "time", true: "hostname"}[d.Cause == compare.Hostname]; !slices.Equal(d.Factors, []repro.Factor{want}) {
					t.Errorf("%s: by %q, want %s", d.What, d.Factors, want)
				}
			}
		})
	}
}

// Java seeds sets by a clock that cannot be held. The words of one line are not reordered by a race.
func TestUnheldHashSeedHasNoFactor(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		words := []string{"alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"}
		return file("[" + strings.Join(append(words[n%7:], words[:n%7]...), ", ") + "]\n")
	})
	v := bisect(t, s)
	if b := v.Bisection; len(b.Factors) > 0 || !slices.Equal(b.Nondeterministic, []string{"out"}) {
		t.Errorf("got %+v", b)
	}
	if d := v.Differences; len(d) != 1 || d[0].Cause != compare.HashSeed || d[0].Fix != compare.FixFor(compare.HashSeed, "") || len(d[0].Factors) > 0 {
		t.Errorf("got %+v", d)
	}
}

// Shells derive random numbers from the time, process IDs and addresses.
func TestSeveralSeedFactorsAreRandom(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		c := &v.Conditions
		return file(fmt.Sprintln((int64(c.ClockOffset/time.Second) + c.FrozenClock + 7919*int64(c.SkippedPIDs) + int64(c.UID)) % 32768))
	})
	v := bisect(t, s)
	if d := v.Differences; len(d) != 1 || !slices.Equal(d[0].Factors, []repro.Factor{"time", "user", "pids"}) || d[0].Cause != compare.Random {
		t.Errorf("got %+v", d)
	}
}

// If all other factors explain other differences, the remaining one explains the remaining difference.
func TestRemainingFactorIsTheCause(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		text, salt := "by "+observed("hostname", n, v)+"\n", "11ee05c7731b84fd29ae05c7731b84f0"
		switch {
		case v.Root != "" && v.Conditions.FrozenClock != 0: // the bisection finds it at another location than the check
			text = "more\n" + text
		case v.Root != "":
			salt = "9ae05c7731b84fd29ae05c7731b84fd2"
		}
		return file(text + "salt " + salt + "\n")
	})
	v := bisect(t, s)
	if d := v.Differences; len(d) != 2 || !slices.Equal(d[1].Factors, []repro.Factor{"path"}) || d[1].Cause != compare.Path {
		t.Errorf("got %+v", d)
	}
}

func TestOrderByRandomNumbersIsAHashSeed(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		parts := []string{"the first part is done\n", "and a second one is done\n", "now the third part as well\n"}
		if v.Conditions.RandomSeed == 0 {
			slices.Reverse(parts[n%2:])
		}
		return file(strings.Join(parts, ""))
	})
	v := bisect(t, s)
	if d := v.Differences; len(d) != 1 || !slices.Equal(d[0].Factors, []repro.Factor{"random"}) || d[0].Cause != compare.HashSeed {
		t.Errorf("got %+v", d)
	}
}

// The cause comes from the factor, the fix from the format.
func TestFixDependsOnFormat(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return file("oncg*22B" + map[bool]string{false: "1234", true: "5678"}[v.Root != ""] + "\x00\x00")
	})
	v := bisect(t, s)
	if d := v.Differences; len(d) != 1 || d[0].Cause != compare.Path || d[0].Fix != compare.FixFor(compare.Path, "gcov") {
		t.Errorf("got %+v", d)
	}
}

func TestBisectReportsFactorsThatActTogether(t *testing.T) {
	s := newScript(t, func(_ int, v *worker.Variation) made {
		if v.Conditions.Hostname != "" && v.Conditions.Umask != 0 {
			return file("odd")
		}
		return file("even")
	})
	if b := bisect(t, s).Bisection; !b.Together || len(b.Factors) > 0 || !strings.Contains(b.Summary, "all together do") {
		t.Errorf("got %+v", b)
	}
}

func TestBisectReportsRareDifferences(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file(map[bool]string{true: "odd"}[n == 2]) })
	expect.Text(t, bisect(t, s).Bisection.Summary, "try more than")
}

func TestParallelRunsOverlap(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file("x") })
	both := make(chan struct{})
	s.wait = func(n int) <-chan struct{} {
		if n == 3 {
			close(both)
		}
		if n == 1 {
			done := make(chan struct{})
			close(done)
			return done
		}
		return both
	}
	o := s.options()
	o.Runs, o.Factors = 2, []repro.Factor{"parallel"}
	v := check(t, s.action(), o)
	if v.Result != repro.Same || s.runs() != 3 || !slices.Contains(v.Runs[1].Varied, "parallel, with another run") {
		t.Errorf("got %d runs, %+v", s.runs(), v.Runs)
	}
}

func TestCheckUsesAnEarlierRun(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file("x") })
	task := s.action()
	out := must.Get(s.Execute(t.Context(), task, func(worker.Stage) {}))(t)
	o := s.options()
	o.Runs, o.First, o.Factors = 2, out, []repro.Factor{"hostname"}
	if v := check(t, task, o); v.Result != repro.Same || s.runs() != 2 || len(v.Runs) != 2 {
		t.Errorf("%d runs, %+v", s.runs(), v)
	}
}

// Each executor may replace the action, and servers encode Trees differently.
func TestExecutorsAreComparedByContent(t *testing.T) {
	act := func(int, *worker.Variation) made { return made{directory: map[string]string{"a": "1"}} }
	here, there := newScript(t, act), newScript(t, act)
	there.idleChild = true
	task := here.action()
	other := there.action("A=B")
	o := here.options()
	o.Executors = append(o.Executors, repro.Executor{Name: "there\x1b[0m", Executor: there, Store: there.store, Action: other.Action})
	v := check(t, task, o)
	if v.Result != repro.Same || len(v.Runs) != 3 || here.runs() < 2 || there.runs() != 1 || v.Runs[1].Action != other.Action.String() {
		t.Errorf("got %+v", v)
	}
	if a, b := v.Runs[0].Root("dir"), v.Runs[1].Root("dir"); a == nil || a.Hash != b.GetHash() || v.Runs[0].Root("x") != nil {
		t.Errorf("got roots %v and %v", a, b)
	}
	expect.That(t, len(v.Runs[1].Varied) == 0 && v.Runs[1].On == `there\x1b[0m`, "got second run %+v", v.Runs[1])
}

func TestCheckReturnsFaults(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	s.fail = func(n int) error {
		if n >= 2 { // a copy that only runs beside the second run may be the second to begin
			return &worker.Fault{Kind: worker.FaultMissing, Err: errors.New("gone")}
		}
		return nil
	}
	var f *worker.Fault
	if _, err := repro.Check(t.Context(), s.action(), s.options()); !errors.As(err, &f) || f.Kind != worker.FaultMissing {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.wait = func(int) <-chan struct{} { return nil }
	expect.That(t, expect.Err(repro.Check(ctx, s.action(), s.options())) != nil, "cancelled check: got no error")
	for what, o := range map[string]repro.Options{
		"one run": {Runs: 1, Executors: s.options().Executors}, "too many": {Runs: 101, Executors: s.options().Executors},
	} {
		if _, err := repro.Check(t.Context(), s.action(), o); !errors.As(err, &f) || f.Kind != worker.FaultInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestCheckNamesTheWrongField: what is missing or unknown is an error that names it, before anything runs.
func TestCheckNamesTheWrongField(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	for want, change := range map[string]func(*worker.Task, *repro.Options){
		"the Task is missing":           func(*worker.Task, *repro.Options) {},
		"Task.Action":                   func(task *worker.Task, _ *repro.Options) { task.Action = cas.Digest{} },
		"Options.Executors":             func(_ *worker.Task, o *repro.Options) { o.Executors = nil },
		"Options.Executors[0].Name":     func(_ *worker.Task, o *repro.Options) { o.Executors[0].Name = "" },
		"Options.Executors[0].Executor": func(_ *worker.Task, o *repro.Options) { o.Executors[0].Executor = nil },
		"Options.Executors[0].Store":    func(_ *worker.Task, o *repro.Options) { o.Executors[0].Store = nil },
		`"hostnam" in Options.Factors`:  func(_ *worker.Task, o *repro.Options) { o.Factors = []repro.Factor{"hostnam"} },
		`"Hostname" in Options.Factors`: func(_ *worker.Task, o *repro.Options) { o.Factors = []repro.Factor{"time", "Hostname"} },
		`"all" in Options.Factors`:      func(_ *worker.Task, o *repro.Options) { o.Factors = []repro.Factor{"all"} },
	} {
		task, o := s.action(), s.options()
		change(task, &o)
		if want == "the Task is missing" {
			task = nil
		}
		var f *worker.Fault
		if _, err := repro.Check(t.Context(), task, o); !errors.As(err, &f) || f.Kind != worker.FaultInvalid || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want an invalid request that names %s", err, want)
		}
	}
	expect.Equal(t, s.runs(), 0, "runs")
}

// TestUnvariedRunsAreNotTheSame: equal runs without any variation do not show that an action is reproducible.
func TestUnvariedRunsAreNotTheSame(t *testing.T) {
	s := newScript(t, func(int, *worker.Variation) made { return file("x") })
	plain := s.options().Executors[0]
	plain.Name, plain.Features = "plain", nil
	for name, c := range map[string]struct {
		change func(*repro.Options)
		want   repro.Result
	}{
		"nil factors":  {func(o *repro.Options) { o.Factors = nil }, repro.Unvaried},
		"no factors":   {func(o *repro.Options) { o.Factors = []repro.Factor{} }, repro.Unvaried},
		"nil features": {func(o *repro.Options) { o.Executors[0].Features = nil }, repro.Unvaried},
		"nothing fits": {func(o *repro.Options) {
			o.Factors, o.Executors[0].Features = []repro.Factor{"pids"}, &sandbox.Features{}
		}, repro.Unvaried},
		"two executors":  {func(o *repro.Options) { o.Factors, o.Executors = nil, append(o.Executors, plain) }, repro.Same},
		"only the first": {func(o *repro.Options) { o.Runs, o.Executors = 2, append(o.Executors, plain) }, repro.Same},
	} {
		o := s.options()
		c.change(&o)
		v := check(t, s.action(), o)
		expect.That(t, v.Result == c.want && len(v.Factors) == 0 && v.Result.AllEqual() && v.Line() == "",
			"%s: got %s with %q varied, want %s", name, v.Result, v.Factors, c.want)
	}
}

func TestVerdictsAreDeterministic(t *testing.T) {
	var texts [][]byte
	for range 5 {
		s := newScript(t, func(n int, _ *worker.Variation) made {
			m := made{files: map[string]string{}, stdout: fmt.Sprint(n)}
			for i := range 20 {
				m.files[fmt.Sprint(i)] = fmt.Sprint(n, i)
			}
			return m
		})
		o := s.options()
		o.Factors = []repro.Factor{}
		b := must.Get(json.Marshal(check(t, s.action(), o)))(t)
		texts = append(texts, b)
	}
	for _, b := range texts[1:] {
		must.Be(t, bytes.Equal(b, texts[0]), "%s\n%s", texts[0], b)
	}
}

func TestChoose(t *testing.T) {
	for list, want := range map[string][]repro.Factor{
		"none": {}, "uid": {"user"}, "time,tz, time": {"time", "zone"},
	} {
		if got, err := repro.Choose(list); err != nil || !slices.Equal(got, want) {
			t.Errorf("Choose(%q) = %q, %v", list, got, err)
		}
	}
	if got, err := repro.Choose("all"); err != nil || len(got) != len(repro.AllFactors) {
		t.Errorf("Choose(all) = %q, %v", got, err)
	}
	for _, empty := range []string{"", " ", ",", " , "} { // an unset shell variable
		expect.Message(t, expect.Err(repro.Choose(empty)), "none", "Choose(%q)", empty)
	}
	expect.Message(t, expect.Err(repro.Choose("moon")), "hostname", "Choose(moon)")
}

// Words on lines of their own look like the keys of a hash table. If they move although every seed is held, processes
// race to write them.
func TestOrderOfLinesThatMovesWithEverythingHeldIsARace(t *testing.T) {
	words := []string{"alpha\n", "beta\n", "gamma\n", "delta\n", "epsilon\n", "zeta\n", "eta\n"}
	rotated := func(n int) made { return file(strings.Join(slices.Concat(words[n%7:], words[:n%7]), "")) }
	for name, c := range map[string]struct {
		command func(n int, v *worker.Variation) made
		want    compare.Cause
	}{
		"a race": {func(n int, _ *worker.Variation) made { return rotated(n) }, compare.Parallel},
		"a hash seed": {func(n int, v *worker.Variation) made {
			if v.Conditions.RandomSeed != 0 {
				return rotated(int(v.Conditions.RandomSeed % 7))
			}
			return rotated(n)
		}, compare.HashSeed},
	} {
		for _, bisect := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, bisect %v", name, bisect), func(t *testing.T) {
				s := newScript(t, c.command)
				o := s.options()
				o.Bisect = bisect
				v := check(t, s.action(), o)
				if d := v.Differences; len(d) != 1 || d[0].Cause != c.want || d[0].Fix != compare.FixFor(c.want, "") {
					t.Errorf("got %+v, want the cause %s", d, c.want)
				}
			})
		}
	}
}

// A certificate is not valid at the held time: the clock is held at the time of the first run, and its owner is found.
func TestBisectHoldsAnotherTimeIfTheCommandFails(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		now := cmp.Or(v.Conditions.FrozenClock, 1_700_000_000+int64(v.Conditions.ClockOffset/time.Second))
		if now > 1_700_040_000 {
			return made{exit: 2, stderr: "checking\nthe certificate is not valid\n"}
		}
		return file("by " + observed("hostname", n, v))
	})
	v := bisect(t, s)
	b := v.Bisection
	if v.Result != repro.FlakyExit || !slices.Equal(b.Factors, []repro.Factor{"time", "hostname"}) ||
		!strings.Contains(b.Summary, "held at 2023-11-15T11:00:00Z the command fails, unlike at 2023-11-14T22:13:20Z: exit 2 (the certificate is not valid)") {
		t.Errorf("got %s, %+v", v.Result, b)
	}
	for _, d := range v.Differences {
		expect.That(t, d.Cause == compare.Unknown || d.Cause == compare.Hostname,
			"the failure is taken for a cause: %+v", d)
	}
	expect.That(t, v.Runs[1].Stderr == "the certificate is not valid", "got stderr %q", v.Runs[1].Stderr)
}

// A command that fails in every control, for another reason than the time, has no factors that could be found.
func TestBisectReportsFailingControls(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		if v.Conditions.FixedLayout {
			return made{exit: 3, stderr: "cannot map"}
		}
		return file(observed("random", n, v))
	})
	b := bisect(t, s).Bisection
	if want := "with all factors held the command fails: exit 3 (cannot map)"; b.Summary != want || len(b.Factors)+len(b.Steps) > 0 {
		t.Errorf("got %+v, want %q", b, want)
	}
}

// A command that fails now and then does so at any time.
func TestFailuresByChanceAreNotBlamedOnTheHeldTime(t *testing.T) {
	for name, failing := range map[string][]int{
		"at the held time once":            {2, 3, 6}, // runs 2 and 3 are in parallel, and run 6 is the first control
		"at both times":                    {2, 3, 6, 7},
		"at the held time twice, and late": {2, 3, 6, 8, 10},
	} {
		s := newScript(t, func(n int, _ *worker.Variation) made {
			return made{exit: map[bool]int32{true: 1}[slices.Contains(failing, n)]}
		})
		if b := bisect(t, s).Bisection; b.Failure != "" || slices.Contains(b.Factors, "time") {
			t.Errorf("%s: got %+v", name, b)
		}
	}
}

// An output that keeps changing with all factors held is no race between processes, as long as nothing shows one.
func TestNondeterminismHasNoCause(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file(fmt.Sprint("\x00", n)) })
	if v := bisect(t, s); len(v.Differences) != 1 || v.Differences[0].Cause != compare.Unknown {
		t.Errorf("got %+v", v.Differences)
	}
}

// What changes with the host's second is different in the next controls, too, and is not blamed on the factor of a
// step.
func TestSlowChangesAreNotAttributedToFactors(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file(fmt.Sprint("\x00", n == 1, max(n, 9)/4)) })
	if b := bisect(t, s).Bisection; len(b.Factors) > 0 || !slices.Equal(b.Nondeterministic, []string{"out"}) {
		t.Errorf("got %+v", b)
	}
}

// The monotonic clock runs in every control, but only a later boot makes it leap.
func TestUptimeIsFoundInWhatAlwaysChanges(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return file(fmt.Sprintf("up %.2f\nnoise %d\n", 1000+float64(n)+v.Conditions.Uptime.Seconds(), n))
	})
	v := bisect(t, s)
	expect.Slices(t, v.Bisection.Factors, []repro.Factor{"uptime"}, "factors")
	if d := v.Differences; len(d) != 2 || d[0].Cause != compare.Uptime || d[1].Cause != compare.Unknown || len(d[1].Factors) > 0 {
		t.Errorf("got %+v", d)
	}
}
