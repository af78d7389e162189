// SPDX-License-Identifier: Apache-2.0

package tree

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cloister-build/cloister/cas"
	"github.com/cloister-build/cloister/cas/tree/internal/erofs"
)

// A composer builds the tree of an image. Composers are reused, since they are a large part of what Stage allocates.
type composer struct {
	tree  erofs.Tree
	dirs  []composedDir
	files []composedFile

	digests []cas.Digest // of files
	image   []byte

	readOnly bool // nothing is created in the directories
}

// A composedDir is one of the directories of a composer's tree.
type composedDir struct {
	path     string // relative to the root of the image, "." for the root
	dir      *directory
	from, to int // the range of files below it
}

// A composedFile is a file that is not empty.
type composedFile struct {
	*entry
	at, dir int // the indexes of its entry and of its directory in the tree
}

var composers = sync.Pool{New: func() any { return &composer{} }}

// maxIdleImage is the size in bytes of the largest image buffer that is reused.
const maxIdleImage = 4 << 20

func (c *composer) recycle() {
	if cap(c.image) <= maxIdleImage {
		composers.Put(c)
	}
}

// reset removes everything from the tree.
func (c *composer) reset() {
	c.tree = erofs.Tree{Devices: c.tree.Devices[:0], Tails: c.tree.Tails[:0], Dirs: c.tree.Dirs[:0], Entries: c.tree.Entries[:0]}
	c.dirs, c.files, c.digests, c.readOnly = c.dirs[:0], c.files[:0], c.digests[:0], false
}

// cachedName is the directory of cached images that contains their subtrees. The image of a run has a whiteout for it.
const cachedName = ".cloister-cached"

// A redirect function reports whether a subtree is in a cached image, and returns its absolute path there.
type redirect = func(*boundInput) (path string, ok bool, err error)

// compose sets the tree to the inputs of l that are not private. Subtrees in cached images become redirects.
func (c *composer) compose(ctx context.Context, l *Layout, elsewhere redirect) error {
	c.reset()
	below := map[string][]*plannedDir{}
	for i := range l.dirs {
		if d := &l.dirs[i]; d.path != "." && !d.inOutput {
			below[path.Dir(d.path)] = append(below[path.Dir(d.path)], d)
		}
	}
	if l.dirs[0].inOutput {
		c.open(nil, ".", 0, modeWritable, epoch)
		return nil
	}
	return c.planned(ctx, -1, &l.dirs[0], below, elsewhere)
}

// planned adds the planned directory d, whose entry has the index at, and everything below it. below has the planned
// directories in each, sorted.
func (c *composer) planned(ctx context.Context, at int, d *plannedDir, below map[string][]*plannedDir, elsewhere redirect,
) error {
	subs := below[d.path]
	first := len(c.tree.Entries)
	n := c.open(nil, d.path, 0, d.mode, d.modTime)
	if at >= 0 {
		c.tree.Entries[at].Dir = int32(n)
	}
	for i, j := 0, 0; i < len(d.entries) || j < len(subs); {
		if j == len(subs) || i < len(d.entries) && d.entries[i].name < path.Base(subs[j].path) {
			if e := d.entries[i]; !e.private {
				c.add(e.entry, e.name, n)
			}
			i++
			continue
		}
		c.tree.Entries = append(c.tree.Entries, erofs.Entry{Name: path.Base(subs[j].path), Kind: erofs.Directory})
		j++
	}
	c.tree.Dirs[n].Count = int32(len(c.tree.Entries) - first)
	for i, j, k := 0, 0, first; k < first+int(c.tree.Dirs[n].Count); k++ {
		for i < len(d.entries) && (d.entries[i].private || d.entries[i].name < c.tree.Entries[k].Name) {
			i++
		}
		var err error
		switch {
		case i < len(d.entries) && d.entries[i].name == c.tree.Entries[k].Name:
			if e := d.entries[i]; e.kind == Directory {
				p := join(d.path, e.name)
				err = c.subtree(ctx, k, p, boundInput{entry: e.entry, target: p}, elsewhere)
			}
		default:
			err = c.planned(ctx, k, subs[j], below, elsewhere)
			j++
		}
		if err != nil {
			return err
		}
	}
	c.dirs[n].to = len(c.files)
	return nil
}

// rootName is the directory of an image that contains a root file system.
const rootName = "root"

// composeRoot sets the tree to a root file system.
func (c *composer) composeRoot(ctx context.Context, root *directory) error {
	c.reset()
	c.readOnly = true
	c.open(nil, ".", 1, 0o755, epoch)
	c.tree.Entries = append(c.tree.Entries, erofs.Entry{Name: rootName, Kind: erofs.Directory})
	top := &entry{name: rootName, kind: Directory, dir: root}
	return c.subtree(ctx, 0, rootName, boundInput{entry: top, target: ".", whole: true}, nil)
}

