// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/changes"
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
		if explained++; explained > maxExplained || len(v.Differences) >= maxDifferences {
			v.Unexplained = append(v.Unexplained, "further outputs: too many differ")
			return
		}
		other := slices.IndexFunc(v.Runs, func(r Run) bool { return !r.items[name].equal(v.Runs[0].items[name]) })
		found, err := differences(ctx, name, &v.Runs[0], &v.Runs[other])
		if err != nil {
			v.Unexplained = append(v.Unexplained, fmt.Sprintf("%s: %s", o.Path, text(err.Error())))
		}
		var bySteps map[string][]Factor
		if v.Bisection != nil {
			bySteps = v.Bisection.factorsAt(ctx, name)
		}
		rest := slices.Clone(o.Factors)
		for _, d := range found {
			known := bySteps[locationKey(&d)]
			rest = slices.DeleteFunc(rest, func(f Factor) bool { return slices.Contains(known, f) })
		}
		for _, d := range found[:min(len(found), maxDifferences-len(v.Differences))] {
			full := Difference{
				Output: o.Path, Difference: d, Runs: [2]int{0, other}, Factors: bySteps[locationKey(&d)],
				item: name, shown: d.Cause,
			}
			c.attribute(o, &full, name, rest, found)
			v.Differences = append(v.Differences, full)
		}
	}
}

// attribute sets the factors of a difference, and its cause if the factors prove another one than it shows. rest are
// the factors of the output that explain no other difference, and all are the differences of the item.
func (c *check) attribute(o *Output, d *Difference, name string, rest []Factor, all []compare.Difference) {
	proved := len(d.Factors) > 0
	isNoise := c.isNoise(name, &d.Difference)
	switch {
	case proved:
	case isNoise:
		factor := c.verdict.Bisection.noise.explanation(name, locationKey(&d.Difference)).factor
		if c.varies(factor) {
			d.Factors = []Factor{factor}
		}
	case len(o.Factors) == 1:
		d.Factors = o.Factors
	case len(rest) == 1:
		d.Factors = rest
	}
	d.Factors = withoutOthers(d.Factors, &d.Difference, all)
	// A single factor is practically proven, except for an order, where the first one is chance.
	proved = proved || len(d.Factors) == 1 && !isOrder(d.Cause) && !isNoise
	if c.races[name] && linesMove(locationKey(&d.Difference)) {
		d.Cause = compare.Parallel
		return
	}
	if a, b := &c.verdict.Runs[d.Runs[0]], &c.verdict.Runs[d.Runs[1]]; a.succeeded() != b.succeeded() {
		return // a run that fails writes something else
	}
	if isVague(d.Cause) || proved && !canShow(d.Factors, d.Cause) || c.refuted(o, d, name) {
		shown := d.Cause
		if by := c.causeBy(d.Factors); by != compare.Unknown || !isVague(shown) {
			d.Cause = by
		}
		switch {
		case d.Cause == compare.Random && isOrder(shown):
			d.Cause = compare.HashSeed // whatever the items are
		case d.Cause == compare.Unknown && isOrder(shown):
			d.Cause = compare.Parallel
		}
	}
}

// isNoise reports whether a difference of an item exists with all factors held.
func (c *check) isNoise(name string, d *compare.Difference) bool {
	b := c.verdict.Bisection
	return b != nil && b.noise.knows(name, locationKey(d))
}

// canShow reports whether differences by one of these factors may show a cause. The result of a bisection outweighs
// what a difference shows.
func canShow(factors []Factor, cause compare.Cause) bool {
	return slices.ContainsFunc(factors, func(name Factor) bool { return factorOf(name).explains(cause) })
}

// withoutOthers returns the factors of a difference without those that belong to another difference at the same
// location, such as the mode and the owner in one line.
func withoutOthers(factors []Factor, d *compare.Difference, all []compare.Difference) []Factor {
	if !slices.ContainsFunc(factors, func(name Factor) bool { return factorOf(name).shows(d.Cause) }) {
		return factors
	}
	return slices.DeleteFunc(slices.Clone(factors), func(name Factor) bool {
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
func (c *check) causeBy(by []Factor) compare.Cause {
	switch b := c.verdict.Bisection; {
	case isSeed(by):
		return compare.Random
	case len(by) > 0:
		return factorOf(by[0]).cause
	case b == nil && len(c.verdict.Factors) == 1:
		return factorOf(c.verdict.Factors[0]).cause // nothing else varied
	}
	return compare.Unknown
}

// isSeed reports whether programs that do not ask the kernel for random numbers derive seeds from these factors: the
// clock together with process IDs or addresses.
func isSeed(by []Factor) bool {
	has := func(name Factor) bool { return slices.Contains(by, name) }
	return (has(factorTime) || has(factorUptime)) && (has(factorPIDs) || has(factorASLR))
}

// maxCopied is the size in bytes of the largest output that is copied from another machine to be compared.
const maxCopied = 128 << 20

// differences compares an item of two runs.
func differences(ctx context.Context, name string, a, b *Run) ([]compare.Difference, error) {
	x, err := a.entry(a.items[name])
	if err != nil {
		return nil, err
	}
	y, err := b.entry(b.items[name])
	if err != nil {
		return nil, err
	}
	return compare.Entries(ctx, displayName(name), x, y, compare.Known{A: a.facts, B: b.facts})
}

// entry returns an item for package compare, nil for none.
func (r *Run) entry(it item) (*changes.Entry, error) {
	switch it.kind {
	case "":
		return nil, nil
	case "symlink":
		return &changes.Entry{Link: true, Target: it.target}, nil
	}
	d, err := cas.FromProto(r.function, it.digest)
	if err != nil {
		return nil, err
	}
	reader := &changes.Reader{Store: r.executor.Store, MaxCopy: maxCopied}
	switch {
	case it.tree:
		return &changes.Entry{Directory: reader.Tree(d)}, nil
	case it.kind == "directory":
		return &changes.Entry{Directory: reader.Directory(d)}, nil
	}
	return reader.File("", d, it.executable), nil
}

// normalizeTrees names output directories by their root Directory, because servers may encode the same Tree
// differently. It skips directories that cannot be read.
func normalizeTrees(ctx context.Context, runs []Run) {
	for _, name := range itemNames(runs) {
		for i := range runs {
			r := &runs[i]
			it := r.items[name]
			if !it.tree {
				continue
			}
			if root, err := rootOf(ctx, r.executor.Store, r.function, it.digest); err == nil {
				it.root, it.name = root, digestName(root)
				r.items[name] = it
			}
		}
	}
}

// rootOf returns the digest of the root Directory of a Tree.
func rootOf(ctx context.Context, s cas.Store, f cas.Function, tree *repb.Digest) (*repb.Digest, error) {
	d, err := cas.FromProto(f, tree)
	if err != nil {
		return nil, err
	}
	var m repb.Tree
	if err := cas.ReadProto(ctx, s, d, &m); err != nil {
		return nil, err
	}
	_, root, err := cas.MarshalProto(f, cmp.Or(m.Root, &repb.Directory{}))
	return root.Proto(), err
}
