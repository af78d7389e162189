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

// A Bisection says which factors make the runs of an action differ. Two runs are made that notice the same, as far as it
// can be held; then each factor is varied alone, and runs that differ from the first of the two name theirs.
type Bisection struct {
	// Runs is how many runs it took, those of the check not counted.
	Runs int `json:"runs"`
	// Held are the factors that were held, Loose those of which this host could not.
	Held   []string `json:"held"`
	Unheld []string `json:"loose,omitempty"`
	// Unsteady are the outputs that differ though everything is held that can be: what no factor explains.
	Nondeterministic []string `json:"unsteady,omitempty"`
	// Drifting are those in which times differ all the same.
	TimeDependent []string `json:"drifting,omitempty"`
	// Steps are what varying each factor alone has changed.
	Steps []Step `json:"steps"`
	// Factors are those whose step changed anything.
	Factors []string `json:"factors"`
	// Together says that none does alone, and all together do.
	Together bool `json:"together,omitempty"`
	// Says is all that in one line for a person.
	Summary string `json:"says"`

	control Run
	noise   noise
}

// A Step is a factor that was varied alone.
type Step struct {
	Factor string `json:"factor"`
	// Runs is how many runs varied it: no more once one differed.
	Runs int `json:"runs"`
	// Changed are the outputs that it changed, "(exit code)" among them.
	Changed []string `json:"changed"`

	run *Run // that differed, or nil
}

// bisect finds the factors.
func (c *check) bisect(ctx context.Context) error {
	b := &Bisection{Held: []string{}, Steps: []Step{}, Factors: []string{}}
	c.verdict.Bisection = b
	i := slices.IndexFunc(c.Executors, func(p Executor) bool { return p.Features != nil })
	if i < 0 {
		b.Summary = "no run is on a worker that can be told what to hold: add local to the places"
		return nil
	}
	place := &c.Executors[i]
	for _, f := range factors {
		switch {
		case f.hold != nil && c.scene.lacks(f.holds) != "":
			b.Unheld = append(b.Unheld, f.Name)
		default:
			b.Held = append(b.Held, f.Name)
		}
	}
	b.noise = noise{}
	if err := c.controls(ctx, b, place); err != nil {
		return err
	}
	for _, f := range c.factors {
		if f.vary == nil && f.copies == 0 && slices.Contains(b.Unheld, f.Name) {
			continue // it varies in each run, the controls among them
		}
		if err := c.step(ctx, b, place, &f); err != nil {
			return err
		}
	}
	if len(b.Factors)+len(b.Nondeterministic) == 0 {
		v, copies := c.scene.varied(c.factors, 1)
		r, err := c.execute(ctx, place, v, copies, "all together")
		if err != nil {
			return err
		}
		b.Runs++
		b.Together = len(differing(&b.control, r)) > 0
	}
	b.conclude(c.Runs)
	return nil
}

// drift is for how long the coarsest time of a file in an archive (2 s in a zip) holds still, and a little more.
const drift = 2100 * time.Millisecond

// pause waits until drift is over since a moment.
func (c *check) pause(ctx context.Context, since time.Time) error {
	all := cmp.Or(c.Pause, drift)
	select {
	case <-time.After(min(all, all-time.Since(since))): // another's clock may be fast
		return nil
	case <-ctx.Done():
		return &worker.Fault{Kind: worker.Cancelled, Err: context.Cause(ctx)}
	}
}

// controls makes the runs that all others are compared with, and finds what differs in them by itself: two at once, one
// after a while, and, if that differs, one more, which tells the times of files from chance.
func (c *check) controls(ctx context.Context, b *Bisection, place *Executor) error {
	v, _ := c.scene.held(nil, 0)
	control := func() (*Run, error) {
		b.Runs++
		return c.execute(ctx, place, v, 0, fmt.Sprintf("control %d", b.Runs))
	}
	began := time.Now()
	first, err := control()
	if err != nil {
		return err
	}
	second, err := control()
	if err != nil {
		return err
	}
	b.control = *first
	c.unheld(ctx, b, first, second, nil)
	if c.scene.lacks([]sandbox.Condition{sandbox.ConditionFrozenClock}) != "" { // whose files' times are held as well
		if err := c.pause(ctx, began); err != nil {
			return err
		}
	}
	later, err := control()
	if err != nil {
		return err
	}
	if len(b.noise.beyond(ctx, first, later)) == 0 {
		return nil
	}
	last, err := control()
	if err != nil {
		return err
	}
	chance := differing(later, last)
	c.unheld(ctx, b, first, later, func(name string) bool { return !slices.Contains(chance, name) })
	c.unheld(ctx, b, later, last, nil)
	return nil
}

