// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Limits of a tree. A few kilobytes of Directories can describe a tree that fills any disk, since each
// may be referred to many times: what counts is the tree written out.
const (
	maxDepth = 1000 // directories above one another, below the root
	// Of the tree written out: what one workspace can hold, each at about 1 KiB of memory.
	maxEntries = 1_000_000
	// Directories that differ: each is a blob to be read, before anything runs.
	maxDirectories = 200_000
	maxName        = 255  // bytes of one name, as on every file system of interest
	maxPath        = 4000 // bytes; leaves room for the root's own path below Linux's 4096
	maxTarget      = 4095 // bytes of a symlink's target, as on Linux
)

// A Kind is what an entry of a directory is.
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

// A directory is one directory of a tree, decoded from a Directory or found on a file system. Equal
// ones of an input root are one value, so that a tree is an acyclic graph.
type directory struct {
	digest  cas.Digest
	entries []entry // sorted by name
	own     *properties

	// What measure finds: of the tree written out below this directory.
	measured       bool
	height, length int // in levels, and of the longest path in bytes
	count          int64
	files, bytes   int64
}

type entry struct {
	name   string
	kind   Kind
	exec   bool       // of a File
	digest cas.Digest // of a File or a Directory
	target string     // of a Symlink
	dir    *directory // of a Directory, which has its properties
	own    *properties
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

// all yields d with the path p and every directory below with its path, in order, parents first. Its
// recursion is as deep as the tree, which measure has limited.
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

// decode fills d's entries from m, which is the message named d.digest, or returns cas.ErrInvalid for a
// message that is not canonical. Subdirectories get their digest only.
func (d *directory) decode(m *repb.Directory) error {
	f := d.digest.Function()
	d.entries = make([]entry, 0, len(m.GetFiles())+len(m.GetDirectories())+len(m.GetSymlinks()))
	bad := func(format string, args ...any) error {
		return faultf(cas.ErrInvalid, "Directory %s: %s", d.digest, fmt.Sprintf(format, args...))
	}
	own := func(k Kind, name string, m *repb.NodeProperties) (*properties, error) {
		p, err := readProperties(m)
		if err != nil {
			return nil, bad("%s %+.256q: %v", k, name, err)
		}
		return p, nil
	}
	prev := ""
	add := func(e entry) error {
		if why := badName(e.name); why != "" {
			return bad("the name %+.256q of a %s %s", e.name, e.kind, why)
		}
		if e.name <= prev {
			return bad("%s %+q follows %+q: names must ascend and differ", e.kind, e.name, prev)
		}
		prev = e.name
		d.entries = append(d.entries, e)
		return nil
	}
	named := func(k Kind, name string, p *repb.Digest) (entry, error) {
		digest, err := cas.FromProto(f, p)
		if err != nil {
			return entry{}, bad("%s %+.256q: %v", k, name, err)
		}
		return entry{name: name, kind: k, digest: digest}, nil
	}

	var err error
	if d.own, err = own(Directory, ".", m.GetNodeProperties()); err != nil {
		return err
	}
	for _, n := range m.GetFiles() {
		e, err := named(File, n.Name, n.Digest)
		if err != nil {
			return err
		}
		e.exec = n.IsExecutable
		if e.own, err = own(File, n.Name, n.NodeProperties); err != nil {
			return err
		}
		if err := add(e); err != nil {
			return err
		}
	}
	prev = ""
	for _, n := range m.GetDirectories() {
		e, err := named(Directory, n.Name, n.Digest)
		if err != nil {
			return err
		}
		if err := add(e); err != nil {
			return err
		}
	}
	prev = ""
	for _, n := range m.GetSymlinks() {
		if t := n.Target; t == "" || len(t) > maxTarget || strings.ContainsRune(t, 0) || !utf8.ValidString(t) {
			return bad("symlink %+.256q has the target %+.64q, which must be 1 to %d bytes of UTF-8 without NUL",
				n.Name, t, maxTarget)
		}
		p, err := own(Symlink, n.Name, n.NodeProperties)
		if err != nil {
			return err
		}
		if err := add(entry{name: n.Name, kind: Symlink, target: n.Target, own: p}); err != nil {
			return err
		}
	}

	slices.SortFunc(d.entries, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for i := 1; i < len(d.entries); i++ {
		if a, b := &d.entries[i-1], &d.entries[i]; a.name == b.name {
			return bad("%+q is both a %s and a %s", a.name, a.kind, b.kind)
		}
	}
	return nil
}

// badName says what is wrong with the name of an entry, "" if nothing is.
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

// encode returns d as a blob and records its digest. Subdirectories and files must have their digests.
func (d *directory) encode(f cas.Function) (cas.Blob, error) {
	m := &repb.Directory{NodeProperties: d.own.proto()}
	for i := range d.entries {
		switch e := &d.entries[i]; e.kind {
		case File:
			m.Files = append(m.Files, &repb.FileNode{
				Name: e.name, Digest: e.digest.Proto(), IsExecutable: e.exec, NodeProperties: e.own.proto(),
			})
		case Directory:
			e.digest = e.dir.digest
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: e.name, Digest: e.digest.Proto()})
		case Symlink:
			m.Symlinks = append(m.Symlinks,
				&repb.SymlinkNode{Name: e.name, Target: e.target, NodeProperties: e.own.proto()})
		}
	}
	data, digest, err := cas.MarshalProto(f, m)
	d.digest = digest
	return cas.Blob{Digest: digest, Data: data}, err
}

// measure computes what the tree below d, which lies depth directories below the root, amounts to. A
// tree above the limits is cas.ErrInvalid. Its recursion is limited with the depth.
func (d *directory) measure(depth int) error {
	if depth+d.height > maxDepth {
		return faultf(cas.ErrInvalid, "Directory %s: the tree is deeper than %d directories", d.digest, maxDepth)
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
			d.files += e.dir.files
			d.bytes = addSaturating(d.bytes, e.dir.bytes)
		}
		if d.length = max(d.length, length); d.length > maxPath {
			return faultf(cas.ErrInvalid, "Directory %s: the path below %+.64q is longer than %d bytes",
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
	return faultf(cas.ErrInvalid, "Directory %s: the tree has more than %d %s", d.digest, limit, of)
}

// addSaturating returns a+b or, above it, MaxInt64: sizes are what a client states.
func addSaturating(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
