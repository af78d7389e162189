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

// Modes of what is laid out, meant for a run that is not the owner. Where it is, read-only mounts still
// keep inputs from it.
const (
	modeSpine    = 0o755
	modeWritable = fs.ModeSticky | 0o777 // new names may be made, inputs not removed
	modePrivate  = 0o777                 // inputs may be removed and replaced too
	modeBoundDir = 0o555
)

// Limits of the spine. Each directory of it has its own path, so that deep ones take up to a thousand
// times the memory of the Command that names them.
const (
	maxSpine      = 100_000  // outputs and directories that lead to them or to the working directory
	maxSpineBytes = 16 << 20 // of all their paths together
)

// modeOf returns the mode of a file: of an input, or of a private copy that may be changed.
func modeOf(exec, private bool) fs.FileMode {
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

// A Layout says how an input root is laid out for one run. It is never changed.
type Layout struct {
	dirs  []spineDir // parents first, in order
	order uint64     // see WithOrder; 0 is none in particular
}

// A spineDir is one real directory of the exec root.
type spineDir struct {
	path    string // relative to the exec root, "." for itself
	mode    fs.FileMode
	date    time.Time // of its last change
	entries []placed  // the inputs in it that are not themselves spine, sorted
	kids    []string  // the names in it that are outputs or spine, sorted
	output  bool      // is an output, or lies in one
}

// A placed is one input in a directory of the spine: bound, if source is set, else private.
type placed struct {
	*entry
	source string // in the workspace
}

// Plan decides the layout for a run in workdir, a directory of the input root, that makes outputs. All
// paths are relative to the input root; "" and "." are the root itself. It fails with cas.ErrInvalid if
// workdir is no directory of the input root (rule 80), for a path that leaves the root or leads through
// an input that is no directory, and for more than 100,000 paths, or 16 MiB of them, counting outputs
// and all directories on the way.
//
// The parents of outputs exist, the outputs do not (rule 100); of those among them that dirs names, the
// directories that API 2.0 declares, an empty one exists, as Bazel makes it when it runs locally and as
// its rules have come to rely on. What the inputs have at or below an output path is copied instead of
// bound, since the run may replace it and Capture must find it (rule 101).
func (in *Input) Plan(workdir string, outputs, dirs []string) (*Layout, error) {
	dir, err := resolve(".", workdir)
	if err != nil {
		return nil, err
	}
	if kind, ok := in.Lookup(dir); !ok || kind != Directory {
		return nil, faultf(cas.ErrInvalid, "the working directory %+.256q is not a directory of the input root", workdir)
	}
	declared := make(map[string]bool, len(dirs))
	for _, d := range dirs {
		declared[d] = true
	}
	l := &planner{top: spine{dir: true}}
	wd, _, err := l.at(dir)
	if err != nil {
		return nil, err
	}
	wd.dir, wd.writable = true, true
	for _, o := range outputs {
		p, err := resolve(".", o)
		if err != nil {
			return nil, err
		}
		made, parent, err := l.at(p)
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
	return &Layout{dirs: l.dirs}, nil // without the spine, which is not needed any more
}

// A spine is what is known of one path because an output or the working directory lies at or below it.
type spine struct {
	kids     map[string]*spine
	dir      bool // is a directory from the start
	writable bool // and the run may make names in it
	output   bool // is an output
}

type planner struct {
	dirs  []spineDir
	binds int
	top   spine
	paths int // below top
	bytes int // of these paths
}

// at returns the node of the clean path p and that of its parent, which for the root is the root, and
// makes the directories that lead to it.
func (l *planner) at(p string) (node, parent *spine, err error) {
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
		if l.paths > maxSpine || l.bytes > maxSpineBytes {
			return nil, nil, faultf(cas.ErrInvalid,
				"outputs and the directories that lead to them are more than %d paths or %d bytes of paths, from %+.256q on",
				maxSpine, maxSpineBytes, p)
		}
		if parent.kids == nil {
			parent.kids = map[string]*spine{}
		}
		node = &spine{}
		parent.kids[name] = node
	}
	return node, parent, nil
}

// place plans the directory s of the spine at p, of which the input root has d, possibly empty. If
// private, an output holds it.
func (l *planner) place(p string, d *directory, s *spine, private bool) error {
	names := slices.Sorted(maps.Keys(s.kids))
	here := spineDir{path: p, mode: modeSpine, date: d.own.date(), kids: names, output: private}
	if s.writable {
		here.mode = modeWritable
	}
	if private || slices.ContainsFunc(names, func(name string) bool {
		return s.kids[name].output && (s.kids[name].dir || d.find(name) != nil)
	}) {
		here.mode = modePrivate
	}
	for i := range d.entries {
		e := &d.entries[i]
		k := s.kids[e.name]
		if k != nil && k.dir {
			if e.kind != Directory {
				return faultf(cas.ErrInvalid, "%+q is an input %s, so that no output can lie below it",
					join(p, e.name), e.kind)
			}
			continue
		}
		at := placed{entry: e}
		if e.kind != Symlink && !private && (k == nil || !k.output) {
			at.source = fmt.Sprintf("in/%d", l.binds)
			l.binds++
		}
		here.entries = append(here.entries, at)
	}
	l.dirs = append(l.dirs, here)
	for _, name := range names {
		k := s.kids[name]
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

// String returns the plan, one line for each directory of the spine, followed by the inputs in it:
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
