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
	"time"

	"github.com/cloister-build/cloister/cas"
)

// A stager builds one layout in a workspace.
type stager struct {
	store cas.Store
	filer cas.Filer // nil if the store is not one
	bare  bool      // make only planned directories and private inputs
	order uint64    // of the layout
	// readOnly is that of the layout.
	readOnly bool
	out      *os.Root // the exec root, or its upper layer
	in       *os.Root // its lower layer, or nil
	staged   Staged
}

// A stageFile is one name to be created. Directories are created empty. A file with a bind is an empty placeholder if
// the store provides it.
type stageFile struct {
	kind    Kind
	dir     *os.Root
	name    string
	path    string // in the exec root, for messages
	target  string // of a symlink
	mode    fs.FileMode
	modTime time.Time
	content cas.Digest
	bind    int // index of the bind, or -1
}

// A stageTree is a created directory, at path in the exec root, to be filled.
type stageTree struct {
	parent  *os.Root
	upper   *os.Root // gets the same directories, or nil
	name    string
	path    string
	dir     *directory
	private bool
}

// bind adds a bind of e and returns its index.
func (s *stager) bind(target string, e *entry) int {
	s.staged.Binds = append(s.staged.Binds, Bind{Target: target, Content: e.digest})
	s.staged.release = append(s.staged.release, nil)
	return len(s.staged.Binds) - 1
}

