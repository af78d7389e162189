// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// Modes of the directories of the exec root, for a run that does not own them.
const (
	modeWritable = fs.ModeSticky | 0o777 // the run may add names, but not remove inputs
	modePrivate  = 0o777                 // the run may also remove and replace what is there
)

// Limits of the planned directories. Each has its own path, so deep ones take up to a thousand times the memory of the
// Command that names them.
const (
	maxPaths     = 100_000  // outputs and the directories that lead to them or to the working directory
	maxPathBytes = 16 << 20 // of all these paths together
)

// defaultMode returns the mode of an input file, or of a private copy that the run may change.
func defaultMode(exec, private bool) fs.FileMode {
	switch {
	case private && exec:
		return 0o777
	case private:
		return 0o666
	case exec:
		return 0o755
	}
	return 0o644
}

// A Layout describes how an input root is laid out for one run. It is immutable.
type Layout struct {
	dirs    []plannedDir // in order, parents first
	order   uint64       // see WithOrder; 0 is the default order
	layered bool         // see Layered
	// readOnly is set for a root file system: nothing is created in its directories.
	readOnly bool
}

// A plannedDir is a directory that the run finds in the exec root: the root itself, the working directory, a parent of
// an output or a directory that leads to one of these. All others are as in the input root.
type plannedDir struct {
	path     string // relative to the exec root, "." for the root
	mode     fs.FileMode
	modTime  time.Time
	entries  []plannedInput // the inputs in it that are not planned directories, sorted
	names    []string       // the names in it that are outputs or planned directories, sorted
	inOutput bool           // it is an output or lies in one
}

// A plannedInput is one input in a planned directory. A private one is at or below an output, so the run may change it.
type plannedInput struct {
	*entry
	private bool
}

// Plan returns the layout for a run in workdir, a directory of the input root, that makes outputs. All paths are
// relative to the input root; "" and "." are the root. It fails with cas.ErrInvalid if workdir is not a directory of
// the input root (rule 80), for a path that leaves the root or leads through an input that is not a directory, and for
// more than 100,000 paths or 16 MiB of paths, counting outputs and all directories that lead to them.
//
// The parents of outputs exist, the outputs do not (rule 100), except that outputs in dirs are empty directories.
// Inputs at or below an output path are private copies, since the run may replace them and Capture must find them (rule
// 101).
func (in *Input) Plan(workdir string, outputs, dirs []string) (*Layout, error) {
	dir, err := resolve(".", workdir)
	if err != nil {
		return nil, err
	}
	if kind, ok := in.Lookup(dir); !ok || kind != Directory {
		return nil, errorf(cas.ErrInvalid, "the working directory %+.256q is not a directory of the input root",
			workdir)
	}
	declared := make(map[string]bool, len(dirs))
	for _, d := range dirs {
		declared[d] = true
	}
	l := &planner{top: planNode{dir: true}}
	wd, err := l.node(dir)
	if err != nil {
		return nil, err
	}
	wd.dir = true
	for _, o := range outputs {
		p, err := resolve(".", o)
		if err != nil {
			return nil, err
		}
		made, err := l.node(p)
		if err != nil {
			return nil, err
		}
		made.output = true
		if declared[o] {
			if kind, ok := in.Lookup(p); !ok || kind == Directory {
				made.dir = true
			}
		}
	}
	if err := l.place(".", in.root, &l.top, l.top.output); err != nil {
		return nil, err
	}
	return &Layout{dirs: l.dirs}, nil
}

// A planNode is one path with an output or the working directory at or below it.
type planNode struct {
	kids   map[string]*planNode
	dir    bool // is a directory before the run
	output bool
}

type planner struct {
	dirs  []plannedDir
	top   planNode
	paths int // below top
	bytes int // of these paths
}

// node returns the node of the clean path p, and makes the nodes of the directories that lead to it.
func (l *planner) node(p string) (*planNode, error) {
	node := &l.top
	if p == "." {
		return node, nil
	}
	end := -1
	for name := range strings.SplitSeq(p, "/") {
		end += 1 + len(name)
		parent := node
		parent.dir = true
		if node = parent.kids[name]; node != nil {
			continue
		}
		l.paths++
		l.bytes += end
		if l.paths > maxPaths || l.bytes > maxPathBytes {
			return nil, errorf(cas.ErrInvalid,
				"outputs and the directories that lead to them exceed %d paths or %d bytes of paths, from %+.256q",
				maxPaths, maxPathBytes, p)
		}
		if parent.kids == nil {
			parent.kids = map[string]*planNode{}
		}
		node = &planNode{}
		parent.kids[name] = node
	}
	return node, nil
}

