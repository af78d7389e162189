// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// maxExplained is how many outputs are looked into, of those that differ.
const maxExplained = 50

// explain looks into the outputs that differ. That one cannot be read any more, or not be compared, is no failure: that it
// differs is known by its digest.
func (c *check) explain(ctx context.Context) {
	v := &c.verdict
	explained := 0
	for i, name := range paths(v.Runs) {
		o := &v.Outputs[i]
		if !o.Differ {
			continue
		}
		if explained++; explained > maxExplained || len(v.Differences) >= MaxDifferences {
			v.Unexplained = append(v.Unexplained, "further outputs: too many differ")
			return
		}
		other := slices.IndexFunc(v.Runs, func(r Run) bool { return r.outputs[name].name != v.Runs[0].outputs[name].name })
		found, err := differences(ctx, name, &v.Runs[0], &v.Runs[other])
		if err != nil {
			v.Unexplained = append(v.Unexplained, fmt.Sprintf("%s: %s", o.Path, text(err.Error())))
		}
		shares := c.bySteps(ctx, name)
		rest := slices.Clone(o.Factors)
		for _, d := range found {
			rest = slices.DeleteFunc(rest, func(f string) bool { return slices.Contains(shares[key(&d)], f) })
		}
		for _, d := range found[:min(len(found), MaxDifferences-len(v.Differences))] {
			full := Difference{Output: o.Path, Difference: d, Runs: [2]int{0, other}, Factors: shares[key(&d)]}
			proved := len(full.Factors) > 0
			switch {
			case proved:
			case c.byItself(name, &d):
				if factor := v.Bisection.noise.origin(name, key(&d)).factor; c.chosen(factor) {
					full.Factors = []string{factor}
				}
			case len(o.Factors) == 1:
				full.Factors = o.Factors
			case len(rest) == 1: // all others explain something else
				full.Factors = rest
			}
			full.Factors = ofCause(full.Factors, &d, found)
			// Where one factor is left it is as good as proved; of an order it is not: what came first is chance.
			proved = proved || len(full.Factors) == 1 && !isOrder(d.Cause) && !c.byItself(name, &d)
			if d.Cause == compare.Unknown || proved && !canLook(full.Factors, d.Cause) || c.refuted(o, &full, name) {
				full.Cause = c.causeBy(o, full.Factors)
				if full.Cause == compare.Random && isOrder(d.Cause) {
					full.Cause = compare.HashSeed // whatever the items look like
				}
				full.Fix = compare.FixFor(full.Cause, d.Format)
			}
			v.Differences = append(v.Differences, full)
		}
	}
}

// byItself reports whether a difference of an item is among those that are there with everything held.
func (c *check) byItself(name string, d *compare.Difference) bool {
	b := c.verdict.Bisection
	return b != nil && b.noise.knows(name, key(d))
}

// canLook reports whether what one of some factors makes differ can look as if it had this cause. What it looks like gives
// way to what is proved.
func canLook(factors []string, looks compare.Cause) bool {
	return slices.ContainsFunc(factors, func(name string) bool { return factorOf(name).explains(looks) })
}

// ofCause returns those of the factors of a place that are not another difference's there: of a mode and an owner in one line each
// has its own.
func ofCause(factors []string, d *compare.Difference, all []compare.Difference) []string {
	return slices.DeleteFunc(slices.Clone(factors), func(name string) bool {
		f := factorOf(name)
		return !f.shows(d.Cause) && slices.ContainsFunc(factors, func(other string) bool { return factorOf(other).shows(d.Cause) }) &&
			slices.ContainsFunc(all, func(other compare.Difference) bool {
				return key(&other) == key(d) && f.shows(other.Cause)
			})
	})
}

// refuted reports whether an order cannot be what it looks like: it is there as well where all that can look so was held.
func (c *check) refuted(o *Output, d *Difference, name string) bool {
	b := c.verdict.Bisection
	if b != nil && b.noise.origin(name, key(&d.Difference)).cause == d.Cause {
		return false // it looked so even there
	}
	return b != nil && len(b.Unheld) == 0 && isOrder(d.Cause) && slices.Contains(b.Nondeterministic, o.Path) && !canLook(d.Factors, d.Cause)
}

