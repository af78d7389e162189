// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"encoding/binary"
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

// A OutputSpec says which outputs of a run to collect. Paths are relative to Dir, as the client spelled
// them.
type OutputSpec struct {
	Dir   string   // the working directory, relative to the exec root
	Paths []string // output_paths
	// Files and Directories are output_files and output_directories of API 2.0; they count only if
	// Paths is empty (rule 78).
	Files, Directories []string
	Format             repb.Command_OutputDirectoryFormat
	// Properties are output_node_properties, of which NodeProperties lists what there is.
	Properties []string
	// MaxBytes limits what the files of all outputs may have together; zero is no limit.
	MaxBytes int64
}

// An output is one declared output that exists.
type output struct {
	path  string // as the client spelled it
	asked Kind   // what was declared; 0 by output_paths
	entry entry
	dirs  []*directory // of a directory: itself and all below, parents first
}

// Capture adds the outputs of a run to b, which the caller flushes, and sets the output fields of r, sorted
// by path. out is the exec root after the run, the directory out/ of the workspace; every process of the run
// must have ended, since Capture looks before it opens. It makes unreadable files readable and changes
// nothing else. What w.Properties asks for is in the messages of files, directories and symlinks, as the run left it;
// without, two runs that write the same bytes have one result.
//
// What rules 111 to 117 leave to a worker is decided thus. Outputs that do not exist are left out. A
// symlink is returned as it is and never followed; an output behind a symlink that the run put in place
// of a parent directory is ErrOutput. So are a special file declared as an output (inside an output
// directory it is left out), an output that is not of the kind declared, a name or a symlink target
// that is not UTF-8, a tree of more than 1000 levels or with a path of more than 4000 bytes, more than 1,000,000
// entries, a Tree or a Directory too large to be read again (cas.CheckMessage), and files above MaxBytes. A symlink
// declared by the fields of API 2.0 is returned by those fields and by output_symlinks; one that leads to a directory
// where a file is declared, or the other way round, is ErrOutput.
//
// What left says, to a person, is which special files were left out, "" for none.
//
// On an ErrOutput about one output r has the others, since what a failed run left tells why. Other errors
// are those of the store and the file system; on them, and if all outputs together are too large, r is
// unchanged.
func Capture(ctx context.Context, b *cas.Batch, f cas.Function, out *os.Root, w OutputSpec, r *repb.ActionResult,
) (left string, err error) {
	s := &scanner{
		root: out, own: true, want: wanted(w.Properties), limit: cmp.Or(w.MaxBytes, noLimit),
		real: map[string]bool{}, dirs: map[string]*place{}, locked: map[string]fs.FileMode{},
	}
	var outputs []*output
	var bad error // the first ErrOutput about one output
	add := func(paths []string, asked Kind) error {
		for _, p := range slices.Compact(slices.Sorted(slices.Values(paths))) {
			o, err := s.output(ctx, w.Dir, p, asked)
			if errors.Is(err, ErrOutput) {
				bad = cmp.Or(bad, err)
				continue
			}
			if err != nil {
				return err
			}
			if o != nil {
				outputs = append(outputs, o)
			}
		}
		return nil
	}
	if len(w.Paths) > 0 {
		if err := add(w.Paths, 0); err != nil {
			return "", err
		}
	} else {
		if err := add(w.Files, File); err != nil {
			return "", err
		}
		if err := add(w.Directories, Directory); err != nil {
			return "", err
		}
	}
	if err := s.put(ctx, b, f); err != nil {
		return "", err
	}

	var res repb.ActionResult
	for _, o := range outputs {
		switch o.entry.kind {
		case File:
			res.OutputFiles = append(res.OutputFiles, &repb.OutputFile{
				Path: o.path, Digest: o.entry.digest.Proto(), IsExecutable: o.entry.exec,
				NodeProperties: o.entry.own.proto(),
			})
		case Directory:
			d, err := s.putTree(ctx, b, f, o.dirs, w.Format)
			if err != nil {
				err = fmt.Errorf("output %+.256q: %w", o.path, err)
			}
			if errors.Is(err, ErrOutput) {
				bad = cmp.Or(bad, err)
				continue
			}
			if err != nil {
				return "", err
			}
			d.Path = o.path
			res.OutputDirectories = append(res.OutputDirectories, d)
		case Symlink:
			link := &repb.OutputSymlink{Path: o.path, Target: o.entry.target, NodeProperties: o.entry.own.proto()}
			res.OutputSymlinks = append(res.OutputSymlinks, link)
			switch o.asked {
			case File:
				res.OutputFileSymlinks = append(res.OutputFileSymlinks, link)
			case Directory:
				res.OutputDirectorySymlinks = append(res.OutputDirectorySymlinks, link)
			}
		}
	}
	// The files and the directories of API 2.0 are sorted each, but not together.
	slices.SortStableFunc(res.OutputSymlinks, func(a, b *repb.OutputSymlink) int {
		return cmp.Compare(a.Path, b.Path)
	})
	r.OutputFiles, r.OutputDirectories = res.OutputFiles, res.OutputDirectories
	r.OutputSymlinks = res.OutputSymlinks
	r.OutputFileSymlinks, r.OutputDirectorySymlinks = res.OutputFileSymlinks, res.OutputDirectorySymlinks
	return s.left(), bad
}

