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

// Modes of the exec root, for a run that does not own it. If it does, read-only mounts still protect the inputs.
const (
	modeParent   = 0o755
	modeWritable = fs.ModeSticky | 0o777 // the run may add names, but not remove inputs
	modePrivate  = 0o777                 // the run may also remove and replace inputs
	modeBoundDir = 0o555
)

// Limits of the writable directories. Each has its own path, so deep ones take up to a thousand times the memory of the
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
		return 0o555
	}
	return 0o444
}

// A Layout describes how an input root is laid out for one run. It is immutable.
type Layout struct {
	dirs  []writableDir // in order, parents first
	order uint64        // see WithOrder; 0 is the default order
}

// A writableDir is one real directory of the exec root.
type writableDir struct {
	path     string // relative to the exec root, "." for the root
	mode     fs.FileMode
	modTime  time.Time
	entries  []plannedInput // the inputs in it that are not writable directories, sorted
	names    []string       // the names in it that are outputs or writable directories, sorted
	inOutput bool           // it is an output or lies in one
}

// A plannedInput is one input in a writable directory. It is bound if source is set, otherwise private.
type plannedInput struct {
	*entry
	source string // in the workspace
}

// Plan returns the layout for a run in workdir, a directory of the input root, that makes outputs. All paths are
// relative to the input root; "" and "." are the root. It fails with cas.ErrInvalid if workdir is not a directory of
// the input root (rule 80), for a path that leaves the root or leads through an input that is not a directory, and for
// more than 100,000 paths or 16 MiB of paths, counting outputs and all directories that lead to them.
//
// The parents of outputs exist, the outputs do not (rule 100). The exception are the outputs in dirs, which lists the
// directories declared by API 2.0: these exist and are empty, as in Bazel's local execution, which its rules rely on.
// Inputs at or below an output path are copied instead of bound, since the run may replace them and Capture must find
// them (rule 101).
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
	wd, _, err := l.node(dir)
	if err != nil {
		return nil, err
	}
	wd.dir, wd.writable = true, true
	for _, o := range outputs {
		p, err := resolve(".", o)
		if err != nil {
			return nil, err
		}
		made, parent, err := l.node(p)
		if err != nil {
			return nil, err
		}
		made.output, parent.writable = true, true
		if declared[o] {
			if kind, ok := in.Lookup(p); !ok || kind == Directory {
				made.dir, made.writable = true, true
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
	kids     map[string]*planNode
	dir      bool // is a directory before the run
	writable bool // is a directory in which the run may make names
	output   bool
}

type planner struct {
	dirs  []writableDir
	binds int
	top   planNode
	paths int // below top
	bytes int // of these paths
}

// node returns the node of the clean path p and its parent, and makes the nodes of the directories that lead to it. The
// root is its own parent.
func (l *planner) node(p string) (node, parent *planNode, err error) {
	node, parent = &l.top, &l.top
	if p == "." {
		return node, parent, nil
	}
	end := -1
	for name := range strings.SplitSeq(p, "/") {
		end += 1 + len(name)
		parent = node
		parent.dir = true
		if node = parent.kids[name]; node != nil {
			continue
		}
		l.paths++
		l.bytes += end
		if l.paths > maxPaths || l.bytes > maxPathBytes {
			return nil, nil, errorf(cas.ErrInvalid,
				"outputs and the directories that lead to them exceed %d paths or %d bytes of paths, from %+.256q",
				maxPaths, maxPathBytes, p)
		}
		if parent.kids == nil {
			parent.kids = map[string]*planNode{}
		}
		node = &planNode{}
		parent.kids[name] = node
	}
	return node, parent, nil
}

// place plans the writable directory n at p, where the input root has d, possibly empty. It is private if it lies in an
// output.
func (l *planner) place(p string, d *directory, n *planNode, private bool) error {
	names := slices.Sorted(maps.Keys(n.kids))
	here := writableDir{path: p, mode: modeParent, modTime: d.props.modTime(), names: names, inOutput: private}
	if n.writable {
		here.mode = modeWritable
	}
	if private || slices.ContainsFunc(names, func(name string) bool {
		return n.kids[name].output && (n.kids[name].dir || d.find(name) != nil)
	}) {
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
		input := plannedInput{entry: e}
		if e.kind != Symlink && !private && (k == nil || !k.output) {
			input.source = fmt.Sprintf("in/%d", l.binds)
			l.binds++
		}
		here.entries = append(here.entries, input)
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

// String returns the plan, one line for each writable directory, followed by the inputs in it:
//
//	dir MODE PATH
//	bind SOURCE MODE PATH DIGEST
//	copy MODE PATH DIGEST
//	link PATH -> TARGET
//
// The path of a bound or copied directory ends in a slash.
func (l *Layout) String() string {
	var b strings.Builder
	for _, d := range l.dirs {
		mode := d.mode.Perm()
		if d.mode&fs.ModeSticky != 0 {
			mode |= 0o1000
		}
		fmt.Fprintf(&b, "dir %05o %s\n", uint32(mode), quoted(d.path))
		for _, e := range d.entries {
			p := join(d.path, e.name)
			switch {
			case e.kind == Symlink:
				fmt.Fprintf(&b, "link %s -> %s\n", quoted(p), quoted(e.target))
				continue
			case e.source != "":
				fmt.Fprintf(&b, "bind %s ", e.source)
			default:
				b.WriteString("copy ")
			}
			mode := fs.FileMode(0)
			if e.kind == Directory {
				mode, p = e.dir.mode(e.source == ""), p+"/"
			} else {
				mode = e.mode(e.source == "")
			}
			fmt.Fprintf(&b, "%05o %s %s\n", uint32(mode), quoted(p), e.digest)
		}
	}
	return b.String()
}

// quoted returns s, quoted if it could be mistaken for more than one word.
func quoted(s string) string {
	if q := strconv.Quote(s); strings.ContainsRune(s, ' ') || len(q) != len(s)+2 {
		return q
	}
	return s
}
