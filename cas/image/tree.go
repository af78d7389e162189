// SPDX-License-Identifier: Apache-2.0

package image

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
)

// Limits of a tree, as of an input root.
const (
	maxDepth  = 1000 // nested directories
	maxName   = 255  // bytes of one name
	maxPath   = 4000 // bytes
	maxTarget = 4095 // bytes of a symlink's target
	maxLinks  = 40   // symlinks on the way to one entry, as on Linux
	maxSteps  = 3000 // names on the way to one entry, those of symlinks included
)

// A node is an entry of the tree that layers are applied to. It is a directory if children is not nil, a symlink if
// target is not "", and a file otherwise.
type node struct {
	children map[string]*node
	target   string
	digest   cas.Digest
	exec     bool
	layer    int // the last that had this entry, or one below it
}

func newDirectory(layer int) *node { return &node{children: map[string]*node{}, layer: layer} }

func (n *node) isDir() bool { return n.children != nil }

// A kind is what an operation does.
type kind uint8

const (
	opFile kind = iota + 1
	opDirectory
	opSymlink
	opHardLink // target is the path of the entry to copy
	opRemove   // a whiteout, or something that cannot be in a tree and hides what was there
	opOpaque   // removes what earlier layers have in the directory
)

// An op is one entry of a layer.
type op struct {
	kind   kind
	exec   bool
	path   string // relative, clean, without ".."; "" is the root
	target string
	digest cas.Digest
}

// A builder is the tree that layers are applied to.
type builder struct {
	root  *node
	layer int // the current one; layers count from 1
	made  int // nodes
	limit int // of made: a path of a few kilobytes makes a thousand directories
}

func newBuilder(limits Limits) *builder {
	return &builder{root: newDirectory(0), limit: limits.Entries}
}

// apply applies the entries of the next layer, in order.
func (b *builder) apply(ctx context.Context, ops []op) error {
	b.layer++
	for i := range ops {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := b.applyOne(&ops[i]); err != nil {
			return fmt.Errorf("entry %+.256q: %w", ops[i].path, err)
		}
	}
	return nil
}

func (b *builder) applyOne(o *op) error {
	dir, base := split(o.path)
	switch o.kind {
	case opOpaque:
		n, err := b.walk(o.path, false)
		if err == nil && n != nil {
			n.removeLower(b.layer)
		}
		return err
	case opRemove:
		parent, err := b.walk(dir, false)
		if err == nil && parent != nil {
			parent.remove(base, b.layer)
		}
		return err
	}
	if o.path == "" {
		if o.kind != opDirectory {
			return refuse("the root can only be a directory")
		}
		return nil
	}
	entry, err := b.entry(o)
	if err != nil {
		return err
	}
	parent, err := b.walk(dir, true)
	if err != nil {
		return err
	}
	old := parent.children[base]
	if old != nil && old.isDir() && entry.isDir() {
		old.layer = b.layer
		return nil
	}
	parent.children[base] = entry
	return b.count()
}

// entry returns the node that o describes.
func (b *builder) entry(o *op) (*node, error) {
	switch o.kind {
	case opDirectory:
		return newDirectory(b.layer), nil
	case opHardLink:
		to, err := b.find(o.target)
		switch {
		case err != nil:
			return nil, err
		case to == nil:
			return nil, refuse("the target %+.256q of the hard link does not exist", o.target)
		case to.isDir():
			return nil, refuse("the target %+.256q of the hard link is a directory", o.target)
		}
		return &node{target: to.target, digest: to.digest, exec: to.exec, layer: b.layer}, nil
	}
	return &node{target: o.target, digest: o.digest, exec: o.exec, layer: b.layer}, nil
}

// count counts a new node.
func (b *builder) count() error {
	if b.made++; b.made > b.limit {
		return tooLarge("the image has more than %d entries", b.limit)
	}
	return nil
}

// find returns the entry at path without following it if it is a symlink, or nil.
func (b *builder) find(path string) (*node, error) {
	dir, base := split(path)
	if base == "" {
		return b.root, nil
	}
	parent, err := b.walk(dir, false)
	if err != nil || parent == nil {
		return nil, err
	}
	return parent.children[base], nil
}