// unheld notes the places in which two runs differ although everything is held. Where times differ they are those of
// files, and so is what differs slowly, if its looks tell nothing. Where the same came in another order it is the
// scheduling, that of other runs included, if there was nothing else that could not be held.
func (c *check) unheld(ctx context.Context, b *Bisection, x, y *Run, slowly func(name string) bool) {
	for _, name := range differing(x, y) {
		for _, s := range b.noise.news(ctx, name, x, y) {
			factor, list := "", &b.Nondeterministic
			switch {
			case s.cause == compare.Timestamp, s.cause == compare.Unknown && slowly != nil && slowly(name):
				factor, list = "time", &b.TimeDependent
			case isOrder(s.cause) && s.cause != compare.HashSeed && len(b.Unheld) == 0: // clocks seed some tables
				factor = "parallel"
			}
			b.noise.add(name, s.place, origin{factor, s.cause})
			if o := shown(name); !slices.Contains(*list, o) {
				*list = append(*list, o)
			}
			if c.chosen(factor) {
				b.found(&c.verdict, factor, []string{shown(name)})
			}
		}
	}
}

// isOrder reports whether a cause is that of an order.
func isOrder(c compare.Cause) bool {
	return slices.Contains([]compare.Cause{compare.Parallel, compare.HashSeed, compare.MemberOrder, compare.Locale}, c)
}

// chosen reports whether a factor of that name is varied in this check.
func (c *check) chosen(name string) bool {
	return slices.ContainsFunc(c.factors, func(f Factor) bool { return f.Name == name })
}

// step varies a factor alone, as often as the check has varied runs, until one differs from the control in more than what
// differs by itself, and does so again.
func (c *check) step(ctx context.Context, b *Bisection, place *Executor, f *Factor) error {
	s := Step{Factor: f.Name, Changed: []string{}}
	for n := 1; n < c.Runs && s.run == nil; n++ {
		var changed []string
		var last *Run
		for range 2 {
			v, copies := c.scene.held(f, n)
			r, err := c.execute(ctx, place, v, copies, "varied alone: "+f.Name)
			if err != nil {
				return err
			}
			b.Runs++
			s.Runs++
			again := c.beyond(ctx, b, f, r)
			noisy := slices.ContainsFunc(again, func(name string) bool { return b.noise[name] != nil })
			if noisy { // it may differ by itself in more ways than are known yet
				if err := c.listen(ctx, b, place); err != nil {
					return err
				}
				again = c.beyond(ctx, b, f, r)
			}
			if last != nil { // what does not differ again may have been chance
				again = slices.DeleteFunc(again, func(name string) bool { return !slices.Contains(changed, name) })
			}
			if changed, last = again, r; len(changed) == 0 || f.chancy() && !noisy {
				break
			}
		}
		if len(changed) > 0 {
			s.run, s.Changed = last, allShown(changed)
			b.found(&c.verdict, f.Name, s.Changed)
		}
	}
	b.Steps = append(b.Steps, s)
	return nil
}

// beyond returns the names of the items in which a run that varies f differs from the control in more than the noise, to which it adds
// times: two controls have the same by chance where they are durations, or a clock that is held was read more often.
func (c *check) beyond(ctx context.Context, b *Bisection, f *Factor, r *Run) []string {
	return slices.DeleteFunc(b.noise.beyond(ctx, &b.control, r), func(name string) bool {
		more := false
		for _, s := range b.noise.news(ctx, name, &b.control, r) {
			switch {
			case !b.chance(name, &s, f):
				more = true
			case s.cause == compare.Timestamp:
				c.drifts(b, name, s)
			}
		}
		return !more
	})
}

// drifts notes a place of an item that differs as time goes by.
func (c *check) drifts(b *Bisection, name string, s spot) {
	b.noise.add(name, s.place, origin{"time", s.cause})
	if o := shown(name); !slices.Contains(b.TimeDependent, o) {
		b.TimeDependent = append(b.TimeDependent, o)
	}
	if c.chosen("time") {
		b.found(&c.verdict, "time", []string{shown(name)})
	}
}

// chance reports whether a place of an item differs by itself, by what it looks like, and not by f: as a time in a text, which none
// but the time, its zone and its language can make other, or as what is known to differ by itself in the same item.
func (b *Bisection) chance(name string, s *spot, f *Factor) bool {
	if s.cause == compare.Unknown || f.explains(s.cause) {
		return false
	}
	isText := s.format == "text" || s.format == "json" // fields of other formats have digests in them, too
	return isText && s.cause == compare.Timestamp && f.Cause != compare.Zone && f.Cause != compare.Locale || b.noise.has(name, s.cause)
}

// listen makes one more control, and adds what differs in it.
func (c *check) listen(ctx context.Context, b *Bisection, place *Executor) error {
	v, _ := c.scene.held(nil, 0)
	r, err := c.execute(ctx, place, v, 0, "another control")
	if err != nil {
		return err
	}
	b.Runs++
	c.unheld(ctx, b, &b.control, r, nil)
	return nil
}

// chancy reports whether runs that vary the factor notice it or not by chance.
func (f *Factor) chancy() bool { return f.vary == nil }

// found notes that a factor changes outputs.
func (b *Bisection) found(v *Verdict, factor string, outputs []string) {
	if !slices.Contains(b.Factors, factor) {
		b.Factors = append(b.Factors, factor)
	}
	for i := range v.Outputs {
		if o := &v.Outputs[i]; slices.Contains(outputs, o.Path) && !slices.Contains(o.Factors, factor) {
			o.Factors = append(o.Factors, factor)
		}
	}
}

