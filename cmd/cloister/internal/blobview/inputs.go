// SPDX-License-Identifier: Apache-2.0

package blobview

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/memory"
)

// Limits of one request about an input tree. Trees are hostile: a few Directories can describe any number of files.
const (
	maxDirectories = 40_000   // read, and visited by a search
	maxNodes       = 400_000  // in them
	maxBytes       = 64 << 20 // of them
	maxHits        = 200      // of a search
	maxPath        = 16 << 10
)

// An Entry is an entry of a directory.
type Entry struct {
	// Name is for people, and Path the unchanged path below the root.
	Name string `json:"name"`
	Path string `json:"path"`
	// Kind is Directory, "file" or "symlink".
	Kind       string     `json:"kind"`
	Digest     cas.Digest `json:"digest,omitzero"`
	Executable bool       `json:"executable,omitempty"`
	Target     string     `json:"target,omitempty"` // of a symlink
	// Sum counts the files below a directory; for a file it has only the size.
	Sum
	// Read is whether the run read the file, or how many files below a directory it did not read; "" if unknown.
	Read string `json:"read,omitempty"`
}

// A Sum counts the files below a directory.
type Sum struct {
	Files int64 `json:"files"`
	Bytes int64 `json:"bytes"`
	// Partial means that there are more: a Directory is absent or damaged, or a limit was reached.
	Partial bool `json:"partial,omitempty"`
}

func (s *Sum) add(o Sum) {
	s.Files, s.Bytes, s.Partial = saturate(s.Files, o.Files), saturate(s.Bytes, o.Bytes), s.Partial || o.Partial
}

func saturate(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}

// Inputs are the Directories of an input tree, up to limits.
type Inputs struct {
	ctx    context.Context
	store  cas.Store
	local  *memory.Store // holds what was fetched
	root   cas.Digest
	nodes  map[cas.Digest]*node // directories that were read
	unread *Unread
}

// A node is a directory.
type node struct {
	own      Sum // of its files
	below    []cas.Digest
	sum      Sum
	measured bool
}

// WithInputs reads the tree below a root Directory, and calls f with it. Directories that are absent or damaged, and
// those beyond the limits, are left out; sums then are partial. unread may be nil. The caller limits the trees in
// memory.
func WithInputs(ctx context.Context, s cas.Store, root cas.Digest, unread *Unread, f func(*Inputs) error) error {
	t := &Inputs{ctx: ctx, store: s, local: memory.New(maxBytes), root: root, nodes: map[cas.Digest]*node{}, unread: unread}
	if err := t.load(); err != nil {
		return err
	}
	return f(t)
}

// A fetcher is a remote store that can copy many blobs at once.
type fetcher interface {
	Fetch(ctx context.Context, to cas.Store, ds []cas.Digest) (absent []cas.Digest, err error)
}

// load reads the Directories of the tree breadth first.
func (t *Inputs) load() error {
	seen, left := map[cas.Digest]bool{t.root: true}, maxNodes
	for level := []cas.Digest{t.root}; len(level) > 0; {
		level = level[:min(len(level), maxDirectories-len(t.nodes))]
		if f, ok := t.store.(fetcher); ok {
			if _, err := f.Fetch(t.ctx, t.local, level); err != nil && !errors.Is(err, cas.ErrFull) {
				return err
			}
		}
		var next []cas.Digest
		for _, d := range level {
			m, err := t.read(d)
			switch {
			case errors.Is(err, cas.ErrNotFound) || errors.Is(err, cas.ErrInvalid) || errors.Is(err, cas.ErrCorrupt):
				continue
			case err != nil:
				return err
			}
			if left -= len(m.Files) + len(m.Directories); left < 0 {
				return nil
			}
			n := newNode(d.Function(), m)
			t.nodes[d] = n
			for _, below := range n.below {
				if !seen[below] {
					seen[below] = true
					next = append(next, below)
				}
			}
		}
		level = next
	}
	return nil
}

func newNode(f cas.Function, m *repb.Directory) *node {
	n := &node{}
	for _, file := range m.Files {
		n.own.add(Sum{Files: 1, Bytes: max(0, file.GetDigest().GetSizeBytes())})
	}
	for _, dir := range m.Directories {
		d, err := cas.FromProto(f, dir.Digest)
		if err != nil {
			n.own.Partial = true
			continue
		}
		n.below = append(n.below, d)
	}
	return n
}

