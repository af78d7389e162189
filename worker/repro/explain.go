// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/compare"
)

// maxExplained limits the outputs whose contents are compared.
const maxExplained = 50

// explain compares the contents of the outputs that differ. An output that cannot be read or compared is not an error:
// its digest shows that it differs.
func (c *check) explain(ctx context.Context) {
	v := &c.verdict
	explained := 0
	for i, name := range itemNames(v.Runs) {
		o := &v.Outputs[i]
		if !o.Differ {
			continue
		}
		if explained++; explained > maxExplained || len(v.Differences) >= MaxDifferences {
			v.Unexplained = append(v.Unexplained, "further outputs: too many differ")
			return
		}
		other := slices.IndexFunc(v.Runs, func(r Run) bool { return r.items[name].name != v.Runs[0].items[name].name })
		found, err := differences(ctx, name, &v.Runs[0], &v.Runs[other])
		if err != nil {
			v.Unexplained = append(v.Unexplained, fmt.Sprintf("%s: %s", o.Path, text(err.Error())))
		}
		bySteps := c.factorsBySteps(ctx, name)
		rest := slices.Clone(o.Factors)
		for _, d := range found {
			known := bySteps[locationKey(&d)]
			rest = slices.DeleteFunc(rest, func(f string) bool { return slices.Contains(known, f) })
		}
		for _, d := range found[:min(len(found), MaxDifferences-len(v.Differences))] {
			full := Difference{Output: o.Path, Difference: d, Runs: [2]int{0, other}, Factors: bySteps[locationKey(&d)]}
			c.attribute(o, &full, name, rest, found)
			v.Differences = append(v.Differences, full)
		}
	}
}

// attribute sets the factors of a difference, and its cause if the factors prove another one than it shows. rest are
// the factors of the output that explain no other difference, and all are the differences of the item.
func (c *check) attribute(o *Output, d *Difference, name string, rest []string, all []compare.Difference) {
	proved := len(d.Factors) > 0
	isNoise := c.isNoise(name, &d.Difference)
	switch {
	case proved:
	case isNoise:
		factor := c.verdict.Bisection.noise.explanation(name, locationKey(&d.Difference)).factor
		if c.varies(factor) {
			d.Factors = []string{factor}
		}
	case len(o.Factors) == 1:
		d.Factors = o.Factors
	case len(rest) == 1:
		d.Factors = rest
	}
	d.Factors = withoutOthers(d.Factors, &d.Difference, all)
	// A single factor is practically proven, except for an order, where the first one is chance.
	proved = proved || len(d.Factors) == 1 && !isOrder(d.Cause) && !isNoise
	if d.Cause == compare.Unknown || proved && !canShow(d.Factors, d.Cause) || c.refuted(o, d, name) {
		shown := d.Cause
		d.Cause = c.causeBy(o, d.Factors)
		if d.Cause == compare.Random && isOrder(shown) {
			d.Cause = compare.HashSeed // whatever the items are
		}
		d.Fix = compare.FixFor(d.Cause, d.Format)
	}
}

// isNoise reports whether a difference of an item exists with all factors held.
func (c *check) isNoise(name string, d *compare.Difference) bool {
	b := c.verdict.Bisection
	return b != nil && b.noise.knows(name, locationKey(d))
}

// canShow reports whether differences by one of these factors may show a cause. The result of a bisection outweighs
// what a difference shows.
func canShow(factors []string, cause compare.Cause) bool {
	return slices.ContainsFunc(factors, func(name string) bool { return factorOf(name).explains(cause) })
}

// withoutOthers returns the factors of a difference without those that belong to another difference at the same
// location, such as the mode and the owner in one line.
func withoutOthers(factors []string, d *compare.Difference, all []compare.Difference) []string {
	if !slices.ContainsFunc(factors, func(name string) bool { return factorOf(name).shows(d.Cause) }) {
		return factors
	}
	return slices.DeleteFunc(slices.Clone(factors), func(name string) bool {
		f := factorOf(name)
		return !f.shows(d.Cause) && slices.ContainsFunc(all, func(other compare.Difference) bool {
			return locationKey(&other) == locationKey(d) && f.shows(other.Cause)
		})
	})
}

