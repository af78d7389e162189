// SPDX-License-Identifier: Apache-2.0

// Package repro checks whether an action is reproducible and finds out why it is not.
//
// Check runs an action several times, varies factors such as the time or the host name in each run, and compares the
// results. With Options.Bisect it also searches for the factors that cause the differences. A Sampler checks a sample
// of the actions that a server executes, and Verdicts keep its results. Package repro neither starts processes nor
// parses file formats: a worker.Executor and package compare do.
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
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A Result classifies the runs of an action.
type Result string

// The results.
const (
	Same      Result = "same"       // outputs, stdout, stderr and exit codes are equal although conditions varied
	Unvaried  Result = "unvaried"   // they are equal, but neither a factor nor the executor varied
	Differs   Result = "differs"    // an output, stdout or stderr differs
	FlakyExit Result = "flaky exit" // the exit or status code differs
)

// AllEqual reports whether no run differs: Same or Unvaried.
func (r Result) AllEqual() bool { return r == Same || r == Unvaried }

// Limits of Options.Runs.
const (
	DefaultRuns = 3
	MinRuns     = 2
	MaxRuns     = 100
)

// Options configure a check. Executors is required.
type Options struct {
	// Runs is the number of runs; 0 means DefaultRuns, or more if there are more Executors.
	Runs int
	// Factors are the factors to vary, such as AllFactors; if there are none, equal runs are Unvaried.
	Factors []Factor
	// Bisect searches for the factors that cause the differences.
	Bisect bool
	// TryFixes tries fixes that are variables or arguments, by two runs each, to tell which ones remove a difference.
	TryFixes bool
	// Executors run the action alternately, beginning with the first.
	Executors []Executor
	Host      Host
	// First, if not nil, is the outcome of a run without variation, which serves as the first run. If a persistent worker
	// made it, the check finds what differs for that reason, unless Bisect is set.
	First *worker.Outcome
	// Pause is the minimum time between the starts of the first two runs if the time is to vary and the clock cannot be
	// shifted, and between the controls of a bisection if the clock cannot be held. 0 means about two seconds, a
	// negative value none.
	Pause time.Duration
	// Progress, if not nil, is called before each run with its purpose in a few words of ASCII.
	Progress func(purpose string)
}

// An Executor runs the action of a check.
type Executor struct {
	// Name is its name for people. Name, Executor and Store are required.
	Name     string
	Executor worker.Executor
	// Store holds the outputs of its runs.
	Store cas.Store
	// Action replaces the action of the Task, unless it is zero.
	Action cas.Digest
	// Features describe what it can vary; nil means nothing, so that its runs are not varied.
	Features *sandbox.Features
}

// A Verdict is the result of a check. Texts from actions and servers are printable ASCII.
type Verdict struct {
	Action   string `json:"action"`
	Instance string `json:"instance,omitempty"`
	Target   string `json:"target,omitempty"`
	Mnemonic string `json:"mnemonic,omitempty"`
	Result   Result `json:"result"`
	// Factors were varied. Skipped were requested but could not be varied; with all factors, what no worker varies follows
	// them.
	Factors []Factor  `json:"factors"`
	Skipped []Skipped `json:"skipped,omitempty"`
	Runs    []Run     `json:"runs"`
	// Outputs are the outputs of all runs by path, then stdout and stderr.
	Outputs     []Output     `json:"outputs"`
	Differences []Difference `json:"differences,omitempty"`
	// Unexplained names the outputs that could not be compared, and why.
	Unexplained []string   `json:"unexplained,omitempty"`
	Bisection   *Bisection `json:"bisection,omitempty"`
	// Diffoscope is the report of diffoscope(1) on the outputs of two runs in printable lines, if requested.
	Diffoscope string `json:"diffoscope,omitempty"`
}

