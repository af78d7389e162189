// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// A composer builds the tree of an image. Composers are reused, since they are a large part of what Stage allocates.
type composer struct {
	tree  erofs.Tree
	names []string // in the root
	dirs  []composedDir
	files []composedFile

	digests []cas.Digest // of files
	image   []byte
}

// A composedDir is one of the directories of a composer's tree. dir is nil for the root and for placeholders.
type composedDir struct {
	path     string // relative to the root of the image
	dir      *directory
	from, to int // the range of files below it
}

// A composedFile is a file that is not empty.
type composedFile struct {
	*entry
	at, dir int // the indexes of its entry and of its directory in the tree
	top     int // the index of the input in the root that is or contains it
}

var composers = sync.Pool{New: func() any { return &composer{} }}

// maxIdleImage is the size in bytes of the largest image buffer that is reused.
const maxIdleImage = 4 << 20

func (c *composer) recycle() {
	if cap(c.image) <= maxIdleImage {
		composers.Put(c)
	}
}

// compose resets c and adds bs to the root. If elsewhere is not nil, it reports which directories below bs are bound
// from another image; these stay empty.
func (c *composer) compose(ctx context.Context, bs []boundInput, elsewhere func(*boundInput) (bool, error)) error {
	c.tree = erofs.Tree{Devices: c.tree.Devices[:0], Dirs: c.tree.Dirs[:0], Entries: c.tree.Entries[:0]}
	c.names, c.dirs, c.files, c.digests = c.names[:0], c.dirs[:0], c.files[:0], c.digests[:0]
	c.open(nil, "", len(bs))
	width := len(strconv.Itoa(len(bs)))
	for i, b := range bs {
		// Names of equal length ascend.
		c.names = append(c.names, fmt.Sprintf("%0*d", width, i))
		c.add(b.entry, c.names[i], 0, i)
	}
	for i, b := range bs {
		if b.kind == Directory {
			if err := c.below(ctx, i, i, c.names[i], b, elsewhere); err != nil {
				return err
			}
		}
	}
	return nil
}

// open adds a directory of n entries and returns its index.
func (c *composer) open(d *directory, p string, n int) int {
	dir := erofs.Dir{Mode: modeBoundDir, First: int32(len(c.tree.Entries)), Count: int32(n)}
	if d != nil {
		dir.Mode, dir.After = uint16(d.mode(false)), d.props.modTime().Sub(epoch)
	}
	c.tree.Dirs = append(c.tree.Dirs, dir)
	c.dirs = append(c.dirs, composedDir{path: p, dir: d, from: len(c.files)})
	return len(c.dirs) - 1
}

// add adds an entry to the directory that was opened last.
func (c *composer) add(e *entry, name string, dir, top int) {
	at := erofs.Entry{Name: name, Kind: erofs.Directory, After: e.props.modTime().Sub(epoch)}
	switch e.kind {
	case File:
		at.Kind, at.Mode = erofs.File, uint16(e.mode(false))
		if e.digest.Size() > 0 {
			c.files = append(c.files, composedFile{e, len(c.tree.Entries), dir, top})
			c.digests = append(c.digests, e.digest)
		}
	case Symlink:
		at.Kind, at.Target = erofs.Symlink, e.target
	}
	c.tree.Entries = append(c.tree.Entries, at)
}

// below adds the contents of the directory b, whose entry has the index at. Load has limited the depth of its
// recursion.
func (c *composer) below(ctx context.Context, at, top int, p string, b boundInput,
	elsewhere func(*boundInput) (bool, error),
) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d := b.dir
	n, first := c.open(d, p, len(d.entries)), len(c.tree.Entries)
	c.tree.Entries[at].Dir = int32(n)
	for i := range d.entries {
		c.add(&d.entries[i], d.entries[i].name, n, top)
	}
	for i := range d.entries {
		e := &d.entries[i]
		if e.kind != Directory {
			continue
		}
		sub := boundInput{entry: e}
		if elsewhere != nil && !b.whole {
			sub.target = b.target + "/" + e.name
			placeholder, err := elsewhere(&sub)
			if err != nil {
				return err
			}
			if placeholder {
				c.tree.Entries[first+i].Dir = int32(c.open(nil, "", 0))
				continue
			}
		}
		sub.whole = sub.whole || b.whole
		if err := c.below(ctx, first+i, top, p+"/"+e.name, sub, elsewhere); err != nil {
			return err
		}
	}
	c.dirs[n].to = len(c.files)
	return nil
}

// maxDevices is the largest number of store files that one image can point at. They are sent to the mounting process in
// one message, which on Linux carries at most 253 descriptors.
const maxDevices = 250

var (
	errDevices = errors.New("the inputs lie in too many segments")
	errNoFile  = errors.New("the store has an input neither in a segment nor as a file")
	errShort   = errors.New("a segment of the store is shorter than its blobs")
)

// locate points the files at their extents. It returns the files without one, and the size of the others in bytes. It
// fails with a *MissingError if a blob is absent.
func (c *composer) locate(p cas.Location, filer bool) (storeFiles []storeFile, bytes int64, err error) {
	files, extents := p.Files(), p.Extents()
	if len(files) > maxDevices {
		return nil, 0, fmt.Errorf("%w: %d of at most %d", errDevices, len(files), maxDevices)
	}
	for _, f := range files {
		info, err := f.Stat()
		if err != nil {
			return nil, 0, err
		}
		c.tree.Devices = append(c.tree.Devices, info.Size())
	}
	var absent []cas.Digest
	for i := range c.files {
		f, x := &c.files[i], extents[i]
		at, size := &c.tree.Entries[f.at], f.digest.Size()
		switch {
		case x.File == cas.Absent:
			absent = append(absent, f.digest)
		case filer && (x.File == cas.Unpacked || size >= LargeFile):
			storeFiles = append(storeFiles, storeFile{*f, i, c.path(f)})
		case x.File == cas.Unpacked:
			return nil, 0, errNoFile
		case x.Offset > c.tree.Devices[x.File]-size:
			return nil, 0, errShort // some kernels would show zeros
		default:
			at.Device, at.Offset, at.Size = x.File, x.Offset, size
			bytes += size
		}
	}
	if len(absent) > 0 {
		return nil, 0, &MissingError{Blobs: unique(absent)}
	}
	return storeFiles, bytes, nil
}

// path returns the path of f in the image.
func (c *composer) path(f *composedFile) string {
	if f.dir == 0 {
		return c.names[f.top]
	}
	return c.dirs[f.dir].path + "/" + f.name
}

// within returns the files that are below d.
func (d *composedDir) within(files []storeFile) []storeFile {
	first := func(n int) int {
		i, _ := slices.BinarySearchFunc(files, n, func(f storeFile, n int) int { return cmp.Compare(f.nth, n) })
		return i
	}
	return files[first(d.from):first(d.to)]
}

// unique removes duplicates from ds and keeps the order.
func unique(ds []cas.Digest) []cas.Digest {
	seen := make(map[cas.Digest]bool, len(ds))
	return slices.DeleteFunc(ds, func(d cas.Digest) bool {
		duplicate := seen[d]
		seen[d] = true
		return duplicate
	})
}
