// SPDX-License-Identifier: Apache-2.0

// Package erofs writes images of the read-only file system EROFS, whose regular files hold no bytes of their own:
// each points into one of the devices that are given along when the image is mounted, which on Linux 6.12 and later
// may be regular files. It neither reads nor mounts images, touches no file, and knows nothing of blobs.
//
// All that an image holds belongs to root and was changed at one time, unless the tree says another, so that equal
// trees make equal images.
package erofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// BlockSize is the size of a block, in bytes: the alignment of what files point at.
const BlockSize = 1 << blockBits

// Time is when what says nothing else was changed, in seconds since 1970.
const Time = 1_000_000_000

// MaxDevices is how many devices an image can have.
const MaxDevices = 4096

// ErrTree says that a Tree breaks the rules of its fields, or is beyond what an image can hold.
var ErrTree = errors.New("no tree for an EROFS image")

// A Kind is what an entry of a directory is.
type Kind uint8

// The kinds, with the numbers that directories on disk give them.
const (
	File      Kind = 1
	Directory Kind = 2
	Symlink   Kind = 7
)

// A Tree is what an image is to hold. It lies in few slices, so that it is made and used again without allocation.
type Tree struct {
	Devices []int64 // the size of each, in bytes, in the order in which they are to be mounted
	// Dirs are all directories. The first is the root; each other one is named by one entry, in a directory that
	// comes before it.
	Dirs    []Dir
	Entries []Entry
}

// A Dir is one directory.
type Dir struct {
	Mode  uint16        // permission bits
	First int32         // of its entries, Entries[First:First+Count]
	Count int32         // ascending by name, compared as bytes
	After time.Duration // when it was changed, from Time on; may be negative

	place
}

// A place is where the inode of a directory is, as Encode finds it.
type place struct {
	inode  int64 // where it starts, or 0
	names  int64 // where its names start, unless they have blocks of their own
	parent int64 // the same of its parent
	size   int64 // of its names, in bytes
	tail   int   // of what follows the inode: the names and a NUL, or nothing
}

// An Entry is one name in a directory.
type Entry struct {
	Name   string // 1 to 255 bytes, without a slash or NUL, neither . nor ..
	Target string // of a Symlink: 1 to 4095 bytes, without NUL
	Size   int64  // of a File, in bytes
	Offset int64  // of a File that is not empty: where its bytes start, a multiple of BlockSize
	Device int32  // in which of the Devices
	Dir    int32  // of a Directory: which of the Dirs
	Mode   uint16 // of a File: permission bits
	Kind   Kind
	After  time.Duration // as of a Dir; of a Directory, that says it

	inode int64 // where it starts, as Encode finds it
}

// Parts of the format.
const (
	blockBits = 9

	magic          = 0xe0f5e1e2
	superblock     = 1024 // where it starts
	superblockSize = 128
	slotSize       = 128 // of a device; slots follow the superblock
	featureChunks  = 0x4
	featureDevices = 0x8
	compactSize    = 32 // of an inode; also what all of them are aligned to
	extendedSize   = 64 // of one with a date of its own, or a size or a count of links beyond a compact one
	extended       = 1  // bit of an inode's format
	layoutPlain    = 0 << 1
	layoutInline   = 2 << 1
	layoutChunks   = 4 << 1
	chunkIndexes   = 0x20
	chunkIndexSize = 8
	direntSize     = 12
	maxInline      = BlockSize - extendedSize // an inode and what follows it must lie in one block
	maxFile        = 1 << (31 + blockBits)    // a file is one chunk
	typeFile       = 0o100000
	typeDirectory  = 0o040000
	typeSymlink    = 0o120000
	permissions    = 0o7777
	modeSymlink    = typeSymlink | 0o777
	maxName        = 255
	maxTarget      = 4095
	firstLinks     = 2 // to a directory without subdirectories
)

