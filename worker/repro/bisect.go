// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A Bisection names the factors that cause the differences. Control runs hold all factors as far as possible and show
// what differs anyway. Then each factor is varied alone, and a run that differs from the controls in more than that
// names it.
type Bisection struct {
	// Runs is the number of runs, without those of the check.
	Runs int `json:"runs"`
	// Held are the factors that were held, Unheld those that this host cannot hold.
	Held   []Factor `json:"held"`
	Unheld []Factor `json:"loose,omitempty"`
	// Nondeterministic are the outputs that differ for no known factor although all are held.
	Nondeterministic []string `json:"unsteady,omitempty"`
	// TimeDependent are the outputs in which times differ although all factors are held.
	TimeDependent []string `json:"drifting,omitempty"`
	// Steps list what varying each factor alone changed.
	Steps []Step `json:"steps"`
	// Factors are those whose steps changed anything.
	Factors []Factor `json:"factors"`
	// Together means that no factor alone changes anything, but all together do.
	Together bool `json:"together,omitempty"`
	// Failure describes how the command fails with all factors held although the first run succeeded, or is "".
	Failure string `json:"failure,omitempty"`
	// Summary is the result in one line.
	Summary string `json:"says"`

	control  Run    // the first of controls
	controls []*Run // with all factors held
	noise    noise
	values   map[place]*values
	compared map[pair][]string // keys of the locations in which they differ
}

// A Step is a factor that was varied alone.
type Step struct {
	Factor Factor `json:"factor"`
	// Runs is the number of runs that varied it.
	Runs int `json:"runs"`
	// Changed are the outputs that it changed, and "(exit code)".
	Changed []string `json:"changed"`

	runs []*Run // the run that differed and its repetitions
}

// bisect searches for the factors.
func (c *check) bisect(ctx context.Context) error {
	b := &Bisection{
		Held: []Factor{}, Steps: []Step{}, Factors: []Factor{}, noise: noise{}, values: map[place]*values{}, compared: map[pair][]string{},
	}
	c.verdict.Bisection = b
	i := slices.IndexFunc(c.Executors, func(x Executor) bool { return x.Features != nil })
	if i < 0 {
		b.Summary = "no executor can hold factors; add a local one"
		return nil
	}
	x := &c.Executors[i]
	for _, f := range factors {
		if f.hold != nil && c.planner.lacks(f.holdNeeds) {
			b.Unheld = append(b.Unheld, f.name)
		} else {
			b.Held = append(b.Held, f.name)
		}
	}
	if err := c.controls(ctx, b, x); err != nil {
		return err
	}
	switch {
	case b.noise[exitCode] != nil: // the command fails by chance
		b.Failure = ""
	case b.Failure != "" && !b.control.succeeded():
		b.Summary = b.Failure
		return nil
	}
	if err := c.settle(ctx, b, x); err != nil {
		return err
	}
	for _, f := range c.factors {
		if f.vary == nil && f.copies == 0 && slices.Contains(b.Unheld, f.name) {
			continue // it varies in the controls, too
		}
		if err := c.step(ctx, b, x, &f); err != nil {
			return err
		}
	}
	if err := c.settle(ctx, b, x); err != nil {
		return err
	}
	c.conclude(ctx, b)
	if len(b.Factors)+len(b.Nondeterministic) == 0 {
		v, copies := c.planner.varied(c.factors, 1)
		r, err := c.execute(ctx, x, v, copies, "all together")
		if err != nil {
			return err
		}
		b.Runs++
		b.Together = len(differing(&b.control, r)) > 0
	}
	b.summarize(c.Runs)
	return nil
}

// defaultPause is a little more than the coarsest resolution of a file's time in an archive (2 s in a zip).
const defaultPause = 2100 * time.Millisecond

// pause waits until Options.Pause has passed since a time.
func (c *check) pause(ctx context.Context, since time.Time) error {
	d := cmp.Or(c.Pause, defaultPause)
	select {
	case <-time.After(min(d, d-time.Since(since))): // another machine's clock may be ahead
		return nil
	case <-ctx.Done():
		return &worker.Fault{Kind: worker.FaultCancelled, Err: context.Cause(ctx)}
	}
}

// controls runs the action with all factors held and records the noise: twice in a row and once after a pause.
func (c *check) controls(ctx context.Context, b *Bisection, x *Executor) error {
	began := time.Now()
	first, err := c.firstControl(ctx, b, x)
	if err != nil {
		return err
	}
	second, err := c.control(ctx, b, x)
	if err != nil {
		return err
	}
	b.control, b.controls = *first, []*Run{first, second}
	c.addNoise(ctx, b, first, second, nil)
	if c.planner.lacks(sandbox.ConditionFrozenClock) { // a held clock also holds the times of files
		if err := c.pause(ctx, began); err != nil {
			return err
		}
	}
	return c.freshControl(ctx, b, x, c.planner.lacks(sandbox.ConditionFrozenClock))
}

