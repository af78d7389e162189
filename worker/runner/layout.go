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
	"path/filepath"
	"unicode/utf8"

	"github.com/cloister-build/cloister/sandbox"
	"github.com/cloister-build/cloister/worker"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// outDir is the directory of a workspace that a command finds as ExecRoot.
	outDir = "out"
	// maxDepth is how many directories there may be above one another.
	maxDepth = 1000
	// maxInputs is how many files there may be: each is a mount, and Linux has 100,000 in a namespace
	// (/proc/sys/fs/mount-max).
	maxInputs = 90_000
	// maxLeft is how many files that cannot be carried over are named.
	maxLeft = 100
	// maxLink is what a symbolic link takes of a workspace, in bytes.
	maxLink = 4096
)

// A layout is what an input root consists of, parents before what is in them.
type layout struct {
	entries []entry
	index   map[string]int // by path
	holders map[uint64]int // by inode in the workspace: the empty files that inputs are mounted over
	links   int64
	count   int // files
}

// An entry is one thing in an input root.
type entry struct {
	path string
	kind fs.FileMode // fs.ModeDir, fs.ModeSymlink or 0
	link string      // where it leads
}

func (l *layout) bytes() int64 { return l.links * maxLink }
func (l *layout) files() int64 { return int64(len(l.entries)) + 1 }

// scan reads what is in an input root. What no command could be given is INVALID_ARGUMENT.
func scan(ctx context.Context, in *os.Root) (*layout, error) {
	l := &layout{index: map[string]int{}, holders: map[uint64]int{}}
	return l, l.scan(ctx, in, "", 0)
}

