// SPDX-License-Identifier: Apache-2.0

package tree_test

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/castest"
	"github.com/cloister-build/cloister/cas/tree"
	"github.com/cloister-build/cloister/tests/must"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// A node is a file, directory or symlink, built without the code under test. Tests write trees as lines, one for each
// node; parents are implicit:
//
//	a/file = content
//	a/tool *= content of an executable
//	a/link -> target
//	a/directory/
type node struct {
	kids    map[string]*node // of a directory, not nil
	target  string           // of a symlink, not empty
	content string
	exec    bool
	own     *repb.NodeProperties // not part of the notation
}

func dirNode() *node { return &node{kids: map[string]*node{}} }

// parse reads the notation.
func parse(t testing.TB, lines ...string) *node {
	t.Helper()
	root := dirNode()
	for _, line := range lines {
		if p, target, ok := strings.Cut(line, " -> "); ok {
			root.set(p, &node{target: target})
		} else if p, ok := strings.CutSuffix(line, "/"); ok {
			root.set(p, dirNode())
		} else if p, content, ok := strings.Cut(line, " *= "); ok {
			root.set(p, &node{content: content, exec: true})
		} else if p, content, ok := strings.Cut(line, " = "); ok {
			root.set(p, &node{content: content})
		} else {
			t.Fatalf("invalid tree notation: %q", line)
		}
	}
	return root
}

// set puts n at p, unless both n and the node at p are directories.
func (r *node) set(p string, n *node) {
	dir, name := path.Split(p)
	at := r
	for seg := range strings.SplitSeq(strings.TrimSuffix(dir, "/"), "/") {
		if seg == "" {
			continue
		}
		if at.kids[seg] == nil {
			at.kids[seg] = dirNode()
		}
		at = at.kids[seg]
	}
	if old := at.kids[name]; old == nil || old.kids == nil || n.kids == nil {
		at.kids[name] = n
	}
}

// at returns the node at p, or nil.
func (r *node) at(p string) *node {
	for seg := range strings.SplitSeq(p, "/") {
		if r == nil {
			return nil
		}
		r = r.kids[seg]
	}
	return r
}

// String writes the notation, with every directory.
func (r *node) String() string {
	var b strings.Builder
	r.write(&b, "")
	return b.String()
}

func (r *node) write(b *strings.Builder, p string) {
	switch {
	case r.kids != nil:
		if p != "" {
			fmt.Fprintf(b, "%s/\n", p)
		}
		for _, name := range slices.Sorted(maps.Keys(r.kids)) {
			r.kids[name].write(b, path.Join(p, name))
		}
	case r.target != "":
		fmt.Fprintf(b, "%s -> %s\n", p, r.target)
	case r.exec:
		fmt.Fprintf(b, "%s *= %s\n", p, r.content)
	default:
		fmt.Fprintf(b, "%s = %s\n", p, r.content)
	}
}

// put stores the tree and returns the digest of its Directory.
func (r *node) put(t testing.TB, store cas.Store) cas.Digest {
	t.Helper()
	m := &repb.Directory{NodeProperties: r.own}
	for _, name := range slices.Sorted(maps.Keys(r.kids)) {
		switch n := r.kids[name]; {
		case n.kids != nil:
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: name, Digest: n.put(t, store).Proto()})
		case n.target != "":
			m.Symlinks = append(m.Symlinks, &repb.SymlinkNode{Name: name, Target: n.target, NodeProperties: n.own})
		default:
			d := putBytes(t, store, []byte(n.content))
			m.Files = append(m.Files,
				&repb.FileNode{Name: name, Digest: d.Proto(), IsExecutable: n.exec, NodeProperties: n.own})
		}
	}
	return putProto(t, store, m)
}

// make writes the tree into dir.
func (r *node) make(t testing.TB, dir *os.Root) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(r.kids)) {
		switch n := r.kids[name]; {
		case n.kids != nil:
			must.Succeed(t, dir.Mkdir(name, 0o755))
			sub := must.Get(dir.OpenRoot(name))(t)
			n.make(t, sub)
			must.Succeed(t, sub.Close())
		case n.target != "":
			must.Succeed(t, dir.Symlink(n.target, name))
		case n.exec:
			must.Succeed(t, dir.WriteFile(name, []byte(n.content), 0o755))
		default:
			must.Succeed(t, dir.WriteFile(name, []byte(n.content), 0o644))
		}
	}
}