// firstControl makes the first control. If it fails although the first run did not, an input such as a certificate may
// not be valid yet at the held time, and the clock is held at the time of the first run instead.
func (c *check) firstControl(ctx context.Context, b *Bisection, x *Executor) (*Run, error) {
	first, err := c.control(ctx, b, x)
	plain := &c.verdict.Runs[0]
	if err != nil || first.succeeded() || !plain.succeeded() {
		return first, err
	}
	b.Failure = "with all factors held the command fails: " + first.failure()
	if c.planner.lacks(sandbox.ConditionFrozenClock) || plain.Start.IsZero() {
		return first, nil
	}
	c.planner.heldTime = plain.Start.Unix()
	second, err := c.control(ctx, b, x)
	if err != nil {
		return nil, err
	}
	c.planner.heldTime = defaultHeldTime
	if !second.succeeded() {
		return first, nil
	}
	switch again, err := c.control(ctx, b, x); {
	case err != nil:
		return nil, err
	case again.succeeded(): // by chance
		b.Failure = ""
		return again, nil
	}
	c.planner.heldTime = plain.Start.Unix()
	b.Failure = fmt.Sprintf("with the clock held at %s the command fails, unlike at %s: %s", date(defaultHeldTime),
		date(c.planner.heldTime), first.failure())
	return second, nil
}

// freshControl makes another control and, if it differs, one more. With byTime, unexplained differences are times if
// the two and further controls are equal and none has the value of the first control again.
func (c *check) freshControl(ctx context.Context, b *Bisection, x *Executor, byTime bool) error {
	later, err := c.control(ctx, b, x)
	if err != nil || len(b.noise.beyond(ctx, &b.control, later)) == 0 {
		return err
	}
	last, err := c.control(ctx, b, x)
	if err != nil {
		return err
	}
	chance := differing(later, last)
	for range stayingControls {
		if !byTime {
			break
		}
		r, err := c.control(ctx, b, x)
		if err != nil {
			return err
		}
		again := differing(&b.control, r)
		chance = append(chance, slices.DeleteFunc(differing(&b.control, later), func(name string) bool { return slices.Contains(again, name) })...)
	}
	c.addNoise(ctx, b, &b.control, later, func(name string) bool { return byTime && !slices.Contains(chance, name) })
	c.addNoise(ctx, b, later, last, nil)
	return nil
}

// control makes a run with all factors held.
func (c *check) control(ctx context.Context, b *Bisection, x *Executor) (*Run, error) {
	b.Runs++
	v, _ := c.planner.held(nil, 0)
	r, err := c.execute(ctx, x, v, 0, fmt.Sprintf("control %d", b.Runs))
	if err == nil {
		b.controls = append(b.controls, r)
	}
	return r, err
}

// addNoise records where two runs differ although all factors are held. Different times are times of files. So are
// differences without a cause in items for which byTime, if not nil, holds. A different order is due to scheduling if
// everything else was held.
func (c *check) addNoise(ctx context.Context, b *Bisection, x, y *Run, byTime func(name string) bool) {
	for _, name := range differing(x, y) {
		for _, l := range b.noise.unknown(ctx, name, x, y) {
			factor, list := Factor(""), &b.Nondeterministic
			switch {
			case isTime(l.cause), isVague(l.cause) && byTime != nil && byTime(name):
				factor, list = factorTime, &b.TimeDependent
			case isOrder(l.cause) && l.cause != compare.HashSeed && len(b.Unheld) == 0: // clocks seed some hash tables
				factor = factorParallel
			}
			c.addLocation(b, name, l, factor, list)
		}
	}
}

// addLocation records a location of noise that is due to a factor, or "", and adds its item to list.
func (c *check) addLocation(b *Bisection, name string, l location, factor Factor, list *[]string) {
	b.noise.add(name, l.key, explanation{factor, l.cause})
	shown := displayName(name)
	if !slices.Contains(*list, shown) {
		*list = append(*list, shown)
	}
}

// isOrder reports whether a cause is that of an order.
func isOrder(c compare.Cause) bool {
	return slices.Contains([]compare.Cause{compare.Parallel, compare.HashSeed, compare.MemberOrder, compare.Locale}, c)
}

// isTime reports whether a cause is a time or a duration.
func isTime(c compare.Cause) bool { return c == compare.Timestamp || c == compare.Duration }

