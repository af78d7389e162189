// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"

	"github.com/cloister-build/cloister/cas"
)

// LargeFile is the size in bytes from which an input file is bound from the store instead of being copied into the
// workspace, if the store is a cas.Filer with room for it. A file with its own mode or modification time is copied,
// since the store's file has neither.
const LargeFile = 64 << 10

// A Bind is a file that must be mounted read-only into the exec root.
type Bind struct {
	Target  string     // relative to the exec root, where it has an empty placeholder
	Source  string     // relative to the workspace, or an absolute host path
	Content cas.Digest // of the file
}

// A Lower is a directory with inputs that must be a lower layer of an overlay at the exec root.
type Lower struct {
	Source string // relative to the workspace, or "." if Image is set
	Image  string // the name of a Mount, or ""
}

// A Staged is an exec root that is ready except for its Lowers and Binds.
type Staged struct {
	// Lower are the layers below out/, the topmost first. Without them, out/ is the exec root.
	Lower []Lower
	// Binds are the files that the store provides.
	Binds      []Bind
	Form       Form
	CopyReason string // why Form is FormCopy, if a Stager made it

	locations []cas.Location
	release   []func()
	reusable  bool
}

// AllowReuse declares that the run that mounted the Binds left neither a process nor an open file. Other runs may then
// use its mounts of cached images. Call it before Release.
func (s *Staged) AllowReuse() { s.reusable = true }

// Valid reports whether the file positions in the images are still correct. They are not if somebody has written to the
// store's files; the run may then have read bytes that are not its inputs. Call it before Release.
func (s *Staged) Valid() bool {
	return !slices.ContainsFunc(s.locations, func(p cas.Location) bool { return !p.Valid() })
}

// Release releases the images and the store's files that Binds refer to, once no run has them mounted. It leaves the
// workspace unchanged. It may be called repeatedly, but not concurrently.
func (s *Staged) Release() {
	for _, release := range s.release {
		if release != nil {
			release()
		}
	}
	s.release = nil
}

// Fetch copies all files of l into a local store, as Stage does, if store is a cas.Fetcher. An absent blob is no error:
// Stage reports it.
func (l *Layout) Fetch(ctx context.Context, store cas.Store) error {
	if _, ok := cas.As[cas.Fetcher](store); !ok {
		return nil
	}
	return cas.Fetch(ctx, store, l.contents(false))
}

// Stage builds l in the empty workspace ws: the exec root as out/ or, if l is Layered, its inputs as in/ and the rest
// as out/. The caller releases the result, and empties the workspace whether or not Stage fails. Stage keeps a
// directory open for each level of the tree. It fails with a *MissingError if a blob has vanished since Load, and with
// cas.ErrFull if the workspace is full.
func (l *Layout) Stage(ctx context.Context, store cas.Store, ws *os.Root) (*Staged, error) {
	return l.build(ctx, store, ws, false)
}

// build builds l. If bare is set, it builds only the planned directories and private inputs: an image has the others.
func (l *Layout) build(ctx context.Context, store cas.Store, ws *os.Root, bare bool) (*Staged, error) {
	if _, ok := cas.As[cas.Fetcher](store); ok {
		if err := cas.Fetch(ctx, store, l.contents(bare)); err != nil {
			return nil, err
		}
	}
	s := &stager{store: store, bare: bare, order: l.order, readOnly: l.readOnly, staged: Staged{Form: FormCopy}}
	s.filer, _ = cas.As[cas.Filer](store)
	if err := s.build(ctx, l, ws); err != nil {
		s.staged.Release()
		return nil, full(err)
	}
	s.staged.Binds = slices.DeleteFunc(s.staged.Binds, func(b Bind) bool { return b.Source == "" })
	return &s.staged, nil
}

// full wraps err in cas.ErrFull if the workspace is full.
func full(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		err = fmt.Errorf("%w: %w", cas.ErrFull, err)
	}
	return err
}

// contents returns the digests of all files of l, or only of the private ones, without duplicates.
func (l *Layout) contents(private bool) []cas.Digest {
	var ds []cas.Digest
	seen := map[cas.Digest]bool{}
	visited := map[*directory]bool{}
	var visit func(e *entry)
	visit = func(e *entry) {
		switch {
		case e.kind == File && !seen[e.digest]:
			seen[e.digest] = true
			ds = append(ds, e.digest)
		case e.kind == Directory && !visited[e.dir]:
			visited[e.dir] = true
			for i := range e.dir.entries {
				visit(&e.dir.entries[i])
			}
		}
	}
	for _, d := range l.dirs {
		for _, e := range d.entries {
			if !private || e.private {
				visit(e.entry)
			}
		}
	}
	return ds
}
