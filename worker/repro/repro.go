// SPDX-License-Identifier: Apache-2.0

// Package repro checks whether an action is reproducible and finds out why it is not.
//
// Check has a worker.Executor run an action several times, varies one condition per run, such as the time or the host
// name, and compares the results. Bisect finds the first action of a build that differs. A Sampler re-runs a sample of
// the actions that a server executes, and Verdicts keeps what it found. Package repro neither starts processes nor
// parses file formats: the executor and package compare do.
//
// The packages below it answer the other questions about equal and different results:
//
//   - manifest: the record of one run, as text with a stable hash
//   - compare: where two outputs differ, and the likely cause
//   - changes: how two actions, results, directories or builds differ, by names and digests alone
//   - attest: signed statements about results
package repro

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A Result is what runs of one action come to. It is a closed list.
type Result string

// The results.
const (
	Same      Result = "same"       // outputs, exit codes, stdout and stderr of all runs are equal
	Differs   Result = "differs"    // an output, stdout or stderr is not
	FlakyExit Result = "flaky exit" // the exit code is not, or how the run ended
)

// Runs of one check.
const (
	DefaultRuns = 3
	MinRuns     = 2
	MaxRuns     = 100
)

// Options say how an action is checked. Executors is required.
type Options struct {
	// Runs is how many runs are compared; 0 is DefaultRuns, but one for each of Executors at least.
	Runs int
	// Factors are the names of those that vary, as Choose returns them; nil is all that can.
	Factors []string
	// Bisect has the factors found that make the runs differ, if they do.
	Bisect bool
	// Executors are where it runs, in turns, the first run at the first.
	Executors []Executor
	Host      Host
	// First, if not nil, is the outcome of the first run, which was made already, as a usual one.
	First *worker.Outcome
	// Pause is how long after the first run the second begins at the earliest, if the time is to vary and no clock can be
	// shifted; and the last control of a bisection after the first, if none can be held. 0 is some two seconds, and negative
	// is none.
	Pause time.Duration
	// Progress, if not nil, is told before each run what it is for, in a few words of ASCII.
	Progress func(what string)
}

// An Executor runs the action of a check.
type Executor struct {
	// Name is what a person calls it.
	Name     string
	Executor worker.Executor
	// Store is where the outputs of its runs are.
	Store cas.Store
	// Action is what the action is called there, if it has another name than in the Task.
	Action cas.Digest
	// Features say what it can vary; nil is nothing, and every run there is as usual.
	Features *sandbox.Features
}

// A Verdict is what came of a check. Its texts from actions and servers are printable ASCII.
type Verdict struct {
	Action   string `json:"action"`
	Instance string `json:"instance,omitempty"`
	Target   string `json:"target,omitempty"`
	Mnemonic string `json:"mnemonic,omitempty"`
	Result   Result `json:"result"`
	// Factors are those that were varied, in the order of Factors, and Skipped the others that were wanted.
	Factors []string  `json:"factors"`
	Skipped []Skipped `json:"skipped,omitempty"`
	Runs    []Run     `json:"runs"`
	// Outputs are those of all runs, by their path; after them stdout and stderr.
	Outputs     []Output     `json:"outputs"`
	Differences []Difference `json:"differences,omitempty"`
	// Unexplained says of which outputs no difference can be told, and why.
	Unexplained []string   `json:"unexplained,omitempty"`
	Bisection   *Bisection `json:"bisection,omitempty"`
	// Diffoscope is what diffoscope(1) says of the outputs of two runs, in printable lines, if it was asked.
	Diffoscope string `json:"diffoscope,omitempty"`
}

// A Run is one run of an action.
type Run struct {
	// On is the name of the place.
	On string `json:"on"`
	// Action is the digest that the action has there, if it is another.
	Action string `json:"action,omitempty"`
	// Worker is what the worker calls itself.
	Worker string `json:"worker,omitempty"`
	// Varied says what the run noticed otherwise than a usual one: "hostname elsewhere1".
	Varied   []string `json:"varied,omitempty"`
	ExitCode int32    `json:"exit_code"`
	// Code is how the run ended, if not well, as the API has it: "DeadlineExceeded".
	Code string `json:"code,omitempty"`
	// Start and End are when the command ran, by the worker's clock.
	Start      time.Time `json:"start,omitzero"`
	End        time.Time `json:"end,omitzero"`
	Manifest   string    `json:"manifest,omitempty"`
	StableHash string    `json:"stable_hash,omitempty"`

	// Result is what the run left, in the store of its place.
	Result *repb.ActionResult `json:"-"`

	outputs map[string]item // by path
	place   *Executor
	facts   *compare.Facts
	digests cas.Function // of its outputs
}

// Function returns the digest function of everything that the runs made.
func (v *Verdict) Function() cas.Function { return v.Runs[0].digests }

// An Output is one thing that runs made.
type Output struct {
	// Path is compare.Stdout or compare.Stderr for what the command said.
	Path string `json:"path"`
	// Kind is file, directory, symlink, stdout or stderr.
	Kind string `json:"kind"`
	// Digests are what each run made there, "" for nothing: HASH/SIZE, or what a symlink holds.
	Digests []string `json:"digests"`
	// Differ says that they are not all equal.
	Differ bool `json:"differ,omitempty"`
	// Factors are those that make it differ, if these were looked for.
	Factors []string `json:"factors,omitempty"`
}