// scan adds what is in a directory. Its recursion is limited with the depth.
func (l *layout) scan(ctx context.Context, dir *os.Root, prefix string, depth int) error {
	bad := func(p, format string, args ...any) error {
		return status.Errorf(codes.InvalidArgument, "input_root_directory: %+.256q %s", p, fmt.Sprintf(format, args...))
	}
	entries, err := list(ctx, dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := path.Join(prefix, e.Name())
		it := entry{path: p, kind: e.Type()}
		switch {
		case !utf8.ValidString(p):
			return bad(p, "is not UTF-8")
		case it.kind == fs.ModeSymlink:
			if it.link, err = dir.Readlink(e.Name()); err != nil {
				return err
			}
			l.links++
		case it.kind == 0:
			if l.count++; l.count > maxInputs {
				return status.Errorf(codes.InvalidArgument, "input_root_directory: there are more than %d files, and each needs a mount", maxInputs)
			}
		case it.kind != fs.ModeDir:
			return bad(p, "is neither file, directory nor symbolic link; every run has /dev already: leave out inputRootCharacterDeviceNodes")
		case depth == maxDepth:
			return bad(p, "is deeper than %d directories", maxDepth)
		}
		l.index[p] = len(l.entries)
		l.entries = append(l.entries, it)
		if it.kind != fs.ModeDir {
			continue
		}
		below, err := dir.OpenRoot(e.Name())
		if err != nil {
			return err
		}
		err = l.scan(ctx, below, p, depth+1)
		below.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// list returns what is in a directory, by name.
func list(ctx context.Context, dir *os.Root) ([]fs.DirEntry, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.ReadDir(-1)
}

// make makes in a workspace what a command may write to, and what its inputs are mounted over. The caller closes what it
// returns.
func (l *layout) make(ws *os.Root) (_ *os.Root, err error) {
	mkdir := func(r *os.Root, p string) error {
		// The user of the command is another one, and the umask may be any.
		return errors.Join(r.Mkdir(p, 0o777), r.Chmod(p, 0o777))
	}
	if err := mkdir(ws, outDir); err != nil {
		return nil, err
	}
	out, err := ws.OpenRoot(outDir)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			out.Close()
		}
	}()
	for i := range l.entries {
		switch e := &l.entries[i]; e.kind {
		case fs.ModeDir:
			err = mkdir(out, e.path)
		case fs.ModeSymlink:
			err = out.Symlink(e.link, e.path)
		default:
			var f *os.File
			if f, err = out.OpenFile(e.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444); err != nil {
				break
			}
			st, statErr := f.Stat()
			if err = errors.Join(statErr, f.Close()); err != nil {
				break
			}
			n, ok := inode(st)
			if !ok {
				return nil, fmt.Errorf("%w: files have no numbers", sandbox.ErrUnsupported)
			}
			l.holders[n] = i
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// inputs returns a run's inputs: those that are given and each file of the input root, which is the host's directory from.
func (l *layout) inputs(given []sandbox.Input, from string) []sandbox.Input {
	all := make([]sandbox.Input, len(given), len(given)+l.count)
	copy(all, given)
	for _, e := range l.entries {
		if e.kind == 0 {
			all = append(all, sandbox.Input{
				Target: path.Join(worker.ExecRoot, e.path), Content: "host", Source: filepath.Join(from, filepath.FromSlash(e.path)),
			})
		}
	}
	return all
}

// carry makes of in, the input root, what the command made of out, once nothing of the run is alive. It returns what
// cannot be carried over, as events. Files that claim to hold more than most bytes together, or an input that was moved
// with a directory around it, are FAILED_PRECONDITION.
func (l *layout) carry(ctx context.Context, out, in *os.Root, most int64) ([]sandbox.Event, error) {
	c := &carrier{layout: l, kept: make([]bool, len(l.entries)), most: most}
	if err := c.dir(ctx, out, in, "", 0); err != nil {
		return c.left, err
	}
	for i, e := range l.entries {
		if c.kept[i] {
			continue
		}
		if e.kind == 0 {
			return c.left, moved(e.path) // what is mounted over cannot be gone; and it is not ours to remove
		}
		if c.made[e.path] {
			continue // something else has the name by now
		}
		if i, ok := l.index[path.Dir(e.path)]; ok && !c.kept[i] {
			continue // it went with its directory, which may be a link to another one by now
		}
		if err := in.RemoveAll(e.path); err != nil {
			return c.left, fmt.Errorf("remove what the command removed: %w", err)
		}
	}
	return c.left, nil
}

// moved refuses what a command did to an input. It could not move the file, but a directory around it.
func moved(p string) error {
	return status.Errorf(codes.FailedPrecondition, "the command renamed a directory with the input %+.256q in it: inputs stay where they are, copy them", p)
}

// A carrier carries outputs over.
type carrier struct {
	*layout
	kept        []bool          // of each entry, whether it is there as it was laid out
	made        map[string]bool // what took the place of an entry
	bytes, most int64
	left        []sandbox.Event
}

// as marks the entry at p as kept if it is there as it was laid out, and reports that.
func (c *carrier) as(p string, kind fs.FileMode, link string) bool {
	i, ok := c.index[p]
	if !ok || c.entries[i].kind != kind || c.entries[i].link != link {
		return false
	}
	c.kept[i] = true
	return true
}

// clear makes room in the input root for something new, if an entry was there.
func (c *carrier) clear(in *os.Root, name, p string) error {
	if _, ok := c.index[p]; !ok {
		return nil
	}
	if c.made == nil {
		c.made = map[string]bool{}
	}
	c.made[p] = true
	return in.RemoveAll(name)
}

// dir carries over what is in one directory. Its recursion is limited with the depth.
func (c *carrier) dir(ctx context.Context, out, in *os.Root, prefix string, depth int) error {
	if depth > maxDepth {
		return status.Errorf(codes.FailedPrecondition, "output %+.64q... is deeper than %d directories", prefix, maxDepth)
	}
	entries, err := list(ctx, out)
	if err != nil {
		return err
	}
	for _, e := range entries {
		p := path.Join(prefix, e.Name())
		switch e.Type() {
		case fs.ModeDir:
			err = c.below(ctx, out, in, e.Name(), p, depth)
		case fs.ModeSymlink:
			err = c.link(out, in, e.Name(), p)
		case 0:
			err = c.file(out, in, e.Name(), p)
		default:
			if len(c.left) < maxLeft {
				c.left = append(c.left, sandbox.Event{Kind: sandbox.EventOutput, Subject: fmt.Sprintf("%+.256q", p), Count: 1,
					Detail: "neither file, directory nor symbolic link: it stays in the sandbox"})
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *carrier) below(ctx context.Context, out, in *os.Root, name, p string, depth int) error {
	if !c.as(p, fs.ModeDir, "") {
		if err := errors.Join(c.clear(in, name, p), in.Mkdir(name, 0o777)); err != nil {
			return fmt.Errorf("output directory: %w", err)
		}
	}
	from, err := reach(out, name, out.OpenRoot)
	if err != nil {
		return fmt.Errorf("output directory: %w", err)
	}
	defer from.Close()
	to, err := in.OpenRoot(name)
	if err != nil {
		return fmt.Errorf("output directory: %w", err)
	}
	defer to.Close()
	return c.dir(ctx, from, to, p, depth+1)
}

func (c *carrier) link(out, in *os.Root, name, p string) error {
	to, err := out.Readlink(name)
	if err != nil {
		return err
	}
	if c.as(p, fs.ModeSymlink, to) {
		return nil
	}
	if err := errors.Join(c.clear(in, name, p), in.Symlink(to, name)); err != nil {
		return fmt.Errorf("output link: %w", err)
	}
	return nil
}

func (c *carrier) file(out, in *os.Root, name, p string) error {
	st, err := out.Lstat(name)
	if err != nil {
		return err
	}
	n, ok := inode(st)
	if !ok {
		return fmt.Errorf("%w: files have no numbers", sandbox.ErrUnsupported)
	}
	if i, ok := c.holders[n]; ok {
		if c.entries[i].path != p {
			return moved(c.entries[i].path)
		}
		c.kept[i] = true
		return nil
	}
	// A file with a hole, or with many names, holds less than it claims until it is copied.
	if c.bytes += st.Size(); c.most != sandbox.Unlimited && c.bytes > c.most {
		return status.Errorf(codes.FailedPrecondition, "outputs up to %+.256q claim to hold %s, and %s are permitted", p, sandbox.Bytes(c.bytes), sandbox.Bytes(c.most))
	}
	if err := c.clear(in, name, p); err != nil {
		return fmt.Errorf("output: %w", err)
	}
	from, err := reach(out, name, out.Open)
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

// reach opens what a command may have made unreadable, even for its owner.
func reach[T any](dir *os.Root, name string, open func(string) (T, error)) (T, error) {
	it, err := open(name)
	if errors.Is(err, fs.ErrPermission) && dir.Chmod(name, 0o700) == nil {
		return open(name)
	}
	return it, err
}
