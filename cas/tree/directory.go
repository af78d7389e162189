// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"iter"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"
)

// Limits of a tree. A few kilobytes of Directories can describe a tree that fills any disk, since each Directory may
// be referenced many times. The limits therefore apply to the expanded tree.
const (
	maxDepth = 1000 // nested directories below the root
	// maxEntries limits the expanded tree to the capacity of one workspace, at about 1 KiB of memory per entry.
	maxEntries = 1_000_000
	// maxDirectories limits distinct Directories: each is a blob to be read before anything runs.
	maxDirectories = 200_000
	maxName        = 255  // bytes of one name, as on every file system of interest
	maxPath        = 4000 // bytes; leaves room for the path of the root below Linux's 4096
	maxTarget      = 4095 // bytes of a symlink's target, as on Linux
)

// A Kind is the type of a directory entry.
type Kind uint8

// The kinds.
const (
	File Kind = iota + 1
	Directory
	Symlink
)

// String returns the kind in lower case.
func (k Kind) String() string {
	return [...]string{"nothing", "file", "directory", "symlink"}[k]
}

// A directory is one directory of a tree, decoded from a Directory or found on a file system. Equal directories of an
// input root share one value, so a tree is an acyclic graph.
type directory struct {
	digest  cas.Digest
	entries []entry // sorted by name
	props   *properties

	// Set by measure, for the expanded tree below this directory.
	measured       bool
	height, length int // in levels, and of the longest path in bytes
	count, dirs    int64
	files, bytes   int64
}

type entry struct {
	name   string
	kind   Kind
	exec   bool       // of a File
	tool   bool       // a File that is marked as a tool
	digest cas.Digest // of a File or a Directory
	target string     // of a Symlink
	dir    *directory // of a Directory; holds its properties
	props  *properties
}

// find returns the entry called name, or nil.
func (d *directory) find(name string) *entry {
	i, ok := slices.BinarySearchFunc(d.entries, name, func(e entry, name string) int {
		return strings.Compare(e.name, name)
	})
	if !ok {
		return nil
	}
	return &d.entries[i]
}

// all yields d, at the path p, and every directory below it in order, parents first. measure has limited the depth of
// its recursion.
func (d *directory) all(p string) iter.Seq2[string, *directory] {
	return func(yield func(string, *directory) bool) { d.yield(p, yield) }
}

func (d *directory) yield(p string, yield func(string, *directory) bool) bool {
	if !yield(p, d) {
		return false
	}
	for i := range d.entries {
		if e := &d.entries[i]; e.kind == Directory && !e.dir.yield(join(p, e.name), yield) {
			return false
		}
	}
	return true
}

// badName returns what is wrong with the name of an entry, or "".
func badName(name string) string {
	switch {
	case name == "":
		return "is empty"
	case name == "." || name == "..":
		return "is reserved"
	case len(name) > maxName:
		return "is longer than 255 bytes"
	case strings.ContainsAny(name, "/\x00"):
		return "contains a slash or NUL"
	case !utf8.ValidString(name):
		return "is not UTF-8"
	}
	return ""
}

// measure computes the totals of the tree below d, which lies depth levels below the root. A tree above the limits is
// cas.ErrInvalid. The depth limit also bounds the recursion.
func (d *directory) measure(depth int) error {
	if depth+d.height > maxDepth {
		return errorf(cas.ErrInvalid, "Directory %s: the tree is deeper than %d directories", d.digest, maxDepth)
	}
	if d.measured {
		return nil
	}
	for i := range d.entries {
		e := &d.entries[i]
		length := len(e.name)
		d.count++
		switch e.kind {
		case File:
			d.files++
			d.bytes = addSaturating(d.bytes, e.digest.Size())
		case Directory:
			if err := e.dir.measure(depth + 1); err != nil {
				return err
			}
			d.height = max(d.height, e.dir.height+1)
			length += 1 + e.dir.length
			d.count += e.dir.count
			d.dirs += 1 + e.dir.dirs
			d.files += e.dir.files
			d.bytes = addSaturating(d.bytes, e.dir.bytes)
		}
		if d.length = max(d.length, length); d.length > maxPath {
			return errorf(cas.ErrInvalid, "Directory %s: the path below %+.64q is longer than %d bytes",
				d.digest, e.name, maxPath)
		}
		if d.count > maxEntries {
			return d.tooLarge(maxEntries, "entries")
		}
	}
	d.measured = true
	return nil
}

func (d *directory) tooLarge(limit int, of string) error {
	return errorf(cas.ErrInvalid, "Directory %s: the tree has more than %d %s", d.digest, limit, of)
}

// addSaturating returns a+b, at most MaxInt64: clients state the sizes.
func addSaturating(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