// build creates the planned directories and their contents. Their modes and times come last, since every new entry
// changes the modification time of its directory.
func (s *stager) build(ctx context.Context, l *Layout, ws *os.Root) error {
	var err error
	if s.out, err = newDir(ws, "out"); err != nil {
		return err
	}
	defer s.out.Close()
	if l.layered && !s.bare && !l.dirs[0].inOutput {
		if s.in, err = newDir(ws, "in"); err != nil {
			return err
		}
		defer s.in.Close()
		s.staged.Lower = []Lower{{Source: "in"}}
	}
	below := map[string][]*plannedDir{} // the planned directories in each
	for i := range l.dirs {
		if d := &l.dirs[i]; d.path != "." {
			below[path.Dir(d.path)] = append(below[path.Dir(d.path)], d)
		}
	}
	for i := range l.dirs {
		if err := s.plannedDir(ctx, &l.dirs[i], below[l.dirs[i].path]); err != nil {
			return err
		}
	}
	for _, d := range l.dirs {
		err := finish(s.out, d.path, d.mode, d.modTime)
		if err == nil && s.in != nil && !d.inOutput {
			err = finish(s.in, d.path, d.mode, d.modTime)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// newDir creates and opens the directory name in ws.
func newDir(ws *os.Root, name string) (*os.Root, error) {
	if err := ws.Mkdir(name, 0o700); err != nil {
		return nil, err
	}
	return ws.OpenRoot(name)
}

// plannedDir creates the contents of one planned directory, and the planned directories in it, which it leaves empty.
func (s *stager) plannedDir(ctx context.Context, d *plannedDir, below []*plannedDir) error {
	out, err := s.out.OpenRoot(d.path)
	if err != nil {
		return err
	}
	defer out.Close()
	in, upper := out, (*os.Root)(nil)
	if s.in != nil && !d.inOutput {
		if in, err = s.in.OpenRoot(d.path); err != nil {
			return err
		}
		defer in.Close()
		upper = out
	}
	names := make([]stageFile, 0, len(d.entries)+len(below))
	var trees []stageTree
	for _, e := range d.entries {
		p := join(d.path, e.name)
		switch {
		case s.bare && !e.private:
			continue
		case e.private:
			names = append(names, s.entry(e.entry, out, p, true))
			trees = append(trees, stageTree{out, nil, e.name, p, e.dir, true})
		default:
			names = append(names, s.entry(e.entry, in, p, false))
			trees = append(trees, stageTree{in, upper, e.name, p, e.dir, false})
			if upper != nil && e.kind == Directory {
				names = append(names, emptyDir(upper, e.name, p))
			}
		}
	}
	for _, sub := range below {
		name := path.Base(sub.path)
		names = append(names, emptyDir(out, name, sub.path))
		if upper != nil && !sub.inOutput {
			names = append(names, emptyDir(in, name, sub.path))
		}
	}
	if err := s.write(ctx, s.creationOrder(names)); err != nil {
		return err
	}
	for i := range trees {
		if trees[i].dir == nil {
			continue
		}
		if err := s.subtree(ctx, &trees[i]); err != nil {
			return err
		}
	}
	return nil
}

// entry returns e, at p in the exec root, to be created in dir.
func (s *stager) entry(e *entry, dir *os.Root, p string, private bool) stageFile {
	switch {
	case e.kind == Symlink:
		return e.link(dir, p)
	case e.kind == Directory:
		return emptyDir(dir, e.name, p)
	case !private && e.inStore(s.filer != nil):
		f := e.file(dir, e.name, p, false)
		f.bind = s.bind(p, e)
		return f
	}
	return e.file(dir, e.name, p, private)
}

// subtree creates the contents of t, and sets its time and mode. Load has limited the depth of its recursion.
func (s *stager) subtree(ctx context.Context, t *stageTree) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	dir, err := t.parent.OpenRoot(t.name)
	if err != nil {
		return err
	}
	defer dir.Close()
	var upper *os.Root
	if t.upper != nil {
		if upper, err = t.upper.OpenRoot(t.name); err != nil {
			return err
		}
		defer upper.Close()
	}
	names := make([]stageFile, 0, len(t.dir.entries))
	for i := range t.dir.entries {
		e := &t.dir.entries[i]
		at := join(t.path, e.name)
		names = append(names, s.entry(e, dir, at, t.private))
		if upper != nil && e.kind == Directory {
			names = append(names, emptyDir(upper, e.name, at))
		}
	}
	if err := s.write(ctx, s.creationOrder(names)); err != nil {
		return err
	}
	for i := range t.dir.entries {
		if e := &t.dir.entries[i]; e.kind == Directory {
			sub := &stageTree{dir, upper, e.name, join(t.path, e.name), e.dir, t.private}
			if err := s.subtree(ctx, sub); err != nil {
				return err
			}
		}
	}
	mode, modTime := t.dir.mode(t.private), t.dir.props.modTime()
	if s.readOnly {
		mode = t.dir.readOnlyMode()
	}
	if upper != nil {
		if err := finish(upper, ".", mode, modTime); err != nil {
			return err
		}
	}
	return finish(dir, ".", mode, modTime)
}

// file returns the file e, at p in the exec root, to be created as name in dir.
func (e *entry) file(dir *os.Root, name, p string, private bool) stageFile {
	return stageFile{
		kind: File, dir: dir, name: name, path: p,
		mode: e.mode(private), modTime: e.props.modTime(), content: e.digest, bind: -1,
	}
}

// link returns the symlink e, at p in the exec root, to be created in dir.
func (e *entry) link(dir *os.Root, p string) stageFile {
	return stageFile{
		kind: Symlink, dir: dir, name: e.name, path: p, target: e.target, modTime: e.props.modTime(), bind: -1,
	}
}

// emptyDir returns an empty directory. Something is mounted over it, or its attributes are set later.
func emptyDir(dir *os.Root, name, p string) stageFile {
	return stageFile{kind: Directory, dir: dir, name: name, path: p, bind: -1}
}

// write creates names in order, since a directory may list them in creation order, and writes file contents in
// parallel.
func (s *stager) write(ctx context.Context, names []stageFile) error {
	var mu sync.Mutex
	next := 0 // guarded by mu
	return each(ctx, len(names), func(ctx context.Context, _ int) error {
		mu.Lock()
		f := &names[next]
		next++
		w, err := f.create()
		mu.Unlock()
		if err == nil {
			err = s.fill(ctx, f, w)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
		return nil
	})
}

// create creates the name of f. It returns a file open for writing.
func (f *stageFile) create() (*os.File, error) {
	switch f.kind {
	case Symlink:
		return nil, f.dir.Symlink(f.target, f.name)
	case Directory:
		return nil, f.dir.Mkdir(f.name, 0o700)
	}
	return f.dir.OpenFile(f.name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// fill completes f: it sets the time of a link, and writes a file or binds it from the store. It closes w.
func (s *stager) fill(ctx context.Context, f *stageFile, w *os.File) error {
	switch f.kind {
	case Symlink:
		return setLinkTime(f.dir, f.name, f.modTime)
	case Directory:
		return nil
	}
	if f.bind >= 0 {
		b := &s.staged.Binds[f.bind]
		source, release, err := s.filer.File(ctx, b.Content, f.mode&0o111 != 0)
		if err == nil {
			b.Source, s.staged.release[f.bind] = source, release
			return w.Close()
		}
		if !errors.Is(err, cas.ErrFull) {
			return errors.Join(notFound(b.Content, err), w.Close())
		}
		// The store has no room for the file, but may be able to read the blob from elsewhere: copy it.
	}
	err := copyBlob(ctx, s.store, f.content, w)
	if err := errors.Join(err, w.Chmod(f.mode), w.Close()); err != nil {
		return err
	}
	return f.dir.Chtimes(f.name, f.modTime, f.modTime)
}

// finish sets the modification time and the mode of the directory name, in this order, since the mode may deny further
// changes.
func finish(dir *os.Root, name string, mode fs.FileMode, modTime time.Time) error {
	if err := dir.Chtimes(name, modTime, modTime); err != nil {
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
		return notFound(d, err)
	}
	defer r.Close()
	// The limit makes io.Copy allocate a buffer of the blob's size; the extra byte reveals the end.
	_, err = io.Copy(w, io.LimitReader(r, d.Size()+1))
	return err
}
