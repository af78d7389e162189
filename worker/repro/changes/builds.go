// SPDX-License-Identifier: Apache-2.0

package changes

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/repro/manifest"
)

// A Step is an action of a build, as somebody remembers it.
type Step struct {
	Action           cas.Digest
	Target, Mnemonic string
	// Result is equal for equal results; "" is not known, and equal to any.
	Result string
	// Manifest is the record of its run, zero if there is none.
	Manifest cas.Digest
}

// A Relation is how a step of one build is to a step of another.
type Relation string

// The relations.
const (
	Same     Relation = "same"
	Changed  Relation = "changed"          // another action
	Unsteady Relation = "not reproducible" // the same action, and another result
	OnlyA    Relation = "only in A"
	OnlyB    Relation = "only in B"
)

// A Pair is a step with the one of the other build that is in its place.
type Pair struct {
	A, B     *Step // nil where there is none
	Relation Relation
	// Changes are how B's action is not A's, if it is Changed, and how its results are not equal, if Unsteady.
	Changes []Change
	// Follows are the pairs whose outputs are all that is Changed: then those are why, and not this one.
	Follows []*Pair
	// Err says why Changes are not known.
	Err error

	madeA, madeB []cas.Digest // files that are outputs of each
}

// maxRead is how many pairs of a comparison are read, and atOnce how many at the same time.
const (
	maxRead = 20_000
	atOnce  = 16
)

// Builds compares two builds. Steps of the same action are a pair, then those of equal target, mnemonic and, where there are several,
// outputs. The pairs come in the order of a, what b alone has last, but for those that are not the same: what is a cause comes
// before what follows from it. r reads what actions and manifests say, results what is recorded of them.
func Builds(ctx context.Context, r *Reader, results cas.ActionCache, a, b []Step) ([]*Pair, error) {
	c := builds{ctx: ctx, r: r, results: results}
	c.match(a, b)
	var unequal []*Pair
	for _, p := range c.pairs {
		if p.Relation == Changed || p.Relation == Unsteady {
			unequal = append(unequal, p)
		}
	}
	unequal = unequal[:min(len(unequal), maxRead)]
	c.each(unequal, c.look)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	madeA, madeB := map[cas.Digest][]*Pair{}, map[cas.Digest][]*Pair{} // whose outputs they are
	for _, p := range unequal {
		for _, d := range p.madeA {
			madeA[d] = append(madeA[d], p)
		}
		for _, d := range p.madeB {
			madeB[d] = append(madeB[d], p)
		}
	}
	for _, p := range unequal {
		p.follow(madeA, madeB)
	}
	return c.sorted(), nil
}

// A builds compares two builds.
type builds struct {
	ctx     context.Context
	r       *Reader
	results cas.ActionCache
	pairs   []*Pair
}

// each calls do for each pair, atOnce of them at the same time, until the context ends.
func (c *builds) each(pairs []*Pair, do func(*Pair)) {
	var group sync.WaitGroup
	turns := make(chan struct{}, atOnce)
	for _, p := range pairs {
		if c.ctx.Err() != nil {
			break
		}
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			do(p)
		})
	}
	group.Wait()
}

// A place is what steps of two builds have in common that are the same one for a person.
type place struct{ target, mnemonic, outputs string }

// match finds the pairs.
func (c *builds) match(a, b []Step) {
	byAction := map[cas.Digest]*Step{}
	for i := range b {
		byAction[b[i].Action] = &b[i]
	}
	taken := map[*Step]bool{}
	var left []*Pair
	for i := range a {
		p := &Pair{A: &a[i]}
		c.pairs = append(c.pairs, p)
		if s := byAction[p.A.Action]; s != nil && !taken[s] {
			p.B, p.Relation, taken[s] = s, Same, true
			if p.A.Result != "" && s.Result != "" && p.A.Result != s.Result {
				p.Relation = Unsteady
			}
		} else {
			left = append(left, p)
		}
	}
	var rest []*Step
	for i := range b {
		if !taken[&b[i]] {
			rest = append(rest, &b[i])
		}
	}
	// First by what is known, then, where that is not enough, by what the commands declare.
	left, rest = join(left, rest, func(s *Step) place { return place{s.Target, s.Mnemonic, ""} })
	declared := c.declared(left, rest)
	left, rest = join(left, rest, func(s *Step) place { return place{s.Target, s.Mnemonic, declared[s]} })
	for _, p := range left {
		p.Relation = OnlyA
	}
	for _, s := range rest {
		c.pairs = append(c.pairs, &Pair{B: s, Relation: OnlyB})
	}
}

// join gives each pair the one step of the same place, where both builds have but one there, and returns what is left.
func join(pairs []*Pair, steps []*Step, at func(*Step) place) ([]*Pair, []*Step) {
	inA, inB := map[place][]*Pair{}, map[place][]*Step{}
	for _, p := range pairs {
		inA[at(p.A)] = append(inA[at(p.A)], p)
	}
	for _, s := range steps {
		inB[at(s)] = append(inB[at(s)], s)
	}
	for where, ps := range inA {
		if ss := inB[where]; len(ps) == 1 && len(ss) == 1 && where != (place{}) {
			ps[0].B, ps[0].Relation = ss[0], Changed
		}
	}
	pairs = slices.DeleteFunc(slices.Clone(pairs), func(p *Pair) bool { return p.B != nil })
	steps = slices.DeleteFunc(slices.Clone(steps), func(s *Step) bool {
		where := at(s)
		return len(inA[where]) == 1 && len(inB[where]) == 1 && where != (place{})
	})
	return pairs, steps
}

