// SPDX-License-Identifier: Apache-2.0

package comparison

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cmd/cloister/internal/render"
	"github.com/cloister-build/cloister/worker/repro/changes"
	"github.com/cloister-build/cloister/worker/repro/compare"
	"google.golang.org/protobuf/proto"
)

// kind returns the kind of two operands: that of --as, or the first of Kinds that fits both.
func (c *Config) kind(ctx context.Context, a, b operand) (string, error) {
	switch {
	case c.As != "":
		return c.As, nil
	case a.folder && b.folder:
		return "directory", nil
	}
	x, err := c.kinds(ctx, a)
	if err != nil {
		return "", err
	}
	y, err := c.kinds(ctx, b)
	if err != nil {
		return "", err
	}
	fit := slices.DeleteFunc(slices.Clone(Kinds), func(k string) bool { return !slices.Contains(x, k) || !slices.Contains(y, k) })
	// Two messages of different kinds are both blobs, but comparing them as such is not what the user wants.
	if len(fit) == 0 || fit[0] == "blob" && len(x) > 1 && len(y) > 1 {
		return "", fmt.Errorf("%s and %s are of different kinds: choose one with --as", render.Quote(a.name), render.Quote(b.name))
	}
	return fit[0], nil
}

// manifestHead begins every manifest.
const manifestHead = "cloister-manifest v1\n"

// kinds returns the kinds that fit an operand.
func (c *Config) kinds(ctx context.Context, t operand) ([]string, error) {
	switch {
	case t.action:
		return []string{"action"}, nil
	case t.folder:
		return []string{"directory"}, nil
	case t.digest.Size() > cas.MaxTree:
		return []string{"blob"}, nil
	}
	in, closeIn, err := c.content(ctx, t)
	if err != nil {
		return nil, err
	}
	defer closeIn()
	most := int64(cas.MaxTree)
	if t.digest.IsZero() {
		most = int64(len(manifestHead))
	}
	b, err := io.ReadAll(io.LimitReader(in, most))
	if err != nil {
		return nil, err
	}
	kinds := []string{"blob"}
	if bytes.HasPrefix(b, []byte(manifestHead)) {
		kinds = append(kinds, "manifest")
	}
	if !t.digest.IsZero() {
		if kind := MessageKind(b, t.digest.Function()); kind != "" {
			kinds = append(kinds, kind)
		}
	}
	return kinds, nil
}

// MessageKind returns the message of the API that b plausibly is: "action", "tree", "directory", "command" or "".
// Commands come last, because every text is a plausible argument.
func MessageKind(b []byte, f cas.Function) string {
	good := func(p *repb.Digest) bool { _, err := cas.FromProto(f, p); return err == nil }
	parsed := func(m proto.Message) bool {
		return cas.CheckMessage(b, m) == nil && proto.Unmarshal(b, m) == nil && len(m.ProtoReflect().GetUnknown()) == 0
	}
	directory := func(d *repb.Directory) bool {
		return len(d.ProtoReflect().GetUnknown()) == 0 &&
			!slices.ContainsFunc(d.Files, func(n *repb.FileNode) bool { return n.Name == "" || !good(n.Digest) }) &&
			!slices.ContainsFunc(d.Directories, func(n *repb.DirectoryNode) bool { return n.Name == "" || !good(n.Digest) }) &&
			!slices.ContainsFunc(d.Symlinks, func(n *repb.SymlinkNode) bool { return n.Name == "" || n.Target == "" })
	}
	var action repb.Action
	var tree repb.Tree
	var dir repb.Directory
	var command repb.Command
	switch {
	case parsed(&action) && good(action.CommandDigest) && good(action.InputRootDigest):
		return "action"
	case parsed(&tree) && tree.Root != nil && directory(tree.Root) && !slices.ContainsFunc(tree.Children, func(d *repb.Directory) bool { return !directory(d) }):
		return "tree"
	case parsed(&dir) && directory(&dir):
		return "directory"
	case parsed(&command) && len(command.Arguments) > 0 && command.Arguments[0] != "":
		return "command"
	}
	return ""
}

// result returns the cached result of an action, and records what is known about the run.
func (c *Config) result(ctx context.Context, t operand, known **compare.Facts) (*repb.ActionResult, error) {
	r, err := c.store.Lookup(ctx, t.digest)
	if errors.Is(err, cas.ErrNotFound) {
		return nil, fmt.Errorf("no result of action %s is recorded at %s, instance %q; compare the actions without --results, or execute it again", t.digest, c.From.Address, c.From.Instance)
	}
	if m := r.GetExecutionMetadata(); m.GetExecutionStartTimestamp() != nil {
		*known = &compare.Facts{Start: m.ExecutionStartTimestamp.AsTime(), End: m.ExecutionCompletedTimestamp.AsTime()}
	}
	return r, err
}

// sectionOf returns the content of an open file, and a function that closes it.
func sectionOf(f *os.File) (*io.SectionReader, func(), error) {
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", render.Quote(f.Name()))
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return io.NewSectionReader(f, 0, info.Size()), func() { f.Close() }, nil
}

// A diskFolder is a directory of this host.
type diskFolder struct {
	root *os.Root
	path string // below root
}

// openFolder opens a directory of this host. The caller closes its root.
func openFolder(name string) (*diskFolder, error) {
	root, err := os.OpenRoot(name)
	return &diskFolder{root, "."}, err
}

// Entries implements changes.Directory. Special files are an error, because they have no content.
func (d *diskFolder) Entries(context.Context) ([]changes.Entry, error) {
	f, err := d.root.Open(d.path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	var all []changes.Entry
	for _, name := range names {
		at := path.Join(d.path, name)
		info, err := d.root.Lstat(at)
		if err != nil {
			return nil, err
		}
		e := changes.Entry{Name: name}
		switch mode := info.Mode(); {
		case mode.IsDir():
			e.Directory = &diskFolder{d.root, at}
		case mode.IsRegular():
			e.Executable = mode&0o100 != 0
			e.Open = func(context.Context) (*io.SectionReader, func(), error) {
				f, err := d.root.Open(at)
				if err != nil {
					return nil, nil, err
				}
				return sectionOf(f)
			}
		case mode&os.ModeSymlink != 0:
			e.Link = true
			if e.Target, err = d.root.Readlink(at); err != nil {
				return nil, err
			}
		default:
			return nil, fmt.Errorf("%s is not a file, directory or link", render.Quote(at))
		}
		all = append(all, e)
	}
	return all, nil
}