// read returns the node at p in dir.
func read(t testing.TB, dir *os.Root, p string) *node {
	t.Helper()
	info := must.Get(dir.Lstat(p))(t)
	switch info.Mode().Type() {
	case fs.ModeDir:
		n := dirNode()
		d := must.Get(dir.Open(p))(t)
		names := must.Get(d.Readdirnames(-1))(t)
		must.Succeed(t, d.Close())
		for _, name := range names {
			n.kids[name] = read(t, dir, path.Join(p, name))
		}
		return n
	case fs.ModeSymlink:
		target := must.Get(dir.Readlink(p))(t)
		return &node{target: target}
	case 0:
		return &node{content: string(must.Get(dir.ReadFile(p))(t)), exec: info.Mode()&0o111 != 0}
	}
	t.Fatalf("%s has the mode %v", p, info.Mode())
	return nil
}

// view returns the exec root that a run sees, with its layers and binds. It must not need an image.
func view(t testing.TB, ws *os.Root, s *tree.Staged) *node {
	t.Helper()
	root := read(t, ws, "out")
	for _, l := range s.Lower {
		root.over(read(t, ws, l.Source))
	}
	bindAll(t, root, ws, s)
	return root
}

// over adds what lower has and r lacks.
func (r *node) over(lower *node) {
	for name, below := range lower.kids {
		if own := r.kids[name]; own == nil {
			r.kids[name] = below
		} else if own.kids != nil && below.kids != nil {
			own.over(below)
		}
	}
}

// bindAll replaces the placeholders in root by the files that s binds.
func bindAll(t testing.TB, root *node, ws *os.Root, s *tree.Staged) {
	t.Helper()
	for _, b := range s.Binds {
		from := &node{}
		if filepath.IsAbs(b.Source) {
			data := must.Get(os.ReadFile(b.Source))(t)
			*from = node{content: string(data), exec: must.Get(os.Stat(b.Source))(t).Mode()&0o111 != 0}
		} else {
			from = read(t, ws, b.Source)
		}
		below := root.at(b.Target)
		switch {
		case below == nil || below.kids != nil || below.target != "" || from.kids != nil:
			t.Fatalf("bind %s lacks a placeholder of its kind", b.Target)
		case below.content != "":
			t.Fatalf("the placeholder of bind %s is not empty", b.Target)
		}
		*below = *from
	}
}

// same checks that got and want have the same notation.
func same(t testing.TB, what string, got, want fmt.Stringer) {
	t.Helper()
	if g, w := got.String(), want.String(); g != w {
		t.Errorf("%s:\ngot\n%s\nwant\n%s", what, g, w)
	}
}

func putBytes(t testing.TB, store cas.Store, b []byte) cas.Digest {
	t.Helper()
	return must.Get(cas.PutBytes(t.Context(), store, cas.SHA256, b))(t)
}

func putProto(t testing.TB, store cas.Store, m proto.Message) cas.Digest {
	t.Helper()
	return must.Get(cas.PutProto(t.Context(), store, cas.SHA256, m))(t)
}

// newRoot returns a new empty directory, which may get subdirectories of any mode.
func newRoot(t testing.TB) *os.Root {
	t.Helper()
	dir := t.TempDir()
	r := must.Get(os.OpenRoot(dir))(t)
	t.Cleanup(func() {
		if os.Getuid() != 0 { // so that TempDir can be removed
			filepath.WalkDir(dir, func(p string, e fs.DirEntry, err error) error {
				if err == nil && e.IsDir() {
					os.Chmod(p, 0o700) // r.Chmod would open each directory above p
				}
				return nil
			})
		}
		r.Close()
	})
	return r
}

// load stores and loads a tree.
func load(t testing.TB, store cas.Store, n *node) *tree.Input {
	t.Helper()
	return must.Get(tree.Load(t.Context(), store, n.put(t, store)))(t)
}

// plan returns the layout of in.
func plan(t testing.TB, in *tree.Input, workdir string, outputs, dirs []string) *tree.Layout {
	t.Helper()
	return must.Get(in.Plan(workdir, outputs, dirs))(t)
}

// A filer is a Memory that is also a cas.Filer.
type filer struct {
	*castest.Memory
	dir  string
	lent atomic.Int64 // files not released
	mu   sync.Mutex   // held while a file is created
}

func newFiler(t testing.TB) *filer {
	return &filer{Memory: castest.NewMemory(), dir: t.TempDir()}
}

func (f *filer) File(ctx context.Context, d cas.Digest, executable bool) (string, func(), error) {
	b, err := cas.ReadAll(ctx, f, d, 1<<20)
	if err != nil {
		return "", nil, err
	}
	p, mode := filepath.Join(f.dir, d.Hash()), fs.FileMode(0o644)
	if executable {
		p, mode = p+"x", 0o755
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := os.Lstat(p); err != nil {
		if err := os.WriteFile(p, b, mode); err != nil {
			return "", nil, err
		}
	}
	f.lent.Add(1)
	return p, func() { f.lent.Add(-1) }, nil
}