// Distinct returns how many different things the runs made.
func (o *Output) Distinct() int {
	d := slices.Sorted(slices.Values(o.Digests))
	return len(slices.Compact(d))
}

// A Difference is one place in which the outputs of two runs differ.
type Difference struct {
	// Output is the path of the output that it is in.
	Output string `json:"output"`
	compare.Difference
	// Runs are the two, counted from 0.
	Runs [2]int `json:"runs"`
	// Factors are those that make it differ, if they were looked for and found.
	Factors []string `json:"factors,omitempty"`
}

// MaxDifferences is how many differences a Verdict has at most.
const MaxDifferences = 200

// Check runs the action of t several times and compares what comes out. A run that fails by itself is one like any other.
// It fails with a *worker.Fault if a run cannot be made, and when ctx ends.
func Check(ctx context.Context, t *worker.Task, o Options) (*Verdict, error) {
	c, err := newCheck(ctx, t, o)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if o.First != nil {
		began = o.First.Result.GetExecutionMetadata().GetExecutionStartTimestamp().AsTime()
	}
	for i := range c.Runs {
		if i == 1 && (o.Factors == nil || slices.Contains(o.Factors, "time")) && c.scene.lacks([]sandbox.Condition{sandbox.ConditionClockOffset}) != "" {
			if err := c.pause(ctx, began); err != nil {
				return nil, err
			}
		}
		if err := c.run(ctx, i); err != nil {
			return nil, err
		}
	}
	if len(c.Executors) > 1 {
		settle(ctx, c.verdict.Runs)
	}
	c.judge()
	if o.Bisect && c.verdict.Result != Same {
		if err := c.bisect(ctx); err != nil {
			return nil, err
		}
	}
	c.explain(ctx)
	return &c.verdict, ctx.Err()
}

// A check is one under way.
type check struct {
	Options
	task    worker.Task
	scene   scene // of the first place that can vary
	factors []Factor
	verdict Verdict
}

func newCheck(ctx context.Context, t *worker.Task, o Options) (*check, error) {
	if len(o.Executors) == 0 {
		return nil, invalidf("there is no place for the runs")
	}
	if o.Runs == 0 {
		o.Runs = max(DefaultRuns, len(o.Executors))
	}
	if o.Runs < MinRuns || o.Runs > MaxRuns {
		return nil, invalidf("%d runs cannot be compared: %d to %d can", o.Runs, MinRuns, MaxRuns)
	}
	c := &check{Options: o, task: *t}
	c.task.Args, c.task.Terminal, c.task.Stdout, c.task.Stderr, c.task.Logs = nil, nil, nil, nil, nil
	action := t.Action
	if p := &o.Executors[0]; !p.Action.IsZero() {
		action = p.Action
	}
	command, err := commandOf(ctx, o.Executors[0].Store, action)
	if err != nil {
		return nil, err
	}
	c.scene = scene{command: command, host: o.Host, seed: t.Seed}
	for i := range o.Executors {
		if p := &o.Executors[i]; p.Features != nil && c.scene.features == nil {
			c.scene.features = p.Features
		}
	}
	v := &c.verdict
	v.Action, v.Instance, v.Target, v.Mnemonic = t.Action.String(), text(t.Instance), text(t.Target), text(t.Mnemonic)
	v.Factors = []string{}
	if c.scene.features == nil {
		v.Skipped = []Skipped{{"all", "no run is on a worker that can be told what to vary"}}
		return c, nil
	}
	c.factors, v.Skipped = c.scene.fit(o.Factors)
	for _, f := range c.factors {
		v.Factors = append(v.Factors, f.Name)
	}
	return c, nil
}

// commandOf reads the command of an action.
func commandOf(ctx context.Context, s cas.Store, action cas.Digest) (*repb.Command, error) {
	var a repb.Action
	if err := cas.ReadProto(ctx, s, action, &a); err != nil {
		return nil, unread(fmt.Errorf("action %s: %w", action, err))
	}
	d, err := cas.FromProto(action.Function(), a.CommandDigest)
	if err != nil {
		return nil, unread(fmt.Errorf("command of action %s: %w", action, err))
	}
	var command repb.Command
	if err := cas.ReadProto(ctx, s, d, &command); err != nil {
		return nil, unread(fmt.Errorf("command of action %s: %w", action, err))
	}
	return &command, nil
}

// unread gives an error of reading a message its kind.
func unread(err error) error {
	kind := worker.Unavailable
	switch {
	case errors.Is(err, cas.ErrNotFound):
		kind = worker.Missing
	case errors.Is(err, cas.ErrInvalid):
		kind = worker.Invalid
	}
	return &worker.Fault{Kind: kind, Err: err}
}

func invalidf(format string, args ...any) error {
	return &worker.Fault{Kind: worker.Invalid, Err: fmt.Errorf(format, args...)}
}
