// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// maxTrials limits the fixes of an action that are tried.
const maxTrials = 8

// trialTime limits a run with a fix of an action without a timeout. A fix whose run takes longer is not verified.
const trialTime = 10 * time.Minute

// A trial is a pair of runs with a fix, one plain and one varied.
type trial struct {
	a, b *Run   // nil if the fix does not fit the command, or the limit was reached
	in   string // names the script that it changed, in the fix's text
	// found are the differences of each item, once they are known.
	found map[string][]compare.Difference
}

// fix chooses a fix for each difference: a tried one that removes it, else the most specific untried one.
func (c *check) fix(ctx context.Context) error {
	scripts, err := c.scripts(ctx)
	if ctx.Err() != nil {
		return err
	}
	m := c.making(ctx)
	for _, s := range scripts {
		m.Scripts = append(m.Scripts, s.text)
	}
	type key struct { // a run varied like another one proves nothing about what the other one varied
		fix  *compare.Fix
		like int
	}
	trials, tried := map[key]*trial{}, 0
	for i := range c.verdict.Differences {
		d := &c.verdict.Differences[i]
		d.Fix = ""
		for _, f := range c.fixesOf(d, m) {
			if !c.TryFixes || !f.Mechanical() || f.Programs != "" && !m.Ran(f.Programs) {
				if d.Fix == "" && !compare.Follows(&d.Difference) {
					d.Fix = f.Text
				}
				continue
			}
			k := key{f, d.Runs[1]}
			if trials[k] == nil {
				t, err := c.try(ctx, f, scripts, d, tried)
				switch {
				case ctx.Err() != nil:
					return err
				case err != nil: // such as arguments that are too long now; the verdict stands
					t, tried = &trial{}, tried+1
				case t.a != nil:
					tried++
				}
				trials[k] = t
			}
			t := trials[k]
			if t.a == nil && d.Fix == "" && !compare.Follows(&d.Difference) {
				d.Fix = f.Text
			}
			if t.removes(ctx, d) {
				d.Fix, d.FixVerified = f.Text+t.in, true
				break
			}
		}
	}
	return nil
}

// fixesOf returns the fixes of a difference by the cause that was found and, if there is none for its format or for a
// program that ran, by the one that it shows.
func (c *check) fixesOf(d *Difference, m *compare.Making) []*compare.Fix {
	all := compare.FixesOf(&d.Difference, m)
	if shown := d.shown; shown != d.Cause {
		by := d.Difference
		by.Cause = shown
		all = append(all, compare.FixesOf(&by, m)...)
	}
	return all
}

// making returns how the action makes its outputs: the command and, by the manifest of a run, the executed programs.
func (c *check) making(ctx context.Context) *compare.Making {
	m := &compare.Making{Args: c.planner.command.GetArguments()}
	for _, v := range c.planner.command.GetEnvironmentVariables() {
		m.Env = append(m.Env, v.Name+"="+v.Value)
	}
	for i := range c.verdict.Runs {
		r := &c.verdict.Runs[i]
		d, err := cas.ParseDigest(r.Manifest)
		if err != nil {
			continue
		}
		const limit = 16 << 20
		text, err := cas.ReadAll(ctx, r.executor.Store, d, limit)
		if err != nil {
			continue
		}
		if parsed, err := manifest.Parse(text); err == nil {
			for _, p := range parsed.Toolchain.Programs {
				m.Programs = append(m.Programs, p.Path)
			}
			return m
		}
	}
	return m
}