// Encode returns the image of t, in the memory of buf if that suffices. What buf holds is overwritten. It fails with
// ErrTree. It uses t as scratch space: nobody else may use it meanwhile, but it may be encoded again.
func Encode(buf []byte, t *Tree) ([]byte, error) {
	if len(t.Dirs) == 0 {
		return nil, fmt.Errorf("%w: there is no root", ErrTree)
	}
	if len(t.Devices) > MaxDevices {
		return nil, fmt.Errorf("%w: %d devices are more than %d", ErrTree, len(t.Devices), MaxDevices)
	}
	for i := range t.Dirs {
		t.Dirs[i].place = place{}
	}
	w := &writer{t: t, b: buf[:0]}
	w.extend(superblock + superblockSize + slotSize*len(t.Devices))
	for i, size := range t.Devices {
		slot := w.b[superblock+superblockSize+i*slotSize:]
		blocks := size >> blockBits
		if size < 0 || blocks > math.MaxUint32 {
			return nil, fmt.Errorf("%w: device %d has %d bytes", ErrTree, i, size)
		}
		binary.LittleEndian.PutUint32(slot[64:], uint32(blocks))
	}
	if err := w.directoryInode(0, 0); err != nil {
		return nil, err
	}
	root := t.Dirs[0].inode
	t.Dirs[0].parent = root
	inodes := 1
	for i := range t.Dirs {
		if t.Dirs[i].inode == 0 {
			return nil, fmt.Errorf("%w: no entry before directory %d names it", ErrTree, i)
		}
		if err := w.directory(i); err != nil {
			return nil, err
		}
		inodes += int(t.Dirs[i].Count)
	}
	w.align(BlockSize)
	blocks := len(w.b) >> blockBits
	if blocks > math.MaxUint32 {
		return nil, fmt.Errorf("%w: the image would have %d bytes", ErrTree, len(w.b))
	}
	sb := w.b[superblock:]
	binary.LittleEndian.PutUint32(sb[0:], magic)
	sb[12] = blockBits
	binary.LittleEndian.PutUint16(sb[14:], uint16(root/compactSize))
	binary.LittleEndian.PutUint64(sb[16:], uint64(inodes))
	binary.LittleEndian.PutUint64(sb[24:], Time)
	binary.LittleEndian.PutUint32(sb[36:], uint32(blocks))
	features := uint32(featureChunks)
	if len(t.Devices) > 0 {
		features |= featureDevices
		binary.LittleEndian.PutUint16(sb[86:], uint16(len(t.Devices)))
		binary.LittleEndian.PutUint16(sb[88:], (superblock+superblockSize)/slotSize)
	}
	binary.LittleEndian.PutUint32(sb[80:], features)
	return w.b, nil
}

// A writer appends to an image.
type writer struct {
	t *Tree
	b []byte
}

// extend appends n zeros and returns where they start.
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

// inode appends room for an inode of size bytes that tail bytes follow: in the same block, if the tail is data.
func (w *writer) inode(size, tail int, inline bool) int {
	w.align(compactSize)
	if inline && len(w.b)&(BlockSize-1)+size+tail > BlockSize {
		w.align(BlockSize)
	}
	return w.extend(size + tail)
}

// directory writes the inodes of the entries of directory i, whose own inode is there, and then its names. Its
// subdirectories get an inode that still lacks its data.
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
		case Directory:
			if int(e.Dir) <= i || int(e.Dir) >= len(w.t.Dirs) || w.t.Dirs[e.Dir].inode != 0 {
				err = fmt.Errorf("%w: directory %d is named in directory %d, or twice", ErrTree, e.Dir, i)
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

// directoryInode writes the inode of directory i but for the address of its data, and finds its place.
func (w *writer) directoryInode(i int, parent int64) error {
	d := &w.t.Dirs[i]
	if d.First < 0 || d.Count < 0 || int64(d.First)+int64(d.Count) > int64(len(w.t.Entries)) {
		return fmt.Errorf("%w: the entries of directory %d are not there", ErrTree, i)
	}
	d.parent = parent
	links, prev := firstLinks, ""
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
		if e.Kind == Directory {
			links++
		}
	}
	d.size = size.total()
	// The kernel takes the last name to end at a NUL or with its block, not with the size of the directory.
	layout := uint16(layoutPlain)
	if d.size < maxInline {
		layout, d.tail = layoutInline, int(d.size)+1
	}
	d.inode, d.names = w.head(typeDirectory|d.Mode&permissions, layout, d.size, links, d.tail, d.After)
	return nil
}

// head writes an inode, followed by tail zeros, and returns where both start.
func (w *writer) head(mode, layout uint16, size int64, links, tail int, after time.Duration) (at, end int64) {
	inline := layout == layoutInline
	if size > math.MaxUint32 || links > math.MaxUint16 || after != 0 {
		at := w.inode(extendedSize, tail, inline)
		changed := time.Unix(Time, 0).Add(after)
		b := w.b[at:]
		binary.LittleEndian.PutUint16(b[0:], layout|extended)
		binary.LittleEndian.PutUint16(b[4:], mode)
		binary.LittleEndian.PutUint64(b[8:], uint64(size))
		binary.LittleEndian.PutUint64(b[32:], uint64(changed.Unix()))
		binary.LittleEndian.PutUint32(b[40:], uint32(changed.Nanosecond()))
		binary.LittleEndian.PutUint32(b[44:], uint32(links))
		return int64(at), int64(at) + extendedSize
	}
	start := w.inode(compactSize, tail, inline)
	b := w.b[start:]
	binary.LittleEndian.PutUint16(b[0:], layout)
	binary.LittleEndian.PutUint16(b[4:], mode)
	binary.LittleEndian.PutUint16(b[6:], uint16(links))
	binary.LittleEndian.PutUint32(b[8:], uint32(size))
	return int64(start), int64(start) + compactSize
}