// place plans the directory n at p, where the input root has d, possibly empty. It is private if it lies in an
// output.
func (l *planner) place(p string, d *directory, n *planNode, private bool) error {
	names := slices.Sorted(maps.Keys(n.kids))
	here := plannedDir{path: p, mode: modeWritable, modTime: d.props.modTime(), names: names, inOutput: private}
	if private {
		here.mode = modePrivate
	}
	for i := range d.entries {
		e := &d.entries[i]
		k := n.kids[e.name]
		if k != nil && k.dir {
			if e.kind != Directory {
				return errorf(cas.ErrInvalid, "%+q is an input %s, so no output can lie below it", join(p, e.name),
					e.kind)
			}
			continue
		}
		here.entries = append(here.entries, plannedInput{e, private || k != nil && k.output})
	}
	l.dirs = append(l.dirs, here)
	for _, name := range names {
		k := n.kids[name]
		if !k.dir {
			continue
		}
		sub := &directory{}
		if e := d.find(name); e != nil {
			sub = e.dir
		}
		if err := l.place(join(p, name), sub, k, private || k.output); err != nil {
			return err
		}
	}
	return nil
}

// Owned returns the paths, relative to the exec root, that must belong to the run's user if it is not the worker's:
// private inputs and outputs that exist before the run, since the run could not replace them in a sticky directory.
// What lies below them need not.
func (l *Layout) Owned() []string {
	var paths []string
	output := "" // the last one; the directories in it follow it
	for i := range l.dirs {
		d := &l.dirs[i]
		switch {
		case d.path == "." && d.inOutput:
			return []string{"."}
		case d.inOutput:
			if output == "" || !strings.HasPrefix(d.path, output+"/") {
				output = d.path
				paths = append(paths, output)
			}
			continue
		}
		for _, e := range d.entries {
			if e.private {
				paths = append(paths, join(d.path, e.name))
			}
		}
	}
	return paths
}

// Layered returns the same layout for a run that has the user ID of the worker, so that owners and modes do not protect
// its inputs. Stage puts copies of its inputs into a lower directory.
func (l *Layout) Layered() *Layout {
	layered := *l
	layered.layered = true
	return &layered
}

// String returns the plan, one line for each planned directory, followed by the inputs in it:
//
//	dir MODE PATH
//	file MODE PATH DIGEST
//	tree MODE PATH DIGEST
//	copy MODE PATH DIGEST
//	link PATH -> TARGET
//
// A copy is private, as is a link after "copy"; the path of a directory ends in a slash.
func (l *Layout) String() string {
	var b strings.Builder
	for _, d := range l.dirs {
		fmt.Fprintf(&b, "dir %05o %s\n", unixMode(d.mode), quoted(d.path))
		for _, e := range d.entries {
			p := join(d.path, e.name)
			switch {
			case e.private:
				b.WriteString("copy ")
			case e.kind == File:
				b.WriteString("file ")
			case e.kind == Directory:
				b.WriteString("tree ")
			}
			if e.kind == Symlink {
				fmt.Fprintf(&b, "link %s -> %s\n", quoted(p), quoted(e.target))
				continue
			}
			mode := e.mode(e.private)
			if e.kind == Directory {
				mode, p = e.dir.mode(e.private), p+"/"
			}
			fmt.Fprintf(&b, "%05o %s %s\n", unixMode(mode), quoted(p), e.digest)
		}
	}
	return b.String()
}

// unixMode returns the permission bits of m, including the sticky bit, as in stat(2).
func unixMode(m fs.FileMode) uint16 {
	if m&fs.ModeSticky != 0 {
		return uint16(m.Perm()) | 0o1000
	}
	return uint16(m.Perm())
}

// quoted returns s, quoted if it could be mistaken for more than one word.
func quoted(s string) string {
	if q := strconv.Quote(s); strings.ContainsRune(s, ' ') || len(q) != len(s)+2 {
		return q
	}
	return s
}
