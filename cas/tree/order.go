// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"math/rand/v2"
	"os"
	"path"
)

// InOrder returns the layout of the same in which directories list their entries in an order that the seed makes, which
// is not 0: always the same for one seed, and another for another, as far as there are others. That holds where a
// workspace lists what was made last first, or what was made first, as tmpfs does (tmpfs(5)); and for all directories
// of the input root, but not for what the run makes in them.
//
// Images list what is in them sorted, so that all of it is copied.
func (l *Layout) InOrder(seed uint64) *Layout { return &Layout{dirs: l.dirs, order: seed} }

// A name is an entry of a directory before there is anything in it.
type name struct {
	name   string
	kind   Kind
	target string // of a symlink
}

// nameSpine makes all names in the directories of the spine, and so these.
func (s *stager) nameSpine(l *Layout, out *os.Root) error {
	names := make(map[string][]name, len(l.dirs))
	for _, sd := range l.dirs {
		for _, e := range sd.entries {
			names[sd.path] = append(names[sd.path], name{e.name, e.kind, e.target})
		}
		if sd.path != "." {
			parent := path.Dir(sd.path)
			names[parent] = append(names[parent], name{path.Base(sd.path), Directory, ""})
		}
	}
	for _, sd := range l.dirs { // parents first
		dir, err := out.OpenRoot(sd.path)
		if err != nil {
			return err
		}
		err = s.make(dir, names[sd.path])
		dir.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// nameEntries makes all names in the directory d, which is dir.
func (s *stager) nameEntries(dir *os.Root, d *directory) error {
	names := make([]name, len(d.entries))
	for i, e := range d.entries {
		names[i] = name{e.name, e.kind, e.target}
	}
	return s.make(dir, names)
}

// make makes names in dir, one after the other, in the order of the layout: links whole, directories and files empty.
func (s *stager) make(dir *os.Root, names []name) error {
	for _, i := range permutation(s.order, len(names)) {
		var err error
		switch n := names[i]; n.kind {
		case Symlink:
			err = dir.Symlink(n.target, n.name)
		case Directory:
			err = dir.Mkdir(n.name, 0o700)
		default:
			var f *os.File
			if f, err = dir.OpenFile(n.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
				err = f.Close()
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fewEntries is up to how many there are so few orders that two seeds would often make the same by chance.
const fewEntries = 5

// permutation returns the numbers below n in an order that the seed makes. Of few, the seed is the number of the order,
// so that two that are close make different ones.
func permutation(seed uint64, n int) []int {
	p := make([]int, n)
	for i := range p {
		p[i] = i
	}
	chance := rand.NewPCG(seed, 0) // whose numbers Go promises to be the same for ever
	for i := n; i > 1; i-- {
		choice := chance.Uint64()
		if n <= fewEntries {
			choice, seed = seed, seed/uint64(i)
		}
		j := int(choice % uint64(i))
		p[i-1], p[j] = p[j], p[i-1]
	}
	return p
}
