// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"maps"
	"slices"

	"github.com/cloister-build/cloister/worker/repro/compare"
)

// A few runs of an action with random output may agree by chance, whether or not they vary a factor. So a difference
// that may be random, such as another order, names a factor only if it separates many runs: no run that varies the
// factor has a value that a control has.
const (
	// minControls are made before such a difference names a factor. calmControls of them have to repeat values of
	// earlier ones, which may take up to maxControls.
	minControls, calmControls, maxControls = 10, 4, 32
	// repetitions of a varied run have to differ. A factor that draws another value in each run has to show
	// minDraws times in maxDraws runs, since it may draw the same value as the controls.
	repetitions        = 4
	minDraws, maxDraws = 4, 12
	// stayingControls have to keep a new value that comes from the time.
	stayingControls = 4
)

// evident are causes that are unlikely to show by chance.
var evident = []compare.Cause{
	compare.Timestamp, compare.BuildDate, compare.Zone, compare.Owner, compare.Hostname, compare.Path, compare.Mode,
}

// doubtful reports whether a difference that f may explain can also be random. A factor without vary draws random
// values, so nothing proves that the name of a temporary file is one of them.
func (f *factor) doubtful(l *location) bool {
	return f.vary == nil || !f.shows(l.cause) || !slices.Contains(evident, l.cause)
}

// isDoubtful reports whether chance may have changed one of the items in a run that varies f.
func (b *Bisection) isDoubtful(ctx context.Context, f *factor, r *Run, changed []string) bool {
	return slices.ContainsFunc(changed, func(name string) bool {
		return slices.ContainsFunc(b.effects(ctx, name, r), func(l location) bool { return f.doubtful(&l) })
	})
}

// byChance reports whether no factor but scheduling explains a location that differs with all factors held.
func (e *explanation) byChance() bool { return e.factor == "" || e.factor == factorParallel }

// A place is a location of an item.
type place struct{ name, key string }

// values are those that a place takes in the controls.
type values struct {
	of       []*Run // a control for each value
	examined int    // controls
	newest   int    // index of the last control with a new value
	endless  bool   // more than half of the controls have a new value; further ones are not examined
}

// lacks reports whether a run has none of the values of a place.
func (b *Bisection) lacks(ctx context.Context, v *values, p place, r *Run) bool {
	return !slices.ContainsFunc(v.of, func(control *Run) bool { return !b.differsAt(ctx, p, control, r) })
}

// settled reports whether the last controls had no new value.
func (v *values) settled() bool { return !v.endless && v.examined-1-v.newest >= calmControls }

// valuesAt returns the values that a place has taken in all controls so far.
func (b *Bisection) valuesAt(ctx context.Context, p place) *values {
	v := b.values[p]
	if v == nil {
		v = &values{}
		b.values[p] = v
	}
	for ; v.examined < len(b.controls) && !v.endless; v.examined++ {
		if r := b.controls[v.examined]; b.lacks(ctx, v, p, r) {
			v.of, v.newest = append(v.of, r), v.examined
		}
		v.endless = v.examined+1 >= minControls && 2*len(v.of) > v.examined+1
	}
	return v
}

// A pair is an item of two runs.
type pair struct {
	name string
	a, b *Run
}

// maxCompared limits Bisection.compared.
const maxCompared = 1024

// differsAt reports whether two runs differ at a place. It compares a pair once for all places of the item.
func (b *Bisection) differsAt(ctx context.Context, p place, x, y *Run) bool {
	if differs := slices.Contains(differing(x, y), p.name); !differs || p.key == wholeItem {
		return differs
	}
	of := pair{p.name, x, y}
	keys, ok := b.compared[of]
	if !ok {
		for _, l := range locationsOf(ctx, p.name, x, y) {
			keys = append(keys, l.key)
		}
		if len(b.compared) >= maxCompared {
			clear(b.compared)
		}
		b.compared[of] = keys
	}
	return slices.Contains(keys, p.key) || slices.Contains(keys, wholeItem)
}

// effects returns the locations in which an item of a run differs from the controls by more than noise. A location that
// takes a few values by chance is one of them if it has none of these.
func (b *Bisection) effects(ctx context.Context, name string, r *Run) []location {
	found := b.noise.unknown(ctx, name, &b.control, r)
	if b.noise[name] == nil {
		return found
	}
	all := slices.Clone(found)
	for _, l := range locationsOf(ctx, name, &b.control, r) {
		isNew := slices.ContainsFunc(found, func(f location) bool { return f.key == l.key })
		if e := b.noise.explanation(name, l.key); isNew || !e.byChance() {
			continue
		}
		p := place{name, l.key}
		if v := b.valuesAt(ctx, p); v.settled() && b.lacks(ctx, v, p, r) {
			all = append(all, l)
		}
	}
	return all
}

// settle makes controls until the places that differ by chance take no new values, or too many.
func (c *check) settle(ctx context.Context, b *Bisection, x *Executor) error {
	for len(b.controls) < maxControls && b.unsettled(ctx) {
		if err := c.freshControl(ctx, b, x, false); err != nil {
			return err
		}
	}
	return nil
}

func (b *Bisection) unsettled(ctx context.Context) bool {
	for name, places := range b.noise {
		for key, e := range places {
			if v := b.valuesAt(ctx, place{name, key}); e.byChance() && !v.endless && (len(b.controls) < minControls || !v.settled()) {
				return true
			}
		}
	}
	return false
}

