// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"sync"
	"syscall"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// LargeFile is the size, in bytes, from which an input file is bound where the store has it, if the
// store is a cas.Filer with room for it, instead of being copied into the workspace. One with a mode or a date of its
// own is copied, since the store's file has neither.
const LargeFile = 64 << 10

// A Bind is a file or a directory that must be mounted read-only for the exec root to be complete.
type Bind struct {
	Target  string     // relative to the exec root, where an empty placeholder of its kind is
	Source  string     // relative to the workspace or the image's root, or an absolute path of the host
	Image   string     // the Mount that has the source, or ""
	Content cas.Digest // of the file or the Directory
}

// A Staged is an exec root that is ready but for its Binds.
type Staged struct {
	// Binds are in the order in which they must be mounted: one inside another follows it.
	Binds      []Bind
	Form       Form
	CopyReason string // it is not FormImage, if it is not

	placements []cas.Location
	release    []func()
	gone       bool
}

// AllowReuse says that nothing is left of the run that had the Binds mounted, neither a process nor a file that it had open:
// another run may then have the mounts that stay. It is called before Release.
func (s *Staged) AllowReuse() { s.gone = true }

// Valid reports whether what images say of where files are has held so far. It does not if somebody has written to the
// store's files, so that the run may have read what is no input of its. It is asked before Release.
func (s *Staged) Valid() bool {
	for _, p := range s.placements {
		if !p.Valid() {
			return false
		}
	}
	return true
}

// Release gives back the images and the files of the store that Binds refer to, after no run has them mounted any more.
// It leaves the workspace as it is. It may be called again, but not concurrently.
func (s *Staged) Release() {
	for _, release := range s.release {
		if release != nil {
			release()
		}
	}
	s.release = nil
}

// Stage builds l in the empty workspace ws: the exec root as out/, what is to be bound into it as in/.
// The caller calls Release on what it returns, and empties the workspace whether it fails or not. It
// keeps one directory open for each level of the tree. It fails with a *MissingError if a blob has
// vanished since Load, with cas.ErrFull if the workspace is full.
func (l *Layout) Stage(ctx context.Context, store cas.Store, ws *os.Root) (*Staged, error) {
	return l.build(ctx, store, ws, false)
}

// build builds l, or, if bare, the spine alone with a placeholder for each of what is bound into it.
func (l *Layout) build(ctx context.Context, store cas.Store, ws *os.Root, bare bool) (*Staged, error) {
	if _, ok := cas.As[cas.Fetcher](store); ok {
		if err := cas.Fetch(ctx, store, l.contents(bare)); err != nil {
			return nil, err
		}
	}
	s := &stager{store: store, bare: bare, order: l.order, staged: Staged{Form: FormCopy}}
	s.filer, _ = cas.As[cas.Filer](store)
	if err := s.build(ctx, l, ws); err != nil {
		s.staged.Release()
		return nil, full(err)
	}
	return &s.staged, nil
}

// full returns err, as cas.ErrFull if it says that the workspace is.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = fmt.Errorf("%w: %w", cas.ErrFull, err)
	}
	return err
}

// contents returns the digests of all files of l, or of those that are private, each once.
func (l *Layout) contents(private bool) []cas.Digest {
	var ds []cas.Digest
	seen := map[cas.Digest]bool{}
	add := func(e *entry) {
		if e.kind == File && !seen[e.digest] {
			seen[e.digest] = true
			ds = append(ds, e.digest)
		}
	}
	walked := map[*directory]bool{}
	var walk func(d *directory)
	walk = func(d *directory) {
		if walked[d] {
			return
		}
		walked[d] = true
		for i := range d.entries {
			add(&d.entries[i])
			if d.entries[i].kind == Directory {
				walk(d.entries[i].dir)
			}
		}
	}
	for _, sd := range l.dirs {
		for _, e := range sd.entries {
			if private && e.source != "" {
				continue
			}
			add(e.entry)
			if e.kind == Directory {
				walk(e.dir)
			}
		}
	}
	return ds
}

type stager struct {
	store  cas.Store
	filer  cas.Filer // nil if the store is none
	bare   bool      // of what is bound, only placeholders are made
	order  uint64    // of the layout
	in     *os.Root  // in/ of the workspace, unless bare
	staged Staged
}

// A stageFile is one name to be made. A file has a content, or is the empty placeholder of one; a placeholder with a
// bind is that of a large file, whose path the store is to say. A directory is made empty.
type stageFile struct {
	kind    Kind
	dir     *os.Root
	name    string
	path    string // of the exec root, for messages
	target  string // of a symlink
	mode    fs.FileMode
	date    time.Time  // of its last change
	content cas.Digest // zero: empty
	bind    int        // index of the bind, or -1
}

