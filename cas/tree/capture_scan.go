// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"

	repb "github.com/bazelbuild/remote-apis/build/bazel/remote/execution/v2"
	"google.golang.org/protobuf/proto"
)

// A scanner reads directories of a file system that nobody changes meanwhile. It follows no symlink and
// opens nothing but regular files and directories, after it has seen what they are.
type scanner struct {
	root *os.Root
	// own says that the files are a finished run's: what cannot be read is made readable, special
	// files in directories are left out, and what cannot be expressed is ErrOutput. Otherwise they
	// are a person's: nothing is changed, and what cannot be expressed is cas.ErrInvalid.
	own   bool
	want  want  // node properties that what is found is to have
	limit int64 // bytes that all files together may have

	batches []batch
	real    map[string]bool        // the parents of outputs that are no links
	locked  map[string]fs.FileMode // what was not readable, by path: the mode that it had, if that is wanted
	paths   int                    // bytes in locked
	dirs    map[string]*place      // of outputs that are files, so that those of one directory are read together
	special []string               // what was left out, the first maxTold
	skipped int                    // how many were
	entries int
	bytes   int64
}

// A batch is some regular files of one directory, of which the entries have no digests yet. It is small,
// so that a directory of many files is read by many at a time, and the larger the deeper the directory is, since it
// is walked to for each.
type batch struct {
	dir   *place
	files []unread
}

// An unread is a file and its size.
type unread struct {
	*entry
	size int64
}

const (
	batchSize = 8 // of a directory at the top
	// smallFile is the size, in bytes, up to which a file is read at once and stored with others.
	smallFile = 64 << 10
)

// add leaves the file e of the directory dir to be stored.
func (s *scanner) add(dir *place, e *entry, size int64) {
	last := len(s.batches) - 1
	if last < 0 || s.batches[last].dir != dir || len(s.batches[last].files) >= batchSize+dir.depth {
		s.batches = append(s.batches, batch{dir: dir})
		last++
	}
	s.batches[last].files = append(s.batches[last].files, unread{e, size})
}

func (s *scanner) faultf(format string, args ...any) error {
	if s.own {
		return faultf(ErrOutput, format, args...)
	}
	return faultf(cas.ErrInvalid, format, args...)
}

// find returns what is at p, or nil if nothing is. A symlink on the way to p is a fault: it may lead
// to an input or to another output, so that what lies behind it is not what was asked for.
func (s *scanner) find(p string) (fs.FileInfo, error) {
	for i, c := range p {
		if c != '/' || s.real[p[:i]] {
			continue
		}
		info, err := s.lstat(p[:i])
		if info == nil || err != nil {
			return nil, err
		}
		switch {
		case info.Mode().Type() == fs.ModeSymlink:
			return nil, s.faultf("%+.256q lies behind the symlink %+.256q", p, p[:i])
		case !info.IsDir():
			return nil, nil
		}
		if err := s.unlock(s.root, p[:i], p[:i], info); err != nil {
			return nil, err
		}
		s.real[p[:i]] = true
	}
	return s.lstat(p)
}

// lstat returns nil if nothing is at p.
func (s *scanner) lstat(p string) (fs.FileInfo, error) {
	info, err := s.root.Lstat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return info, err
}

// unlock makes the file or directory name in dir, which is at p, readable if it is the run's and is not (rule 116).
func (s *scanner) unlock(dir *os.Root, name, p string, info fs.FileInfo) error {
	need := fs.FileMode(0o400)
	if info.IsDir() {
		need = 0o500
	}
	if !s.own || info.Mode()&need == need {
		return nil
	}
	// An output within another is looked at twice.
	if _, again := s.locked[p]; s.want.mode && !again && s.paths < maxSpineBytes {
		s.locked[p] = info.Mode()
		s.paths += len(p)
	}
	return dir.Chmod(name, info.Mode().Perm()|need)
}