// A Run is one run of an action.
type Run struct {
	// On is the name of the Executor.
	On string `json:"on"`
	// Action is the digest of the action if the Executor replaced it.
	Action string `json:"action,omitempty"`
	// Worker is the worker's own name.
	Worker string `json:"worker,omitempty"`
	// Varied lists the varied conditions: "hostname elsewhere1".
	Varied   []string `json:"varied,omitempty"`
	ExitCode int32    `json:"exit_code"`
	// Code is the status code of the API unless it is OK: "DeadlineExceeded".
	Code string `json:"code,omitempty"`
	// Stderr is the last line of stderr if the run failed.
	Stderr string `json:"stderr,omitempty"`
	// Start and End are when the command ran, by the worker's clock.
	Start      time.Time `json:"start,omitzero"`
	End        time.Time `json:"end,omitzero"`
	Manifest   string    `json:"manifest,omitempty"`
	StableHash string    `json:"stable_hash,omitempty"`

	// Result is the result of the run, in the store of its Executor.
	Result *repb.ActionResult `json:"-"`

	items    map[string]item // by path, and stdout and stderr
	executor *Executor
	facts    *compare.Facts
	uptime   time.Duration // added to the monotonic clock
	function cas.Function  // of the outputs' digests
}

// Function returns the digest function of the outputs.
func (v *Verdict) Function() cas.Function { return v.Runs[0].function }

// An Output is an output of the action in all runs.
type Output struct {
	// Path is a path, compare.Stdout or compare.Stderr.
	Path string `json:"path"`
	// Kind is file, directory, symlink, stdout or stderr.
	Kind string `json:"kind"`
	// Digests has one entry per run: HASH/SIZE, the target of a symlink, or "" if there is no output.
	Digests []string `json:"digests"`
	// Differ means that the Digests differ.
	Differ bool `json:"differ,omitempty"`
	// Factors are the factors it depends on, if they were searched for.
	Factors []Factor `json:"factors,omitempty"`
}

// distinct returns the number of distinct digests.
func (o *Output) distinct() int {
	d := slices.Sorted(slices.Values(o.Digests))
	return len(slices.Compact(d))
}

// A Difference is a difference between the outputs of two runs.
type Difference struct {
	// Output is the path of the output.
	Output string `json:"output"`
	compare.Difference
	// Runs are the indexes of the two runs.
	Runs [2]int `json:"runs"`
	// Factors are the factors that cause it, if known.
	Factors []Factor `json:"factors,omitempty"`
	// FixVerified means that the difference was gone in runs with the fix.
	FixVerified bool `json:"fix_verified,omitempty"`

	item  string        // a key of Run.items
	shown compare.Cause // without what the factors tell
}

// maxDifferences is the maximum number of a Verdict's Differences.
const maxDifferences = 200

// Check runs the action of t several times and compares the results. Runs may fail: that is a result, too. Check fails
// with a *worker.Fault if a run is impossible, and when ctx ends.
func Check(ctx context.Context, t *worker.Task, o Options) (*Verdict, error) {
	c, err := newCheck(ctx, t, o)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if o.First != nil {
		began = o.First.Result.GetExecutionMetadata().GetExecutionStartTimestamp().AsTime()
	}
	varyTime := slices.Contains(o.Factors, factorTime)
	for i := range c.Runs {
		if i == 1 && varyTime && c.planner.lacks(sandbox.ConditionClockOffset) {
			if err := c.pause(ctx, began); err != nil {
				return nil, err
			}
		}
		if err := c.run(ctx, i); err != nil {
			return nil, err
		}
	}
	if len(c.Executors) > 1 {
		normalizeTrees(ctx, c.verdict.Runs)
	}
	c.verdict.Result, c.verdict.Outputs = compareRuns(c.verdict.Runs)
	if c.verdict.Result == Same && len(c.verdict.Factors) == 0 && !c.alternates() {
		c.verdict.Result = Unvaried
	}
	warm := c.describeWorkers(ctx)
	if !c.verdict.Result.AllEqual() {
		find := c.findRaces
		switch {
		case o.Bisect:
			find = c.bisect
		case warm:
			find = c.findWarm
		}
		if err := find(ctx); err != nil {
			return nil, err
		}
	}
	c.explain(ctx)
	if err := c.fix(ctx); err != nil {
		return nil, err
	}
	return &c.verdict, ctx.Err()
}

// A check is the state of Check.
type check struct {
	Options
	task    worker.Task
	planner planner // for the first Executor that can vary conditions
	factors []factor
	verdict Verdict
	races   map[string]bool // items in which findRaces found that processes race
}