// A stageTree is a directory that is made, and what is to be in it: to be bound at path of the exec root, or private and
// there already.
type stageTree struct {
	parent  *os.Root
	name    string
	path    string
	dir     *directory
	private bool
}

// bind adds a bind and returns its index.
func (s *stager) bind(target, source string, e *entry) int {
	s.staged.Binds = append(s.staged.Binds, Bind{Target: target, Source: source, Content: e.digest})
	s.staged.release = append(s.staged.release, nil)
	return len(s.staged.Binds) - 1
}

// large reports whether e is bound where the store has it.
func (s *stager) large(e *entry) bool {
	return s.filer != nil && e.digest.Size() >= LargeFile && !e.special()
}

// build makes the spine and what is in it. Modes and times of the spine come last, since a directory is
// dated anew by each directory made in it.
func (s *stager) build(ctx context.Context, l *Layout, ws *os.Root) error {
	if err := ws.Mkdir("out", 0o700); err != nil {
		return err
	}
	out, err := ws.OpenRoot("out")
	if err != nil {
		return err
	}
	defer out.Close()
	if !s.bare {
		if err := ws.Mkdir("in", 0o700); err != nil {
			return err
		}
		if s.in, err = ws.OpenRoot("in"); err != nil {
			return err
		}
		defer s.in.Close()
	}
	below := map[string][]string{} // the spine's directories in each of it
	for _, sd := range l.dirs {
		if sd.path != "." {
			parent := path.Dir(sd.path)
			below[parent] = append(below[parent], path.Base(sd.path))
		}
	}
	for _, sd := range l.dirs {
		if err := s.spine(ctx, out, sd, below[sd.path]); err != nil {
			return err
		}
	}
	for _, sd := range l.dirs {
		if err := seal(out, sd.path, sd.mode, sd.date); err != nil {
			return err
		}
	}
	if s.bare {
		return nil
	}
	return seal(ws, "in", modeSpine, epoch)
}

// spine makes what is in one directory of the spine; of those of the spine itself, which are below it, the names.
func (s *stager) spine(ctx context.Context, out *os.Root, sd spineDir, below []string) error {
	dir, err := out.OpenRoot(sd.path)
	if err != nil {
		return err
	}
	defer dir.Close()
	names := make([]stageFile, 0, len(sd.entries)+len(below))
	var sources []stageFile
	var trees []stageTree
	for _, e := range sd.entries {
		p := join(sd.path, e.name)
		source := path.Base(e.source)
		f := placeholder(e.kind, dir, e.name, p)
		switch {
		case e.kind == Symlink:
			f = e.link(dir, p)
		case e.source != "" && s.bare:
		case e.kind == Directory && e.source == "":
			trees = append(trees, stageTree{dir, e.name, p, e.dir, true})
		case e.kind == Directory:
			s.bind(p, e.source, e.entry)
			sources = append(sources, placeholder(Directory, s.in, source, p))
			trees = append(trees, stageTree{s.in, source, p, e.dir, false})
		case e.source == "":
			f = e.file(dir, e.name, p, true)
		case s.large(e.entry):
			f = s.shown(dir, p, e.entry)
		default:
			s.bind(p, e.source, e.entry)
			sources = append(sources, e.file(s.in, source, p, false))
		}
		names = append(names, f)
	}
	for _, name := range below {
		names = append(names, placeholder(Directory, dir, name, join(sd.path, name)))
	}
	if err := s.write(ctx, append(s.inOrder(names), sources...)); err != nil {
		return err
	}
	for i := range trees {
		if err := s.subtree(ctx, &trees[i]); err != nil {
			return err
		}
	}
	return nil
}

// subtree makes what is in t, and gives it its date and mode. Its recursion is as deep as the tree, which Load has limited.
func (s *stager) subtree(ctx context.Context, t *stageTree) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	dir, err := t.parent.OpenRoot(t.name)
	if err != nil {
		return err
	}
	defer dir.Close()
	names := make([]stageFile, 0, len(t.dir.entries))
	for i := range t.dir.entries {
		e := &t.dir.entries[i]
		at := join(t.path, e.name)
		switch {
		case e.kind == Symlink:
			names = append(names, e.link(dir, at))
		case e.kind == Directory:
			names = append(names, placeholder(Directory, dir, e.name, at))
		case !t.private && s.large(e):
			names = append(names, s.shown(dir, at, e))
		default:
			names = append(names, e.file(dir, e.name, at, t.private))
		}
	}
	if err := s.write(ctx, s.inOrder(names)); err != nil {
		return err
	}
	for i := range t.dir.entries {
		if e := &t.dir.entries[i]; e.kind == Directory {
			if err := s.subtree(ctx, &stageTree{dir, e.name, join(t.path, e.name), e.dir, t.private}); err != nil {
				return err
			}
		}
	}
	return seal(dir, ".", t.dir.mode(t.private), t.dir.own.date())
}

