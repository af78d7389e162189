// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"
)

// Merge returns an input root with the entries of upper and lower. Directories of the same path are merged; any other
// entry of upper replaces that of lower. The result has no Digest. It fails with cas.ErrInvalid if it is too large.
func Merge(upper, lower *Input) (*Input, error) {
	root := merge(upper.root, lower.root)
	if err := root.measure(0); err != nil {
		return nil, err
	}
	return &Input{root: root}, nil
}

// merge does the same for directories. Measure has limited the depth of its recursion.
func merge(upper, lower *directory) *directory {
	d := &directory{props: upper.props, entries: make([]entry, 0, max(len(upper.entries), len(lower.entries)))}
	if d.props == nil {
		d.props = lower.props
	}
	u, l := upper.entries, lower.entries
	for len(u) > 0 && len(l) > 0 {
		switch c := strings.Compare(u[0].name, l[0].name); {
		case c < 0:
			d.entries, u = append(d.entries, u[0]), u[1:]
		case c > 0:
			d.entries, l = append(d.entries, l[0]), l[1:]
		default:
			e := u[0]
			if e.kind == Directory && l[0].kind == Directory && e.dir != l[0].dir {
				e.dir, e.digest = merge(e.dir, l[0].dir), cas.Digest{}
			}
			d.entries, u, l = append(d.entries, e), u[1:], l[1:]
		}
	}
	d.entries = append(append(d.entries, u...), l...)
	return d
}

// WithPaths returns an input root with the given directories and empty files added, at clean paths relative to the
// root: things are mounted there. A directory replaces whatever else has its name. A file is left out if something has
// its name, or if its parent is not a directory. The result has no Digest; those of the files have the function f. It
// fails with cas.ErrInvalid if a directory lies below something that is not a directory.
func (in *Input) WithPaths(f cas.Function, dirs, files []string) (*Input, error) {
	added := &Input{root: &directory{}}
	for _, p := range dirs {
		if !in.accepts(p) {
			return nil, errorf(cas.ErrInvalid, "%+.256q lies below something that is not a directory", p)
		}
		added.root = merge(added.root, chain(p, entry{kind: Directory, dir: &directory{}}))
	}
	out, err := Merge(added, in)
	if err != nil {
		return nil, err
	}
	for _, p := range files {
		if _, exists := out.Lookup(p); exists || !out.accepts(p) {
			continue
		}
		if out, err = Merge(&Input{root: chain(p, entry{kind: File, digest: f.Sum(nil)})}, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// accepts reports whether everything above p is a directory or absent.
func (in *Input) accepts(p string) bool {
	for i := range p {
		if p[i] != '/' {
			continue
		}
		if kind, ok := in.Lookup(p[:i]); ok && kind != Directory {
			return false
		}
	}
	return true
}

// chain returns a directory that contains only e, at the path p.
func chain(p string, e entry) *directory {
	names := strings.Split(p, "/")
	for _, name := range slices.Backward(names) {
		e.name = name
		e = entry{kind: Directory, dir: &directory{entries: []entry{e}}}
	}
	return e.dir
}
