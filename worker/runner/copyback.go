// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"github.com/cloister-build/cloister/sandbox"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxSpecial is the number of special files that are reported.
const maxSpecial = 100

// copyBack makes the input root in a copy of out after the run. It returns an event for each special file, which cannot
// be copied. It fails with FAILED_PRECONDITION if the files claim more than maxBytes together, or if an input was moved
// with a directory that contains it.
func (l *layout) copyBack(ctx context.Context, out, in *os.Root, maxBytes int64) ([]sandbox.Event, error) {
	c := &copier{layout: l, unchanged: make([]bool, len(l.entries)), replaced: map[string]bool{}, maxBytes: maxBytes}
	if err := c.copyDir(ctx, out, in, "", 0); err != nil {
		return c.special, err
	}
	for i, e := range l.entries {
		if c.unchanged[i] {
			continue
		}
		if e.kind == 0 {
			return c.special, movedError(e.path) // a mount point cannot be removed, and the file is not ours to remove
		}
		if c.replaced[e.path] {
			continue
		}
		if i, ok := l.index[path.Dir(e.path)]; ok && !c.unchanged[i] {
			continue // it was removed with its directory, which may be a symlink to another one now
		}
		if err := in.RemoveAll(e.path); err != nil {
			return c.special, fmt.Errorf("remove what the command removed: %w", err)
		}
	}
	return c.special, nil
}

// movedError is the error for an input that is no longer in its place. A command cannot move the file, but a directory
// that contains it.
func movedError(p string) error {
	return status.Errorf(codes.FailedPrecondition,
		"the command renamed a directory that contains the input %+.256q: inputs cannot be moved, copy them", p)
}

// A copier copies outputs back.
type copier struct {
	*layout
	unchanged       []bool          // of each entry, whether it is still in place
	replaced        map[string]bool // entries with a new file in their place
	bytes, maxBytes int64
	special         []sandbox.Event
}

// isUnchanged reports whether the entry at p still has this kind and target, and records it.
func (c *copier) isUnchanged(p string, kind fs.FileMode, link string) bool {
	i, ok := c.index[p]
	if !ok || c.entries[i].kind != kind || c.entries[i].link != link {
		return false
	}
	c.unchanged[i] = true
	return true
}

// remove removes an entry that is being replaced from the input root.
func (c *copier) remove(in *os.Root, name, p string) error {
	if _, ok := c.index[p]; !ok {
		return nil
	}
	c.replaced[p] = true
	return in.RemoveAll(name)
}

// copyDir copies the entries of one directory.
func (c *copier) copyDir(ctx context.Context, out, in *os.Root, prefix string, depth int) error {
	if depth > maxDepth {
		return status.Errorf(codes.FailedPrecondition,
			"output %+.64q... is nested deeper than %d directories", prefix, maxDepth)
	}
	entries, err := readDir(ctx, out)
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := path.Join(prefix, e.Name())
		switch e.Type() {
		case fs.ModeDir:
			err = c.copySubdir(ctx, out, in, e.Name(), p, depth)
		case fs.ModeSymlink:
			err = c.copyLink(out, in, e.Name(), p)
		case 0:
			err = c.copyFile(out, in, e.Name(), p)
		default:
			if len(c.special) < maxSpecial {
				c.special = append(c.special, sandbox.Event{
					Kind: sandbox.EventOutput, Subject: fmt.Sprintf("%+.256q", p), Count: 1,
					Detail: "not a file, directory or symbolic link: it stays in the sandbox",
				})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *copier) copySubdir(ctx context.Context, out, in *os.Root, name, p string, depth int) error {
	if !c.isUnchanged(p, fs.ModeDir, "") {
		if err := errors.Join(c.remove(in, name, p), in.Mkdir(name, 0o777)); err != nil {
			return fmt.Errorf("output directory: %w", err)
		}
	}
	from, err := openAnyway(out, name, out.OpenRoot)
	if err != nil {
		return fmt.Errorf("output directory: %w", err)
	}
	defer from.Close()
	to, err := in.OpenRoot(name)
	if err != nil {
		return fmt.Errorf("output directory: %w", err)
	}
	defer to.Close()
	return c.copyDir(ctx, from, to, p, depth+1)
}

func (c *copier) copyLink(out, in *os.Root, name, p string) error {
	target, err := out.Readlink(name)
	if err != nil {
		return err
	}
	if c.isUnchanged(p, fs.ModeSymlink, target) {
		return nil
	}
	if err := errors.Join(c.remove(in, name, p), in.Symlink(target, name)); err != nil {
		return fmt.Errorf("output link: %w", err)
	}
	return nil
}

func (c *copier) copyFile(out, in *os.Root, name, p string) error {
	st, err := out.Lstat(name)
	if err != nil {
		return err
	}
	n, err := inode(st)
	if err != nil {
		return err
	}
	if i, ok := c.placeholders[n]; ok {
		if c.entries[i].path != p {
			return movedError(c.entries[i].path)
		}
		c.unchanged[i] = true
		return nil
	}
	// Copying a sparse file, or one with several hard links, takes more space than the file does.
	if c.bytes += st.Size(); c.maxBytes != sandbox.Unlimited && c.bytes > c.maxBytes {
		return status.Errorf(codes.FailedPrecondition, "outputs up to %+.256q claim %s, more than the permitted %s",
			p, sandbox.Bytes(c.bytes), sandbox.Bytes(c.maxBytes))
	}
	if err := c.remove(in, name, p); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	from, err := openAnyway(out, name, out.Open)
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	defer from.Close()
	mode := fs.FileMode(0o666)
	if st.Mode()&0o111 != 0 {
		mode = 0o777
	}
	to, err := in.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("output: %w", err)
	}
	_, err = io.Copy(to, from)
	if err := errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("output %+.256q: %w", p, err)
	}
	return nil
}

// openAnyway opens a file or directory even if the command removed its read permission.
func openAnyway[T any](dir *os.Root, name string, open func(string) (T, error)) (T, error) {
	f, err := open(name)
	if errors.Is(err, fs.ErrPermission) && dir.Chmod(name, 0o700) == nil {
		return open(name)
	}
	return f, err
}