func newCheck(ctx context.Context, t *worker.Task, o Options) (*check, error) {
	if err := o.validate(t); err != nil {
		return nil, &worker.Fault{Kind: worker.FaultInvalid, Err: err}
	}
	if o.Runs == 0 {
		o.Runs = max(DefaultRuns, len(o.Executors))
	}
	if o.Runs < MinRuns || o.Runs > MaxRuns {
		return nil, invalidf("%d runs: want %d to %d", o.Runs, MinRuns, MaxRuns)
	}
	c := &check{Options: o, task: *t}
	c.task.Args, c.task.Terminal, c.task.Stdin, c.task.Stdout, c.task.Stderr, c.task.Logs = nil, nil, nil, nil, nil, nil
	action := t.Action
	if x := &o.Executors[0]; !x.Action.IsZero() {
		action = x.Action
	}
	a, err := changes.ReadAction(ctx, o.Executors[0].Store, action)
	if err != nil {
		return nil, readFault(err)
	}
	c.planner = planner{command: a.Command, host: o.Host, seed: t.Seed, heldTime: defaultHeldTime}
	for i := range o.Executors {
		if x := &o.Executors[i]; x.Features != nil && c.planner.features == nil {
			c.planner.features = x.Features
		}
	}
	v := &c.verdict
	v.Action, v.Instance, v.Target, v.Mnemonic = t.Action.String(), text(t.Instance), text(t.Target), text(t.Mnemonic)
	v.Factors = []Factor{}
	if c.planner.features == nil {
		v.Skipped = []Skipped{{"all", "no executor can vary conditions"}}
		return c, nil
	}
	c.factors, v.Skipped = c.planner.fit(o.Factors)
	if !slices.ContainsFunc(AllFactors, func(f Factor) bool { return !slices.Contains(o.Factors, f) }) {
		v.Skipped = append(v.Skipped, unvaried...)
	}
	if !c.variesAny() {
		v.Skipped = []Skipped{{"all", "no executor that can vary conditions makes a run after the first"}}
		return c, nil
	}
	for _, f := range c.factors {
		v.Factors = append(v.Factors, f.name)
	}
	return c, nil
}

// validate returns an error that names the first field that is missing or wrong.
func (o *Options) validate(t *worker.Task) error {
	if t == nil {
		return errors.New("the Task is missing")
	}
	if t.Action.IsZero() {
		return errors.New("Task.Action is zero")
	}
	if len(o.Executors) == 0 {
		return errors.New("Options.Executors is empty: no executor to run the action on")
	}
	for i := range o.Executors {
		x, missing := &o.Executors[i], ""
		switch {
		case x.Name == "":
			missing = "Name"
		case x.Executor == nil:
			missing = "Executor"
		case x.Store == nil:
			missing = "Store"
		default:
			continue
		}
		return fmt.Errorf("Options.Executors[%d].%s is missing", i, missing)
	}
	for _, name := range o.Factors {
		if !slices.Contains(AllFactors, name) {
			return fmt.Errorf("unknown factor %+.100q in Options.Factors: choose from %s", name, Join(AllFactors))
		}
	}
	return nil
}

// variesAny reports whether a run after the first varies the factors.
func (c *check) variesAny() bool {
	for i := 1; i < c.Runs; i++ {
		if c.Executors[i%len(c.Executors)].Features != nil {
			return true
		}
	}
	return false
}

// alternates reports whether the runs took place on different executors.
func (c *check) alternates() bool {
	return slices.ContainsFunc(c.verdict.Runs, func(r Run) bool { return r.On != c.verdict.Runs[0].On })
}

// readFault turns an error of reading a message into a Fault.
func readFault(err error) error {
	kind := worker.FaultUnavailable
	switch {
	case errors.Is(err, cas.ErrNotFound):
		kind = worker.FaultMissing
	case errors.Is(err, cas.ErrInvalid):
		kind = worker.FaultInvalid
	}
	return &worker.Fault{Kind: kind, Err: err}
}

func invalidf(format string, args ...any) error {
	return &worker.Fault{Kind: worker.FaultInvalid, Err: fmt.Errorf(format, args...)}
}