// declared returns what the commands of steps declare as outputs, as one text; "" where that cannot be read.
func (c *builds) declared(pairs []*Pair, steps []*Step) map[*Step]string {
	var all []*Pair
	for _, p := range pairs {
		all = append(all, &Pair{A: p.A})
	}
	for _, s := range steps {
		all = append(all, &Pair{A: s})
	}
	all = all[:min(len(all), maxRead)]
	var mu sync.Mutex
	m := map[*Step]string{}
	c.each(all, func(p *Pair) {
		a, err := readAction(c.ctx, c.r.Store, p.A.Action)
		if err != nil {
			return
		}
		paths := slices.Sorted(slices.Values(outputs(a.command)))
		mu.Lock()
		defer mu.Unlock()
		m[p.A] = strings.Join(paths, "\x00")
	})
	return m
}

// outputs returns the result of a step as far as its outputs are known, nil if they are not: as its manifest has them, or
// as the action cache does, whose result may be of another run.
func (c *builds) outputs(s *Step) *repb.ActionResult {
	if !s.Manifest.IsZero() {
		if text, err := cas.ReadAll(c.ctx, c.r.Store, s.Manifest, manifest.MaxBytes); err == nil {
			if m, err := manifest.Parse(text); err == nil {
				return resultOf(m)
			}
		}
	}
	r, err := c.results.Lookup(c.ctx, s.Action)
	if err != nil {
		return nil
	}
	return r
}

// resultOf returns what a manifest says of a result.
func resultOf(m *manifest.Manifest) *repb.ActionResult {
	r := &repb.ActionResult{ExitCode: int32(m.ExitCode)}
	for _, o := range m.Outputs {
		switch o.Kind {
		case manifest.File, manifest.Executable:
			r.OutputFiles = append(r.OutputFiles, &repb.OutputFile{Path: o.Path, Digest: o.Digest.Proto(), IsExecutable: o.Kind == manifest.Executable})
		case manifest.Tree:
			r.OutputDirectories = append(r.OutputDirectories, &repb.OutputDirectory{Path: o.Path, TreeDigest: o.Digest.Proto()})
		case manifest.Root:
			r.OutputDirectories = append(r.OutputDirectories, &repb.OutputDirectory{Path: o.Path, RootDirectoryDigest: o.Digest.Proto()})
		case manifest.Symlink:
			r.OutputSymlinks = append(r.OutputSymlinks, &repb.OutputSymlink{Path: o.Path, Target: o.Target})
		}
	}
	return r
}

// look reads how the two steps of p differ, and what they made.
func (c *builds) look(p *Pair) {
	a, b := c.outputs(p.A), c.outputs(p.B)
	f := p.A.Action.Function()
	p.madeA, p.madeB = c.files(f, a), c.files(p.B.Action.Function(), b)
	switch {
	case p.Relation == Changed:
		p.Changes, p.Err = Actions(c.ctx, c.r, p.A.Action, p.B.Action)
	case a != nil && b != nil:
		x, errX := c.r.outputs(c.ctx, f, a)
		y, errY := c.r.outputs(c.ctx, f, b)
		if p.Err = errors.Join(errX, errY); p.Err == nil {
			p.Changes, p.Err = Folders(c.ctx, "output", x, y)
		}
	}
}

// files returns the digests of the files among the outputs of a result, as far as they can be read.
func (c *builds) files(f cas.Function, r *repb.ActionResult) []cas.Digest {
	var all []cas.Digest
	add := func(p *repb.Digest) {
		if d, err := cas.FromProto(f, p); err == nil && !slices.Contains(all[max(0, len(all)-1):], d) {
			all = append(all, d)
		}
	}
	for _, o := range r.GetOutputFiles() {
		add(o.Digest)
	}
	for _, o := range r.GetOutputDirectories() {
		d, err := cas.FromProto(f, o.TreeDigest)
		if err != nil {
			continue
		}
		var t repb.Tree
		if cas.ReadProto(c.ctx, c.r.Store, d, &t) != nil {
			continue
		}
		for _, dir := range append(t.Children, t.Root) {
			for _, file := range dir.GetFiles() {
				add(file.Digest)
			}
		}
	}
	return all
}

// follow finds the pairs that p follows from, if all that is changed in it are inputs that they made.
func (p *Pair) follow(madeA, madeB map[cas.Digest][]*Pair) {
	if p.Relation != Changed || p.Err != nil {
		return
	}
	var from []*Pair
	for i := range p.Changes {
		c := &p.Changes[i]
		// Of an action, inputs alone have entries.
		if c.EntryA == nil || c.EntryB == nil || c.EntryA.Digest == c.EntryB.Digest {
			return
		}
		both := slices.IndexFunc(madeA[c.EntryA.Digest], func(of *Pair) bool { return of != p && slices.Contains(madeB[c.EntryB.Digest], of) })
		if both < 0 {
			return
		}
		if of := madeA[c.EntryA.Digest][both]; !slices.Contains(from, of) {
			from = append(from, of)
		}
	}
	p.Follows = from
}

// sorted returns the pairs: causes first, then what follows from others, what is missing, and what is the same.
func (c *builds) sorted() []*Pair {
	rank := func(p *Pair) int {
		switch {
		case p.Relation == Unsteady:
			return 0
		case p.Relation == Changed && len(p.Follows) == 0:
			return 1
		case p.Relation == Changed:
			return 2
		case p.Relation == Same:
			return 4
		}
		return 3
	}
	slices.SortStableFunc(c.pairs, func(x, y *Pair) int { return cmp.Compare(rank(x), rank(y)) })
	return c.pairs
}
