// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"errors"
	"slices"
	"strings"
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
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// tried checks an action, varying factors, with its fixes tried.
func tried(t *testing.T, s *script, task *worker.Task, factors ...repro.Factor) *repro.Verdict {
	t.Helper()
	o := s.options()
	o.Factors, o.TryFixes = factors, true
	return check(t, task, o)
}

func has(v *worker.Variation, kv string) bool { return slices.Contains(v.Env, kv) }

func TestFixesThatRemoveADifferenceAreVerified(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		return file("in zone " + observed("zone", n, v))
	})
	v := tried(t, s, s.action(), "zone")
	if d := v.Differences; len(d) != 1 || !d[0].FixVerified || d[0].Fix != compare.FixFor(compare.Zone, "") {
		t.Errorf("got %+v", d)
	}
	expect.Equal(t, s.runs(), repro.DefaultRuns+2, "runs")
	var text strings.Builder
	must.Succeed(t, v.Text(&text, repro.TextOptions{}))
	markdown := string(repro.Report{v}.Markdown())
	for _, want := range []string{"verified fix: set TZ=UTC", "check that the outputs are still right"} {
		if !strings.Contains(text.String(), want) || !strings.Contains(markdown, want) {
			t.Errorf("no %q in %s or in %s", want, text.String(), markdown)
		}
	}
}

func TestFixesThatDoNotHelpAreNotSuggested(t *testing.T) {
	for _, row := range []struct {
		name string
		act  func(n int, v *worker.Variation) made
	}{
		{"same difference", func(n int, v *worker.Variation) made {
			return file("in zone " + observed("zone", n, v) + strings.Repeat("x", n))
		}},
		{"failure", func(n int, v *worker.Variation) made {
			m := file("in zone " + observed("zone", n, v))
			if has(v, "TZ=UTC") {
				m.exit = 1
			}
			return m
		}},
		{"no output", func(n int, v *worker.Variation) made {
			if has(v, "TZ=UTC") {
				return made{}
			}
			return file("in zone " + observed("zone", n, v))
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newScript(t, row.act)
			v := tried(t, s, s.action(), "zone")
			if d := v.Differences; len(d) != 1 || d[0].FixVerified || d[0].Cause == compare.Zone && d[0].Fix != "" {
				t.Errorf("got %+v", d)
			}
		})
	}
}

// A fix that is an argument changes the command and nothing else.
func TestFixesChangeTheCommand(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made { return file("umask " + observed("umask", n, v)) })
	task := s.actionOf([]string{"sh", "-c", "umask > out"}, "A=b")
	tried(t, s, task, "umask")
	want := []string{"sh", "-c", "umask 022\numask > out"}
	for i, tk := range s.tasks {
		a := must.Get(changes.ReadAction(t.Context(), s.store, tk.Action))(t)
		if fixed := i >= repro.DefaultRuns; fixed != slices.Equal(a.Command.Arguments, want) || len(a.Command.EnvironmentVariables) != 1 {
			t.Errorf("run %d: got %q", i+1, a.Command)
		}
	}
	expect.Equal(t, s.runs(), repro.DefaultRuns+2, "runs")
}

// A fix may make a run impossible, such as one with too long arguments. That is no reason to lose the verdict.
func TestImpossibleTrialsLeaveTheVerdict(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made { return file("in zone " + observed("zone", n, v)) })
	s.fail = func(n int) error {
		if n > repro.DefaultRuns+1 {
			return &worker.Fault{Kind: worker.FaultInvalid, Err: errors.New("too long")}
		}
		return nil
	}
	if d := tried(t, s, s.action(), "zone").Differences; len(d) != 1 || d[0].FixVerified || d[0].Fix != compare.FixFor(compare.Zone, "") {
		t.Errorf("got %+v", d)
	}
}

// Fixes that do not fit the command take no runs, so they do not count.
func TestOnlyTrialsWithRunsAreLimited(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		if slices.ContainsFunc(v.Env, func(kv string) bool { return strings.HasPrefix(kv, "SOURCE_DATE_EPOCH=") }) {
			return file("made 2023-11-14T22:13:20Z")
		}
		return file("made " + time.Unix(1_700_000_000, 0).Add(v.Conditions.ClockOffset).UTC().Format(time.RFC3339))
	})
	task := s.actionOf([]string{"sh", "-c", "perl a; python3 a; node a; jq a; tclsh a; sqlite3 a; awk a"})
	if d := tried(t, s, task, "time").Differences; len(d) != 1 || !d[0].FixVerified || !strings.HasPrefix(d[0].Fix, "set SOURCE_DATE_EPOCH") {
		t.Errorf("got %+v", d)
	}
	expect.Equal(t, s.runs(), repro.DefaultRuns+2, "runs")
}

