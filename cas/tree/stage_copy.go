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
	store  cas.Store
	filer  cas.Filer // nil if the store is not one
	bare   bool      // make only placeholders of bound inputs
	order  uint64    // of the layout
	in     *os.Root  // in/ of the workspace, unless bare
	staged Staged
}

// A stageFile is one name to be created. Directories are created empty. A file without content is an empty placeholder;
// with a bind, it is the placeholder of a large file that the store provides.
type stageFile struct {
	kind    Kind
	dir     *os.Root
	name    string
	path    string // in the exec root, for messages
	target  string // of a symlink
	mode    fs.FileMode
	modTime time.Time
	content cas.Digest // zero for a placeholder
	bind    int        // index of the bind, or -1
}

// A stageTree is a created directory to be filled: one to be bound at path in the exec root, or a private one that is
// already there.
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

// build creates the writable directories and their contents. Their modes and times come last, since every new entry
// changes the modification time of its directory.
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
	below := map[string][]string{} // the names of the writable directories in each
	for _, d := range l.dirs {
		if d.path != "." {
			parent := path.Dir(d.path)
			below[parent] = append(below[parent], path.Base(d.path))
		}
	}
	for _, d := range l.dirs {
		if err := s.writableDir(ctx, out, d, below[d.path]); err != nil {
			return err
		}
	}
	for _, d := range l.dirs {
		if err := finish(out, d.path, d.mode, d.modTime); err != nil {
			return err
		}
	}
	if s.bare {
		return nil
	}
	return finish(ws, "in", modeParent, epoch)
}

// writableDir creates the contents of one writable directory. below are the names of the writable directories in it,
// which it creates empty.
func (s *stager) writableDir(ctx context.Context, out *os.Root, d writableDir, below []string) error {
	dir, err := out.OpenRoot(d.path)
	if err != nil {
		return err
	}
	defer dir.Close()
	names := make([]stageFile, 0, len(d.entries)+len(below))
	var sources []stageFile
	var trees []stageTree
	for _, e := range d.entries {
		p := join(d.path, e.name)
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
		case e.inStore(s.filer != nil):
			f = s.storeFile(dir, p, e.entry)
		default:
			s.bind(p, e.source, e.entry)
			sources = append(sources, e.file(s.in, source, p, false))
		}
		names = append(names, f)
	}
	for _, name := range below {
		names = append(names, placeholder(Directory, dir, name, join(d.path, name)))
	}
	if err := s.write(ctx, append(s.creationOrder(names), sources...)); err != nil {
		return err
	}
	for i := range trees {
		if err := s.subtree(ctx, &trees[i]); err != nil {
			return err
		}
	}
	return nil
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
	names := make([]stageFile, 0, len(t.dir.entries))
	for i := range t.dir.entries {
		e := &t.dir.entries[i]
		at := join(t.path, e.name)
		switch {
		case e.kind == Symlink:
			names = append(names, e.link(dir, at))
		case e.kind == Directory:
			names = append(names, placeholder(Directory, dir, e.name, at))
		case !t.private && e.inStore(s.filer != nil):
			names = append(names, s.storeFile(dir, at, e))
		default:
			names = append(names, e.file(dir, e.name, at, t.private))
		}
	}
	if err := s.write(ctx, s.creationOrder(names)); err != nil {
		return err
	}
	for i := range t.dir.entries {
		if e := &t.dir.entries[i]; e.kind == Directory {
			if err := s.subtree(ctx, &stageTree{dir, e.name, join(t.path, e.name), e.dir, t.private}); err != nil {
				return err
			}
		}
	}
	return finish(dir, ".", t.dir.mode(t.private), t.dir.props.modTime())
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

// placeholder returns an empty file or directory. Something is mounted over it or created in it later, so its own
// attributes are never visible.
func placeholder(kind Kind, dir *os.Root, name, p string) stageFile {
	return stageFile{kind: kind, dir: dir, name: name, path: p, bind: -1}
}

// storeFile returns the placeholder of the file e at p, which is bound from the store.
func (s *stager) storeFile(dir *os.Root, p string, e *entry) stageFile {
	f := placeholder(File, dir, e.name, p)
	f.mode, f.modTime, f.bind = e.mode(false), e.props.modTime(), s.bind(p, "", e)
	return f
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
	switch {
	case f.kind == Symlink:
		return setLinkTime(f.dir, f.name, f.modTime)
	case f.kind == Directory:
		return nil
	case f.bind >= 0:
		return errors.Join(w.Close(), s.bindStoreFile(ctx, f))
	case f.content.IsZero():
		return w.Close() // a placeholder
	}
	err := copyBlob(ctx, s.store, f.content, w)
	if err := errors.Join(err, w.Chmod(f.mode), w.Close()); err != nil {
		return err
	}
	return f.dir.Chtimes(f.name, f.modTime, f.modTime)
}

// bindStoreFile completes the bind of the large file whose placeholder is f.
func (s *stager) bindStoreFile(ctx context.Context, f *stageFile) error {
	b := &s.staged.Binds[f.bind]
	source, release, err := s.filer.File(ctx, b.Content, f.mode&0o111 != 0)
	if errors.Is(err, cas.ErrFull) {
		// The store has no room for the file, but may be able to read the blob from elsewhere.
		copied := *f
		copied.dir, copied.name, copied.content, copied.bind = s.in, fmt.Sprintf("large%d", f.bind), b.Content, -1
		var w *os.File
		if w, err = copied.create(); err == nil {
			source, release, err = path.Join("in", copied.name), nil, s.fill(ctx, &copied, w)
		}
	}
	if err != nil {
		return notFound(b.Content, err)
	}
	b.Source, s.staged.release[f.bind] = source, release
	return nil
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
