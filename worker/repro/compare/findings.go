// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// findings are the differences found so far. Of adjacent differences with the same cause it keeps some and counts the
// rest.
type findings struct {
	diffs  []Difference
	after  []Difference // consequences
	groups []group
	beyond bool // differences were dropped
	added  int  // differences, also dropped ones
}

// A group counts differences of one kind and cause with the same parent.
type group struct {
	parent, what string
	cause        Cause
	kept, more   int
	first        Difference
	// directory contains all of them.
	directory string
}

func (f *findings) none() bool { return len(f.diffs)+len(f.after) == 0 }
func (f *findings) full() bool { return f.beyond }

func (f *findings) add(d Difference) {
	f.added++
	if f.full() {
		return
	}
	group := f.groupOf(&d)
	group.directory = commonDirectory(group.directory, path.Dir(d.Where[0]))
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

// groupOf returns the group of d. There are at most maxDifferences+1 groups.
func (f *findings) groupOf(d *Difference) *group {
	parent := strings.Join(d.Where[:len(d.Where)-1], "\x00")
	for i := range f.groups {
		if g := &f.groups[i]; g.parent == parent && g.what == d.What && g.cause == d.Cause {
			return g
		}
	}
	if len(f.groups) > maxDifferences {
		f.groups = f.groups[:maxDifferences] // the last one keeps nothing
	}
	f.groups = append(f.groups,
		group{parent: parent, what: d.What, cause: d.Cause, first: *d, directory: path.Dir(d.Where[0])})
	return &f.groups[len(f.groups)-1]
}

// commonDirectory returns the deepest directory that is or contains both a and b; "." if there is none.
func commonDirectory(a, b string) string {
	for a != b && a != "." && a != "/" {
		if strings.HasPrefix(b, a+"/") {
			return a
		}
		a = path.Dir(a)
	}
	return a
}

// merge adds the findings of o.
func (f *findings) merge(o *findings) {
	for _, d := range o.diffs {
		f.add(d)
	}
	for _, d := range o.after {
		f.addAfter(d)
	}
	for i := range o.groups {
		if g := &o.groups[i]; g.more > 0 {
			group := f.groupOf(&g.first)
			group.more += g.more
			group.directory = commonDirectory(group.directory, g.directory)
		}
	}
	f.beyond = f.beyond || o.beyond
}

// all returns the differences, then the counts, and then the consequences; nil if there are none.
func (f *findings) all() []Difference {
	all := slices.Clone(f.diffs)
	for i := range f.groups {
		g := &f.groups[i]
		if g.more == 0 {
			continue
		}
		d := g.first
		if len(d.Where) > 1 {
			d.Where = d.Where[:len(d.Where)-1]
		} else if g.directory != "." && g.directory != "/" {
			d.Where = []string{g.directory}
		}
		d.What, d.A, d.B, d.Offset, d.More = fmt.Sprintf("%s, in %d more like these", d.What, g.more), "", "", -1, g.more
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