// read reads a Directory.
func (t *Inputs) read(d cas.Digest) (*repb.Directory, error) {
	m := &repb.Directory{}
	err := cas.ReadProto(t.ctx, t.local, d, m)
	if errors.Is(err, cas.ErrNotFound) {
		err = cas.ReadProto(t.ctx, t.store, d, m)
	}
	return m, err
}

// sum returns the sum below a directory.
func (t *Inputs) sum(d cas.Digest) Sum {
	n := t.nodes[d]
	if n == nil {
		return Sum{Partial: true}
	}
	if !n.measured {
		n.sum, n.measured = n.own, true
		for _, below := range n.below {
			n.sum.add(t.sum(below))
		}
	}
	return n.sum
}

// entries returns the entries of a directory at a path, with sums and marks.
func (t *Inputs) entries(m *repb.Directory, at string) ([]Entry, error) {
	all, err := entriesOf(t.root.Function(), m, at)
	for i := range all {
		if e := &all[i]; e.Kind == Directory {
			e.Sum = t.sum(e.Digest)
		}
		t.unread.mark(&all[i])
	}
	return all, err
}

// Listing returns the entries of the directory at a path, with the sums below each.
func (t *Inputs) Listing(dir string) ([]Entry, error) {
	at := t.root
	walked := ""
	for name := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if name == "" {
			continue
		}
		m, err := t.read(at)
		if err != nil {
			return nil, fmt.Errorf("directory %s: %w", Visible("/"+walked), err)
		}
		walked = strings.TrimPrefix(walked+"/"+name, "/")
		i := slices.IndexFunc(m.Directories, func(n *repb.DirectoryNode) bool { return n.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("%w: the input tree has no directory %s", cas.ErrNotFound, Visible(walked))
		}
		if at, err = cas.FromProto(t.root.Function(), m.Directories[i].Digest); err != nil {
			return nil, err
		}
	}
	m, err := t.read(at)
	if err != nil {
		return nil, fmt.Errorf("directory %s: %w", Visible("/"+walked), err)
	}
	return t.entries(m, walked)
}

// errLimit means that a search has found or visited enough.
var errLimit = errors.New("enough")

// Search returns the entries whose name contains text, and whether these are all.
func (t *Inputs) Search(text string) (found []Entry, all bool, err error) {
	visits, nodes, partial := maxDirectories, 2*maxNodes, false
	var visit func(d cas.Digest, at string) error
	visit = func(d cas.Digest, at string) error {
		if visits--; visits < 0 || nodes < 0 || len(at) > maxPath {
			return errLimit
		}
		if err := t.ctx.Err(); err != nil {
			return err
		}
		if t.nodes[d] == nil {
			partial = true
			return nil
		}
		m, err := t.read(d)
		if err != nil {
			return err
		}
		entries, err := t.entries(m, at)
		if err != nil {
			return err
		}
		nodes -= len(entries)
		for _, e := range entries {
			if strings.Contains(e.Name, text) {
				if len(found) == maxHits {
					return errLimit
				}
				found = append(found, e)
			}
			if e.Kind == Directory {
				if err := visit(e.Digest, e.Path); err != nil {
					return err
				}
			}
		}
		return nil
	}
	err = visit(t.root, "")
	if errors.Is(err, errLimit) {
		return found, false, nil
	}
	return found, !partial, err
}

// entriesOf returns the entries of a Directory at a path: directories, then files and links.
func entriesOf(f cas.Function, m *repb.Directory, at string) (all []Entry, err error) {
	digest := func(p *repb.Digest) (d cas.Digest) {
		d, e := cas.FromProto(f, p)
		if e != nil && err == nil {
			err = e
		}
		return d
	}
	add := func(name string, e Entry) {
		e.Name, e.Path = Visible(name), strings.TrimPrefix(at+"/"+name, "/")
		all = append(all, e)
	}
	for _, n := range m.GetDirectories() {
		add(n.Name, Entry{Kind: Directory, Digest: digest(n.Digest)})
	}
	for _, n := range m.GetFiles() {
		d := digest(n.Digest)
		add(n.Name, Entry{Kind: "file", Digest: d, Executable: n.IsExecutable, Sum: Sum{Files: 1, Bytes: d.Size()}})
	}
	for _, n := range m.GetSymlinks() {
		add(n.Name, Entry{Kind: "symlink", Target: Visible(n.Target)})
	}
	return all, err
}

// Total returns the sum of entries.
func Total(entries []Entry) (total Sum) {
	for _, e := range entries {
		total.add(e.Sum)
	}
	return total
}