// A noise is what differs by itself: the places in items, by the items' names.
type noise map[string]map[string]origin

// An origin is why a place differs by itself: the factor that is known to be why, or "", and the cause by what it looks like.
type origin struct {
	factor string
	cause  compare.Cause
}

// A spot is a place in which an item differs, and the likely cause by what it looks like there.
type spot struct {
	place  string
	cause  compare.Cause
	format string // in whose words it is told
}

// whole is the place that is all of an item.
const whole = "\x00"

// maxPlaced is in how many items the places are looked for.
const maxPlaced = 20

// news returns where an item differs in two runs beyond what is known.
func (n noise) news(ctx context.Context, name string, a, b *Run) []spot {
	spots := []spot{{place: whole}}
	if n[name] != nil || len(n) < maxPlaced {
		spots = spotsOf(ctx, name, a, b)
	}
	return slices.DeleteFunc(spots, func(s spot) bool { return n.knows(name, s.place) })
}

// add adds a place in an item, and why it differs.
func (n noise) add(name, place string, o origin) {
	if n[name] == nil {
		n[name] = map[string]origin{}
	}
	n[name][place] = o
}

// has reports whether a place in an item looks as if it had a cause.
func (n noise) has(name string, cause compare.Cause) bool {
	for _, o := range n[name] {
		if o.cause == cause {
			return true
		}
	}
	return false
}

// beyond returns the names of the items in which two runs differ in more than n.
func (n noise) beyond(ctx context.Context, a, b *Run) []string {
	return slices.DeleteFunc(differing(a, b), func(name string) bool {
		return n[name] != nil && len(n.news(ctx, name, a, b)) == 0
	})
}

func (n noise) knows(name, place string) bool {
	_, all := n[name][whole]
	_, known := n[name][place]
	return all || known
}

// origin returns what is known of why a place differs.
func (n noise) origin(name, place string) origin {
	if o, ok := n[name][place]; ok {
		return o
	}
	return n[name][whole]
}

// spotsOf returns where an item differs in two runs; if that cannot be told, it is the whole.
func spotsOf(ctx context.Context, name string, a, b *Run) []spot {
	if name == exitCode {
		return []spot{{place: whole}}
	}
	const most = 100 // beyond, package compare tells of some only
	found, err := differences(ctx, name, a, b)
	if err != nil || len(found) == 0 {
		return []spot{{place: whole}}
	}
	var spots []spot
	for i := range found {
		spots = append(spots, spot{key(&found[i]), found[i].Cause, found[i].Format})
	}
	if len(found) <= most {
		return spots
	}
	all := spot{place: whole, cause: spots[0].cause}
	if slices.ContainsFunc(spots, func(s spot) bool { return s.cause != all.cause }) {
		all.cause = compare.Unknown
	}
	return []spot{all}
}

// conclude says what was found.
func (b *Bisection) conclude(runs int) {
	var parts []string
	if n := len(b.Factors); n > 0 {
		parts = append(parts, "caused by "+strings.Join(b.Factors, ", "))
	}
	if len(b.Nondeterministic) > 0 {
		why := "scheduling, or something else that cannot be held"
		if len(b.Unheld) > 0 {
			why += " here (" + strings.Join(b.Unheld, ", ") + ")"
		}
		parts = append(parts, fmt.Sprintf("in %s something differs although everything is held that can be: %s, is at work", some(b.Nondeterministic), why))
	}
	if len(b.TimeDependent) > 0 {
		parts = append(parts, fmt.Sprintf("%s: times of files are in it, or how long something took, which go on by the host's clock", some(b.TimeDependent)))
	}
	switch {
	case b.Together:
		parts = append(parts, "no factor changes anything alone, and all together do: try --vary with some of them")
	case len(parts) == 0:
		parts = append(parts, fmt.Sprintf("nothing differed this time: what makes it differ is seldom, so try more runs than %d", runs))
	}
	b.Summary = strings.Join(parts, "; ")
}

// some returns the first of names, and how many more there are.
func some(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// exitCode is the name of what is no output, among those of items.
const exitCode = "exit code/"

// differing returns the names of items in which two runs differ.
func differing(a, b *Run) []string {
	var names []string
	for _, name := range paths([]Run{*a, *b}) {
		if x, y := a.outputs[name], b.outputs[name]; x.kind != y.kind || x.name != y.name {
			names = append(names, name)
		}
	}
	if a.ExitCode != b.ExitCode || a.Code != b.Code {
		names = append(names, exitCode)
	}
	return names
}

// shown returns the name of an item as a Verdict has it.
func shown(name string) string {
	switch name {
	case stdout:
		return compare.Stdout
	case stderr:
		return compare.Stderr
	case exitCode:
		return "(exit code)"
	}
	return text(name)
}

func allShown(names []string) []string {
	all := make([]string, 0, len(names))
	for _, name := range names {
		all = append(all, shown(name))
	}
	return all
}