// refuted reports whether an order cannot have the cause that it shows, because it differs with all such factors held.
func (c *check) refuted(o *Output, d *Difference, name string) bool {
	b := c.verdict.Bisection
	if b == nil || b.noise.explanation(name, locationKey(&d.Difference)).cause == d.Cause {
		return false
	}
	return len(b.Unheld) == 0 && isOrder(d.Cause) && slices.Contains(b.Nondeterministic, o.Path) &&
		!canShow(d.Factors, d.Cause)
}

// causeBy returns the cause that follows from what was varied.
func (c *check) causeBy(o *Output, by []string) compare.Cause {
	switch b := c.verdict.Bisection; {
	case isSeed(by):
		return compare.Random
	case len(by) > 0:
		return factorOf(by[0]).cause
	case b != nil && slices.Contains(b.Nondeterministic, o.Path) && len(b.Unheld) == 0:
		return compare.Parallel
	case b == nil && len(c.verdict.Factors) == 1:
		return factorOf(c.verdict.Factors[0]).cause // nothing else varied
	}
	return compare.Unknown
}

// isSeed reports whether programs that do not ask the kernel for random numbers derive seeds from these factors: the
// clock together with process IDs or addresses.
func isSeed(by []string) bool {
	has := func(name string) bool { return slices.Contains(by, name) }
	return (has("time") || has("uptime")) && (has("pids") || has("aslr"))
}

// factorsBySteps returns the factors of each location of an item that the steps of the bisection show.
func (c *check) factorsBySteps(ctx context.Context, name string) map[string][]string {
	all := map[string][]string{}
	b := c.verdict.Bisection
	if b == nil {
		return all
	}
	for i := range b.Steps {
		s := &b.Steps[i]
		if s.run == nil || !slices.Contains(s.Changed, displayName(name)) {
			continue
		}
		f := factorOf(s.Factor)
		found, _ := differences(ctx, name, &b.control, s.run) // the output's factors are known anyway
		for _, d := range found {
			l := location{locationKey(&d), d.Cause, d.Format}
			if !b.noise.knows(name, l.key) && !b.chance(name, &l, f) && !slices.Contains(all[l.key], s.Factor) {
				all[l.key] = append(all[l.key], s.Factor)
			}
		}
	}
	return all
}

// differences compares an item of two runs.
func differences(ctx context.Context, name string, a, b *Run) ([]compare.Difference, error) {
	x, err := a.entry(ctx, a.items[name])
	if err != nil {
		return nil, err
	}
	y, err := b.entry(ctx, b.items[name])
	if err != nil {
		return nil, err
	}
	s := a.executor.Store
	if b.executor != a.executor {
		s = &fallbackStore{s, b.executor.Store}
	}
	return compare.Entries(ctx, s, displayName(name), x, y, compare.Known{A: a.facts, B: b.facts})
}

// entry returns an item for package compare.
func (r *Run) entry(ctx context.Context, it item) (e compare.Entry, err error) {
	switch it.kind {
	case "":
		return e, nil
	case "symlink":
		e.Target = it.target
		return e, nil
	case "directory":
		if e.Directory, err = cas.FromProto(r.function, it.digest); err != nil || !it.tree {
			return e, err
		}
		if e.Tree, err = compare.ReadTree(ctx, r.executor.Store, e.Directory); err == nil {
			e.Directory = e.Tree.Root
		}
		return e, err
	}
	e.Executable = it.executable
	e.File, err = cas.FromProto(r.function, it.digest)
	return e, err
}

// A fallbackStore reads the blobs that Store lacks from second.
type fallbackStore struct {
	cas.Store
	second cas.Store
}

// Open implements cas.Store.
func (s *fallbackStore) Open(ctx context.Context, d cas.Digest, off int64) (io.ReadCloser, error) {
	r, err := s.Store.Open(ctx, d, off)
	if errors.Is(err, cas.ErrNotFound) {
		return s.second.Open(ctx, d, off)
	}
	return r, err
}

// normalizeTrees names output directories by their root Directory, because servers may encode the same Tree
// differently. It skips directories that cannot be read.
func normalizeTrees(ctx context.Context, runs []Run) {
	for _, name := range itemNames(runs) {
		for i := range runs {
			it := runs[i].items[name]
			if !it.tree {
				continue
			}
			if e, err := runs[i].entry(ctx, it); err == nil {
				it.root = e.Directory.Proto()
				it.name = digestName(it.root)
				runs[i].items[name] = it
			}
		}
	}
}
