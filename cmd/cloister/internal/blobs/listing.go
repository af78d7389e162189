// SPDX-License-Identifier: Apache-2.0

// Package blobs moves files and directories to and from a server's store, and lists them there.
package blobs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
)

// An Entry is an entry of a directory.
type Entry struct {
	Path       string `json:"path"`
	Kind       string `json:"kind"` // file, directory, symlink
	Executable bool   `json:"executable,omitempty"`
	Digest     string `json:"digest,omitempty"`
	Size       int64  `json:"size"`
	Target     string `json:"target,omitempty"`
	Absent     bool   `json:"absent,omitempty"` // a directory
}

// A Listing prints directories.
type Listing struct {
	Store  cas.Store
	Out    io.Writer
	JSON   bool
	Rows   []Entry
	Absent bool
	// The directories of a Tree, if there is one.
	root    cas.Digest
	unboxed map[cas.Digest]*repb.Directory
}

// Unpack reads the Tree d, so that d names its root directory.
func (l *Listing) Unpack(ctx context.Context, d cas.Digest) error {
	var t repb.Tree
	if err := cas.ReadProto(ctx, l.Store, d, &t); err != nil {
		return err
	}
	if t.Root == nil {
		return fmt.Errorf("%w: %s is not a Tree: it has no root", cas.ErrInvalid, d)
	}
	l.root, l.unboxed = d, map[cas.Digest]*repb.Directory{d: t.Root}
	for _, dir := range t.Children {
		_, child, err := cas.MarshalProto(d.Function(), dir)
		if err != nil {
			return err
		}
		l.unboxed[child] = dir
	}
	return nil
}

// directory returns the Directory d.
func (l *Listing) directory(ctx context.Context, d cas.Digest) (*repb.Directory, error) {
	if dir := l.unboxed[d]; dir != nil {
		return dir, nil
	}
	dir := &repb.Directory{}
	if err := cas.ReadProto(ctx, l.Store, d, dir); err != nil {
		return nil, fmt.Errorf("directory %s: %w", d, err)
	}
	return dir, nil
}

// PrintPath prints the entry at a path below the directory d.
func (l *Listing) PrintPath(ctx context.Context, d cas.Digest, below string, deep bool) error {
	prefix := ""
	if below != "." {
		for name := range strings.SplitSeq(below, "/") {
			dir, err := l.directory(ctx, d)
			if err != nil {
				return err
			}
			es, err := entries(d.Function(), dir)
			if err != nil {
				return fmt.Errorf("directory %s: %w", d, err)
			}
			i := slices.IndexFunc(es, func(e Entry) bool { return e.Path == name })
			if i < 0 {
				return fmt.Errorf("%s in directory %s: %w", render.Quote(path.Join(prefix, name)), d, cas.ErrNotFound)
			}
			prefix = path.Join(prefix, name)
			if es[i].Kind != "directory" {
				if prefix != below {
					return fmt.Errorf("%s is a %s: %w", render.Quote(prefix), es[i].Kind, cas.ErrNotFound)
				}
				es[i].Path = prefix
				return l.print(es[i])
			}
			if d, err = cas.ParseDigest(es[i].Digest); err != nil {
				return err
			}
		}
	}
	return l.walk(ctx, d, prefix, deep)
}

// walk prints a directory, recursively if deep. Digests rule out cycles; the depth is limited as well.
func (l *Listing) walk(ctx context.Context, d cas.Digest, prefix string, deep bool) error {
	type step struct {
		digest cas.Digest
		path   string
	}
	for todo := []step{{d, prefix}}; len(todo) > 0; {
		at := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		dir, err := l.directory(ctx, at.digest)
		if err != nil {
			if at.digest == d || !errors.Is(err, cas.ErrNotFound) {
				return err
			}
			l.Absent = true
			if err := l.print(Entry{Path: at.path, Kind: "directory", Digest: at.digest.String(), Size: at.digest.Size(), Absent: true}); err != nil {
				return err
			}
			continue
		}
		es, err := entries(d.Function(), dir)
		if err != nil {
			return fmt.Errorf("directory %s: %w", at.digest, err)
		}
		var subs []step
		for _, e := range es {
			if at.path != "" {
				e.Path = at.path + "/" + e.Path
			}
			if err := l.print(e); err != nil {
				return err
			}
			if e.Kind == "directory" && deep {
				sub, err := cas.ParseDigest(e.Digest)
				if err != nil {
					return err
				}
				subs = append(subs, step{sub, e.Path})
			}
		}
		slices.Reverse(subs) // the first is next on the stack
		todo = append(todo, subs...)
		if strings.Count(at.path, "/") > maxDepth {
			return fmt.Errorf("%w: directory %s is more than %d levels deep", cas.ErrInvalid, at.digest, maxDepth)
		}
	}
	return nil
}

// maxDepth limits the depth of a printed tree; no action may have a deeper one.
const maxDepth = 5000

// entries returns the entries of dir, sorted by name.
func entries(f cas.Function, dir *repb.Directory) ([]Entry, error) {
	var all []Entry
	for _, n := range dir.Directories {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all = append(all, Entry{Path: n.Name, Kind: "directory", Digest: d.String(), Size: d.Size()})
	}
	for _, n := range dir.Files {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all = append(all, Entry{Path: n.Name, Kind: "file", Executable: n.IsExecutable, Digest: d.String(), Size: d.Size()})
	}
	for _, n := range dir.Symlinks {
		all = append(all, Entry{Path: n.Name, Kind: "symlink", Target: n.Target})
	}
	slices.SortFunc(all, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
	return all, nil
}

// print prints an entry, with names quoted.
func (l *Listing) print(e Entry) error {
	if l.JSON {
		l.Rows = append(l.Rows, e)
		return nil
	}
	kind, size, name := "-", fmt.Sprint(e.Size), render.Quote(e.Path)
	switch {
	case e.Kind == "directory":
		kind, size, name = "d", "-", name+"/"
	case e.Kind == "symlink":
		kind, size, name = "l", "-", name+" -> "+render.Quote(e.Target)
	case e.Executable:
		kind = "x"
	}
	line := fmt.Sprintf("%s %12s  %s", kind, size, name)
	if e.Digest != "" {
		line += "  " + e.Digest
	}
	if e.Absent {
		line += "  ABSENT"
	}
	_, err := fmt.Fprintln(l.Out, line)
	return err
}
