// SPDX-License-Identifier: Apache-2.0

// Package erofs encodes images of the read-only file system EROFS. The regular files of an image contain no data: each
// points into one of the extra devices of the mount, which may be regular files on Linux 6.12 and later. The package
// neither reads nor mounts images, and accesses no files.
//
// Everything in an image belongs to root and has one modification time, unless the tree states another, so equal trees
// give equal images.
package erofs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"
)

// BlockSize is the size of a block in bytes, to which the contents of files are aligned.
const BlockSize = 1 << blockBits

// Time is the default modification time, in seconds since 1970.
const Time = 1_000_000_000

// MaxDevices is the maximum number of devices of an image.
const MaxDevices = 4096

// ErrTree is returned for a Tree with an invalid field or beyond the limits of an image.
var ErrTree = errors.New("invalid tree for an EROFS image")

// A Kind is the type of a directory entry.
type Kind uint8

// The kinds, with their numbers in on-disk directories.
const (
	File      Kind = 1
	Directory Kind = 2
	Whiteout  Kind = 3 // hides the name in lower layers of an overlay
	Symlink   Kind = 7
)

// A Tree is the content of an image. It consists of few slices, so it can be reused without allocation.
type Tree struct {
	Devices []int64 // the size of each in bytes, in mount order
	Tails   []Tail  // of files that refer to them
	// Dirs are all directories. The first is the root; every other one has exactly one entry, in a directory before it.
	Dirs    []Dir
	Entries []Entry
}

// A Dir is one directory.
type Dir struct {
	Mode  uint16        // permission bits
	First int32         // of its entries, Entries[First:First+Count]
	Count int32         // ascending by name, compared as bytes
	After time.Duration // modification time relative to Time; may be negative
	// Redirect, if not "", is the attribute trusted.overlay.redirect: the absolute path, in the lower layers of an
	// overlay, of the directory that is merged with this one. Such a directory has no entries of its own.
	Redirect string

	placement
}

// A placement is the position of the inode of a directory, set by Encode.
type placement struct {
	inode  int64 // its offset, or 0
	names  int64 // offset of its names, unless they have separate blocks
	parent int64 // offset of the parent's inode
	size   int64 // of its names, in bytes
	tail   int   // size of the inline data: the names and a NUL, or 0
}

// A Tail is the location of a file's last chunk, if it does not follow the others. The kernel reads whole blocks and
// fails if a device ends in the middle of one. Every chunk before the last one has TailChunk bytes.
type Tail struct {
	Device int32
	Offset int64 // a multiple of BlockSize
}

// TailChunk is the size of the chunks of a file with a Tail, in bytes.
const TailChunk = 16 << 10

// An Entry is one name in a directory.
type Entry struct {
	Name   string // 1 to 255 bytes, without a slash or NUL, neither . nor ..
	Target string // of a Symlink: 1 to 4095 bytes, without NUL
	Size   int64  // of a File, in bytes
	Offset int64  // of a File that is not empty: where its data starts, a multiple of BlockSize
	Device int32  // of a File: index of the device
	Dir    int32  // of a Directory: index in Dirs
	Tail   int32  // of a File: index in Tails, from 1, or 0
	Mode   uint16 // of a File: permission bits
	Kind   Kind
	After  time.Duration // like Dir.After; unused for a Directory

	inode int64 // its offset, set by Encode
}

// Parts of the format.
const (
	blockBits = 9

	magic          = 0xe0f5e1e2
	superblock     = 1024 // its offset
	superblockSize = 128
	slotSize       = 128 // of a device; slots follow the superblock
	featureChunks  = 0x4
	featureDevices = 0x8
	compactSize    = 32 // of an inode; also the alignment of all inodes
	extendedSize   = 64 // of an inode with its own time, or a size too large for a compact one
	extended       = 1  // bit of an inode's format
	layoutPlain    = 0 << 1
	layoutInline   = 2 << 1
	layoutChunks   = 4 << 1
	chunkIndexes   = 0x20
	chunkIndexSize = 8
	direntSize     = 12
	maxInline      = BlockSize - extendedSize // an inode and its inline data must lie in one block
	xattrHeader    = 12
	xattrTrusted   = 4 // the number of the prefix "trusted."
	redirectName   = "overlay.redirect"
	maxFile        = 1 << (31 + blockBits) // a file is one chunk
	typeFile       = 0o100000
	typeDirectory  = 0o040000
	typeSymlink    = 0o120000
	permissions    = 0o7777
	modeSymlink    = typeSymlink | 0o777
	modeWhiteout   = 0o020000 // a character device with the number 0
	maxName        = 255
	maxTarget      = 4095
)

// MaxRedirect is the maximum length of a redirect in bytes. The kernel follows no longer ones.
const MaxRedirect = 255

// Encode returns the image of t. It overwrites and reuses buf if it is large enough. It fails with ErrTree. It uses t
// as scratch space, so calls must not share t, but t may be encoded again.
func Encode(buf []byte, t *Tree) ([]byte, error) {
	if len(t.Dirs) == 0 {
		return nil, fmt.Errorf("%w: it has no root", ErrTree)
	}
	if len(t.Devices) > MaxDevices {
		return nil, fmt.Errorf("%w: %d devices are more than %d", ErrTree, len(t.Devices), MaxDevices)
	}
	for i := range t.Dirs {
		t.Dirs[i].placement = placement{}
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
			return nil, fmt.Errorf("%w: no entry before directory %d refers to it", ErrTree, i)
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
