// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// linesMove reports whether the key of a location stands for the order of lines. Words and file names on lines of their
// own may come from a hash table, a directory or racing processes; a race does not reorder the words of one line.
func linesMove(key string) bool { return strings.HasSuffix(key, "\x00order of lines") }

// raceRuns is the number of runs with all factors held that findRaces compares with a first one. At least minRaces of
// them must differ, since threads that share a seeded random number generator also change the order, but rarely.
const (
	raceRuns = 4
	minRaces = 3
)

// findRaces finds the items whose lines change their order even if all factors are held: the cause is a race, not a
// seed or a directory. It makes runs only if the order of lines differs, and on one processor, so that threads of one
// process hardly race.
func (c *check) findRaces(ctx context.Context) error {
	c.races = map[string]bool{}
	x := c.holds()
	if x == nil {
		return nil
	}
	moved := map[string]int{} // in how many runs
	for _, name := range itemNames(c.verdict.Runs) {
		first := &c.verdict.Runs[0]
		other := slices.IndexFunc(c.verdict.Runs, func(r Run) bool { return r.items[name].name != first.items[name].name })
		if other >= 0 && len(moved) < maxPlaced && movesLines(ctx, name, first, &c.verdict.Runs[other], compare.HashSeed, compare.MemberOrder) {
			moved[name] = 0
		}
	}
	if len(moved) == 0 {
		return nil
	}
	control := func(n int) (*Run, error) {
		v, _ := c.planner.held(nil, 0)
		if !c.planner.lacks(sandbox.ConditionCPUs) {
			v.Conditions.CPUs = 1
		}
		return c.execute(ctx, x, v, 0, fmt.Sprintf("control %d of %d", n, raceRuns+1))
	}
	first, err := control(1)
	if err != nil {
		return err
	}
	for n := range raceRuns {
		r, err := control(n + 2)
		if err != nil {
			return err
		}
		for name := range moved {
			if movesLines(ctx, name, first, r) {
				moved[name]++
			}
			c.races[name] = moved[name] >= minRaces
		}
	}
	return nil
}

// movesLines reports whether the order of lines differs in an item of two runs, with one of the causes; no causes
// mean any.
func movesLines(ctx context.Context, name string, a, b *Run, causes ...compare.Cause) bool {
	return slices.ContainsFunc(locationsOf(ctx, name, a, b), func(l location) bool {
		return linesMove(l.key) && (causes == nil || slices.Contains(causes, l.cause))
	})
}

// holds returns an executor that can hold all factors, or nil.
func (c *check) holds() *Executor {
	i := slices.IndexFunc(c.Executors, func(x Executor) bool { return x.Features != nil })
	if i < 0 || slices.ContainsFunc(factors, func(f factor) bool { return f.hold != nil && c.planner.lacks(f.holdNeeds) }) {
		return nil
	}
	return &c.Executors[i]
}
