// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"

	"github.com/cloister-build/cloister/cas"
)

// longTarget is the length from which the target of a symlink takes a page on a memory-backed file system.
const longTarget = 128

// overlayFiles is the number of files that an overlay adds to the workspace: its work directory, and a directory that
// the kernel makes in it.
const overlayFiles = 2

// SizeEstimate returns what Stage takes of a memory-backed workspace if the blobs are in store: bytes, with each file
// rounded up to whole pages, and files, including directories, links and placeholders. Neither exceeds MaxInt64.
func (l *Layout) SizeEstimate(store cas.Store) (bytes, files int64) {
	_, filer := cas.As[cas.Filer](store)
	return newSizeEstimate(filer).layout(l, false)
}

// A sizeEstimate computes the size of inputs in a workspace.
type sizeEstimate struct {
	page  int64
	filer bool                 // large files are bound from the store
	known map[*directory]int64 // sizes of directories that are not private
}

func newSizeEstimate(filer bool) *sizeEstimate {
	return &sizeEstimate{page: int64(os.Getpagesize()), filer: filer, known: map[*directory]int64{}}
}

// layout returns the size of a workspace with l. If bare is set, images hold the inputs that are not private.
func (r *sizeEstimate) layout(l *Layout, bare bool) (bytes, files int64) {
	files = 1 // the workspace itself
	layered := l.layered && !bare && !l.dirs[0].inOutput
	if layered || bare {
		files += overlayFiles
	}
	for i := range l.dirs {
		files++
		if layered && !l.dirs[i].inOutput {
			files++ // in in/
		}
		for _, e := range l.dirs[i].entries {
			if bare && !e.private {
				continue
			}
			files++
			if e.kind == Directory {
				files += e.dir.count
				if layered && !e.private {
					files += 1 + e.dir.dirs // in out/
				}
			}
			bytes = addSaturating(bytes, r.entry(e.entry, e.private))
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