// confirm repeats run n of a factor, r, and returns the changed items that differ again, as often as it takes to
// exclude chance. It adds the runs to s.
func (c *check) confirm(ctx context.Context, b *Bisection, x *Executor, s *Step, f *factor, n int, r *Run, changed []string) ([]string, error) {
	always, draws, atLeast := 1, 1, 1 // runs that have to differ; or how many of how many
	switch doubtful := b.isDoubtful(ctx, f, r, changed); {
	case doubtful:
		always, draws, atLeast = repetitions, maxDraws, minDraws
		for len(b.controls) < minControls {
			if err := c.freshControl(ctx, b, x, false); err != nil {
				return nil, err
			}
		}
		if err := c.settle(ctx, b, x); err != nil {
			return nil, err
		}
		changed = c.beyond(ctx, b, f, r)
	case f.vary != nil || slices.ContainsFunc(changed, func(name string) bool { return b.noise[name] != nil }):
		always = 2
	}
	hits := map[string]int{}
	for _, name := range changed {
		hits[name] = 1
	}
	runs := []*Run{r}
	// decided reports whether an item needs no more runs, and whether it has changed often enough.
	decided := func(name string) (done, ok bool) {
		if f.vary != nil || b.noise[name] != nil {
			return hits[name] < len(runs) || len(runs) >= always, hits[name] >= always
		}
		return hits[name] >= atLeast || len(runs) >= draws, hits[name] >= atLeast
	}
	for slices.ContainsFunc(changed, func(name string) bool { done, _ := decided(name); return !done }) {
		again, err := c.vary(ctx, b, x, s, f, n)
		if err != nil {
			return nil, err
		}
		runs = append(runs, again)
		for _, name := range c.beyond(ctx, b, f, again) {
			hits[name]++
		}
	}
	changed = slices.DeleteFunc(changed, func(name string) bool { _, ok := decided(name); return !ok })
	if len(changed) > 0 {
		s.runs = runs
	}
	return changed, nil
}

// factorsAt returns the factors of each location of an item that the steps of the bisection show, by all controls.
func (b *Bisection) factorsAt(ctx context.Context, name string) map[string][]Factor {
	all, ordered := map[string][]Factor{}, map[string]bool{}
	for i := range b.Steps {
		s := &b.Steps[i]
		if !slices.Contains(s.Changed, displayName(name)) {
			continue
		}
		f, hits := factorOf(s.Factor), map[string]int{}
		for _, r := range s.runs {
			found := map[string]bool{}
			for _, l := range b.effects(ctx, name, r) {
				if !b.chance(name, &l, f) {
					found[l.key] = true
					ordered[l.key] = ordered[l.key] || isOrder(l.cause)
				}
			}
			for key := range found {
				hits[key]++
			}
		}
		for key, n := range hits {
			if n == len(s.runs) || f.vary == nil && !b.noise.knows(name, key) && n >= min(minDraws, len(s.runs)) {
				all[key] = append(all[key], s.Factor)
			}
		}
	}
	for key, by := range all {
		if ordered[key] && isSeeded(by) {
			all[key] = withoutScheduling(by)
		}
	}
	return all
}

// isSeeded reports whether random numbers determine an order. Threads may share them, so scheduling changes it, too,
// but by chance: it is no factor of its own.
func isSeeded(by []Factor) bool { return slices.Contains(by, factorRandom) }

func withoutScheduling(by []Factor) []Factor {
	return slices.DeleteFunc(by, func(f Factor) bool { return f == factorCPUs || f == factorParallel })
}

// conclude recomputes the factors from all controls, including those made after the step of a factor.
func (c *check) conclude(ctx context.Context, b *Bisection) {
	b.Factors = []Factor{}
	for i := range c.verdict.Outputs {
		c.verdict.Outputs[i].Factors = nil
	}
	if b.Failure != "" && c.varies(factorTime) {
		b.found(&c.verdict, factorTime, []string{displayName(exitCode)})
	}
	changed := map[Factor][]string{}
	runs := append([]Run{b.control}, c.verdict.Runs...)
	for i := range b.Steps {
		for _, r := range b.Steps[i].runs {
			runs = append(runs, *r)
		}
	}
	for _, name := range itemNames(runs) {
		c.concludeItem(ctx, b, name, changed)
	}
	c.concludeItem(ctx, b, exitCode, changed)
	for i := range b.Steps {
		s := &b.Steps[i]
		s.Changed = slices.DeleteFunc(s.Changed, func(shown string) bool { return !slices.Contains(changed[s.Factor], shown) })
	}
	inOrder := func(x, y Factor) int { return slices.Index(AllFactors, x) - slices.Index(AllFactors, y) }
	slices.SortFunc(b.Factors, inOrder)
	for i := range c.verdict.Outputs {
		slices.SortFunc(c.verdict.Outputs[i].Factors, inOrder)
	}
}

// concludeItem adds the factors of an item to b, and the item to what each factor of a step has changed.
func (c *check) concludeItem(ctx context.Context, b *Bisection, name string, changed map[Factor][]string) {
	at, shown := b.factorsAt(ctx, name), displayName(name)
	for _, key := range slices.Sorted(maps.Keys(at)) {
		for _, f := range at[key] {
			changed[f] = append(changed[f], shown)
			b.found(&c.verdict, f, []string{shown})
		}
	}
	for key, e := range b.noise[name] {
		if c.varies(e.factor) && !(e.factor == factorParallel && isSeeded(at[key])) {
			b.found(&c.verdict, e.factor, []string{shown})
		}
	}
}
