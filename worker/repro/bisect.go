// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/worker/compare"
)

// A Bisection says which factors make the runs of an action differ. Two runs are made that notice the same, as far as it
// can be held; then each factor is varied alone, and runs that differ from the first of the two name theirs.
type Bisection struct {
	// Runs is how many runs it took, those of the check not counted.
	Runs int `json:"runs"`
	// Held are the factors that were held, Loose those of which this host could not.
	Held  []string `json:"held"`
	Loose []string `json:"loose,omitempty"`
	// Unsteady are the outputs that differ though everything is held that can be: what no factor explains.
	Unsteady []string `json:"unsteady,omitempty"`
	// Steps are what varying each factor alone has changed.
	Steps []Step `json:"steps"`
	// Factors are those whose step changed anything.
	Factors []string `json:"factors"`
	// Together says that none does alone, and all together do.
	Together bool `json:"together,omitempty"`
	// Says is all that in one line for a person.
	Says string `json:"says"`

	control []Run
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
	i := slices.IndexFunc(c.Places, func(p Place) bool { return p.Features != nil })
	if i < 0 {
		b.Says = "no run is on a worker that can be told what to hold: add local to the places"
		return nil
	}
	place := &c.Places[i]
	for _, f := range factors {
		switch {
		case f.hold != nil && c.scene.lacks(f.holds) != "":
			b.Loose = append(b.Loose, f.Name)
		default:
			b.Held = append(b.Held, f.Name)
		}
	}
	for n := range 2 {
		v, _ := c.scene.held(nil, 0)
		r, err := c.execute(ctx, place, v, 0, fmt.Sprintf("control %d of 2", n+1))
		if err != nil {
			return err
		}
		b.Runs++
		b.control = append(b.control, *r)
	}
	unsteady := differing(&b.control[0], &b.control[1])
	b.Unsteady = allShown(unsteady)
	for _, f := range c.factors {
		if f.vary == nil && f.copies == 0 && slices.Contains(b.Loose, f.Name) {
			continue // it varies in each run, the control among them
		}
		if err := c.step(ctx, b, place, &f, unsteady); err != nil {
			return err
		}
	}
	if len(b.Factors) == 0 && len(unsteady) == 0 {
		v, copies := c.scene.varied(c.factors, 1)
		r, err := c.execute(ctx, place, v, copies, "all together")
		if err != nil {
			return err
		}
		b.Runs++
		b.Together = len(differing(&b.control[0], r)) > 0
	}
	b.conclude(c.Runs)
	return nil
}

// step varies a factor alone, as often as the check has varied runs, until one differs from the control in more than what
// differs by itself.
func (c *check) step(ctx context.Context, b *Bisection, place *Place, f *Factor, unsteady []string) error {
	s := Step{Factor: f.Name, Changed: []string{}}
	for n := 1; n < c.Runs && s.run == nil; n++ {
		v, copies := c.scene.held(f, n)
		r, err := c.execute(ctx, place, v, copies, "varied alone: "+f.Name)
		if err != nil {
			return err
		}
		b.Runs++
		s.Runs++
		changed := slices.DeleteFunc(differing(&b.control[0], r), func(name string) bool { return slices.Contains(unsteady, name) })
		if len(changed) == 0 {
			continue
		}
		s.run, s.Changed = r, allShown(changed)
		b.Factors = append(b.Factors, f.Name)
		for i := range c.verdict.Outputs {
			o := &c.verdict.Outputs[i]
			if slices.Contains(s.Changed, o.Path) {
				o.Factors = append(o.Factors, f.Name)
			}
		}
	}
	b.Steps = append(b.Steps, s)
	return nil
}

// conclude says what was found.
func (b *Bisection) conclude(runs int) {
	var parts []string
	if n := len(b.Factors); n > 0 {
		parts = append(parts, "caused by "+strings.Join(b.Factors, ", "))
	}
	if len(b.Unsteady) > 0 {
		why := "scheduling, or something else that cannot be held"
		if len(b.Loose) > 0 {
			why += " here (" + strings.Join(b.Loose, ", ") + ")"
		}
		parts = append(parts, fmt.Sprintf("%s differ although everything is held that can be: %s, is at work", some(b.Unsteady), why))
	}
	switch {
	case b.Together:
		parts = append(parts, "no factor changes anything alone, and all together do: try --vary with some of them")
	case len(parts) == 0:
		parts = append(parts, fmt.Sprintf("nothing differed this time: what makes it differ is seldom, so try more runs than %d", runs))
	}
	b.Says = strings.Join(parts, "; ")
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

// causeOf returns why a factor makes things differ.
func causeOf(name string) compare.Cause {
	for _, f := range factors {
		if f.Name == name {
			return f.Cause
		}
	}
	return compare.Unknown
}
