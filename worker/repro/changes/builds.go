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
	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro/manifest"
	"golang.org/x/sync/errgroup"
)

// A Step is an action of a recorded build.
type Step struct {
	Action           cas.Digest
	Target, Mnemonic string
	// Result identifies the result; "" if unknown. Equal results have equal strings.
	Result string
	// Manifest is the digest of the manifest of its run; zero if there is none.
	Manifest cas.Digest
}

// A Relation is how a step of one build relates to its counterpart in another.
type Relation string

// The relations.
const (
	Same             Relation = "same"
	Changed          Relation = "changed"          // a different action
	Nondeterministic Relation = "not reproducible" // the same action with a different result
	OtherToolchain   Relation = "other toolchain"  // the same action with a different result, from other programs of the host
	OnlyA            Relation = "only in A"
	OnlyB            Relation = "only in B"
)

// A Pair is a step and its counterpart in the other build.
type Pair struct {
	A, B     *Step // nil if the build has none
	Relation Relation
	// Changes describe how the actions differ if the step is Changed, how the results differ if it is Nondeterministic,
	// and how programs and results differ if it is OtherToolchain.
	Changes []Change
	// Follows are the pairs that caused this one: all its changes are outputs of theirs.
	Follows []*Pair
	// Err is the reason why Changes are unknown.
	Err error

	outputsA, outputsB []cas.Digest // digests of output files
}

// maxRead limits the pairs that are read, concurrency those that are read at the same time.
const (
	maxRead     = 20_000
	concurrency = 16
)

// Builds compares two builds. It pairs steps of the same action, and then steps with the same target, mnemonic and, if
// there are several, outputs. It sorts the pairs by relation, causes before the pairs that follow from them, and
// otherwise keeps the order of a. r reads actions and manifests, results holds recorded results.
func Builds(ctx context.Context, r *Reader, results cas.ActionCache, a, b []Step) ([]*Pair, error) {
	c := builds{ctx: ctx, r: r, results: results}
	c.match(a, b)
	var unequal []*Pair
	for _, p := range c.pairs {
		if p.Relation == Changed || p.Relation == Nondeterministic {
			unequal = append(unequal, p)
		}
	}
	unequal = unequal[:min(len(unequal), maxRead)]
	each(ctx, unequal, c.compare)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	producersA, producersB := map[cas.Digest][]*Pair{}, map[cas.Digest][]*Pair{}
	for _, p := range unequal {
		for _, d := range p.outputsA {
			producersA[d] = append(producersA[d], p)
		}
		for _, d := range p.outputsB {
			producersB[d] = append(producersB[d], p)
		}
	}
	for _, p := range unequal {
		p.follow(producersA, producersB)
	}
	return c.sorted(), nil
}

// builds is the state of Builds.
type builds struct {
	ctx     context.Context
	r       *Reader
	results cas.ActionCache
	pairs   []*Pair
}

// each calls do for each item concurrently, until the context ends.
func each[T any](ctx context.Context, items []T, do func(T)) {
	var group errgroup.Group
	group.SetLimit(concurrency)
	for _, item := range items {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { do(item); return nil })
	}
	_ = group.Wait() // do returns no error
}

// A stepKey identifies a step across builds.
type stepKey struct{ target, mnemonic, outputs string }

// match pairs the steps.
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
				p.Relation = Nondeterministic
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
	// Reading the declared outputs costs more, so only the ambiguous steps are matched by them.
	left, rest = join(left, rest, func(s *Step) stepKey { return stepKey{s.Target, s.Mnemonic, ""} })
	declared := c.declared(left, rest)
	left, rest = join(left, rest, func(s *Step) stepKey { return stepKey{s.Target, s.Mnemonic, declared[s]} })
	for _, p := range left {
		p.Relation = OnlyA
	}
	for _, s := range rest {
		c.pairs = append(c.pairs, &Pair{B: s, Relation: OnlyB})
	}
}

// join completes each pair whose key occurs once in each build, and returns the remaining pairs and steps.
func join(pairs []*Pair, steps []*Step, at func(*Step) stepKey) ([]*Pair, []*Step) {
	inA, inB := map[stepKey][]*Pair{}, map[stepKey][]*Step{}
	for _, p := range pairs {
		inA[at(p.A)] = append(inA[at(p.A)], p)
	}
	for _, s := range steps {
		inB[at(s)] = append(inB[at(s)], s)
	}
	for where, ps := range inA {
		if ss := inB[where]; len(ps) == 1 && len(ss) == 1 && where != (stepKey{}) {
			ps[0].B, ps[0].Relation = ss[0], Changed
		}
	}
	pairs = slices.DeleteFunc(slices.Clone(pairs), func(p *Pair) bool { return p.B != nil })
	steps = slices.DeleteFunc(slices.Clone(steps), func(s *Step) bool {
		where := at(s)
		return len(inA[where]) == 1 && len(inB[where]) == 1 && where != (stepKey{})
	})
	return pairs, steps
}

