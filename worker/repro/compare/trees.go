// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/sandbox/printable"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Limits of trees. Beyond them only digests are compared.
const (
	maxTreeDepth = 100
	maxBlob      = 128 << 20 // bytes, unless the store provides files
)

// An Entry is a file, a directory, a symbolic link or, if zero, nothing.
type Entry struct {
	File, Directory cas.Digest // at most one is set
	// Tree, if not nil, contains directories that need not be in the store.
	Tree *Tree
	// Target is the target of a symbolic link.
	Target     string
	Executable bool
	// Properties are the properties of the API's node, if any.
	Properties *repb.NodeProperties
}

func (e Entry) kind() string {
	switch {
	case !e.File.IsZero():
		return "file"
	case !e.Directory.IsZero():
		return "directory"
	case e.Target != "":
		return "symbolic link"
	}
	return ""
}

// A Tree holds the directories of a Tree message.
type Tree struct {
	Root        cas.Digest
	directories map[cas.Digest]*repb.Directory
}

// ReadTree reads the Tree message d.
func ReadTree(ctx context.Context, s cas.Store, d cas.Digest) (*Tree, error) {
	var m repb.Tree
	if err := cas.ReadProto(ctx, s, d, &m); err != nil {
		return nil, fmt.Errorf("read tree %s: %w", d, err)
	}
	t := &Tree{directories: make(map[cas.Digest]*repb.Directory, len(m.Children)+1)}
	for i, dir := range append([]*repb.Directory{m.Root}, m.Children...) {
		if dir == nil {
			dir = &repb.Directory{}
		}
		_, digest, err := cas.MarshalProto(d.Function(), dir)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			t.Root = digest
		}
		t.directories[digest] = dir
	}
	return t, nil
}

// Entries compares two entries whose content is in a store. It returns what Blobs returns.
func Entries(ctx context.Context, s cas.Store, name string, a, b Entry, k Known) ([]Difference, error) {
	c := newComparison(ctx, k)
	if err := newTreeComparison(s).entry(c, name, a, b, 0); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.found.all(), nil
}

// Names of the output streams of a command.
const (
	Stdout = "(standard output)"
	Stderr = "(standard error)"
)

// A treeComparison compares entries in a store.
type treeComparison struct {
	store cas.Store
	// compared holds the compared pairs of directories, each of which is reported once.
	compared map[[2]cas.Digest]bool
}

func newTreeComparison(s cas.Store) *treeComparison {
	return &treeComparison{store: s, compared: map[[2]cas.Digest]bool{}}
}

// entry compares two entries at a path.
func (t *treeComparison) entry(c *comparison, name string, a, b Entry, depth int) error {
	if err := c.ctx.Err(); err != nil {
		return err
	}
	if c.found.full() {
		return errEnough
	}
	if ka, kb := a.kind(), b.kind(); ka != kb {
		what := "type"
		if ka == "" || kb == "" {
			what = "entry"
		}
		c.differ(what, ka, kb, -1, Unknown, name)
		return nil
	}
	if a.Executable != b.Executable {
		c.differ("executable", fmt.Sprint(a.Executable), fmt.Sprint(b.Executable), -1, Mode, name)
	}
	c.compareFields(properties(a.Properties), properties(b.Properties), name)
	switch {
	case a.Target != b.Target:
		c.differ("target of the link", a.Target, b.Target, -1, c.classify(a.Target, b.Target), name)
	case a.File != b.File:
		return t.files(c, name, &a, &b)
	case a.Directory != b.Directory && depth == maxTreeDepth:
		c.differ("directory, not compared: too deep", a.Directory.String(), b.Directory.String(), -1, Unknown, name)
	case a.Directory != b.Directory:
		return t.directories(c, name, a, b, depth)
	}
	return nil
}

// properties returns the properties of a node as fields.
func properties(p *repb.NodeProperties) []field {
	var fs []field
	if mode := p.GetUnixMode(); mode != nil {
		fs = append(fs, field{"mode", fmt.Sprintf("%04o", mode.Value), Mode})
	}
	if p.GetMtime() != nil {
		fs = append(fs, field{"mtime", instant(p.Mtime.AsTime()), Timestamp})
	}
	for _, other := range p.GetProperties() {
		fs = append(fs, field{"property " + other.Name, other.Value, Unknown})
	}
	return fs
}

