// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"os/exec"
)

// A Kind is the behavior of a Workload's actions.
type Kind string

// The kinds.
const (
	Noop     Kind = "noop"    // do nothing, without inputs
	Trees    Kind = "tree"    // do nothing, or read all inputs
	Outputs  Kind = "outputs" // write files
	Compiles Kind = "compile" // start Python, which runs a C++ compiler
	Mixed    Kind = "mixed"   // three in five do nothing, one reads a small tree, one writes files
)

// Program is the program that does nothing.
const Program = "/bin/true"

// A Workload is a set of different actions.
type Workload struct {
	Kind        Kind
	Actions     int  // per round, without the two before the clock starts
	Parallel    int  // in flight
	Tree        Tree // of Trees and Mixed
	Files       int  // output files of 1 KiB
	InDirectory int  // files in one output directory
}

// A Tree is an input root with one level of directories. Files have 1 to 8 KiB.
type Tree struct {
	Files   int
	Dirs    int  // at most Files
	Changed int  // files that differ between actions, at most Files
	Read    bool // actions read all files
}

// Default returns the workload of a kind that benchmarks use.
func Default(kind Kind) Workload {
	w := Workload{Kind: kind, Actions: 100, Parallel: 2}
	switch kind {
	case Noop:
		w.Actions, w.Parallel = 300, 1
	case Trees:
		w.Tree = Tree{Files: 2000, Dirs: 100, Changed: 10}
	case Outputs:
		w.Files, w.InDirectory = 100, 20
	case Compiles:
		w.Actions = 60
	case Mixed:
		w.Actions, w.Parallel = 30, 4
		w.Tree, w.Files, w.InDirectory = Tree{Files: 200, Dirs: 10, Changed: 2, Read: true}, 50, 10
	}
	return w
}

// idle reports whether the commands do nothing.
func (w *Workload) idle() bool { return w.Kind == Noop || w.Kind == Trees && !w.Tree.Read }

// Missing returns a program that the commands need and this machine lacks, or "".
func (w *Workload) Missing() string {
	if w.Kind == Compiles {
		for _, program := range []string{python, compiler} {
			if _, err := exec.LookPath(program); err != nil {
				return program
			}
		}
	}
	return ""
}

// String describes w in one line.
func (w *Workload) String() string {
	read := ""
	if w.Tree.Read {
		read = ", read"
	}
	return fmt.Sprintf("%s%s, %d in flight", w.Kind, read, w.Parallel)
}