// declared returns the declared outputs of steps as one string each. It leaves out steps that cannot be read.
func (c *builds) declared(pairs []*Pair, steps []*Step) map[*Step]string {
	all := slices.Clone(steps)
	for _, p := range pairs {
		all = append(all, p.A)
	}
	var mu sync.Mutex
	m := map[*Step]string{}
	each(c.ctx, all[:min(len(all), maxRead)], func(s *Step) {
		a, err := ReadAction(c.ctx, c.r.Store, s.Action)
		if err != nil {
			return
		}
		paths := slices.Sorted(slices.Values(a.Outputs()))
		mu.Lock()
		defer mu.Unlock()
		m[s] = strings.Join(paths, "\x00")
	})
	return m
}

// manifest returns the manifest of a step, nil if unknown.
func (c *builds) manifest(s *Step) *manifest.Manifest {
	if s.Manifest.IsZero() {
		return nil
	}
	text, err := cas.ReadAll(c.ctx, c.r.Store, s.Manifest, manifest.MaxBytes)
	if err != nil {
		return nil
	}
	m, err := manifest.Parse(text)
	if err != nil {
		return nil
	}
	return m
}

// programs returns the programs of the host that both runs executed and that differ; a manifest may be nil.
func programs(a, b *manifest.Manifest) []Change {
	if a == nil || b == nil {
		return nil
	}
	sums := map[string]string{}
	for _, p := range a.Toolchain.Programs {
		sums[p.Path] = p.Sum
	}
	var changes []Change
	for _, p := range b.Toolchain.Programs {
		if sum := sums[p.Path]; sum != "" && sum != p.Sum {
			changes = append(changes, Change{What: "program", Name: printable.Quote(p.Path, maxText), A: sum, B: p.Sum})
		}
	}
	return changes
}

// outputs returns the outputs of a step with this manifest, nil if unknown. The manifest has precedence, because the
// action cache may hold the result of another run.
func (c *builds) outputs(s *Step, m *manifest.Manifest) *repb.ActionResult {
	if m != nil {
		return resultOf(m)
	}
	r, err := c.results.Lookup(c.ctx, s.Action)
	if err != nil {
		return nil
	}
	return r
}

// resultOf returns the result that a manifest records.
func resultOf(m *manifest.Manifest) *repb.ActionResult {
	r := &repb.ActionResult{ExitCode: int32(m.ExitCode)}
	for _, o := range m.Outputs {
		switch o.Kind {
		case manifest.File, manifest.Executable:
			r.OutputFiles = append(r.OutputFiles,
				&repb.OutputFile{Path: o.Path, Digest: o.Digest.Proto(), IsExecutable: o.Kind == manifest.Executable})
		case manifest.Tree:
			r.OutputDirectories = append(r.OutputDirectories,
				&repb.OutputDirectory{Path: o.Path, TreeDigest: o.Digest.Proto()})
		case manifest.Root:
			r.OutputDirectories = append(r.OutputDirectories,
				&repb.OutputDirectory{Path: o.Path, RootDirectoryDigest: o.Digest.Proto()})
		case manifest.Symlink:
			r.OutputSymlinks = append(r.OutputSymlinks, &repb.OutputSymlink{Path: o.Path, Target: o.Target})
		}
	}
	return r
}

// compare reads the outputs of the two steps and how they differ.
func (c *builds) compare(p *Pair) {
	manifestA, manifestB := c.manifest(p.A), c.manifest(p.B)
	a, b := c.outputs(p.A, manifestA), c.outputs(p.B, manifestB)
	f := p.A.Action.Function()
	p.outputsA, p.outputsB = c.files(f, a), c.files(p.B.Action.Function(), b)
	switch {
	case p.Relation == Changed:
		p.Changes, p.Err = Actions(c.ctx, c.r, p.A.Action, p.B.Action)
	case a != nil && b != nil:
		x, errX := c.r.outputs(f, a)
		y, errY := c.r.outputs(f, b)
		if p.Err = errors.Join(errX, errY); p.Err == nil {
			p.Changes, p.Err = Directories(c.ctx, "output", x, y)
		}
	}
	if p.Relation == Nondeterministic {
		if other := programs(manifestA, manifestB); len(other) > 0 {
			p.Relation, p.Changes = OtherToolchain, append(other, p.Changes...)
		}
	}
}

// files returns the digests of a result's output files. It leaves out directories that it cannot read.
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

// follow sets Follows if all changes of p are inputs that other pairs produced.
func (p *Pair) follow(producersA, producersB map[cas.Digest][]*Pair) {
	if p.Relation != Changed || p.Err != nil {
		return
	}
	var from []*Pair
	for i := range p.Changes {
		c := &p.Changes[i]
		// Only inputs have entries.
		if c.EntryA == nil || c.EntryB == nil || c.EntryA.Digest == c.EntryB.Digest {
			return
		}
		candidates := producersA[c.EntryA.Digest]
		i := slices.IndexFunc(candidates, func(of *Pair) bool {
			return of != p && slices.Contains(producersB[c.EntryB.Digest], of)
		})
		if i < 0 {
			return
		}
		if !slices.Contains(from, candidates[i]) {
			from = append(from, candidates[i])
		}
	}
	p.Follows = from
}

// sorted returns the pairs: causes first, then the pairs that follow, unmatched ones, and equal ones.
func (c *builds) sorted() []*Pair {
	rank := func(p *Pair) int {
		switch {
		case p.Relation == Nondeterministic, p.Relation == OtherToolchain:
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