// walk returns the directory at path, with all symlinks resolved in this tree; ".." of the root is the root. If there
// is nothing it returns nil, or, with create, makes the missing directories. It then marks those on the way with the
// layer.
func (b *builder) walk(path string, create bool) (*node, error) {
	at := []*node{b.root} // the way from the root
	rest, links, steps := path, 0, 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		if steps++; steps > maxSteps {
			return nil, refuse("the symlinks on the way are too long")
		}
		switch name {
		case "", ".":
			continue
		case "..":
			at = at[:max(1, len(at)-1)]
			continue
		}
		dir := at[len(at)-1]
		next := dir.children[name]
		switch {
		case next == nil && !create:
			return nil, nil
		case next == nil:
			if why := badName(name); why != "" {
				return nil, refuse("a symlink on the way contains a name that %s", why)
			}
			if err := b.count(); err != nil {
				return nil, err
			}
			next = newDirectory(b.layer)
			dir.children[name] = next
		case next.target != "":
			if links++; links > maxLinks {
				return nil, refuse("there are more than %d symlinks on the way", maxLinks)
			}
			if strings.HasPrefix(next.target, "/") {
				at = at[:1]
			}
			rest = next.target + "/" + rest
			continue
		case !next.isDir():
			return nil, refuse("its parent %+.64q is not a directory", name)
		}
		if at = append(at, next); len(at) > maxDepth {
			return nil, refuse("there are more than %d nested directories", maxDepth)
		}
	}
	if create {
		for _, n := range at {
			n.layer = b.layer
		}
	}
	return at[len(at)-1], nil
}

// remove removes what layers before this one have at name. What this layer has there stays, in whatever order.
func (n *node) remove(name string, layer int) {
	switch c := n.children[name]; {
	case c == nil:
	case c.layer < layer:
		delete(n.children, name)
	case c.isDir():
		c.removeLower(layer)
	}
}

// removeLower removes what layers before this one have below n. The depth of its recursion is that of the tree.
func (n *node) removeLower(layer int) {
	for name := range n.children {
		n.remove(name, layer)
	}
}

// A count is what a tree contains.
type count struct {
	entries, files int
	bytes          int64
}

// put stores the Directory messages of n and everything below it, and returns its digest.
func (n *node) put(ctx context.Context, f cas.Function, batch *cas.Batch, c *count, limits Limits, path string,
	depth int,
) (cas.Digest, error) {
	switch {
	case depth > maxDepth:
		return cas.Digest{}, refuse("%.64q... has more than %d nested directories", path, maxDepth)
	case len(path) > maxPath:
		return cas.Digest{}, refuse("the path %.64q... is longer than %d bytes", path, maxPath)
	}
	var m repb.Directory
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		if c.entries++; c.entries > limits.Entries {
			return cas.Digest{}, tooLarge("it has more than %d entries", limits.Entries)
		}
		switch e := n.children[name]; {
		case e.isDir():
			d, err := e.put(ctx, f, batch, c, limits, path+"/"+name, depth+1)
			if err != nil {
				return d, err
			}
			m.Directories = append(m.Directories, &repb.DirectoryNode{Name: name, Digest: d.Proto()})
		case e.target != "":
			m.Symlinks = append(m.Symlinks, &repb.SymlinkNode{Name: name, Target: e.target})
		default:
			c.files++
			c.bytes += e.digest.Size()
			m.Files = append(m.Files, &repb.FileNode{Name: name, Digest: e.digest.Proto(), IsExecutable: e.exec})
		}
	}
	data, digest, err := cas.MarshalProto(f, &m)
	if err != nil {
		return digest, err
	}
	if len(data) > cas.MaxMessage {
		return digest, tooLarge("the directory %.256q has too many entries", path)
	}
	return digest, batch.Add(ctx, cas.Blob{Digest: digest, Data: data})
}

// split splits a clean relative path.
func split(path string) (dir, base string) {
	i := strings.LastIndexByte(path, '/')
	return path[:max(i, 0)], path[i+1:]
}

// cleanPath returns the path of an entry as a clean relative one.
func cleanPath(p string) (string, error) {
	var names []string
	length := 0
	for name := range strings.SplitSeq(p, "/") {
		switch name {
		case "", ".":
			continue
		case "..":
			return "", refuse(`the path contains ".."`)
		}
		if why := badName(name); why != "" {
			return "", refuse("a name in its path %s", why)
		}
		if length += len(name) + 1; length > maxPath || len(names) >= maxDepth {
			return "", refuse("the path is longer than %d bytes or %d directories", maxPath, maxDepth)
		}
		names = append(names, name)
	}
	return strings.Join(names, "/"), nil
}

// badName returns what is wrong with a name, or "".
func badName(name string) string {
	switch {
	case len(name) > maxName:
		return fmt.Sprintf("is longer than %d bytes", maxName)
	case strings.Contains(name, "\x00"):
		return "contains NUL"
	case !utf8.ValidString(name):
		return "is not UTF-8, as the Remote Execution API requires"
	}
	return ""
}

// refuse returns an ErrLayer.
func refuse(format string, args ...any) error {
	return &classified{ErrLayer, fmt.Sprintf(format, args...)}
}

// tooLarge returns an ErrTooLarge.
func tooLarge(format string, args ...any) error {
	return &classified{ErrTooLarge, fmt.Sprintf(format, args...)}
}

// classified is an error of one of the package's kinds, whose text does not repeat the kind.
type classified struct {
	kind error
	text string
}

func (e *classified) Error() string { return e.text }
func (e *classified) Unwrap() error { return e.kind }
