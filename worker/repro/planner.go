// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
)

// A planner chooses the conditions of an action's runs.
type planner struct {
	command  *repb.Command
	features *sandbox.Features
	host     Host
	seed     *uint64 // Task.Seed
	heldTime int64   // start of a held clock
}

// fit returns those of the named factors that can be varied here, and those that cannot. A factor that changes on its
// own needs no condition to vary, even where it cannot be held.
func (p *planner) fit(names []Factor) (fit []factor, skipped []Skipped) {
	for _, f := range factors {
		if !slices.Contains(names, f.name) {
			continue
		}
		why := ""
		switch {
		case p.lacks(f.varyNeeds):
			why = "this worker cannot vary it"
		case f.unfit != nil:
			why = f.unfit(p)
		}
		if why != "" {
			skipped = append(skipped, Skipped{f.name, why})
			continue
		}
		fit = append(fit, f)
	}
	return fit, skipped
}

// lacks reports whether the host cannot set a condition. "" needs nothing.
func (p *planner) lacks(c sandbox.Condition) bool {
	return c != "" && (p.features == nil || !slices.Contains(p.features.Conditions, c))
}

// baseline returns the variation of a run without varied factors. If the task states a seed it holds, as in every run
// with a seed, random numbers and memory layout.
func (p *planner) baseline() *worker.Variation {
	v := &worker.Variation{}
	if p.seed != nil {
		v.Conditions.FixedLayout = !p.lacks(sandbox.ConditionFixedLayout)
		if !p.lacks(sandbox.ConditionRandomSeed) {
			v.Conditions.RandomSeed = *p.seed + 1 // 0 means the kernel's own, and a seed may be 0
		}
	}
	return v
}

// varied returns the variation of run i, counted from 1, and the number of copies in parallel with it.
func (p *planner) varied(fs []factor, i int) (v *worker.Variation, copies int) {
	v = p.baseline()
	for _, f := range fs {
		if f.vary != nil {
			f.vary(v, i, p)
		}
		copies += f.copies
	}
	return v, copies
}

// held returns the variation of run i that holds all factors except vary, which may be nil. Factors without vary, such
// as random numbers, vary if they are not held.
func (p *planner) held(vary *factor, i int) (v *worker.Variation, copies int) {
	v = p.baseline()
	for _, f := range factors {
		switch {
		case vary != nil && f.name == vary.name:
			if f.vary != nil {
				f.vary(v, i, p)
			}
			copies += f.copies
		case f.hold != nil && (p.seed == nil || f.name != factorRandom) && !p.lacks(f.holdNeeds):
			f.hold(v, p)
		}
	}
	return v, copies
}