// causeBy returns the cause that is known of a difference by what was varied.
func (c *check) causeBy(o *Output, by []string) compare.Cause {
	switch b := c.verdict.Bisection; {
	case isSeed(by):
		return compare.Random
	case len(by) > 0:
		return factorOf(by[0]).Cause
	case b != nil && slices.Contains(b.Nondeterministic, o.Path) && len(b.Unheld) == 0:
		return compare.Parallel
	case b == nil && len(c.verdict.Factors) == 1:
		return factorOf(c.verdict.Factors[0]).Cause // nothing else was other
	}
	return compare.Unknown
}

// isSeed reports whether factors are those of which programs make seeds that do not ask the kernel for one: the clock, with
// numbers of processes or addresses.
func isSeed(by []string) bool {
	has := func(name string) bool { return slices.Contains(by, name) }
	return (has("time") || has("uptime")) && (has("pids") || has("aslr"))
}

// bySteps returns the factors of each difference of an item that a step of the bisection shows alone.
func (c *check) bySteps(ctx context.Context, name string) map[string][]string {
	all := map[string][]string{}
	if c.verdict.Bisection == nil {
		return all
	}
	b := c.verdict.Bisection
	for i := range b.Steps {
		s := &b.Steps[i]
		if s.run == nil || !slices.Contains(s.Changed, shown(name)) {
			continue
		}
		found, _ := differences(ctx, name, &b.control, s.run) // without them the output's factors are known all the same
		for _, d := range found {
			if k := key(&d); !b.noise.knows(name, k) && !b.chance(name, &spot{k, d.Cause, d.Format}, factorOf(s.Factor)) && !slices.Contains(all[k], s.Factor) {
				all[k] = append(all[k], s.Factor)
			}
		}
	}
	return all
}

// key names the place of a difference, whatever stands there.
func key(d *compare.Difference) string {
	what, _, _ := strings.Cut(d.What, ", ") // "content, of 5 and 6 bytes"
	return strings.Join(d.Where, "\x00") + "\x00" + what
}

// differences compares what two runs have in one place.
func differences(ctx context.Context, name string, a, b *Run) ([]compare.Difference, error) {
	x, err := a.entry(ctx, a.outputs[name])
	if err != nil {
		return nil, err
	}
	y, err := b.entry(ctx, b.outputs[name])
	if err != nil {
		return nil, err
	}
	s := a.place.Store
	if b.place != a.place {
		s = &either{s, b.place.Store}
	}
	return compare.Entries(ctx, s, shown(name), x, y, compare.Known{A: a.facts, B: b.facts})
}

// entry returns an item as package compare has it.
func (r *Run) entry(ctx context.Context, it item) (e compare.Entry, err error) {
	switch it.kind {
	case "":
		return e, nil
	case "symlink":
		e.Target = it.target
		return e, nil
	case "directory":
		if e.Directory, err = cas.FromProto(r.digests, it.digest); err != nil || !it.tree {
			return e, err
		}
		if e.Tree, err = compare.ReadTree(ctx, r.place.Store, e.Directory); err == nil {
			e.Directory = e.Tree.Root
		}
		return e, err
	}
	e.Executable = it.executable
	e.File, err = cas.FromProto(r.digests, it.digest)
	return e, err
}

// An either is two stores: what the first lacks is looked for in the second.
type either struct {
	cas.Store
	second cas.Store
}

// Open opens a blob of one of them.
func (s *either) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, d, off)
	if errors.Is(err, cas.ErrNotFound) {
		return s.second.Open(ctx, d, off)
	}
	return r, err
}

// settle gives the output directories of all runs names that are equal where what is in them is: a Tree can be written in
// more than one way, and servers differ. Those that cannot be read keep theirs.
func settle(ctx context.Context, runs []Run) {
	for _, name := range paths(runs) {
		for i := range runs {
			it := runs[i].outputs[name]
			if !it.tree {
				continue
			}
			if e, err := runs[i].entry(ctx, it); err == nil {
				it.root = e.Directory.Proto()
				it.name = digestName(it.root)
				runs[i].outputs[name] = it
			}
		}
	}
}
