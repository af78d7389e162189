// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"
)

var errNotPE = errors.New("not a PE file, or a damaged one")

// Offsets in the header from "PE\0\0", and the size of a section header.
const (
	peStamp       = 4 + 4
	peOptional    = 4 + 20
	peChecksum    = peOptional + 64
	sizePESection = 40
)

func isPE(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte("MZ")) }

// comparePE compares Windows programs by sections and the time in their header.
//
// Source: Microsoft, "PE Format", sections COFF File Header and Section Table.
func comparePE(c *comparison, a, b *io.SectionReader) error {
	headA, sectionsA, err := peSections(a)
	if err != nil {
		return err
	}
	headB, sectionsB, err := peSections(b)
	if err != nil {
		return err
	}
	hashed := false
	if x, y := headA[peStamp:peStamp+4], headB[peStamp:peStamp+4]; !bytes.Equal(x, y) {
		hashed = !c.known.times(peTime(x), peTime(y), time.Second)
		if !hashed {
			c.differ("TimeDateStamp", peTime(x).Format(time.RFC3339), peTime(y).Format(time.RFC3339), -1, Timestamp,
				"header")
		}
	}
	if err := c.pieces("section", sectionsA, sectionsB, c.pieceContents); err != nil {
		return err
	}
	if hashed { // by a linker with /Brepro
		c.identity("TimeDateStamp, a hash", fmt.Sprintf("%x", headA[peStamp:peStamp+4]),
			fmt.Sprintf("%x", headB[peStamp:peStamp+4]), "header")
	}
	if x, y := headA[peChecksum:], headB[peChecksum:]; !bytes.Equal(x, y) {
		c.identity("checksum", fmt.Sprintf("%x", x), fmt.Sprintf("%x", y), "header")
	}
	return nil
}

func peTime(p []byte) time.Time { return time.Unix(int64(binary.LittleEndian.Uint32(p)), 0).UTC() }

// peSections returns the header up to its checksum, and the sections.
func peSections(r *io.SectionReader) (head []byte, sections []piece, err error) {
	dos, err := window(r, 0, 64)
	if err != nil || len(dos) < 64 {
		return nil, nil, errors.Join(err, errNotPE)
	}
	at := int64(binary.LittleEndian.Uint32(dos[60:]))
	head, err = window(r, at, peChecksum+4)
	if err != nil || len(head) < peChecksum+4 || string(head[:4]) != "PE\x00\x00" {
		return nil, nil, errors.Join(err, errNotPE)
	}
	count := int(binary.LittleEndian.Uint16(head[6:]))
	table, err := window(r, at+peOptional+int64(binary.LittleEndian.Uint16(head[20:])), count*sizePESection)
	if err != nil || len(table) < count*sizePESection {
		return nil, nil, errors.Join(err, errNotPE)
	}
	for ; len(table) > 0; table = table[sizePESection:] {
		size, off := binary.LittleEndian.Uint32(table[16:]), binary.LittleEndian.Uint32(table[20:])
		data := io.NewSectionReader(r, int64(off), max(0, min(int64(size), r.Size()-int64(off))))
		sections = append(sections, piece{stringAt(table[:8], 0), data})
	}
	if overlap(sections, r.Size()) {
		return nil, nil, errNotPE
	}
	return head, sections, nil
}