// fill sets e to the file, directory or symlink name in dir, which is at p and which info describes, and
// reports whether it is one of these. What is in a directory and in a file is left to be read.
func (s *scanner) fill(e *entry, dir *os.Root, name, p string, info fs.FileInfo) (ok bool, err error) {
	if s.entries++; s.entries > maxEntries {
		return false, s.faultf("%+.256q is one too many: only %d entries are permitted altogether", p, maxEntries)
	}
	mode, ok := s.locked[p] // before another output that it belongs to was read
	if !ok {
		mode = info.Mode()
	}
	own := s.want.of(info, mode)
	switch info.Mode().Type() {
	case 0:
		e.kind, e.exec, e.own = File, info.Mode()&0o111 != 0, own
		if info.Size() > s.limit-s.bytes {
			return false, s.faultf("%+.256q is too large: only %d bytes are permitted altogether", p, s.limit)
		}
		s.bytes += info.Size()
		return true, s.unlock(dir, name, p, info)
	case fs.ModeDir:
		e.kind, e.dir = Directory, &directory{own: own}
		return true, s.unlock(dir, name, p, info)
	case fs.ModeSymlink:
		e.kind, e.own = Symlink, own
		if e.target, err = dir.Readlink(name); err != nil {
			return false, err
		}
		if !utf8.ValidString(e.target) {
			return false, s.faultf("symlink %+.256q has the target %+.256q, which is not UTF-8", p, e.target)
		}
		return true, nil
	}
	return false, nil
}

// A place is a directory that was scanned. Places share what is above them, since a run may nest directories so deep
// that the paths of all would fill any memory.
type place struct {
	above *place // nil of the first
	name  string // a path, of the first
	depth int
}

// path returns where p is, relative to the root of the scanner.
func (p *place) path() string {
	if p.above == nil {
		return p.name
	}
	return join(p.above.path(), p.name)
}

// scan reads the directory at p into top and returns top and all directories below it, parents first. It keeps one
// directory open for each level.
func (s *scanner) scan(ctx context.Context, p string, top *directory) ([]*directory, error) {
	dir, err := s.root.OpenRoot(p)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var all []*directory
	err = s.below(ctx, dir, &place{name: p}, top, &all)
	return all, err
}