// isVague reports whether a cause does not explain a difference.
func isVague(c compare.Cause) bool { return c == compare.Unknown || c == compare.Compressed }

// varies reports whether the check varies a factor of that name.
func (c *check) varies(name Factor) bool {
	return slices.ContainsFunc(c.factors, func(f factor) bool { return f.name == name })
}

// step varies a factor alone, in as many runs as the check did, until a run differs by more than noise from the first
// and from a fresh control, and further runs confirm the difference.
func (c *check) step(ctx context.Context, b *Bisection, x *Executor, f *factor) error {
	s := Step{Factor: f.name, Changed: []string{}}
	for n := 1; n < c.Runs && s.runs == nil; n++ {
		r, err := c.vary(ctx, b, x, &s, f, n)
		if err != nil {
			return err
		}
		if len(c.beyond(ctx, b, f, r)) == 0 {
			continue
		}
		if err := c.freshControl(ctx, b, x, false); err != nil {
			return err
		}
		if err := c.settle(ctx, b, x); err != nil {
			return err
		}
		changed := c.beyond(ctx, b, f, r)
		if len(changed) == 0 {
			continue
		}
		if changed, err = c.confirm(ctx, b, x, &s, f, n, r, changed); err != nil {
			return err
		}
		s.Changed = displayNames(changed)
	}
	b.Steps = append(b.Steps, s)
	return nil
}

// vary makes a run that varies f alone.
func (c *check) vary(ctx context.Context, b *Bisection, x *Executor, s *Step, f *factor, n int) (*Run, error) {
	b.Runs++
	s.Runs++
	v, copies := c.planner.held(f, n)
	return c.execute(ctx, x, v, copies, "varied alone: "+string(f.name))
}

// beyond returns the items in which a run that varies f differs from the control in more than noise. It adds times to
// the noise: two controls may agree in a duration by chance, or read a held clock equally often.
func (c *check) beyond(ctx context.Context, b *Bisection, f *factor, r *Run) []string {
	return slices.DeleteFunc(differing(&b.control, r), func(name string) bool {
		more := false
		for _, l := range b.effects(ctx, name, r) {
			switch {
			case !b.chance(name, &l, f):
				more = true
			case isTime(l.cause):
				c.addLocation(b, name, l, factorTime, &b.TimeDependent)
			}
		}
		return !more
	})
}

// chance reports whether a location differs independently of f, by the cause that it shows: a time in a text,
// which only the time, its zone and its language change, or a cause that is noise elsewhere in the item.
func (b *Bisection) chance(name string, l *location, f *factor) bool {
	if isVague(l.cause) || f.explains(l.cause) {
		return false
	}
	isText := l.format == "text" || l.format == "json" // numbers in other formats may be digests
	byTime := isText && isTime(l.cause) && f.cause != compare.Zone && f.cause != compare.Locale
	return byTime || b.noise.has(name, l.cause)
}

// found records that a factor changes outputs.
func (b *Bisection) found(v *Verdict, factor Factor, outputs []string) {
	if !slices.Contains(b.Factors, factor) {
		b.Factors = append(b.Factors, factor)
	}
	for i := range v.Outputs {
		if o := &v.Outputs[i]; slices.Contains(outputs, o.Path) && !slices.Contains(o.Factors, factor) {
			o.Factors = append(o.Factors, factor)
		}
	}
}

// summarize sets Summary.
func (b *Bisection) summarize(runs int) {
	var parts []string
	if b.Failure != "" {
		parts = append(parts, b.Failure)
	}
	if len(b.Factors) > 0 {
		parts = append(parts, "caused by "+Join(b.Factors))
	}
	if len(b.Nondeterministic) > 0 {
		why := "scheduling or something that cannot be held"
		if len(b.Unheld) > 0 {
			why += " here (" + Join(b.Unheld) + ")"
		}
		parts = append(parts,
			fmt.Sprintf("%s differs with all factors held, due to %s", abbreviate(b.Nondeterministic), why))
	}
	if len(b.TimeDependent) > 0 {
		parts = append(parts, abbreviate(b.TimeDependent)+" contains times of files or durations by the host's clock")
	}
	switch {
	case b.Together:
		parts = append(parts, "no factor alone changes anything, but all together do; vary some of them")
	case len(parts) == 0:
		parts = append(parts, fmt.Sprintf("nothing differed this time; try more than %d runs", runs))
	}
	b.Summary = strings.Join(parts, "; ")
}

// abbreviate returns the first of names and the number of the others.
func abbreviate(names []string) string {
	const limit = 3
	if len(names) > limit {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:limit], ", "), len(names)-limit)
	}
	return strings.Join(names, ", ")
}