// Two runs of one executor are equal with and without a fix if only the other executor makes something else.
func TestDifferencesBetweenExecutorsHaveNoVerifiedFix(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made {
		return file("made " + map[bool]string{true: "2023-11-14T22:13:21Z", false: "2023-11-14T22:13:20Z"}[n == 2])
	})
	o := s.options()
	o.TryFixes, o.Runs = true, 2
	o.Executors = append(o.Executors, repro.Executor{Name: "other", Executor: s, Store: s.store})
	if d := check(t, s.action(), o).Differences; len(d) != 1 || d[0].Cause != compare.Timestamp || d[0].FixVerified || d[0].Fix == "" {
		t.Errorf("got %+v", d)
	}
}

// Where the clock cannot be shifted, the runs of a trial are so far apart that times differ.
func TestTrialsOfTimesPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		epoch := time.Now()
		s := newScript(t, func(int, *worker.Variation) made {
			return file("made " + time.Unix(1_700_000_000, 0).Add(time.Since(epoch)/8).UTC().Format(time.RFC3339))
		})
		o := s.options()
		o.TryFixes, o.Pause, o.Executors[0].Features = true, 10*time.Second, &sandbox.Features{}
		if d := check(t, s.action(), o).Differences; len(d) != 1 || d[0].Cause != compare.Timestamp || d[0].FixVerified {
			t.Errorf("got %+v", d)
		}
	})
}

// A fix that removes what one run varied need not remove what another one varied.
func TestEachRunHasItsTrial(t *testing.T) {
	s := newScript(t, func(n int, v *worker.Variation) made {
		text := "in zone "
		if v.Conditions.Hostname == "elsewhere2" {
			text += host.Zones[1] // whatever TZ says
		}
		return made{files: map[string]string{"a": "in zone " + observed("zone", n, v), "b": text}}
	})
	v := tried(t, s, s.action(), "zone", "hostname")
	if d := v.Differences; len(d) != 2 || d[1].Runs != [2]int{0, 2} || !d[0].FixVerified || d[1].FixVerified {
		t.Errorf("got %+v", d)
	}
}

// A fix for a program that a script among the inputs executes changes a copy of that script, and its text names the
// script. Neither the command nor other inputs change.
func TestFixesChangeScriptsAmongInputs(t *testing.T) {
	const text = "#!/bin/sh\nset -e\numask > out\n"
	for _, row := range []struct {
		name       string
		args       []string
		dir        string
		file, want string
	}{
		{"argument of a shell", []string{"sh", "-e", "tools/make.sh"}, "", text, "#!/bin/sh\numask 022\nset -e\numask > out\n"},
		{"program", []string{"./make.sh", "x"}, "tools", text, "#!/bin/sh\numask 022\nset -e\numask > out\n"},
		{"another program", []string{"tools/make.sh"}, "", "#!/usr/bin/python3\n", ""},
		{"absent", []string{"sh", "../make.sh"}, "", text, ""},
		{"fixed already", []string{"sh", "tools/make.sh"}, "", "umask 022\n" + text, ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newScript(t, nil)
			inputs := func(tk *worker.Task) string {
				a := must.Get(changes.ReadAction(t.Context(), s.store, tk.Action))(t)
				root, tools := &repb.Directory{}, &repb.Directory{}
				must.Succeed(t, cas.ReadProto(t.Context(), s.store, must.Get(a.Root())(t), root))
				must.Succeed(t, cas.ReadProto(t.Context(), s.store, must.Get(cas.FromProto(cas.SHA256, root.Directories[0].Digest))(t), tools))
				if !slices.Equal(a.Command.Arguments, row.args) || len(root.Files) != 1 || !tools.Files[0].IsExecutable {
					t.Errorf("other parts of the action changed: %v, %v", a.Command, root)
				}
				d := must.Get(cas.FromProto(cas.SHA256, tools.Files[0].Digest))(t)
				return string(must.Get(cas.ReadAll(t.Context(), s.store, d, 1<<20))(t))
			}
			s.act = func(n int, v *worker.Variation) made {
				if inputs(s.tasks[n-1]) == row.want {
					return file("a")
				}
				return file("umask " + observed("umask", n, v))
			}
			task := s.actionWith(&repb.Command{Arguments: row.args, WorkingDirectory: row.dir}, &repb.Directory{
				Files: []*repb.FileNode{{Name: "other", Digest: s.put("x")}},
				Directories: []*repb.DirectoryNode{{Name: "tools", Digest: s.putProto(&repb.Directory{
					Files: []*repb.FileNode{{Name: "make.sh", Digest: s.put(row.file), IsExecutable: true}},
				})}},
			})
			d := tried(t, s, task, "umask").Differences
			if len(d) != 1 || d[0].FixVerified != (row.want != "") || row.want != "" && d[0].Fix != "umask 022 first (in tools/make.sh)" {
				t.Errorf("got %+v", d)
			}
		})
	}
}