// file writes the inode of a file: one chunk that holds all of it, and where that is.
func (w *writer) file(e *Entry) error {
	mode := typeFile | e.Mode&permissions
	if e.Size == 0 {
		e.inode, _ = w.head(mode, layoutPlain, 0, 1, 0, e.After)
		return nil
	}
	block := e.Offset >> blockBits
	switch {
	case e.Size < 0 || e.Size > maxFile:
		return fmt.Errorf("%w: a file of %d bytes", ErrTree, e.Size)
	case e.Device < 0 || int(e.Device) >= len(w.t.Devices):
		return fmt.Errorf("%w: there is no device %d", ErrTree, e.Device)
	case e.Offset < 0 || e.Offset&(BlockSize-1) != 0 || block > math.MaxUint32:
		return fmt.Errorf("%w: a file at byte %d of a device", ErrTree, e.Offset)
	}
	e.inode, _ = w.head(mode, layoutChunks, e.Size, 1, chunkIndexSize, e.After)
	binary.LittleEndian.PutUint16(w.b[e.inode+16:], chunkIndexes|uint16(max(bits.Len64(uint64(e.Size-1)), blockBits)-blockBits))
	index := w.b[len(w.b)-chunkIndexSize:]
	binary.LittleEndian.PutUint16(index[2:], uint16(e.Device+1)) // 0 is the image itself
	binary.LittleEndian.PutUint32(index[4:], uint32(block))
	return nil
}

// symlink writes an inode with the target behind it, or in blocks of its own if that is too long.
func (w *writer) symlink(e *Entry) error {
	n := len(e.Target)
	if n == 0 || n > maxTarget || strings.IndexByte(e.Target, 0) >= 0 {
		return fmt.Errorf("%w: a target of %d bytes, or with a NUL", ErrTree, n)
	}
	if n <= maxInline {
		inode, end := w.head(modeSymlink, layoutInline, int64(n), 1, n, e.After)
		e.inode = inode
		copy(w.b[end:], e.Target)
		return nil
	}
	e.inode, _ = w.head(modeSymlink, layoutPlain, int64(n), 1, 0, e.After)
	w.align(BlockSize)
	at := w.extend(n)
	copy(w.b[at:], e.Target)
	binary.LittleEndian.PutUint32(w.b[e.inode+16:], uint32(at>>blockBits))
	return nil
}

// names writes the names of d at at: in each block first a record of each name, then the names.
func (w *writer) names(at int, d *Dir, entries []Entry) {
	end := at + int(d.size)
	first := merge(entries)
	for at < end {
		block := w.b[at:min(at+BlockSize, end)]
		var size blocks
		n := 0
		for ahead := first; ; n++ {
			name, _, ok := ahead.next()
			if !ok || !size.add(len(name)) && n > 0 {
				break
			}
		}
		off := n * direntSize
		for k := range n {
			name, e, _ := first.next()
			inode, kind := d.inode, Directory
			switch {
			case e != nil:
				inode, kind = e.inode, e.Kind
			case name == "..":
				inode = d.parent
			}
			record := block[k*direntSize:]
			binary.LittleEndian.PutUint64(record, uint64(inode/compactSize))
			binary.LittleEndian.PutUint16(record[8:], uint16(off))
			record[10] = byte(kind)
			off += copy(block[off:], name)
		}
		at += BlockSize
	}
}

// blocks counts the bytes of a directory, none of whose names crosses the end of a block.
type blocks struct {
	full int64
	used int // of the last one
}

// add counts a name of n bytes and reports whether it is in the same block as the one before.
func (s *blocks) add(n int) bool {
	s.used += direntSize + n
	if s.used <= BlockSize {
		return true
	}
	s.full, s.used = s.full+1, direntSize+n
	return false
}

func (s *blocks) total() int64 { return s.full<<blockBits + int64(s.used) }

// A merged yields the names of a directory with . and .. where they belong.
type merged struct {
	entries []Entry
	dots    int // how many of . and .. were yielded
}

func merge(entries []Entry) merged { return merged{entries: entries} }

// next returns the next name and its entry, which . and .. have none of.
func (m *merged) next() (string, *Entry, bool) {
	if m.dots < 2 {
		if dot := ".."[:m.dots+1]; len(m.entries) == 0 || m.entries[0].Name > dot {
			m.dots++
			return dot, nil, true
		}
	}
	if len(m.entries) == 0 {
		return "", nil, false
	}
	e := &m.entries[0]
	m.entries = m.entries[1:]
	return e.Name, e, true
}

// badName says what is wrong with a name, "" if nothing is.
func badName(name string) string {
	switch {
	case name == "" || len(name) > maxName:
		return "is not 1 to 255 bytes long"
	case name == "." || name == "..":
		return "is reserved"
	case strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return "contains a slash or NUL"
	}
	return ""
}