// below reads dir, which is at, into d, and what is below it, and adds all directories to all. Its recursion is as deep
// as is permitted.
func (s *scanner) below(ctx context.Context, dir *os.Root, at *place, d *directory, all *[]*directory) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p := at.path()
	switch {
	case at.depth > maxDepth:
		return s.faultf("%+.64q... is deeper than %d directories", p, maxDepth)
	case len(p) > maxPath:
		return s.faultf("%+.64q... is longer than %d bytes", p, maxPath)
	}
	*all = append(*all, d)
	if err := s.level(dir, at, p, d); err != nil {
		return err
	}
	for i := range d.entries {
		e := &d.entries[i]
		if e.kind != Directory {
			continue
		}
		sub, err := dir.OpenRoot(e.name)
		if err != nil {
			return err
		}
		err = s.below(ctx, sub, &place{at, e.name, at.depth + 1}, e.dir, all)
		sub.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// level reads dir, which is at, at the path p, into d, but not what is in its subdirectories.
func (s *scanner) level(dir *os.Root, at *place, p string, d *directory) error {
	names, err := list(dir)
	if err != nil {
		return err
	}
	d.entries = make([]entry, 0, len(names)) // never grows, since batches point into it
	for _, name := range names {
		p := join(p, name)
		if !utf8.ValidString(name) {
			return s.faultf("%+.256q is not UTF-8, which names must be", p)
		}
		info, err := dir.Lstat(name)
		if err != nil {
			return err
		}
		d.entries = append(d.entries, entry{name: name})
		e := &d.entries[len(d.entries)-1]
		ok, err := s.fill(e, dir, name, p, info)
		switch {
		case err != nil:
			return err
		case !ok && !s.own:
			return s.faultf("%+.256q is a %s, which cannot be an input", p, special(info.Mode()))
		case !ok:
			d.entries = d.entries[:len(d.entries)-1]
			s.skip(p, info)
		case e.kind == File:
			s.add(at, e, info.Size())
		}
	}
	return nil
}

// maxTold is how many special files a person is told of.
const maxTold = 3

// skip notes that the special file at p is left out.
func (s *scanner) skip(p string, info fs.FileInfo) {
	if s.skipped++; s.skipped <= maxTold {
		s.special = append(s.special, fmt.Sprintf("the %s %+.256q", special(info.Mode()), p))
	}
}

// left says what was left out.
func (s *scanner) left() string {
	text := strings.Join(s.special, ", ")
	if more := s.skipped - len(s.special); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// list returns the names in dir, sorted.
func list(dir *os.Root) ([]string, error) {
	d, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// put adds every file found to b and gives its entry the digest.
func (s *scanner) put(ctx context.Context, b *cas.Batch, f cas.Function) error {
	return each(ctx, len(s.batches), func(ctx context.Context, i int) error {
		some := s.batches[i]
		p := some.dir.path()
		dir, err := s.root.OpenRoot(p)
		if err != nil {
			return err
		}
		defer dir.Close()
		for _, u := range some.files {
			if err := putFile(ctx, b, f, dir, u); err != nil {
				return fmt.Errorf("put %+.256q: %w", join(p, u.name), err)
			}
		}
		return nil
	})
}

func putFile(ctx context.Context, b *cas.Batch, f cas.Function, dir *os.Root, u unread) error {
	if u.size == 0 {
		u.digest = f.Sum(nil)
		return nil
	}
	file, err := dir.Open(u.name)
	if err != nil {
		return err
	}
	defer file.Close()
	if u.size > smallFile {
		u.digest, err = b.AddSeeker(ctx, f, &reader{ctx, file})
		return err
	}
	data := make([]byte, u.size)
	if _, err := io.ReadFull(file, data); err != nil {
		return err
	}
	u.digest, err = b.AddBytes(ctx, f, data)
	return err
}

// A reader reads a file until its context ends: even a small disk holds files with holes that would
// take days to read.
type reader struct {
	ctx  context.Context
	file *os.File
}

func (r *reader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.file.Read(p)
}

func (r *reader) Seek(offset int64, whence int) (int64, error) { return r.file.Seek(offset, whence) }

// special returns the word for a file that is no file, directory or symlink.
func special(m fs.FileMode) string {
	switch {
	case m&fs.ModeNamedPipe != 0:
		return "named pipe"
	case m&fs.ModeSocket != 0:
		return "socket"
	case m&fs.ModeDevice != 0:
		return "device"
	}
	return "special file"
}

// encodeAll encodes dirs, which come parents first and whose files have digests. It returns the blobs
// in that order too, but each once: after its last parent.
func encodeAll(f cas.Function, dirs []*directory) ([]cas.Blob, error) {
	var blobs []cas.Blob
	seen := map[cas.Digest]bool{}
	for _, d := range slices.Backward(dirs) {
		b, err := d.encode(f)
		if err != nil {
			return nil, err
		}
		if !seen[b.Digest] {
			seen[b.Digest] = true
			blobs = append(blobs, b)
		}
	}
	slices.Reverse(blobs)
	return blobs, nil
}

// putDirectories adds blobs, which are Directories, to b, unless one is too large to be read again.
func (s *scanner) putDirectories(ctx context.Context, b *cas.Batch, blobs []cas.Blob) error {
	for _, d := range blobs {
		if err := s.check(d.Data, &repb.Directory{}); err != nil {
			return err
		}
	}
	for _, d := range blobs {
		if err := b.Add(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// check returns a fault if b, the encoding of a message of m's type, is too large to be read again.
func (s *scanner) check(b []byte, m proto.Message) error {
	if err := cas.CheckMessage(b, m); err != nil {
		return s.faultf("too many entries: %v", err)
	}
	return nil
}

// Ingest stores the directory dir as an input root and returns its digest. Symlinks are kept as they
// are, even if they dangle. A special file, a name that is not UTF-8, or more than 1,000,000 entries are
// cas.ErrInvalid. Nobody may change dir meanwhile.
func Ingest(ctx context.Context, store cas.Store, f cas.Function, dir *os.Root) (cas.Digest, error) {
	s := &scanner{root: dir, limit: noLimit}
	dirs, err := s.scan(ctx, ".", &directory{})
	if err != nil {
		return cas.Digest{}, err
	}
	b := cas.NewBatch(store)
	if err := s.put(ctx, b, f); err != nil {
		return cas.Digest{}, err
	}
	blobs, err := encodeAll(f, dirs)
	if err != nil {
		return cas.Digest{}, err
	}
	if err := s.putDirectories(ctx, b, blobs); err != nil {
		return cas.Digest{}, err
	}
	return dirs[0].digest, b.Flush(ctx)
}
