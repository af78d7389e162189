// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"

	"github.com/cloister-build/cloister/cas"
)

// longTarget is the length from which the target of a symlink takes a page on a memory-backed file system.
const longTarget = 128

// SizeEstimate returns what Stage takes of a memory-backed workspace if the blobs are in store: bytes, with each file
// rounded up to whole pages, and files, including directories, links and placeholders. Neither exceeds MaxInt64.
func (l *Layout) SizeEstimate(store cas.Store) (bytes, files int64) {
	_, filer := cas.As[cas.Filer](store)
	r := newSizeEstimate(filer)
	files = 2 // the workspace itself and in/
	for i := range l.dirs {
		files++
		for _, e := range l.dirs[i].entries {
			private := e.source == ""
			files++
			if e.kind == Directory {
				files += e.dir.count
			}
			if !private && (e.kind == Directory || !r.bound(e.entry)) {
				files++ // its placeholder
			}
			bytes = addSaturating(bytes, r.entry(e.entry, private))
		}
	}
	return bytes, files
}

// writableSize is SizeEstimate for the writable directories alone, if images hold the bound inputs.
func (l *Layout) writableSize() (bytes, files int64) {
	r := newSizeEstimate(false)
	files = 1 // the workspace itself
	for i := range l.dirs {
		files++
		for _, e := range l.dirs[i].entries {
			files++
			if e.source != "" {
				continue
			}
			if e.kind == Directory {
				files += e.dir.count
			}
			bytes = addSaturating(bytes, r.entry(e.entry, true))
		}
	}
	return bytes, files
}

// A sizeEstimate computes the size of inputs in a workspace.
type sizeEstimate struct {
	page  int64
	filer bool                 // large files are bound from the store
	known map[*directory]int64 // sizes of bound directories
}

func newSizeEstimate(filer bool) *sizeEstimate {
	return &sizeEstimate{page: int64(os.Getpagesize()), filer: filer, known: map[*directory]int64{}}
}

// bound reports whether e, unless it is private, is bound from outside the workspace.
func (r *sizeEstimate) bound(e *entry) bool {
	return r.filer && e.kind == File && e.digest.Size() >= LargeFile && !e.needsCopy()
}

func (r *sizeEstimate) entry(e *entry, private bool) int64 {
	switch {
	case e.kind == Directory:
		return r.directory(e.dir, private)
	case e.kind == Symlink && len(e.target) < longTarget, !private && r.bound(e):
		return 0
	case e.kind == Symlink:
		return r.page
	}
	return addSaturating(e.digest.Size(), r.page-1) / r.page * r.page
}

// directory returns the size of everything below d. Load has limited the depth of its recursion.
func (r *sizeEstimate) directory(d *directory, private bool) int64 {
	n, ok := r.known[d]
	if ok && !private {
		return n
	}
	n = 0
	for i := range d.entries {
		n = addSaturating(n, r.entry(&d.entries[i], private))
	}
	if !private {
		r.known[d] = n
	}
	return n
}
