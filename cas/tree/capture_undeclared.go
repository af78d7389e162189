// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"
	"path"
	"slices"
	"strings"
)

// Undeclared returns what a run of l left in the directories of the spine and that is neither an input nor
// an output, sorted, most paths at most, and how many there are beyond. Paths are relative to out, the exec
// root after the run, of which every process must have ended. A directory is one path, with a slash at its
// end, whatever is in it. What lies in an output belongs to it and is not looked at.
func (l *Layout) Undeclared(out *os.Root, most int) (paths []string, more int, err error) {
	s := &scanner{root: out, own: true}
	real := map[string]bool{} // the directories that are still there, and not behind a link
	for i := range l.dirs {
		d := &l.dirs[i]
		if d.output || d.path != "." && !real[path.Dir(d.path)] {
			continue
		}
		names, err := s.names(d.path)
		if err != nil {
			return nil, 0, err
		}
		real[d.path] = names != nil
		for _, name := range names {
			switch {
			case d.knows(name):
			case len(paths) == most:
				more++
			default:
				p := join(d.path, name)
				if info, err := out.Lstat(p); err == nil && info.IsDir() {
					p += "/"
				}
				paths = append(paths, p)
			}
		}
	}
	slices.Sort(paths)
	return paths, more, nil
}

// knows reports whether name is an input, an output or spine.
func (d *spineDir) knows(name string) bool {
	if _, ok := slices.BinarySearch(d.kids, name); ok {
		return true
	}
	_, ok := slices.BinarySearchFunc(d.entries, name, func(e placed, name string) int {
		return strings.Compare(e.name, name)
	})
	return ok
}

// names returns the names in the directory at p, sorted, or nil if the run has removed it or put something
// else in its place. Its parents must be real.
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
