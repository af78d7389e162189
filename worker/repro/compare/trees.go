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

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

// Bounds of trees: what lies deeper is compared by its digest, and larger blobs too.
const (
	maxTreeDepth = 100
	maxBlob      = 128 << 20 // bytes, where the store has no file to look at
)

// Trees compares two directories, by the digests of their Directory messages in a store, and returns their differences as
// Blobs does. name is what they are called.
func Trees(ctx context.Context, s cas.Store, name string, a, b cas.Digest, k Known) ([]Difference, error) {
	return Entries(ctx, s, name, Entry{Directory: a}, Entry{Directory: b}, k)
}

// An Entry is one thing by which outputs, or directories, are compared: a file, a directory or a symbolic link, or nothing at all.
type Entry struct {
	File, Directory cas.Digest // one of them, or none
	// Tree, if not nil, is where directories are found by their digests, before the store.
	Tree *Tree
	// Target is that of a symbolic link.
	Target string
	// Executable is whether a file is.
	Executable bool
	// Properties are those of a node, as the API has them, else nil.
	Properties *repb.NodeProperties
	// raw is the content of File, if it came with its name.
	raw []byte
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

// A Tree is the directories of a Tree message.
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

// Entries compares two things in a store, and returns their differences as Blobs does.
func Entries(ctx context.Context, s cas.Store, name string, a, b Entry, k Known) ([]Difference, error) {
	c := newComparison(ctx, k)
	if err := newTreeComparison(s).entry(c, name, a, b, 0); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.found.all(), nil
}

// Outputs compares what two results have as outputs, with standard output and error, and returns the differences in the order of their
// paths; f is the function of their digests. Exit codes are not compared.
func Outputs(ctx context.Context, s cas.Store, f cas.Function, a, b *repb.ActionResult, k Known) ([]Difference, error) {
	ea, err := outputs(ctx, s, f, a)
	if err != nil {
		return nil, err
	}
	eb, err := outputs(ctx, s, f, b)
	if err != nil {
		return nil, err
	}
	c := newComparison(ctx, k)
	if err := newTreeComparison(s).entries(c, "", ea, eb, 0); err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return c.found.all(), nil
}

// Names of the texts that a command writes.
const (
	Stdout = "(standard output)"
	Stderr = "(standard error)"
)

// outputs returns the outputs of a result by their paths.
func outputs(ctx context.Context, s cas.Store, f cas.Function, r *repb.ActionResult) (map[string]Entry, error) {
	all := map[string]Entry{}
	for _, o := range r.GetOutputFiles() {
		d, err := cas.FromProto(f, o.Digest)
		if err != nil {
			return nil, fmt.Errorf("output %s: %w", printable(o.Path, MaxText), err)
		}
		all[o.Path] = Entry{File: d, Executable: o.IsExecutable, Properties: o.NodeProperties}
	}
	for _, o := range r.GetOutputDirectories() {
		p, isTree := o.RootDirectoryDigest, o.TreeDigest != nil
		if isTree {
			p = o.TreeDigest
		}
		d, err := cas.FromProto(f, p)
		if err != nil {
			return nil, fmt.Errorf("output %s: %w", printable(o.Path, MaxText), err)
		}
		e := Entry{Directory: d}
		if isTree {
			if e.Tree, err = ReadTree(ctx, s, d); err != nil {
				return nil, err
			}
			e.Directory = e.Tree.Root
		}
		all[o.Path] = e
	}
	for _, o := range slices.Concat(r.GetOutputSymlinks(), r.GetOutputFileSymlinks(), r.GetOutputDirectorySymlinks()) { //nolint:staticcheck // older servers set those
		all[o.Path] = Entry{Target: o.Target, Properties: o.NodeProperties}
	}
	for _, o := range []struct {
		name   string
		digest *repb.Digest
		raw    []byte
	}{{Stdout, r.GetStdoutDigest(), r.GetStdoutRaw()}, {Stderr, r.GetStderrDigest(), r.GetStderrRaw()}} {
		e := Entry{File: f.Sum(o.raw), raw: o.raw}
		if o.digest != nil {
			d, err := cas.FromProto(f, o.digest)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", o.name, err)
			}
			e = Entry{File: d}
		}
		all[o.name] = e
	}
	return all, nil
}

// A treeComparison compares what is in a store.
type treeComparison struct {
	store cas.Store
	// compared are the pairs of directories that were: what is the same in many places is told of once.
	compared map[[2]cas.Digest]bool
}

func newTreeComparison(s cas.Store) *treeComparison {
	return &treeComparison{store: s, compared: map[[2]cas.Digest]bool{}}
}

// entry compares two things at a path.
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
		c.differ("target of the link", a.Target, b.Target, -1, c.attribute(a.Target, b.Target), name)
	case a.File != b.File:
		return t.files(c, name, &a, &b)
	case a.Directory != b.Directory && depth == maxTreeDepth:
		c.differ("directory, not looked into: it is too deep", a.Directory.String(), b.Directory.String(), -1, Unknown, name)
	case a.Directory != b.Directory:
		return t.directories(c, name, a, b, depth)
	}
	return nil
}

// properties returns those of a node as fields.
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
		return fmt.Errorf("%s: %w", printable(name, MaxText), err)
	}
	defer closeA()
	sb, closeB, err := t.open(c.ctx, b)
	if err != nil {
		return fmt.Errorf("%s: %w", printable(name, MaxText), err)
	}
	defer closeB()
	if sa == nil || sb == nil {
		c.differ("content, too large to look into", a.File.String(), b.File.String(), -1, Unknown, name)
		return nil
	}
	return c.descend(name, sa, sb)
}

// open returns the content of a file: the store's own, or in memory; nil if it is too large for that.
func (t *treeComparison) open(ctx context.Context, e *Entry) (*io.SectionReader, func(), error) {
	if len(e.raw) > 0 || e.File.Size() == 0 {
		return section(e.raw), func() {}, nil
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

// entries compares what the directory at a path holds, in the order of names; an entry that has another name for what the two
// runs differ in is the same one.
func (t *treeComparison) entries(c *comparison, at string, a, b map[string]Entry, depth int) error {
	by := c.attributor
	renamed := map[string][]string{} // the names that only b has, by what they are but for the run
	var left []string                // that only a has
	for _, name := range sortedNames(a, b) {
		_, inA := a[name]
		_, inB := b[name]
		switch {
		case !inB:
			left = append(left, name)
		case !inA:
			key := by.canonical(by.b, name)
			renamed[key] = append(renamed[key], name)
		default:
			if err := t.entry(c, join(at, name), a[name], b[name], depth); err != nil {
				return err
			}
		}
	}
	for _, name := range left {
		key := by.canonical(by.a, name)
		if len(renamed[key]) == 0 {
			c.differ("entry", a[name].kind(), "", -1, Unknown, join(at, name))
			continue
		}
		other := renamed[key][0]
		renamed[key] = renamed[key][1:]
		c.differ("name", name, other, -1, c.attribute(name, other), join(at, name))
		if err := t.entry(c, join(at, name), a[name], b[other], depth); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(slices.Values(slices.Concat(slices.Collect(maps.Values(renamed))...))) {
		c.differ("entry", "", b[name].kind(), -1, Unknown, join(at, name))
	}
	return nil
}

// join is a path, in which a name that is none stays one name.
func join(at, name string) string {
	if at == "" {
		return name
	}
	return at + "/" + name
}

func sortedNames(a, b map[string]Entry) []string {
	var names []string
	for name := range a {
		names = append(names, name)
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// children returns what the directory e holds.
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
