// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"debug/macho"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
)

var errNotMachO = errors.New("not a Mach-O file, or a damaged one")

const (
	maxCommands = 1 << 12 // of a Mach-O file
	machoUUID   = 0x1b    // LC_UUID
)

// isMachO reports whether head is that of a little-endian program or object for one machine.
func isMachO(head []byte, _ string) bool {
	if len(head) < 32 {
		return false
	}
	magic := binary.LittleEndian.Uint32(head)
	return magic == macho.Magic64 || magic == macho.Magic32
}

// compareMachO compares macOS programs by sections. The UUID is a consequence if anything else differs.
//
// Source: mach-o/loader.h.
func compareMachO(c *comparison, a, b *io.SectionReader) error {
	uuidA, sectionsA, err := machoSections(a)
	if err != nil {
		return err
	}
	uuidB, sectionsB, err := machoSections(b)
	if err != nil {
		return err
	}
	if err := c.pieces("section", sectionsA, sectionsB, c.pieceContents); err != nil {
		return err
	}
	if uuidA != uuidB {
		c.identity("LC_UUID", uuidA, uuidB)
	}
	return nil
}

// machoSections returns the UUID, "" if there is none, and the sections.
func machoSections(r *io.SectionReader) (uuid string, sections []piece, err error) {
	head, err := window(r, 0, 32)
	if err != nil || len(head) < 32 {
		return "", nil, errors.Join(err, errNotMachO)
	}
	c := cursor{data: head, off: 16, order: binary.LittleEndian}
	wide := binary.LittleEndian.Uint32(head) == macho.Magic64
	count, size := c.number(4), c.number(4)
	start := int64(28)
	if wide {
		start = 32
	}
	commands, err := window(r, start, int(min(size, uint64(r.Size()))))
	if err != nil || count > maxCommands {
		return "", nil, errors.Join(err, errNotMachO)
	}
	c = cursor{data: commands, order: binary.LittleEndian}
	for range count {
		kind, size := c.number(4), c.number(4)
		body := c.next(size - 8) // fails for a size below 8, which wraps around
		if c.short {
			return "", nil, errNotMachO
		}
		switch kind {
		case machoUUID:
			uuid = hex.EncodeToString(body)
		case uint64(macho.LoadCmdSegment), uint64(macho.LoadCmdSegment64):
			sections = append(sections, machoSegment(r, body, kind == uint64(macho.LoadCmdSegment64))...)
		}
	}
	if overlap(sections, r.Size()) {
		return "", nil, errNotMachO
	}
	return uuid, sections, nil
}

// machoSegment returns the sections that a segment command lists.
func machoSegment(r *io.SectionReader, body []byte, wide bool) []piece {
	head, size, word := 48, 68, 4
	if wide {
		head, size, word = 64, 80, 8
	}
	var sections []piece
	for at := head; at+size <= len(body); at += size {
		c := cursor{data: body[at : at+size], off: 32, order: binary.LittleEndian}
		c.number(word) // the address
		length, off := c.number(word), int64(c.number(4))
		name := stringAt(body[at+16:at+32], 0) + "," + stringAt(body[at:at+16], 0)
		c.next(3 * 4)
		// S_ZEROFILL and S_THREAD_LOCAL_ZEROFILL have no bytes in the file.
		if kind := c.number(4) & 0xff; kind == 1 || kind == 12 || off > r.Size() {
			length, off = 0, 0
		}
		data := io.NewSectionReader(r, off, int64(min(length, uint64(r.Size()-off))))
		sections = append(sections, piece{name, data})
	}
	return sections
}
