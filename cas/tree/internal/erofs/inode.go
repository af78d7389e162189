// SPDX-License-Identifier: Apache-2.0

package erofs

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// A writer appends to an image.
type writer struct {
	t *Tree
	b []byte
}

// extend appends n zeros and returns their offset.
func (w *writer) extend(n int) int {
	at := len(w.b)
	w.b = slices.Grow(w.b, n)[:at+n]
	clear(w.b[at:])
	return at
}

// align appends zeros up to the next multiple of n, a power of two.
func (w *writer) align(n int) {
	if over := len(w.b) & (n - 1); over != 0 {
		w.extend(n - over)
	}
}

// inode appends space for an inode of size bytes and tail bytes. If inline is set, both are in one block.
func (w *writer) inode(size, tail int, inline bool) int {
	w.align(compactSize)
	if inline && len(w.b)&(BlockSize-1)+size+tail > BlockSize {
		w.align(BlockSize)
	}
	return w.extend(size + tail)
}

// directory writes the inodes of the entries of directory i, whose inode exists, and then its names. The inodes of its
// subdirectories lack the address of their data.
func (w *writer) directory(i int) error {
	d := &w.t.Dirs[i]
	entries := w.t.entries(d)
	for j := range entries {
		e := &entries[j]
		var err error
		switch e.Kind {
		case File:
			err = w.file(e)
		case Symlink:
			err = w.symlink(e)
		case Whiteout:
			e.inode, _ = w.head(modeWhiteout, layoutPlain, 0, 0, 0)
		case Directory:
			if int(e.Dir) <= i || int(e.Dir) >= len(w.t.Dirs) || w.t.Dirs[e.Dir].inode != 0 {
				err = fmt.Errorf("%w: directory %d has an entry in directory %d, or two entries", ErrTree, e.Dir, i)
				break
			}
			err = w.directoryInode(int(e.Dir), d.inode)
			e.inode = w.t.Dirs[e.Dir].inode
		default:
			err = fmt.Errorf("%w: kind %d", ErrTree, e.Kind)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", e.Name, err)
		}
	}
	at := int(d.names)
	if d.tail == 0 {
		w.align(BlockSize)
		at = w.extend(int(d.size))
		if len(w.b)&(BlockSize-1) != 0 {
			w.extend(1) // see directoryInode
		}
		if at>>blockBits > math.MaxUint32 {
			return fmt.Errorf("%w: the image would have more than %d bytes", ErrTree, at)
		}
		binary.LittleEndian.PutUint32(w.b[d.inode+16:], uint32(at>>blockBits))
	}
	w.names(at, d, entries)
	return nil
}

func (t *Tree) entries(d *Dir) []Entry { return t.Entries[d.First : d.First+d.Count] }

// directoryInode writes the inode of directory i without the address of its data, and sets its placement.
func (w *writer) directoryInode(i int, parent int64) error {
	d := &w.t.Dirs[i]
	if d.First < 0 || d.Count < 0 || int64(d.First)+int64(d.Count) > int64(len(w.t.Entries)) {
		return fmt.Errorf("%w: the entries of directory %d are out of range", ErrTree, i)
	}
	d.parent = parent
	prev := ""
	var size blocks
	all := merge(w.t.entries(d))
	for name, e, ok := all.next(); ok; name, e, ok = all.next() {
		size.add(len(name))
		if e == nil {
			continue
		}
		if why := badName(name); why != "" {
			return fmt.Errorf("%w: the name %q %s", ErrTree, name, why)
		}
		if name <= prev {
			return fmt.Errorf("%w: %q follows %q", ErrTree, name, prev)
		}
		prev = name
	}
	if len(d.Redirect) > MaxRedirect || d.Redirect != "" && d.Count > 0 {
		return fmt.Errorf("%w: directory %d has a redirect of %d bytes and %d entries", ErrTree, i, len(d.Redirect), d.Count)
	}
	d.size = size.total()
	// For the kernel, the last name ends at a NUL or at the end of its block, not at the size of the directory.
	layout := uint16(layoutPlain)
	if d.size < maxInline {
		layout, d.tail = layoutInline, int(d.size)+1
	}
	attribute := redirectSize(d.Redirect)
	d.inode, d.names = w.head(typeDirectory|d.Mode&permissions, layout, d.size, attribute+d.tail, d.After)
	if attribute > 0 {
		w.redirect(d, attribute)
	}
	return nil
}

// redirectSize returns the size of the attributes of an inode with a redirect, in bytes.
func redirectSize(to string) int {
	if to == "" {
		return 0
	}
	return xattrHeader + (4+len(redirectName)+len(to)+3)&^3
}

// redirect writes the redirect of d after its inode, where the names would be, and moves the names behind it.
func (w *writer) redirect(d *Dir, size int) {
	binary.LittleEndian.PutUint16(w.b[d.inode+2:], uint16(1+(size-xattrHeader)/4))
	b := w.b[d.names+xattrHeader:]
	b[0], b[1] = byte(len(redirectName)), xattrTrusted
	binary.LittleEndian.PutUint16(b[2:], uint16(len(d.Redirect)))
	copy(b[4+copy(b[4:], redirectName):], d.Redirect)
	d.names += int64(size)
}