// files compares two blobs.
func (t *treeComparison) files(c *comparison, name string, a, b *Entry) error {
	sa, closeA, err := t.open(c.ctx, a)
	if err != nil {
		return fmt.Errorf("%s: %w", printable.Head(name, MaxText), err)
	}
	defer closeA()
	sb, closeB, err := t.open(c.ctx, b)
	if err != nil {
		return fmt.Errorf("%s: %w", printable.Head(name, MaxText), err)
	}
	defer closeB()
	if sa == nil || sb == nil {
		c.differ("content, too large to compare", a.File.String(), b.File.String(), -1, Unknown, name)
		return nil
	}
	return c.descend(name, sa, sb)
}

// open opens a file of the store, or reads it into memory; nil if it is too large.
func (t *treeComparison) open(ctx context.Context, e *Entry) (*io.SectionReader, func(), error) {
	if e.File.Size() == 0 {
		return section(nil), func() {}, nil
	}
	if filer, ok := cas.As[cas.Filer](t.store); ok {
		path, release, err := filer.File(ctx, e.File, false)
		if err != nil {
			return nil, nil, err
		}
		f, err := os.Open(path)
		if err != nil {
			release()
			return nil, nil, err
		}
		return io.NewSectionReader(f, 0, e.File.Size()), func() { f.Close(); release() }, nil
	}
	if e.File.Size() > maxBlob {
		return nil, func() {}, nil
	}
	data, err := cas.ReadAll(ctx, t.store, e.File, maxBlob)
	return section(data), func() {}, err
}

func (t *treeComparison) directories(c *comparison, name string, a, b Entry, depth int) error {
	pair := [2]cas.Digest{a.Directory, b.Directory}
	if t.compared[pair] {
		return nil
	}
	t.compared[pair] = true
	da, err := t.children(c.ctx, a)
	if err != nil {
		return err
	}
	db, err := t.children(c.ctx, b)
	if err != nil {
		return err
	}
	return t.entries(c, name, da, db, depth+1)
}

// entries compares the entries of a directory in the order of names. It pairs names that differ only in words that
// depend on the run.
func (t *treeComparison) entries(c *comparison, at string, a, b map[string]Entry, depth int) error {
	by := c.classifier
	renamed := map[string][]string{} // names that only b has, by their normalized form
	var left []string                // names that only a has
	for _, name := range sortedNames(a, b) {
		_, inA := a[name]
		_, inB := b[name]
		switch {
		case !inB:
			left = append(left, name)
		case !inA:
			key := by.normalized(by.b, name)
			renamed[key] = append(renamed[key], name)
		default:
			if err := t.entry(c, join(at, name), a[name], b[name], depth); err != nil {
				return err
			}
		}
	}
	for _, name := range left {
		key := by.normalized(by.a, name)
		if len(renamed[key]) == 0 {
			c.differ("entry", a[name].kind(), "", -1, Unknown, join(at, name))
			continue
		}
		other := renamed[key][0]
		renamed[key] = renamed[key][1:]
		c.differ("name", name, other, -1, c.classify(name, other), join(at, name))
		if err := t.entry(c, join(at, name), a[name], b[other], depth); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(slices.Values(slices.Concat(slices.Collect(maps.Values(renamed))...))) {
		c.differ("entry", "", b[name].kind(), -1, Unknown, join(at, name))
	}
	return nil
}

// join joins paths without cleaning them, because names may be invalid.
func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "/" + name
}

func sortedNames(a, b map[string]Entry) []string {
	names := slices.AppendSeq(slices.Collect(maps.Keys(a)), maps.Keys(b))
	slices.Sort(names)
	return slices.Compact(names)
}

// children returns the entries of a directory.
func (t *treeComparison) children(ctx context.Context, e Entry) (map[string]Entry, error) {
	var dir *repb.Directory
	if e.Tree != nil {
		dir = e.Tree.directories[e.Directory]
	}
	if dir == nil {
		dir = &repb.Directory{}
		if err := cas.ReadProto(ctx, t.store, e.Directory, dir); err != nil {
			return nil, fmt.Errorf("read directory %s: %w", e.Directory, err)
		}
	}
	all := map[string]Entry{}
	f := e.Directory.Function()
	for _, n := range dir.Files {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all[n.Name] = Entry{File: d, Executable: n.IsExecutable, Properties: n.NodeProperties}
	}
	for _, n := range dir.Directories {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all[n.Name] = Entry{Directory: d, Tree: e.Tree}
	}
	for _, n := range dir.Symlinks {
		all[n.Name] = Entry{Target: n.Target, Properties: n.NodeProperties}
	}
	return all, nil
}
