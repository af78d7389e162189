// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// findings are the differences found so far, in a bounded number: of those that are alike, next to each other with the same cause, some
// are kept and the rest is counted.
type findings struct {
	diffs  []Difference
	after  []Difference // that only follow
	alike  []alike
	beyond bool // there is more than is kept
	added  int
}

// alike are differences of things next to each other.
type alike struct {
	parent, what string
	cause        Cause
	kept, more   int
	like         Difference
	// around is where all of them are, of files in directories.
	around string
}

func (f *findings) none() bool { return len(f.diffs)+len(f.after) == 0 }
func (f *findings) full() bool { return f.beyond }

// count rises with every difference that is added.
func (f *findings) count() int { return f.added }

func (f *findings) add(d Difference) {
	f.added++
	if f.full() {
		return
	}
	group := f.group(&d)
	group.around = commonDirectory(group.around, path.Dir(d.Where[0]))
	if group.kept == maxAlike {
		group.more++
		return
	}
	if len(f.diffs) == maxDifferences {
		f.beyond = true
		return
	}
	group.kept++
	f.diffs = append(f.diffs, d)
}

func (f *findings) addAfter(d Difference) {
	f.added++
	if len(f.after) < maxDifferences/2 {
		f.after = append(f.after, d)
	}
}

// group returns that of d. There are no more groups than differences, and one.
func (f *findings) group(d *Difference) *alike {
	parent := strings.Join(d.Where[:len(d.Where)-1], "\x00")
	for i := range f.alike {
		if g := &f.alike[i]; g.parent == parent && g.what == d.What && g.cause == d.Cause {
			return g
		}
	}
	if len(f.alike) > maxDifferences {
		f.alike = f.alike[:maxDifferences] // the last one kept nothing
	}
	f.alike = append(f.alike, alike{parent: parent, what: d.What, cause: d.Cause, like: *d, around: path.Dir(d.Where[0])})
	return &f.alike[len(f.alike)-1]
}

// commonDirectory returns the directory that two directories are in, or are; "." if there is none.
func commonDirectory(a, b string) string {
	for a != b && a != "." && a != "/" {
		if strings.HasPrefix(b, a+"/") {
			return a
		}
		a = path.Dir(a)
	}
	return a
}

// merge adds what o has.
func (f *findings) merge(o *findings) {
	for _, d := range o.diffs {
		f.add(d)
	}
	for _, d := range o.after {
		f.addAfter(d)
	}
	for i := range o.alike {
		if g := &o.alike[i]; g.more > 0 {
			group := f.group(&g.like)
			group.more += g.more
			group.around = commonDirectory(group.around, g.around)
		}
	}
	f.beyond = f.beyond || o.beyond
}

// all returns the differences, those that follow from others last, and what was counted; nil if there are none.
func (f *findings) all() []Difference {
	all := slices.Clone(f.diffs)
	for i := range f.alike {
		g := &f.alike[i]
		if g.more == 0 {
			continue
		}
		d := g.like
		if len(d.Where) > 1 {
			d.Where = d.Where[:len(d.Where)-1]
		} else if g.around != "." && g.around != "/" {
			d.Where = []string{g.around}
		}
		d.What, d.A, d.B, d.Offset = fmt.Sprintf("%s, in %d more like these", d.What, g.more), "", "", -1
		all = append(all, d)
	}
	if left := maxDifferences - len(all); len(f.after) > left {
		f.beyond = true
		all = append(all, f.after[:max(0, left)]...)
	} else {
		all = append(all, f.after...)
	}
	if len(all) > maxDifferences {
		all, f.beyond = all[:maxDifferences], true
	}
	if f.beyond && len(all) > 0 {
		all = append(all, Difference{Where: all[0].Where[:1], What: "more differences, not listed", Offset: -1})
	}
	return all
}
