// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/worker/compare"
)

const (
	// maxExplained is how many outputs are looked into, of those that differ.
	maxExplained = 50
	// maxCompared is the size, in bytes, of the largest output that is looked into.
	maxCompared = 1 << 30
	// maxInMemory is the size of the largest that is held in memory for it; a larger one becomes a file.
	maxInMemory = 4 << 20
)

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
		factors := c.bySteps(ctx, name)
		for _, d := range found[:min(len(found), MaxDifferences-len(v.Differences))] {
			full := Difference{Difference: d, Runs: [2]int{0, other}, Factor: factors[key(&d)]}
			if full.Factor == "" && len(o.Factors) == 1 {
				full.Factor = o.Factors[0]
			}
			if d.Cause == compare.Unknown {
				full.Cause = c.causeBy(o, full.Factor)
				full.Fix = compare.FixFor(full.Cause, "")
			}
			v.Differences = append(v.Differences, full)
		}
	}
}

// causeBy returns the cause that is known of an output by what was varied.
func (c *check) causeBy(o *Output, factor string) compare.Cause {
	if factor == "" && len(o.Factors) > 0 {
		factor = o.Factors[0]
	}
	if factor != "" {
		return causeOf(factor)
	}
	if b := c.verdict.Bisection; b != nil && slices.Contains(b.Unsteady, o.Path) {
		return compare.Parallel
	}
	if len(c.verdict.Factors) == 1 {
		return causeOf(c.verdict.Factors[0]) // nothing else was other
	}
	return compare.Unknown
}

// bySteps returns the factor of each difference of an item that a step of the bisection shows alone.
func (c *check) bySteps(ctx context.Context, name string) map[string]string {
	all := map[string]string{}
	if c.verdict.Bisection == nil {
		return all
	}
	b := c.verdict.Bisection
	for i := range b.Steps {
		s := &b.Steps[i]
		if s.run == nil || !slices.Contains(s.Changed, text(strings.TrimSuffix(name, "/"))) {
			continue
		}
		found, _ := differences(ctx, name, &b.control[0], s.run) // without them the output's factors are known all the same
		for _, d := range found {
			if k := key(&d); all[k] == "" {
				all[k] = s.Factor
			}
		}
	}
	return all
}

// key names the place of a difference, whatever stands there.
func key(d *compare.Difference) string { return strings.Join(d.Where, "\x00") + "\x00" + d.What }

// differences compares what two runs have in one place.
func differences(ctx context.Context, name string, a, b *Run) ([]compare.Difference, error) {
	x, y := a.outputs[name], b.outputs[name]
	where := []string{text(strings.TrimSuffix(name, "/"))}
	one := func(what, a, b string) []compare.Difference {
		return []compare.Difference{{Where: where, What: what, A: short(a), B: short(b), Offset: -1}}
	}
	switch {
	case x.kind == "" || y.kind == "":
		return one("exists", orNone(x.kind), orNone(y.kind)), nil
	case x.kind != y.kind:
		return one("kind", x.kind, y.kind), nil
	case x.kind == "symlink":
		return one("target", x.name, y.name), nil
	case x.kind == "directory":
		return directories(ctx, where[0], a, b, x, y)
	}
	var all []compare.Difference
	if x.executable != y.executable {
		all = one("executable", fmt.Sprint(x.executable), fmt.Sprint(y.executable))
	}
	if digestName(x.digest) == digestName(y.digest) {
		return all, nil
	}
	found, err := blobs(ctx, where[0], a, b, x.digest, y.digest)
	return append(all, found...), err
}

func orNone(kind string) string {
	if kind == "" {
		return "nothing"
	}
	return kind
}

func short(s string) string {
	if s = text(s); len(s) > compare.MaxText {
		s = s[:compare.MaxText]
	}
	return s
}

// blobs compares what two runs left.
func blobs(ctx context.Context, name string, a, b *Run, x, y *repb.Digest) ([]compare.Difference, error) {
	left, closeLeft, err := open(ctx, a, x)
	if err != nil {
		return nil, err
	}
	defer closeLeft()
	right, closeRight, err := open(ctx, b, y)
	if err != nil {
		return nil, err
	}
	defer closeRight()
	return compare.Blobs(ctx, name, left, right, compare.Known{A: a.facts, B: b.facts})
}

// open returns a blob that a run left, to be read in any order. The caller closes it.
func open(ctx context.Context, from *Run, p *repb.Digest) (*io.SectionReader, func(), error) {
	d, err := cas.FromProto(from.digests, p)
	if err != nil {
		return nil, nil, err
	}
	if d.Size() > maxCompared {
		return nil, nil, fmt.Errorf("%d bytes are too many to be looked into: %d are at most", d.Size(), maxCompared)
	}
	if d.Size() <= maxInMemory {
		data, err := cas.ReadAll(ctx, from.place.Store, d, maxInMemory)
		if err != nil {
			return nil, nil, err
		}
		return io.NewSectionReader(bytes.NewReader(data), 0, d.Size()), func() {}, nil
	}
	r, err := from.place.Store.Open(ctx, d, 0)
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	file, err := os.CreateTemp("", "cloister-repro-")
	if err != nil {
		return nil, nil, err
	}
	done := func() { file.Close(); os.Remove(file.Name()) }
	if n, err := io.Copy(file, r); err != nil || n != d.Size() {
		done()
		return nil, nil, errors.Join(err, fmt.Errorf("%d of %d bytes were read", n, d.Size()))
	}
	return io.NewSectionReader(file, 0, d.Size()), done, nil
}