// composeCached sets the tree to the subtrees bs, at the paths that cachedPath returns for them.
func (c *composer) composeCached(ctx context.Context, image uint64, bs []boundInput) error {
	c.reset()
	p := "."
	for _, name := range []string{cachedName, strconv.FormatUint(image, 10)} {
		c.open(nil, p, 1, modeWritable, epoch)
		c.tree.Entries = append(c.tree.Entries, erofs.Entry{Name: name, Kind: erofs.Directory, Dir: int32(len(c.dirs))})
		p = join(p, name)
	}
	first := len(c.tree.Entries)
	c.open(nil, p, len(bs), modeWritable, epoch)
	for i := range bs {
		c.tree.Entries = append(c.tree.Entries, erofs.Entry{Name: cachedNumber(i), Kind: erofs.Directory})
	}
	for i, b := range bs {
		b.whole = true
		if err := c.subtree(ctx, first+i, join(p, cachedNumber(i)), b, nil); err != nil {
			return err
		}
	}
	return nil
}

// cachedPath returns the absolute path of the subtree i of a cached image, in the overlay of a run that uses it.
func cachedPath(image uint64, i int) string {
	return fmt.Sprintf("/%s/%d/%s", cachedName, image, cachedNumber(i))
}

// cachedNumber returns i as a name. Names of equal length ascend.
func cachedNumber(i int) string { return fmt.Sprintf("%04d", i) }

// hideCached adds a whiteout for cachedName to the root of the tree. It reports false if an input or an output has that
// name.
func (c *composer) hideCached(l *Layout) bool {
	root := &c.tree.Dirs[0]
	entries := c.tree.Entries[:root.Count] // the root comes first
	at, found := slices.BinarySearchFunc(entries, cachedName, func(e erofs.Entry, name string) int {
		return strings.Compare(e.Name, name)
	})
	if _, declared := l.dirs[0].declared(cachedName); found || declared {
		return false
	}
	c.tree.Entries = slices.Insert(c.tree.Entries, at, erofs.Entry{Name: cachedName, Kind: erofs.Whiteout})
	root.Count++
	for i := range c.tree.Dirs[1:] {
		c.tree.Dirs[i+1].First++
	}
	for i := range c.files {
		if c.files[i].at >= at {
			c.files[i].at++
		}
	}
	return true
}

// open adds a directory of n entries, which the caller adds next, and returns its index.
func (c *composer) open(d *directory, p string, n int, mode fs.FileMode, modTime time.Time) int {
	c.tree.Dirs = append(c.tree.Dirs, erofs.Dir{
		Mode: unixMode(mode), First: int32(len(c.tree.Entries)), Count: int32(n), After: modTime.Sub(epoch),
	})
	c.dirs = append(c.dirs, composedDir{path: p, dir: d, from: len(c.files)})
	return len(c.dirs) - 1
}

// add adds an entry to the directory that was opened last.
func (c *composer) add(e *entry, name string, dir int) {
	at := erofs.Entry{Name: name, Kind: erofs.Directory, After: e.props.modTime().Sub(epoch)}
	switch e.kind {
	case File:
		at.Kind, at.Mode = erofs.File, uint16(e.mode(false))
		if e.digest.Size() > 0 {
			c.files = append(c.files, composedFile{e, len(c.tree.Entries), dir})
			c.digests = append(c.digests, e.digest)
		}
	case Symlink:
		at.Kind, at.Target = erofs.Symlink, e.target
	}
	c.tree.Entries = append(c.tree.Entries, at)
}

// subtree adds the directory b, at the path p in the image, whose entry has the index at, and everything below it, or a
// redirect. Load has limited the depth of its recursion.
func (c *composer) subtree(ctx context.Context, at int, p string, b boundInput, elsewhere redirect) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d := b.dir
	if !b.whole {
		to, ok, err := elsewhere(&b)
		if err != nil {
			return err
		}
		if ok {
			n := c.open(nil, p, 0, d.mode(false), d.props.modTime())
			c.tree.Dirs[n].Redirect = to
			c.tree.Entries[at].Dir = int32(n)
			c.dirs[n].to = len(c.files)
			return nil
		}
	}
	mode := d.mode(false)
	if c.readOnly {
		mode = d.readOnlyMode()
	}
	n, first := c.open(d, p, len(d.entries), mode, d.props.modTime()), len(c.tree.Entries)
	c.tree.Entries[at].Dir = int32(n)
	for i := range d.entries {
		c.add(&d.entries[i], d.entries[i].name, n)
	}
	for i := range d.entries {
		e := &d.entries[i]
		if e.kind != Directory {
			continue
		}
		sub := boundInput{entry: e, target: b.target + "/" + e.name, whole: b.whole}
		if err := c.subtree(ctx, first+i, p+"/"+e.name, sub, elsewhere); err != nil {
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

// locate points the files at their extents. It returns the files without one and those of large bytes and more, and the
// size of the others in bytes. It fails with a *MissingError if a blob is absent.
func (c *composer) locate(p cas.Location, filer bool, large int64) (storeFiles []storeFile, bytes int64, err error) {
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
		case filer && (x.File == cas.Unpacked || size >= large):
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
func (c *composer) path(f *composedFile) string { return join(c.dirs[f.dir].path, f.name) }

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
