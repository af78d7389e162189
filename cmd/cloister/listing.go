// SPDX-License-Identifier: Apache-2.0

package main

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
	"github.com/cloister-build/cloister/cas/remote"
	"github.com/spf13/cobra"
)

func casLsCommand() *cobra.Command {
	return listingCommand("ls", false, "Lists one directory",
		`Ls prints what is in a directory: of each entry its kind and whether it may be executed, its size, its name and
its digest. DIGEST is that of a Directory message, such as an input root, or with --tree that of a Tree message, as
results name output directories. PATH leads from there to another directory, or to one entry.

It exits with 4 if a Directory or the path is absent, and with 5 if the server cannot be reached.`,
		`  cloister cas ls 77ab...02/310
  cloister cas ls 77ab...02/310 external/zlib --json`)
}

func casTreeCommand() *cobra.Command {
	return listingCommand("tree", true, "Lists a directory and all that is below it",
		`Tree prints a directory and everything below it, a line for each entry, with its path from there. What is absent
is named, and the rest is printed nevertheless. DIGEST and PATH are as for cloister cas ls.

It exits with 4 if something is absent, and with 5 if the server cannot be reached.`,
		`  cloister cas tree 77ab...02/310
  cloister cas tree 1f0c...99/88 --tree`)
}

func listingCommand(name string, deep bool, short, long, example string) *cobra.Command {
	var from origin
	var message, asJSON bool
	cmd := &cobra.Command{
		Use:     name + " DIGEST [PATH] [--tree] [--cas URL] [--instance NAME] [--json]",
		Short:   short,
		Long:    long,
		Example: example,
		Args:    cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			d, err := cas.ParseDigest(args[0])
			if err != nil {
				return err
			}
			below := "."
			if len(args) > 1 {
				below = path.Clean(strings.Trim(args[1], "/"))
			}
			l := &listing{out: cmd.OutOrStdout(), json: asJSON, rows: []listed{}}
			err = onServer(cmd.Context(), &from, func(ctx context.Context, s *remote.Store) error {
				l.store = s
				if message {
					if err := l.unpack(ctx, d); err != nil {
						return err
					}
				}
				return l.from(ctx, d, below, deep)
			})
			if err == nil && asJSON {
				err = printJSON(l.out, l.rows)
			}
			if err == nil && l.absent {
				err = newExit(exitAbsent, nil)
			}
			return err
		},
	}
	from.register(cmd)
	registerForms(cmd, nil, &message)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON list")
	return cmd
}

// A listed is one entry of a directory.
type listed struct {
	Path       string `json:"path"`
	Kind       string `json:"kind"` // file, directory, symlink
	Executable bool   `json:"executable,omitempty"`
	Digest     string `json:"digest,omitempty"`
	Size       int64  `json:"size"`
	Target     string `json:"target,omitempty"`
	Absent     bool   `json:"absent,omitempty"` // a directory
}

// A listing prints directories.
type listing struct {
	store  cas.Store
	out    io.Writer
	json   bool
	rows   []listed
	absent bool
	// Of a Tree, instead of those of the store.
	root    cas.Digest
	unboxed map[cas.Digest]*repb.Directory
}

// unpack reads the Tree d, so that d names its root.
func (l *listing) unpack(ctx context.Context, d cas.Digest) error {
	var t repb.Tree
	if err := cas.ReadProto(ctx, l.store, d, &t); err != nil {
		return err
	}
	if t.Root == nil {
		return fmt.Errorf("%w: %s is not the digest of a Tree: it has no root", cas.ErrInvalid, d)
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
func (l *listing) directory(ctx context.Context, d cas.Digest) (*repb.Directory, error) {
	if dir := l.unboxed[d]; dir != nil {
		return dir, nil
	}
	dir := &repb.Directory{}
	if err := cas.ReadProto(ctx, l.store, d, dir); err != nil {
		return nil, fmt.Errorf("directory %s: %w", d, err)
	}
	return dir, nil
}

// from prints what is at the path below of the directory d.
func (l *listing) from(ctx context.Context, d cas.Digest, below string, deep bool) error {
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
			i := slices.IndexFunc(es, func(e listed) bool { return e.Path == name })
			if i < 0 {
				return fmt.Errorf("%s in directory %s: %w", quote(path.Join(prefix, name)), d, cas.ErrNotFound)
			}
			prefix = path.Join(prefix, name)
			if es[i].Kind != "directory" {
				if prefix != below {
					return fmt.Errorf("%s is a %s: %w", quote(prefix), es[i].Kind, cas.ErrNotFound)
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

// walk prints a directory, and what is below it if deep. A digest says all that is below it, so that no directory is in
// itself; the depth is bounded all the same.
func (l *listing) walk(ctx context.Context, d cas.Digest, prefix string, deep bool) error {
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
			l.absent = true
			if err := l.print(listed{Path: at.path, Kind: "directory", Digest: at.digest.String(), Size: at.digest.Size(), Absent: true}); err != nil {
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
				e.Path = at.path + "/" + e.Path // as it is called, whatever that may be
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
		slices.Reverse(subs) // so that the first is the next
		todo = append(todo, subs...)
		if strings.Count(at.path, "/") > maxDepth {
			return fmt.Errorf("%w: directory %s is more than %d levels deep", cas.ErrInvalid, at.digest, maxDepth)
		}
	}
	return nil
}

// maxDepth is how deep a tree is printed: deeper than any that an action may have.
const maxDepth = 5000

// entries returns what is in dir, in the order of names. Paths are names alone.
func entries(f cas.Function, dir *repb.Directory) ([]listed, error) {
	var all []listed
	for _, n := range dir.Directories {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all = append(all, listed{Path: n.Name, Kind: "directory", Digest: d.String(), Size: d.Size()})
	}
	for _, n := range dir.Files {
		d, err := cas.FromProto(f, n.Digest)
		if err != nil {
			return nil, err
		}
		all = append(all, listed{Path: n.Name, Kind: "file", Executable: n.IsExecutable, Digest: d.String(), Size: d.Size()})
	}
	for _, n := range dir.Symlinks {
		all = append(all, listed{Path: n.Name, Kind: "symlink", Target: n.Target})
	}
	slices.SortFunc(all, func(a, b listed) int { return strings.Compare(a.Path, b.Path) })
	return all, nil
}

// print prints one entry. What a client chose is quoted.
func (l *listing) print(e listed) error {
	if l.json {
		l.rows = append(l.rows, e)
		return nil
	}
	kind, size, name := "-", fmt.Sprint(e.Size), quote(e.Path)
	switch {
	case e.Kind == "directory":
		kind, size, name = "d", "-", name+"/"
	case e.Kind == "symlink":
		kind, size, name = "l", "-", name+" -> "+quote(e.Target)
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
	_, err := fmt.Fprintln(l.out, line)
	return err
}
