// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/tests/expect"
	"github.com/cloister-build/cloister/tests/must"
)

// A varied run neither reads nor writes the action cache, even if the variation changes nothing.
func TestVariedRunsAreNotCached(t *testing.T) {
	runs := 0
	b := newBench(t, func(context.Context, *sandbox.Spec, sandbox.Stdio, *os.Root) *sandbox.Result {
		runs++
		return &sandbox.Result{}
	})
	action := b.action(nil)
	task := &Task{Action: action, Variation: &Variation{}}
	if out := b.do(task); !out.Uncacheable || out.Cached || b.recorded(action) {
		t.Errorf("got %+v, cached %v, want an uncached run", out, b.recorded(action))
	}
	must.Succeed(t, b.store.Record(t.Context(), action, &repb.ActionResult{}))
	if out := b.do(task); out.Cached || runs != 2 {
		t.Error("got a cached result for a varied run")
	}
	admission, err := b.Admit(t.Context(), task)
	expect.That(t, err == nil && admission.DoNotMerge, "got %+v, %v, want DoNotMerge", admission, err)
}

func TestVariationChangesSpec(t *testing.T) {
	var got *sandbox.Spec
	b := newBench(t, func(_ context.Context, spec *sandbox.Spec, _ sandbox.Stdio, _ *os.Root) *sandbox.Result {
		got = spec
		return &sandbox.Result{Opened: []string{ExecRoot + "/d/b", "/home/x/src/a"}}
	})
	b.cfg.Features.Conditions = []sandbox.Condition{sandbox.ConditionHostname}
	action := b.action(func(a *repb.Action, c *repb.Command) {
		c.WorkingDirectory, c.OutputPaths = "d", []string{"x"}
		c.EnvironmentVariables = []*repb.Command_EnvironmentVariable{{Name: "A", Value: "1"}, {Name: "B", Value: "2"}}
		a.Platform = platform("cloister-audit", "full")
	})
	hash := func(v *Variation) string { return b.execution(b.do(&Task{Action: action, Variation: v})).SpecHash }

	usual := hash(nil)
	expect.That(t, hash(&Variation{}) == usual, "the zero variation changes the spec")
	expect.That(t, hash(&Variation{Order: 7}) == usual, "an order changes the spec hash")
	v := &Variation{
		Conditions: sandbox.Conditions{Hostname: "elsewhere"}, Root: "/home/x/src",
		Env: []string{"A=3", "B", "C=4", "HOME", "NOTSET"},
	}
	out := b.do(&Task{Action: action, Variation: v})
	if m := b.execution(out); m.SpecHash == usual || m.UnreadInputs == nil || *m.UnreadInputs != 1 {
		t.Errorf("got %v, want a hash other than %s and one unread input", m, usual)
	}
	env := append([]string{"A=3", "C=4"}, sandbox.Environment("HOME")...)
	if got.Dir != "/home/x/src/d" || got.Outputs[0].Target != "/home/x/src" || !slices.Equal(got.Env, env) || got.Conditions != v.Conditions {
		t.Errorf("got spec %+v", got)
	}
	for _, in := range got.Inputs {
		expect.That(t, in.Target != ExecRoot && in.Target != ExecRoot+"/a", "got an input at %s", in.Target)
	}
}

func TestInvalidVariationsAreRefused(t *testing.T) {
	b := newBench(t, ended(0))
	b.cfg.Toolchain = []sandbox.Input{{Target: "/usr", Content: "host", Source: "/usr"}}
	b.cfg.Features.Conditions = []sandbox.Condition{sandbox.ConditionUmask}
	for name, c := range map[string]struct {
		v    Variation
		want FaultKind
	}{
		"unsupported condition":   {Variation{Conditions: sandbox.Conditions{Hostname: "a"}}, FaultUnmet},
		"invalid condition":       {Variation{Conditions: sandbox.Conditions{Umask: 0o1000}}, FaultInvalid},
		"variable without a name": {Variation{Env: []string{"=x"}}, FaultInvalid},
		"a relative root":         {Variation{Root: "build"}, FaultInvalid},
		"an unclean root":         {Variation{Root: "/a/../b"}, FaultInvalid},
		"the root directory":      {Variation{Root: "/"}, FaultInvalid},
		"a root in the toolchain": {Variation{Root: "/usr/src"}, FaultInvalid},
		"a root in /proc":         {Variation{Root: "/proc/x"}, FaultInvalid},
		"a root in /sys":          {Variation{Root: "/sys/x"}, FaultInvalid},
		"a root in /tmp":          {Variation{Root: "/tmp/x"}, FaultInvalid},
		"a root in /etc":          {Variation{Root: "/etc/x"}, FaultInvalid},
		"a root in /dev":          {Variation{Root: "/dev"}, FaultInvalid},
	} {
		var f *Fault
		if _, err := b.Execute(t.Context(), &Task{Action: b.action(nil), Variation: &c.v}, func(Stage) {}); !errors.As(err, &f) || f.Kind != c.want {
			t.Errorf("%s: got %v, want a fault of kind %v", name, err, c.want)
		}
	}
}
