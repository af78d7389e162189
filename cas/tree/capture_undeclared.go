// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"
	"path"
	"slices"
	"strings"
)

// Undeclared returns what a run of l left in the writable directories that is neither an input nor an output: at most
// max sorted paths, and the number of further ones. Paths are relative to out, the exec root after the run, all of
// whose processes must have ended. A directory is one path that ends in a slash, whatever it contains. Contents of
// outputs are not listed.
func (l *Layout) Undeclared(out *os.Root, max int) (paths []string, more int, err error) {
	s := &scanner{root: out, ofRun: true}
	real := map[string]bool{} // the directories that still exist and are not behind a link
	for i := range l.dirs {
		d := &l.dirs[i]
		if d.inOutput || d.path != "." && !real[path.Dir(d.path)] {
			continue
		}
		names, err := s.names(d.path)
		if err != nil {
			return nil, 0, err
		}
		real[d.path] = names != nil
		for _, name := range names {
			switch {
			case d.declares(name):
			case len(paths) == max:
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

// declares reports whether name is an input, an output or a writable directory.
func (d *writableDir) declares(name string) bool {
	if _, ok := slices.BinarySearch(d.names, name); ok {
		return true
	}
	_, ok := slices.BinarySearchFunc(d.entries, name, func(e plannedInput, name string) int {
		return strings.Compare(e.name, name)
	})
	return ok
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
