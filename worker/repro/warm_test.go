// SPDX-License-Identifier: Apache-2.0

package repro_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// warmed returns s's options with a first run that was a request of this number to a persistent worker.
func (s *script) warmed(task *worker.Task, request int) repro.Options {
	s.t.Helper()
	o := s.options()
	o.Runs, o.Factors = 2, []repro.Factor{"time", "hostname"} // without copies of runs
	o.First = execute(s.t, s, task)
	m := manifest.Manifest{
		Action: task.Action, Command: task.Action, InputRoot: task.Action, Status: "OK",
		Stdout: cas.SHA256.Sum(nil), Stderr: cas.SHA256.Sum(nil),
		Volatile: manifest.Volatile{Audit: "off", WorkerRequest: request},
	}
	text, _ := m.Sealed()
	o.First.Manifest = must.Get(cas.PutBytes(s.t.Context(), s.store, cas.SHA256, []byte(text)))(s.t)
	return o
}

// TestWarmDifferences: what only the first run has, a request to a persistent worker, is due to that. What varied runs
// change is not, nor is what differs by chance.
func TestWarmDifferences(t *testing.T) {
	leak := func(n int) string { // of the first run
		if n == 1 {
			return "one two"
		}
		return "two"
	}
	random := []string{"north", "south", "east", "west"}
	for name, c := range map[string]struct {
		act     func(n int, v *worker.Variation) made
		request int
		runs    int      // with the first one
		worker  []string // outputs that depend on the persistent worker
		line    string
	}{
		"leak": {func(n int, _ *worker.Variation) made { return file(leak(n)) }, 2, 4, []string{"out"}, "out differs (persistent worker)"},
		"hostname": {
			func(_ int, v *worker.Variation) made { return file("on " + v.Conditions.Hostname) }, 2, 4, nil, "out differs (hostname)",
		},
		"both, in two outputs": {func(n int, v *worker.Variation) made {
			return made{files: map[string]string{"leak": leak(n), "z": "on " + v.Conditions.Hostname}}
		}, 2, 4, []string{"leak"}, "leak, z differ (persistent worker)"},
		"chance":       {func(n int, _ *worker.Variation) made { return file(random[n-1]) }, 2, 4, nil, "out differs"},
		"exit code":    {func(n int, _ *worker.Variation) made { return made{exit: int32(1 / n)} }, 2, 4, []string{"(exit code)"}, "exit 1, exit 0 (persistent-worker)"},
		"its own":      {func(n int, _ *worker.Variation) made { return file(leak(n)) }, 0, 2, nil, "out differs"},
		"no leak":      {func(int, *worker.Variation) made { return file("two") }, 2, 2, nil, ""},
		"only started": {func(n int, _ *worker.Variation) made { return file(leak(n)) }, 1, 4, []string{"out"}, "out differs (persistent worker)"},
	} {
		s := newScript(t, c.act)
		task := s.action()
		v := check(t, task, s.warmed(task, c.request))
		var changed []string
		if v.Bisection != nil {
			for _, step := range v.Bisection.Steps {
				changed = append(changed, step.Changed...)
			}
		}
		expect.That(t, slices.Equal(changed, c.worker), "%s: got outputs %q, want %q", name, changed, c.worker)
		expect.That(t, strings.HasSuffix(v.Line(), c.line) && (v.Line() == "") == (c.line == ""), "%s: got %q, want %q", name, v.Line(), c.line)
		expect.Equal(t, s.runs(), c.runs, "runs of %s", name)
		expect.Equal(t, len(v.Runs[0].Varied) > 0 && strings.HasPrefix(v.Runs[0].Varied[0], "persistent-worker request "), c.request > 0, "%s", name)
	}
}

// TestWarmRunsCanRace: if the worker is not responsible, the cause is found as without one.
func TestWarmRunsCanRace(t *testing.T) {
	words := []string{"alpha\n", "beta\n", "gamma\n", "delta\n", "epsilon\n", "zeta\n", "eta\n"}
	s := newScript(t, func(n int, _ *worker.Variation) made {
		return file(strings.Join(slices.Concat(words[n%7:], words[:n%7]), ""))
	})
	task := s.action()
	v := check(t, task, s.warmed(task, 2))
	if d := v.Differences; len(d) != 1 || d[0].Cause != compare.Parallel {
		t.Errorf("got %+v, want the cause %s", d, compare.Parallel)
	}
}

// TestWarmVerdict: the verdict names the process, and the fix.
func TestWarmVerdict(t *testing.T) {
	s := newScript(t, func(n int, _ *worker.Variation) made { return file(strings.Repeat("x", 1+1/n)) })
	task := s.action()
	v := check(t, task, s.warmed(task, 7))
	var b bytes.Buffer
	must.Succeed(t, v.Text(&b, repro.TextOptions{Verbose: true}))
	for _, line := range []string{
		"run 1   local, persistent-worker request 7\n",
		"out  DIFFERS  2 digests in 2 runs  (1 of 1 outputs)  depends on persistent-worker\n",
		"cause: persistent worker   found by varying: persistent-worker   untested fix: have the tool keep nothing between requests",
		"bisected in 2 runs: caused by persistent-worker\n",
		"not reproducible: persistent worker\n",
	} {
		expect.That(t, strings.Contains(b.String(), line), "got\n%s\nwant %q", b.String(), line)
	}
	isCause := func(row compare.CauseRow) bool { return row.Cause == v.Differences[0].Cause }
	expect.That(t, slices.ContainsFunc(compare.Causes, isCause), "%q is none of the documented causes", v.Differences[0].Cause)
}
