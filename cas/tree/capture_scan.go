// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/cas"
)

// A scanner reads directories of a file system that nobody changes meanwhile. It follows no symlinks, and opens nothing
// but regular files and directories, after it has checked their type.
type scanner struct {
	root *os.Root
	// ofRun is set for the files of a finished run. Then the scanner makes unreadable files readable, omits special
	// files in directories, and fails with ErrOutput if the API cannot express something. Otherwise the files are a
	// user's: it changes nothing and fails with cas.ErrInvalid.
	ofRun  bool
	wanted propertySet
	limit  int64 // bytes that all files together may have

	batches      []batch
	real         map[string]bool        // parents of outputs that are known not to be links
	unlocked     map[string]fs.FileMode // the original modes of files made readable, by path, if modes are wanted
	pathBytes    int                    // in unlocked
	dirs         map[string]*scannedDir // of outputs that are files, so that those of one directory share batches
	special      []string               // the first maxListed omitted files
	omittedCount int
	entries      int
	bytes        int64
}

// A batch is a set of regular files of one directory whose entries have no digests yet. Batches are small, so that a
// large directory is read in parallel. They grow with the depth of the directory, whose path is resolved for each.
type batch struct {
	dir   *scannedDir
	files []unreadFile
}

// An unreadFile is a file and its size.
type unreadFile struct {
	*entry
	size int64
}

// batchSize is the number of files in a batch of a top-level directory.
const batchSize = 8

// add adds the file e of the directory dir to the batches.
func (s *scanner) add(dir *scannedDir, e *entry, size int64) {
	last := len(s.batches) - 1
	if last < 0 || s.batches[last].dir != dir || len(s.batches[last].files) >= batchSize+dir.depth {
		s.batches = append(s.batches, batch{dir: dir})
		last++
	}
	s.batches[last].files = append(s.batches[last].files, unreadFile{e, size})
}

func (s *scanner) errorf(format string, args ...any) error {
	if s.ofRun {
		return errorf(ErrOutput, format, args...)
	}
	return errorf(cas.ErrInvalid, format, args...)
}

// find returns the file at p, or nil. A symlink on the way is an error: it may lead to an input or another output,
// which is not the output that was declared.
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
			return nil, s.errorf("%+.256q lies behind the symlink %+.256q", p, p[:i])
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

// unlock makes the file or directory name in dir, at the path p, readable if it is the run's (rule 116).
func (s *scanner) unlock(dir *os.Root, name, p string, info fs.FileInfo) error {
	need := fs.FileMode(0o400)
	if info.IsDir() {
		need = 0o500
	}
	if !s.ofRun || info.Mode()&need == need {
		return nil
	}
	// The first mode counts: an output within another is scanned twice.
	if _, again := s.unlocked[p]; s.wanted.mode && !again && s.pathBytes < maxPathBytes {
		s.unlocked[p] = info.Mode()
		s.pathBytes += len(p)
	}
	return dir.Chmod(name, info.Mode().Perm()|need)
}

// fill sets e to the file, directory or symlink name in dir, which is at the path p and has info. It reports false for
// anything else. It reads neither directories nor files.
func (s *scanner) fill(e *entry, dir *os.Root, name, p string, info fs.FileInfo) (ok bool, err error) {
	if s.entries++; s.entries > maxEntries {
		return false, s.errorf("%+.256q exceeds the limit of %d entries in all outputs", p, maxEntries)
	}
	mode, ok := s.unlocked[p]
	if !ok {
		mode = info.Mode()
	}
	props := s.wanted.of(info, mode)
	switch info.Mode().Type() {
	case 0:
		e.kind, e.exec, e.props = File, info.Mode()&0o111 != 0, props
		if info.Size() > s.limit-s.bytes {
			return false, s.errorf("%+.256q exceeds the limit of %d bytes in all outputs", p, s.limit)
		}
		s.bytes += info.Size()
		return true, s.unlock(dir, name, p, info)
	case fs.ModeDir:
		e.kind, e.dir = Directory, &directory{props: props}
		return true, s.unlock(dir, name, p, info)
	case fs.ModeSymlink:
		e.kind, e.props = Symlink, props
		if e.target, err = dir.Readlink(name); err != nil {
			return false, err
		}
		if !utf8.ValidString(e.target) {
			return false, s.errorf("symlink %+.256q has the target %+.256q, which is not UTF-8", p, e.target)
		}
		return true, nil
	}
	return false, nil
}

// A scannedDir is the path of a scanned directory. Paths share their parents, since a run may nest directories so deep
// that separate paths would exhaust memory.
type scannedDir struct {
	parent *scannedDir // nil for the first
	name   string      // a path for the first
	depth  int
}

// path returns the path relative to the root of the scanner.
func (p *scannedDir) path() string {
	if p.parent == nil {
		return p.name
	}
	return join(p.parent.path(), p.name)
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
	err = s.below(ctx, dir, &scannedDir{name: p}, top, &all)
	return all, err
}

// below reads dir and everything below it into d, and appends all directories to all. maxDepth limits its recursion.
func (s *scanner) below(ctx context.Context, dir *os.Root, at *scannedDir, d *directory, all *[]*directory) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	p := at.path()
	switch {
	case at.depth > maxDepth:
		return s.errorf("%+.64q... is deeper than %d directories", p, maxDepth)
	case len(p) > maxPath:
		return s.errorf("%+.64q... is longer than %d bytes", p, maxPath)
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
		err = s.below(ctx, sub, &scannedDir{at, e.name, at.depth + 1}, e.dir, all)
		sub.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// level reads dir, whose path is p, into d, but not its subdirectories.
func (s *scanner) level(dir *os.Root, at *scannedDir, p string, d *directory) error {
	names, err := list(dir)
	if err != nil {
		return err
	}
	d.entries = make([]entry, 0, len(names)) // never grows, since batches point into it
	for _, name := range names {
		p := join(p, name)
		if !utf8.ValidString(name) {
			return s.errorf("%+.256q is not UTF-8", p)
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
		case !ok && !s.ofRun:
			return s.errorf("%+.256q is a %s, which cannot be an input", p, special(info.Mode()))
		case !ok:
			d.entries = d.entries[:len(d.entries)-1]
			s.omit(p, info)
		case e.kind == File:
			s.add(at, e, info.Size())
		}
	}
	return nil
}

// maxListed is the number of omitted files that are listed to the user.
const maxListed = 3

// omit records that the special file at p is omitted.
func (s *scanner) omit(p string, info fs.FileInfo) {
	if s.omittedCount++; s.omittedCount <= maxListed {
		s.special = append(s.special, fmt.Sprintf("the %s %+.256q", special(info.Mode()), p))
	}
}

// omitted lists the omitted files.
func (s *scanner) omitted() string {
	text := strings.Join(s.special, ", ")
	if more := s.omittedCount - len(s.special); more > 0 {
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

// special returns the noun for a file that is not a regular file, directory or symlink.
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