// output looks at the output that the client calls spelled. It returns nil if there is none.
func (s *scanner) output(ctx context.Context, dir, spelled string, asked Kind) (*output, error) {
	p, err := resolve(dir, spelled)
	if err != nil {
		return nil, err
	}
	info, err := s.find(p)
	if info == nil || err != nil {
		return nil, err
	}
	if err := s.target(p, spelled, asked, info); err != nil {
		return nil, err
	}
	o := &output{path: spelled, asked: asked, entry: entry{name: path.Base(p)}}
	ok, err := s.fill(&o.entry, s.root, p, p, info)
	switch {
	case err != nil:
		return nil, err
	case !ok:
		return nil, s.faultf("output %+.256q is a %s", spelled, special(info.Mode()))
	case asked != 0 && o.entry.kind != asked && o.entry.kind != Symlink:
		return nil, s.faultf("output %+.256q is a %s, declared as a %s", spelled, o.entry.kind, asked)
	case o.entry.kind == Directory:
		o.dirs, err = s.scan(ctx, p, o.entry.dir)
	case o.entry.kind == File:
		dir := s.dirs[path.Dir(p)]
		if dir == nil {
			dir = &place{name: path.Dir(p), depth: strings.Count(p, "/")}
			s.dirs[dir.name] = dir
		}
		s.add(dir, &o.entry, info.Size())
	}
	return o, err
}

// target returns a fault if a symlink at p, declared as a file or a directory by the fields of API 2.0, leads to the
// other (ActionResult, output_file_symlinks). Where it leads out of the exec root, into a bound input or to nothing it
// is taken as it is.
func (s *scanner) target(p, spelled string, asked Kind, info fs.FileInfo) error {
	if asked == 0 || info.Mode().Type() != fs.ModeSymlink {
		return nil
	}
	to, err := s.root.Stat(p)
	switch {
	case err != nil, asked == Directory && to.IsDir(), asked == File && to.Mode().IsRegular():
		return nil
	case to.IsDir():
		return s.faultf("output %+.256q is a symlink to a directory, declared as a file", spelled)
	}
	return s.faultf("output %+.256q is a symlink to what is no %s, as which it is declared", spelled, asked)
}

// putTree adds dirs, parents first, to b in the form that format asks for: as one Tree, as Directories, or
// both. A format that is not known is TREE_ONLY (rule 82).
func (s *scanner) putTree(ctx context.Context, b *cas.Batch, f cas.Function, dirs []*directory,
	format repb.Command_OutputDirectoryFormat,
) (*repb.OutputDirectory, error) {
	blobs, err := encodeAll(f, dirs)
	if err != nil {
		return nil, err
	}
	out := &repb.OutputDirectory{}
	if format == repb.Command_DIRECTORY_ONLY || format == repb.Command_TREE_AND_DIRECTORY {
		out.RootDirectoryDigest = blobs[0].Digest.Proto()
		if err := s.putDirectories(ctx, b, blobs); err != nil {
			return nil, err
		}
	}
	if format != repb.Command_DIRECTORY_ONLY {
		data := encodeTree(blobs)
		if err := s.check(data, &repb.Tree{}); err != nil {
			return nil, err
		}
		d, err := b.AddBytes(ctx, f, data)
		if err != nil {
			return nil, err
		}
		out.TreeDigest, out.IsTopologicallySorted = d.Proto(), true
	}
	return out, nil
}

// encodeTree returns the Tree of the Directories blobs, root first, as the records that
// is_topologically_sorted promises: tag, length, message.
func encodeTree(blobs []cas.Blob) []byte {
	const root, child = 1<<3 | 2, 2<<3 | 2
	var b []byte
	tag := byte(root)
	for _, d := range blobs {
		b = append(b, tag)
		b = binary.AppendUvarint(b, uint64(len(d.Data)))
		b = append(b, d.Data...)
		tag = child
	}
	return b
}