// file returns the file e of the exec root at p as one to be made as name in dir.
func (e *entry) file(dir *os.Root, name, p string, private bool) stageFile {
	return stageFile{kind: File, dir: dir, name: name, path: p, mode: e.mode(private), date: e.own.date(), content: e.digest, bind: -1}
}

// link returns the symlink e of the exec root at p as one to be made in dir.
func (e *entry) link(dir *os.Root, p string) stageFile {
	return stageFile{kind: Symlink, dir: dir, name: e.name, path: p, target: e.target, date: e.own.date(), bind: -1}
}

// placeholder returns an empty file or directory, for another to be bound over or for what is made in it later: what it is
// like itself nobody sees.
func placeholder(kind Kind, dir *os.Root, name, p string) stageFile {
	return stageFile{kind: kind, dir: dir, name: name, path: p, bind: -1}
}

// shown returns the placeholder of the file e at p, which the store is to show.
func (s *stager) shown(dir *os.Root, p string, e *entry) stageFile {
	f := placeholder(File, dir, e.name, p)
	f.mode, f.date, f.bind = e.mode(false), e.own.date(), s.bind(p, "", e)
	return f
}

// write makes names one after the other, since a directory may list them in the order in which they were made, and what
// is in files some at a time.
func (s *stager) write(ctx context.Context, names []stageFile) error {
	var naming sync.Mutex
	next := 0 // guarded by naming
	return each(ctx, len(names), func(ctx context.Context, _ int) error {
		naming.Lock()
		f := &names[next]
		next++
		w, err := f.create()
		naming.Unlock()
		if err == nil {
			err = s.fill(ctx, f, w)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		return nil
	})
}

// create makes the name of f, and returns a file open.
func (f *stageFile) create() (*os.File, error) {
	switch f.kind {
	case Symlink:
		return nil, f.dir.Symlink(f.target, f.name)
	case Directory:
		return nil, f.dir.Mkdir(f.name, 0o700)
	}
	return f.dir.OpenFile(f.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// fill does the rest for f: it dates a link, writes what is in a file, or has the store show it in its place. It closes w.
func (s *stager) fill(ctx context.Context, f *stageFile, w *os.File) error {
	switch {
	case f.kind == Symlink:
		return dateLink(f.dir, f.name, f.date)
	case f.kind == Directory:
		return nil
	case f.bind >= 0:
		return errors.Join(w.Close(), s.show(ctx, f))
	case f.content.IsZero():
		return w.Close() // a placeholder
	}
	err := copyBlob(ctx, s.store, f.content, w)
	if err := errors.Join(err, w.Chmod(f.mode), w.Close()); err != nil {
		return err
	}
	return f.dir.Chtimes(f.name, f.date, f.date)
}

// show has the store say where the large file is whose placeholder f is.
func (s *stager) show(ctx context.Context, f *stageFile) error {
	b := &s.staged.Binds[f.bind]
	source, release, err := s.filer.File(ctx, b.Content, f.mode&0o111 != 0)
	if errors.Is(err, cas.ErrFull) {
		// The store cannot hold the file, but may be able to read the blob elsewhere.
		copied := stageFile{kind: File, dir: s.in, name: fmt.Sprintf("large%d", f.bind), path: f.path, mode: f.mode, date: f.date, content: b.Content, bind: -1}
		var w *os.File
		if w, err = copied.create(); err == nil {
			source, release, err = path.Join("in", copied.name), nil, s.fill(ctx, &copied, w)
		}
	}
	if err != nil {
		return vanished(b.Content, err)
	}
	b.Source, s.staged.release[f.bind] = source, release
	return nil
}

// seal gives the directory name the date and the mode it is to have: in this order, since the mode may be one that
// permits us nothing more.
func seal(dir *os.Root, name string, mode fs.FileMode, date time.Time) error {
	if err := dir.Chtimes(name, date, date); err != nil {
		return err
	}
	return dir.Chmod(name, mode)
}

// copyBlob writes the blob d to w.
func copyBlob(ctx context.Context, store cas.Store, d cas.Digest, w io.Writer) error {
	if d.IsEmpty() {
		return nil
	}
	r, err := store.Open(ctx, d, 0)
	if err != nil {
		return vanished(d, err)
	}
	defer r.Close()
	// The limit lets io.Copy take a buffer of the blob's size; one byte more shows the end.
	_, err = io.Copy(w, io.LimitReader(r, d.Size()+1))
	return err
}

// vanished returns err, or, if it says that d is absent, the *MissingError of d.
func vanished(d cas.Digest, err error) error {
	if errors.Is(err, cas.ErrNotFound) {
		return &MissingError{Blobs: []cas.Digest{d}}
	}
	return err
}
