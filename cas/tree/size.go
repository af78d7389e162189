// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"os"

	"github.com/cloister-build/cloister/cas"
)

// shortTarget is the length from which a symlink's target takes a page on a memory-backed file system.
const shortTarget = 128

// SizeEstimate returns what Stage takes of a memory-backed workspace if the blobs are in store: bytes, each file
// in whole pages, and files, with directories, links and placeholders. Neither exceeds MaxInt64.
func (l *Layout) SizeEstimate(store cas.Store) (bytes, files int64) {
	_, filer := cas.As[cas.Filer](store)
	r := &room{page: int64(os.Getpagesize()), filer: filer, known: map[*directory]int64{}}
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

// A room counts bytes.
type room struct {
	page  int64
	filer bool                 // large files are bound where the store has them
	known map[*directory]int64 // of directories that are bound, since equal ones are one value
}

// bound reports whether e is bound from outside the workspace unless it is private.
func (r *room) bound(e *entry) bool {
	return r.filer && e.kind == File && e.digest.Size() >= LargeFile && !e.special()
}

func (r *room) entry(e *entry, private bool) int64 {
	switch {
	case e.kind == Directory:
		return r.directory(e.dir, private)
	case e.kind == Symlink && len(e.target) < shortTarget, !private && r.bound(e):
		return 0
	case e.kind == Symlink:
		return r.page
	}
	return addSaturating(e.digest.Size(), r.page-1) / r.page * r.page
}

// directory returns the bytes of all that is below d. Its recursion is as deep as the tree.
func (r *room) directory(d *directory, private bool) int64 {
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
