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
	Binds []Bind
	Form  Form
	Why   string // it is not FormImage, if it is not

	placements []cas.Placement
	release    []func()
	gone       bool
}

// Gone says that nothing is left of the run that had the Binds mounted, neither a process nor a file that it had open:
// another run may then have the mounts that stay. It is called before Release.
func (s *Staged) Gone() { s.gone = true }

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
	if _, ok := store.(cas.Fetcher); ok {
		if err := cas.Fetch(ctx, store, l.contents(bare)); err != nil {
			return nil, err
		}
	}
	s := &stager{store: store, bare: bare, order: l.order, staged: Staged{Form: FormCopy}}
	s.filer, _ = store.(cas.Filer)
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
	order  uint64    // of the layout; unless 0 all names that the run sees are made before any is filled
	in     *os.Root  // in/ of the workspace, unless bare
	staged Staged
}

// A stageFile is one file to be made: with a content, or as the empty placeholder of one. A placeholder
// with a bind is that of a large file, whose path the store is to say.
type stageFile struct {
	dir     *os.Root
	name    string
	path    string // of the exec root, for messages
	mode    fs.FileMode
	date    time.Time  // of its last change
	content cas.Digest // zero: empty
	bind    int        // index of the bind, or -1
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
	if s.order != 0 {
		if err := s.nameSpine(l, out); err != nil {
			return err
		}
	}
	for _, sd := range l.dirs {
		if err := s.spine(ctx, out, sd); err != nil {
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

// spine makes one directory of the spine and all that is in it but other spine.
func (s *stager) spine(ctx context.Context, out *os.Root, sd spineDir) error {
	if sd.path != "." && s.order == 0 {
		if err := out.Mkdir(sd.path, 0o700); err != nil {
			return err
		}
	}
	dir, err := out.OpenRoot(sd.path)
	if err != nil {
		return err
	}
	defer dir.Close()
	var files []stageFile
	for _, e := range sd.entries {
		p := join(sd.path, e.name)
		source := path.Base(e.source)
		switch {
		case e.kind == Symlink:
			err = s.link(dir, e.entry)
		case e.source != "" && s.bare && e.kind == Directory:
			err = s.placeholder(dir, e.name)
		case e.source != "" && s.bare:
			files = append(files, placeholderFile(dir, e.name, p))
		case e.kind == Directory && e.source == "":
			err = s.subtree(ctx, dir, e.name, p, e.dir, true)
		case e.kind == Directory:
			s.bind(p, e.source, e.entry)
			if err = s.placeholder(dir, e.name); err == nil {
				err = s.subtree(ctx, s.in, source, p, e.dir, false)
			}
		case e.source == "":
			files = append(files, e.file(dir, e.name, p, true))
		case s.large(e.entry):
			files = append(files, s.shown(dir, p, e.entry))
		default:
			s.bind(p, e.source, e.entry)
			files = append(files, e.file(s.in, source, p, false), placeholderFile(dir, e.name, p))
		}
		if err != nil {
			return err
		}
	}
	return s.write(ctx, files)
}

// subtree makes the directory d as name in parent, with all below it: to be bound at p of the exec
// root, or private and there already. Its recursion is as deep as the tree, which Load has limited.
func (s *stager) subtree(ctx context.Context, parent *os.Root, name, p string, d *directory, private bool,
) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if s.order == 0 || parent == s.in {
		if err := parent.Mkdir(name, 0o700); err != nil {
			return err
		}
	}
	dir, err := parent.OpenRoot(name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if s.order != 0 {
		if err := s.nameEntries(dir, d); err != nil {
			return err
		}
	}
	files := make([]stageFile, 0, len(d.entries))
	for i := range d.entries {
		e := &d.entries[i]
		at := join(p, e.name)
		switch {
		case e.kind == Symlink:
			err = s.link(dir, e)
		case e.kind == Directory:
			err = s.subtree(ctx, dir, e.name, at, e.dir, private)
		case !private && s.large(e):
			files = append(files, s.shown(dir, at, e))
		default:
			files = append(files, e.file(dir, e.name, at, private))
		}
		if err != nil {
			return err
		}
	}
	if err := s.write(ctx, files); err != nil {
		return err
	}
	return seal(dir, ".", d.mode(private), d.own.date())
}

// file returns the file e of the exec root at p as one to be made as name in dir.
func (e *entry) file(dir *os.Root, name, p string, private bool) stageFile {
	return stageFile{dir, name, p, e.mode(private), e.own.date(), e.digest, -1}
}

// placeholderFile returns an empty file for another to be bound over.
func placeholderFile(dir *os.Root, name, p string) stageFile {
	return stageFile{dir: dir, name: name, path: p, bind: -1}
}

// shown returns the placeholder of the file e at p, which the store is to show.
func (s *stager) shown(dir *os.Root, p string, e *entry) stageFile {
	f := placeholderFile(dir, e.name, p)
	f.mode, f.date, f.bind = e.mode(false), e.own.date(), s.bind(p, "", e)
	return f
}

// link makes the symlink e in dir.
func (s *stager) link(dir *os.Root, e *entry) error {
	if s.order == 0 {
		if err := dir.Symlink(e.target, e.name); err != nil {
			return err
		}
	}
	return dateLink(dir, e.name, e.own.date())
}

// placeholder makes an empty directory for another to be bound over: what it is like itself nobody sees.
func (s *stager) placeholder(dir *os.Root, name string) error {
	if s.order != 0 {
		return nil
	}
	return dir.Mkdir(name, 0o700)
}

// write makes files: their names one after the other, since a directory may list them in the order in which they were
// made, and what is in them some at a time.
func (s *stager) write(ctx context.Context, files []stageFile) error {
	var naming sync.Mutex
	next := 0 // guarded by naming
	return each(ctx, len(files), func(ctx context.Context, _ int) error {
		naming.Lock()
		f := files[next]
		next++
		w, err := s.create(f)
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

// create makes the name of f.
func (s *stager) create(f stageFile) (*os.File, error) {
	flags := os.O_WRONLY | os.O_CREATE
	if s.order == 0 {
		flags |= os.O_EXCL
	}
	return f.dir.OpenFile(f.name, flags, 0o600)
}

// fill writes what is in f, or has the store show it in its place. It closes w.
func (s *stager) fill(ctx context.Context, f stageFile, w *os.File) error {
	if f.content.IsZero() {
		err := w.Close() // a placeholder
		if f.bind >= 0 {
			err = errors.Join(err, s.show(ctx, f))
		}
		return err
	}
	err := copyBlob(ctx, s.store, f.content, w)
	if err := errors.Join(err, w.Chmod(f.mode), w.Close()); err != nil {
		return err
	}
	return f.dir.Chtimes(f.name, f.date, f.date)
}

// show has the store say where the large file is whose placeholder f is.
func (s *stager) show(ctx context.Context, f stageFile) error {
	b := &s.staged.Binds[f.bind]
	source, release, err := s.filer.File(ctx, b.Content, f.mode&0o111 != 0)
	if errors.Is(err, cas.ErrFull) {
		// The store cannot hold the file, but may be able to read the blob elsewhere.
		copied := stageFile{s.in, fmt.Sprintf("large%d", f.bind), f.path, f.mode, f.date, b.Content, -1}
		var w *os.File
		if w, err = s.create(copied); err == nil {
			source, release, err = path.Join("in", copied.name), nil, s.fill(ctx, copied, w)
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
