// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/cloister-build/cloister/cas"
)

// Restage turns out, an exec root that Restage laid out for from, into one for l. It keeps the inputs that from and l
// have in common, removes everything else, and copies the remaining inputs of l. If from is nil, out is empty.
//
// Restage does not replace the directories that lead to the working directory, unless they are in an output of l or
// from, so that a process may have one as its working directory. A process of another user may run in out if the caller
// has called Lock. After an error out is unusable.
func (l *Layout) Restage(ctx context.Context, store cas.Store, out *os.Root, from *Layout) error {
	u := &restager{want: l.expand(), had: map[string]placed{}, kept: map[string]bool{".": true}}
	if from != nil {
		u.had = from.expand()
	}
	if err := u.clean(ctx, out, "."); err != nil {
		return err
	}
	var dirs []string
	var files []stageFile
	var digests []cas.Digest
	for _, p := range slices.Sorted(maps.Keys(u.want)) { // a parent sorts before its children
		w := u.want[p]
		if w.kind == Directory {
			dirs = append(dirs, p)
			if !u.kept[p] {
				if err := out.Mkdir(p, 0o700); err != nil {
					return full(err)
				}
			}
			continue
		}
		if u.kept[p] {
			continue
		}
		files = append(files, stageFile{
			kind: w.kind, dir: out, name: p, path: p, target: w.target, mode: w.mode, modTime: w.modTime, content: w.digest, bind: -1,
		})
		if w.kind == File {
			digests = append(digests, w.digest)
		}
	}
	if err := cas.Fetch(ctx, store, digests); err != nil {
		return err
	}
	if err := (&stager{store: store}).write(ctx, files); err != nil {
		return full(err)
	}
	for _, p := range slices.Backward(dirs) {
		if err := finish(out, p, u.want[p].mode, u.want[p].modTime); err != nil {
			return err
		}
	}
	return nil
}

// Lock makes every directory of out read-only to a process of another user that may still run there. The process can
// then change the contents of its own files, but not create, remove or rename any. Restage makes the directories
// writable again. Lock locks a directory before it reads it, so that nothing it has seen can be replaced.
func Lock(out *os.Root) error { return lock(out, 0) }

func lock(dir *os.Root, depth int) error {
	if depth > maxDepth {
		return errorf(ErrOutput, "the run left more than %d nested directories", maxDepth)
	}
	entries, err := lockOne(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		sub, err := dir.OpenRoot(e.Name())
		if err != nil {
			return err
		}
		err = lock(sub, depth+1)
		sub.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// lockOne locks dir, then returns its entries.
func lockOne(dir *os.Root) ([]fs.DirEntry, error) {
	d, err := dir.Open(".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	info, err := d.Stat()
	if err == nil {
		err = d.Chown(os.Geteuid(), os.Getegid())
	}
	if err == nil {
		err = d.Chmod(info.Mode() &^ 0o022)
	}
	if err != nil {
		return nil, err
	}
	return d.ReadDir(-1)
}

// RestageSize returns how many bytes and files Restage puts into a memory-backed workspace, like SizeEstimate.
func (l *Layout) RestageSize() (bytes, files int64) { return newSizeEstimate(false).layout(l, false) }

// placed describes what a Layout has at one path.
type placed struct {
	kind    Kind
	mode    fs.FileMode // not of a Symlink
	modTime time.Time
	digest  cas.Digest // of a File
	target  string     // of a Symlink
	private bool
}

// keeps reports whether the file at p can stay for w. Only the mode and time of a directory may differ.
func (p *placed) keeps(w *placed) bool {
	if p.private || w.private || p.kind != w.kind {
		return false
	}
	return p.kind == Directory || p.mode == w.mode && p.modTime.Equal(w.modTime) && p.digest == w.digest && p.target == w.target
}

// expand returns the files, directories and symlinks of l by their paths in the exec root.
func (l *Layout) expand() map[string]placed {
	all := map[string]placed{}
	var add func(p string, e *entry, private bool)
	add = func(p string, e *entry, private bool) {
		at := placed{kind: e.kind, modTime: e.props.modTime(), target: e.target, private: private}
		switch e.kind {
		case File:
			at.mode, at.digest = e.mode(private), e.digest
		case Directory:
			at.mode, at.modTime = e.dir.mode(private), e.dir.props.modTime()
			for i := range e.dir.entries {
				add(join(p, e.dir.entries[i].name), &e.dir.entries[i], private)
			}
		}
		all[p] = at
	}
	for _, d := range l.dirs {
		all[d.path] = placed{kind: Directory, mode: d.mode, modTime: d.modTime, private: d.inOutput}
		for _, e := range d.entries {
			add(join(d.path, e.name), e.entry, e.private)
		}
	}
	return all
}

// A restager compares what an exec root had with what the next action wants.
type restager struct {
	want, had map[string]placed
	kept      map[string]bool
}

// clean removes from dir, whose path is p, everything that cannot be kept, and records the rest in kept.
func (u *restager) clean(ctx context.Context, dir *os.Root, p string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	names, err := list(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		at := join(p, name)
		had, ok := u.had[at]
		want, wanted := u.want[at]
		if !ok || !wanted || !had.keeps(&want) {
			if err := dir.RemoveAll(name); err != nil {
				return err
			}
			continue
		}
		u.kept[at] = true
		if want.kind != Directory {
			continue
		}
		sub, err := dir.OpenRoot(name)
		if err != nil {
			return err
		}
		err = u.clean(ctx, sub, at)
		sub.Close()
		if err != nil {
			return err
		}
	}
	return nil
}
