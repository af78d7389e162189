// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
)

const noLimit = math.MaxInt64

// An OutputSpec lists the outputs of a run to collect. Paths are relative to Dir, as the client spelled them.
type OutputSpec struct {
	Dir   string   // the working directory, relative to the exec root
	Paths []string // output_paths
	// Files and Directories are output_files and output_directories of API 2.0. They apply only if Paths is empty (rule
	// 78).
	Files, Directories []string
	Format             repb.Command_OutputDirectoryFormat
	// Properties are output_node_properties. NodeProperties lists the supported ones.
	Properties []string
	// MaxBytes limits the total size of the files of all outputs; zero means no limit.
	MaxBytes int64
}

// An output is one declared output that exists.
type output struct {
	path     string // as the client spelled it
	declared Kind   // 0 by output_paths
	entry    entry
	dirs     []*directory // of a directory: itself and everything below it, parents first
}

// Capture adds the outputs of a run to b, which the caller flushes, and sets the output fields of r, sorted by path.
// out is the exec root after the run, the directory out/ of the workspace. Every process of the run must have ended,
// since Capture checks files before it opens them. It makes unreadable files readable and changes nothing else. The
// messages of files, directories and symlinks have the properties in w.Properties. Without them, runs that write the
// same bytes have the same result.
//
// Rules 111 to 117 leave some decisions to the worker. Outputs that do not exist are omitted. A symlink is returned as
// it is and never followed. These are ErrOutput:
//
//   - an output behind a symlink that the run put in place of a parent directory,
//   - a special file declared as an output (inside an output directory it is omitted),
//   - an output of another kind than declared, including a symlink declared as a file that leads to a directory, and
//     the reverse,
//   - a name or a symlink target that is not UTF-8,
//   - a tree of more than 1000 levels, with a path of more than 4000 bytes or with more than 1,000,000 entries,
//   - a Tree or a Directory too large to be read back (cas.CheckMessage),
//   - files above MaxBytes.
//
// A symlink declared by the fields of API 2.0 is returned in those fields and in output_symlinks.
//
// omitted lists the special files that were omitted, as text for a user, or is "".
//
// On an ErrOutput about one output, r has the others, since the outputs of a failed run help to explain it. Other
// errors come from the store and the file system. After these, and if all outputs together are too large, r is
// unchanged.
func Capture(ctx context.Context, b *cas.Batch, f cas.Function, out *os.Root, w OutputSpec, r *repb.ActionResult,
) (omitted string, err error) {
	switch {
	case b == nil:
		return "", errNoStore
	case out == nil:
		return "", errNoDirectory
	case f == 0:
		return "", fmt.Errorf("%w: no digest function", cas.ErrInvalid)
	}
	c := &capturer{
		scanner: &scanner{
			root: out, ofRun: true, wanted: newPropertySet(w.Properties), limit: cmp.Or(w.MaxBytes, noLimit),
			real: map[string]bool{}, dirs: map[string]*scannedDir{}, unlocked: map[string]fs.FileMode{},
		},
		dir: w.Dir,
	}
	if len(w.Paths) > 0 {
		err = c.find(ctx, w.Paths, 0)
	} else if err = c.find(ctx, w.Files, File); err == nil {
		err = c.find(ctx, w.Directories, Directory)
	}
	if err != nil {
		return "", err
	}
	if err := c.put(ctx, b, f); err != nil {
		return "", err
	}
	var res repb.ActionResult
	for _, o := range c.outputs {
		if err := c.addTo(ctx, b, f, o, w.Format, &res); err != nil {
			return "", err
		}
	}
	// The files and the directories of API 2.0 are each sorted, but not together.
	slices.SortStableFunc(res.OutputSymlinks, func(a, b *repb.OutputSymlink) int {
		return cmp.Compare(a.Path, b.Path)
	})
	r.OutputFiles, r.OutputDirectories = res.OutputFiles, res.OutputDirectories
	r.OutputSymlinks = res.OutputSymlinks
	r.OutputFileSymlinks, r.OutputDirectorySymlinks = res.OutputFileSymlinks, res.OutputDirectorySymlinks
	return c.omitted(), c.bad
}

// A capturer is one call of Capture.
type capturer struct {
	*scanner
	dir     string // the working directory
	outputs []*output
	bad     error // the first ErrOutput about one output
}

