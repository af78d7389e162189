// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"
	"path"
	"slices"
	"strings"
)

// Undeclared returns what a run of l left in the exec root that is neither an input nor an output: at most max sorted
// paths, and the number of further ones. Paths are relative to out, the exec root after the run or its upper layer; all
// processes of the run must have ended. A directory is one path that ends in a slash, whatever it contains. Contents of
// outputs are not listed.
func (l *Layout) Undeclared(out *os.Root, max int) (paths []string, more int, err error) {
	u := &undeclared{scanner: scanner{root: out, ofRun: true}, max: max}
	real := map[string]bool{} // the planned directories that still exist and are not behind a link
	for i := range l.dirs {
		d := &l.dirs[i]
		if d.inOutput || d.path != "." && !real[path.Dir(d.path)] {
			continue
		}
		exists, err := u.look(d.path, d.declared)
		if err != nil {
			return nil, 0, err
		}
		real[d.path] = exists
	}
	slices.Sort(u.paths)
	return u.paths, u.more, nil
}

// An undeclared is one call of Undeclared.
type undeclared struct {
	scanner
	paths     []string
	max, more int
}

// look examines the directory at p and reports whether it exists. declared reports whether a name in it is declared,
// and returns the input directory of that name that look is to examine, too, or nil.
func (u *undeclared) look(p string, declared func(string) (*directory, bool)) (exists bool, err error) {
	names, err := u.names(p)
	if err != nil || names == nil {
		return false, err
	}
	for _, name := range names {
		p := join(p, name)
		d, ok := declared(name)
		switch {
		case d != nil:
			if _, err := u.look(p, d.declared); err != nil {
				return false, err
			}
		case ok:
		case len(u.paths) == u.max:
			u.more++
		default:
			if info, err := u.root.Lstat(p); err == nil && info.IsDir() {
				p += "/"
			}
			u.paths = append(u.paths, p)
		}
	}
	return true, nil
}

// declared reports whether name is an input, an output or a planned directory. It returns the input directory of that
// name, or nil if there is none or it is a planned directory.
func (d *plannedDir) declared(name string) (*directory, bool) {
	if _, ok := slices.BinarySearch(d.names, name); ok {
		return nil, true
	}
	i, ok := slices.BinarySearchFunc(d.entries, name, func(e plannedInput, name string) int {
		return strings.Compare(e.name, name)
	})
	if !ok {
		return nil, false
	}
	return d.entries[i].dir, true
}

// declared does the same for an input directory that is not a planned one.
func (d *directory) declared(name string) (*directory, bool) {
	e := d.find(name)
	if e == nil {
		return nil, false
	}
	return e.dir, true
}

// names returns the sorted names in the directory at p, or nil if the run has removed or replaced it. Its parents must
// not be links.
func (s *scanner) names(p string) ([]string, error) {
	info, err := s.lstat(p)
	if err != nil || info == nil || !info.IsDir() {
		return nil, err
	}
	if err := s.unlock(s.root, p, p, info); err != nil {
		return nil, err
	}
	dir, err := s.root.OpenRoot(p)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return list(dir)
}
