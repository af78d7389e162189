// SPDX-License-Identifier: Apache-2.0

package runner

import (
	"context"
	"errors"
	"fmt"
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
	// outDir is the directory of a workspace that becomes ExecRoot.
	outDir = "out"
	// maxDepth bounds the nesting of directories.
	maxDepth = 1000
	// maxInputs bounds the files of an input root. Each needs a mount, and Linux allows 100,000 in a namespace
	// (/proc/sys/fs/mount-max).
	maxInputs = 90_000
	// maxLink is the size of a symbolic link in a workspace, in bytes.
	maxLink = 4096
)

// A layout lists the entries of an input root, parents first.
type layout struct {
	entries      []entry
	index        map[string]int // by path
	placeholders map[uint64]int // by inode in the workspace; empty files over which inputs are mounted
	links        int64
	files        int
}

// An entry is a file, directory or symbolic link of an input root.
type entry struct {
	path string
	kind fs.FileMode // fs.ModeDir, fs.ModeSymlink or 0
	link string      // target
}

// workspace returns the size of a workspace for the layout and the outputs.
func (l *layout) workspace(limits sandbox.Limits) (bytes, files int64) {
	bytes, files = limits.OutputBytes, limits.OutputFiles
	if bytes != sandbox.Unlimited {
		bytes += l.links * maxLink
	}
	if files != sandbox.Unlimited {
		files += int64(len(l.entries)) + 1
	}
	return bytes, files
}

// scan reads an input root. Anything that cannot be an input is INVALID_ARGUMENT.
func scan(ctx context.Context, in *os.Root) (*layout, error) {
	l := &layout{index: map[string]int{}, placeholders: map[uint64]int{}}
	return l, l.scan(ctx, in, "", 0)
}

// scan adds the entries of a directory.
func (l *layout) scan(ctx context.Context, dir *os.Root, prefix string, depth int) error {
	bad := func(p, format string, args ...any) error {
		return status.Errorf(codes.InvalidArgument, "input_root_directory: %+.256q %s", p, fmt.Sprintf(format, args...))
	}
	entries, err := readDir(ctx, dir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		p := path.Join(prefix, d.Name())
		e := entry{path: p, kind: d.Type()}
		switch {
		case !utf8.ValidString(p):
			return bad(p, "is not UTF-8")
		case e.kind == fs.ModeSymlink:
			if e.link, err = dir.Readlink(d.Name()); err != nil {
				return err
			}
			l.links++
		case e.kind == 0:
			if l.files++; l.files > maxInputs {
				return status.Errorf(codes.InvalidArgument,
					"input_root_directory: more than %d files, each of which needs a mount", maxInputs)
			}
		case e.kind != fs.ModeDir:
			return bad(p, "is not a file, directory or symbolic link; remove inputRootCharacterDeviceNodes from the "+
				"configuration, because every run has /dev")
		case depth == maxDepth:
			return bad(p, "is nested deeper than %d directories", maxDepth)
		}
		l.index[p] = len(l.entries)
		l.entries = append(l.entries, e)
		if e.kind != fs.ModeDir {
			continue
		}
		below, err := dir.OpenRoot(d.Name())
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

// readDir returns the entries of a directory.
func readDir(ctx context.Context, dir *os.Root) ([]fs.DirEntry, error) {
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

// create creates the layout in a workspace, with a placeholder for each file. The caller closes the result.
func (l *layout) create(ws *os.Root) (_ *os.Root, err error) {
	mkdir := func(r *os.Root, p string) error {
		// The command runs as another user, and our umask is unknown.
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
	for i, e := range l.entries {
		switch e.kind {
		case fs.ModeDir:
			err = mkdir(out, e.path)
		case fs.ModeSymlink:
			err = out.Symlink(e.link, e.path)
		default:
			var n uint64
			if n, err = createPlaceholder(out, e.path); err == nil {
				l.placeholders[n] = i
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// createPlaceholder creates an empty file and returns its inode number.
func createPlaceholder(out *os.Root, p string) (uint64, error) {
	f, err := out.OpenFile(p, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return 0, err
	}
	st, err := f.Stat()
	if err := errors.Join(err, f.Close()); err != nil {
		return 0, err
	}
	return inode(st)
}

// inputs returns the given inputs and a mount for each file of the input root, which is the host's directory dir.
func (l *layout) inputs(given []sandbox.Input, dir string) []sandbox.Input {
	all := make([]sandbox.Input, len(given), len(given)+l.files)
	copy(all, given)
	for _, e := range l.entries {
		if e.kind == 0 {
			source := filepath.Join(dir, filepath.FromSlash(e.path))
			all = append(all, sandbox.Input{Target: path.Join(worker.ExecRoot, e.path), Content: "host", Source: source})
		}
	}
	return all
}