// unusable records err and reports true if it is an ErrOutput.
func (c *capturer) unusable(err error) bool {
	if !errors.Is(err, ErrOutput) {
		return false
	}
	c.bad = cmp.Or(c.bad, err)
	return true
}

// find adds the outputs at paths that exist.
func (c *capturer) find(ctx context.Context, paths []string, declared Kind) error {
	for _, p := range slices.Compact(slices.Sorted(slices.Values(paths))) {
		o, err := c.output(ctx, c.dir, p, declared)
		switch {
		case c.unusable(err):
		case err != nil:
			return err
		case o != nil:
			c.outputs = append(c.outputs, o)
		}
	}
	return nil
}

// addTo adds o to res, and the Tree and Directories of a directory to b.
func (c *capturer) addTo(ctx context.Context, b *cas.Batch, f cas.Function, o *output,
	format repb.Command_OutputDirectoryFormat, res *repb.ActionResult,
) error {
	switch o.entry.kind {
	case File:
		res.OutputFiles = append(res.OutputFiles, &repb.OutputFile{
			Path: o.path, Digest: o.entry.digest.Proto(), IsExecutable: o.entry.exec,
			NodeProperties: o.entry.props.proto(),
		})
	case Directory:
		d, err := c.putTree(ctx, b, f, o.dirs, format)
		if err != nil {
			err = fmt.Errorf("output %+.256q: %w", o.path, err)
			if c.unusable(err) {
				return nil
			}
			return err
		}
		d.Path = o.path
		res.OutputDirectories = append(res.OutputDirectories, d)
	case Symlink:
		link := &repb.OutputSymlink{Path: o.path, Target: o.entry.target, NodeProperties: o.entry.props.proto()}
		res.OutputSymlinks = append(res.OutputSymlinks, link)
		switch o.declared {
		case File:
			res.OutputFileSymlinks = append(res.OutputFileSymlinks, link)
		case Directory:
			res.OutputDirectorySymlinks = append(res.OutputDirectorySymlinks, link)
		}
	}
	return nil
}

// output returns the output that the client spells as spelled, or nil if it does not exist.
func (s *scanner) output(ctx context.Context, dir, spelled string, declared Kind) (*output, error) {
	p, err := resolve(dir, spelled)
	if err != nil {
		return nil, err
	}
	info, err := s.find(p)
	if info == nil || err != nil {
		return nil, err
	}
	if err := s.checkLink(p, spelled, declared, info); err != nil {
		return nil, err
	}
	o := &output{path: spelled, declared: declared, entry: entry{name: path.Base(p)}}
	ok, err := s.fill(&o.entry, s.root, p, p, info)
	switch {
	case err != nil:
		return nil, err
	case !ok:
		return nil, s.errorf("output %+.256q is a %s", spelled, special(info.Mode()))
	case declared != 0 && o.entry.kind != declared && o.entry.kind != Symlink:
		return nil, s.errorf("output %+.256q is a %s, declared as a %s", spelled, o.entry.kind, declared)
	case o.entry.kind == Directory:
		o.dirs, err = s.scan(ctx, p, o.entry.dir)
	case o.entry.kind == File:
		dir := s.dirs[path.Dir(p)]
		if dir == nil {
			dir = &scannedDir{name: path.Dir(p), depth: strings.Count(p, "/")}
			s.dirs[dir.name] = dir
		}
		s.add(dir, &o.entry, info.Size())
	}
	return o, err
}

// checkLink returns an error if a symlink at p, declared as a file or a directory by the fields of API 2.0, leads to
// the other kind (ActionResult, output_file_symlinks). It accepts a symlink that leads out of the exec root, to an
// input or nowhere.
func (s *scanner) checkLink(p, spelled string, declared Kind, info fs.FileInfo) error {
	if declared == 0 || info.Mode().Type() != fs.ModeSymlink {
		return nil
	}
	to, err := s.root.Stat(p)
	switch {
	case err != nil, declared == Directory && to.IsDir(), declared == File && to.Mode().IsRegular():
		return nil
	case to.IsDir():
		return s.errorf("output %+.256q is a symlink to a directory, declared as a file", spelled)
	}
	return s.errorf("output %+.256q is a symlink to a file of another kind, declared as a %s", spelled, declared)
}
