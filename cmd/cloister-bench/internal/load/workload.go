// SPDX-License-Identifier: Apache-2.0

package load

import "fmt"

// A Kind is the behavior of a Workload's actions.
type Kind string

// The kinds.
const (
	Noop    Kind = "noop"    // do nothing, without inputs
	Trees   Kind = "tree"    // do nothing, or read all inputs
	Outputs Kind = "outputs" // write files
	Mixed   Kind = "mixed"   // three in five do nothing, one reads a small tree, one writes files
)

// A Workload is a set of different actions.
type Workload struct {
	Kind        Kind   `json:"kind"`
	Actions     int    `json:"actions"` // per round, without the two before the clock starts
	Parallel    int    `json:"parallel"`
	Program     string `json:"program"` // absolute path of a program that does nothing
	Tree        Tree   `json:"tree"`    // of Trees and Mixed
	Files       int    `json:"output_files"`
	InDirectory int    `json:"output_files_in_directory"` // files in one output directory
}

// A Tree is an input root with one level of directories.
type Tree struct {
	Files    int   `json:"files"`
	Dirs     int   `json:"directories"` // at most Files
	Changed  int   `json:"changed"`     // files that differ between actions, at most Files
	Smallest int64 `json:"smallest_bytes"`
	Largest  int64 `json:"largest_bytes"` // sizes are uniformly distributed
	Read     bool  `json:"read"`          // actions read all files
}

// Check reports the first mistake in w.
func (w *Workload) Check() error {
	t := &w.Tree
	switch {
	case w.Actions < 1 || w.Parallel < 1:
		return fmt.Errorf("%s: need at least one action, and one in flight", w.Kind)
	case w.Program == "" || w.Program[0] != '/':
		return fmt.Errorf("%s: program %q: write its absolute path", w.Kind, w.Program)
	case w.Files < 0 || w.InDirectory < 0 || w.Kind == Outputs && w.Files+w.InDirectory == 0:
		return fmt.Errorf("%s: need at least one output file", w.Kind)
	case w.Kind != Trees && w.Kind != Mixed:
		return nil
	case t.Dirs < 1 || t.Files < t.Dirs:
		return fmt.Errorf("%s: need at least one directory, and one file per directory", w.Kind)
	case t.Changed < 1 || t.Changed > t.Files:
		return fmt.Errorf("%s: need 1 to %d changed files", w.Kind, t.Files)
	case t.Smallest < 1 || t.Largest < t.Smallest || t.Largest > 1<<20:
		return fmt.Errorf("%s: need file sizes of 1B to 1MiB", w.Kind)
	case t.Read && t.Files > maxRead:
		return fmt.Errorf("%s: can read at most %d files, since one command gets all names", w.Kind, maxRead)
	}
	return nil
}

// idle reports whether the commands do nothing.
func (w *Workload) idle() bool { return w.Kind == Noop || w.Kind == Trees && !w.Tree.Read }

// String describes w in one line.
func (w *Workload) String() string {
	var text string
	switch w.Kind {
	case Noop:
		text = w.Program
	case Trees:
		text = w.Tree.String() + ", not read"
		if w.Tree.Read {
			text = w.Tree.String() + ", all read"
		}
	case Outputs:
		text = fmt.Sprintf("%d files of 1 KiB, and a directory of %d", w.Files, w.InDirectory)
	case Mixed:
		text = fmt.Sprintf("3 of 5 %s, 1 reads %s, 1 writes %d files of 1 KiB and a directory of %d",
			w.Program, &w.Tree, w.Files, w.InDirectory)
	}
	return fmt.Sprintf("%s: %s; %d actions, %d in flight", w.Kind, text, w.Actions, w.Parallel)
}

// String describes the shape of t.
func (t *Tree) String() string {
	size := bytesText(t.Smallest)
	if t.Largest > t.Smallest {
		size += " to " + bytesText(t.Largest)
	}
	return fmt.Sprintf("%d files of %s in %d directories, %d files changed per action", t.Files, size, t.Dirs, t.Changed)
}

func bytesText(n int64) string {
	if n%1024 == 0 {
		return fmt.Sprintf("%d KiB", n/1024)
	}
	return fmt.Sprintf("%d bytes", n)
}