// try runs the action with a fix: as it is, and varied like the second run of a difference. before is the number of
// earlier trials with runs. It does not try a difference between executors, which two runs of one of them cannot show.
func (c *check) try(ctx context.Context, f *compare.Fix, scripts []inputScript, d *Difference, before int) (*trial, error) {
	t := &trial{found: map[string][]compare.Difference{}}
	x := slices.IndexFunc(c.Executors, func(x Executor) bool { return x.Features != nil && x.Action.IsZero() })
	elsewhere := func(run int) bool { return c.verdict.Runs[run].executor != &c.Executors[x] }
	if x < 0 || before >= maxTrials || slices.ContainsFunc(d.Runs[:], elsewhere) {
		return t, nil
	}
	action, in, err := c.fixed(ctx, &c.Executors[x], f, scripts)
	t.in = in
	if err != nil || action.IsZero() {
		return t, err
	}
	began, original := time.Now(), c.task
	defer func() { c.task = original }()
	c.task.Action, c.task.ActionBlob = action, nil
	for _, side := range []struct {
		run     **Run
		factors []factor
	}{{&t.a, nil}, {&t.b, c.factors}} {
		if side.run == &t.b && factorOf(factorTime).explains(f.Cause) && !c.varies(factorTime) {
			if err := c.pause(ctx, began); err != nil { // times of the same second would be equal without the fix, too
				return nil, err
			}
		}
		v, copies := c.planner.varied(side.factors, d.Runs[1])
		overrideEnv(v, f.Env)
		if *side.run, err = c.execute(ctx, &c.Executors[x], v, copies, "with fix: "+f.Text); err != nil {
			return nil, err
		}
	}
	return t, nil
}

// overrideEnv sets variables of a run and overrides those of its variation.
func overrideEnv(v *worker.Variation, env []string) {
	for _, kv := range env {
		key, _, _ := strings.Cut(kv, "=")
		v.Env = slices.DeleteFunc(v.Env, func(old string) bool { return old == key || strings.HasPrefix(old, key+"=") })
		v.Env = append(v.Env, kv)
	}
}

// fixed returns the action with what a fix changes, the arguments of its command or else one of its scripts, and names
// the script. It returns a zero Digest if the fix does not fit.
func (c *check) fixed(ctx context.Context, x *Executor, f *compare.Fix, scripts []inputScript) (cas.Digest, string, error) {
	a, err := changes.ReadAction(ctx, x.Store, c.task.Action)
	if err != nil {
		return cas.Digest{}, "", readFault(err)
	}
	function := c.task.Action.Function()
	action, in := proto.CloneOf(a.Action), ""
	if args, ok := f.Apply(a.Command.GetArguments()); ok {
		command := proto.CloneOf(a.Command)
		command.Arguments = args
		d, err := cas.PutProto(ctx, x.Store, function, command)
		if err != nil {
			return d, "", fmt.Errorf("command with a fix: %w", err)
		}
		action.CommandDigest = d.Proto()
	} else {
		root, path, err := fixScript(ctx, x.Store, function, a, f, scripts)
		if err != nil || path == "" {
			return cas.Digest{}, "", err
		}
		action.InputRootDigest, in = root.Proto(), " (in "+clip(path)+")"
	}
	if action.GetTimeout().AsDuration() == 0 { // a fix may make a program loop: tr -dc a-z < /dev/zero | head -c 8
		action.Timeout = durationpb.New(trialTime)
	}
	d, err := cas.PutProto(ctx, x.Store, function, action)
	if err != nil {
		return d, "", fmt.Errorf("action with a fix: %w", err)
	}
	return d, in, nil
}

// removes reports whether both runs of a trial succeeded without the difference.
func (t *trial) removes(ctx context.Context, d *Difference) bool {
	if t.a == nil {
		return false
	}
	for _, r := range []*Run{t.a, t.b} {
		if r.ExitCode != 0 || r.Code != "" || r.items[d.item].kind == "" {
			return false
		}
	}
	if t.a.items[d.item].equal(t.b.items[d.item]) {
		return true
	}
	if _, ok := t.found[d.item]; !ok {
		found, err := differences(ctx, d.item, t.a, t.b)
		if err != nil {
			return false
		}
		t.found[d.item] = found
	}
	return !slices.ContainsFunc(t.found[d.item], func(other compare.Difference) bool {
		same := other.Cause == d.shown || other.Cause == d.Cause || isVague(other.Cause)
		return same && locationKey(&other) == locationKey(&d.Difference)
	})
}

// verifiedMeans tells readers of a verified fix what the trial did not check.
const verifiedMeans = "verified fixes: the difference was gone, the exit code 0; check that the outputs are still right"

func (v *Verdict) hasVerifiedFix() bool {
	return slices.ContainsFunc(v.Differences, func(d Difference) bool { return d.FixVerified })
}

// fixText returns the fix with a word on whether it was tried, or "".
func (d *Difference) fixText() string {
	switch {
	case d.Fix == "":
		return ""
	case d.FixVerified:
		return "verified fix: " + text(d.Fix)
	}
	return "untested fix: " + text(d.Fix)
}