// head writes an inode with one link and tail zeros, and returns the offsets of both. Directories have one link, too,
// as overlayfs shows those that are in several layers.
func (w *writer) head(mode, layout uint16, size int64, tail int, after time.Duration) (at, end int64) {
	inline := layout == layoutInline
	if size > math.MaxUint32 || after != 0 {
		at := w.inode(extendedSize, tail, inline)
		changed := time.Unix(Time, 0).Add(after)
		b := w.b[at:]
		binary.LittleEndian.PutUint16(b[0:], layout|extended)
		binary.LittleEndian.PutUint16(b[4:], mode)
		binary.LittleEndian.PutUint64(b[8:], uint64(size))
		binary.LittleEndian.PutUint64(b[32:], uint64(changed.Unix()))
		binary.LittleEndian.PutUint32(b[40:], uint32(changed.Nanosecond()))
		binary.LittleEndian.PutUint32(b[44:], 1)
		return int64(at), int64(at) + extendedSize
	}
	start := w.inode(compactSize, tail, inline)
	b := w.b[start:]
	binary.LittleEndian.PutUint16(b[0:], layout)
	binary.LittleEndian.PutUint16(b[4:], mode)
	binary.LittleEndian.PutUint16(b[6:], 1)
	binary.LittleEndian.PutUint32(b[8:], uint32(size))
	return int64(start), int64(start) + compactSize
}

// file writes the inode of a file and the address of its data, which is one chunk.
func (w *writer) file(e *Entry) error {
	mode := typeFile | e.Mode&permissions
	if e.Size == 0 {
		e.inode, _ = w.head(mode, layoutPlain, 0, 0, e.After)
		return nil
	}
	block := e.Offset >> blockBits
	switch {
	case e.Size < 0 || e.Size > maxFile:
		return fmt.Errorf("%w: a file of %d bytes", ErrTree, e.Size)
	case e.Device < 0 || int(e.Device) >= len(w.t.Devices):
		return fmt.Errorf("%w: device %d does not exist", ErrTree, e.Device)
	case e.Offset < 0 || e.Offset&(BlockSize-1) != 0 || block > math.MaxUint32:
		return fmt.Errorf("%w: a file at byte %d of a device", ErrTree, e.Offset)
	}
	if e.Tail != 0 {
		return w.chunks(e, mode, block)
	}
	e.inode, _ = w.head(mode, layoutChunks, e.Size, chunkIndexSize, e.After)
	chunkBits := uint16(max(bits.Len64(uint64(e.Size-1)), blockBits) - blockBits)
	binary.LittleEndian.PutUint16(w.b[e.inode+16:], chunkIndexes|chunkBits)
	index := w.b[len(w.b)-chunkIndexSize:]
	binary.LittleEndian.PutUint16(index[2:], uint16(e.Device+1)) // 0 is the image itself
	binary.LittleEndian.PutUint32(index[4:], uint32(block))
	return nil
}

// chunks writes the inode of a file with a tail and the addresses of its chunks. All but the last are contiguous, from
// block on.
func (w *writer) chunks(e *Entry, mode uint16, block int64) error {
	if e.Tail < 0 || int(e.Tail) > len(w.t.Tails) {
		return fmt.Errorf("%w: tail %d does not exist", ErrTree, e.Tail)
	}
	tail := w.t.Tails[e.Tail-1]
	n := (e.Size + TailChunk - 1) / TailChunk
	if tail.Device < 0 || int(tail.Device) >= len(w.t.Devices) || tail.Offset < 0 || tail.Offset&(BlockSize-1) != 0 ||
		tail.Offset>>blockBits > math.MaxUint32 || block+n*TailChunk>>blockBits > math.MaxUint32 {
		return fmt.Errorf("%w: a tail at byte %d of device %d", ErrTree, tail.Offset, tail.Device)
	}
	inode, indexes := w.head(mode, layoutChunks, e.Size, int(n*chunkIndexSize), e.After)
	e.inode = inode
	binary.LittleEndian.PutUint16(w.b[inode+16:], chunkIndexes|uint16(bits.Len64(TailChunk-1)-blockBits))
	for i := range n {
		device, at := e.Device, block+i*TailChunk>>blockBits
		if i == n-1 {
			device, at = tail.Device, tail.Offset>>blockBits
		}
		index := w.b[indexes+i*chunkIndexSize:]
		binary.LittleEndian.PutUint16(index[2:], uint16(device+1)) // 0 is the image itself
		binary.LittleEndian.PutUint32(index[4:], uint32(at))
	}
	return nil
}

// symlink writes an inode and its target: inline if it fits, otherwise in separate blocks.
func (w *writer) symlink(e *Entry) error {
	n := len(e.Target)
	if n == 0 || n > maxTarget || strings.IndexByte(e.Target, 0) >= 0 {
		return fmt.Errorf("%w: a target of %d bytes or with a NUL", ErrTree, n)
	}
	if n <= maxInline {
		inode, end := w.head(modeSymlink, layoutInline, int64(n), n, e.After)
		e.inode = inode
		copy(w.b[end:], e.Target)
		return nil
	}
	e.inode, _ = w.head(modeSymlink, layoutPlain, int64(n), 0, e.After)
	w.align(BlockSize)
	at := w.extend(n)
	copy(w.b[at:], e.Target)
	binary.LittleEndian.PutUint32(w.b[e.inode+16:], uint32(at>>blockBits))
	return nil
}
