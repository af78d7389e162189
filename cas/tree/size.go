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
	bytes, files = newSizeEstimate(filer).layout(l, false)
	return bytes, files + 1 // in/
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

// layout returns the size of a workspace with l, without in/. If bare is set, images hold the bound inputs, so that
// only their placeholders count.
func (r *sizeEstimate) layout(l *Layout, bare bool) (bytes, files int64) {
	files = 1 // the workspace itself
	for i := range l.dirs {
		files++
		for _, e := range l.dirs[i].entries {
			private := e.source == ""
			files++ // the input or its placeholder
			if bare && !private {
				continue
			}
			if e.kind == Directory {
				files += e.dir.count
			}
			if !private && !e.inStore(r.filer) {
				files++ // in in/
			}
			bytes = addSaturating(bytes, r.entry(e.entry, private))
		}
	}
	return bytes, files
}

// inStore reports whether the input e, unless it is private, is bound from a store, which may be a cas.Filer.
func (e *entry) inStore(filer bool) bool {
	return filer && e.kind == File && e.digest.Size() >= LargeFile && !e.needsCopy()
}

func (r *sizeEstimate) entry(e *entry, private bool) int64 {
	switch {
	case e.kind == Directory:
		return r.directory(e.dir, private)
	case e.kind == Symlink && len(e.target) < longTarget, !private && e.inStore(r.filer):
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
