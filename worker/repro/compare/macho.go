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

// Sizes of 64-bit structures, and the load command LC_UUID.
const (
	machoHeader  = 32
	machoSegment = 72
	machoSection = 80
	machoUUID    = 0x1b
)

// compareMachO compares macOS programs by sections. The UUID is a consequence if anything else differs. Only texts show
// causes: in code some numbers look like times.
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
	c.textsOnly = true
	if err := c.compareMembers(sectionsA, sectionsB); err != nil {
		return err
	}
	if uuidA != uuidB {
		c.identity("LC_UUID", uuidA, uuidB)
	}
	return nil
}

// machoSections returns the UUID, "" if there is none, and the sections.
func machoSections(r *io.SectionReader) (uuid string, sections []member, err error) {
	le := binary.LittleEndian
	head, err := window(r, 0, machoHeader)
	if err != nil || len(head) < machoHeader {
		return "", nil, errors.Join(err, errNotMachO)
	}
	commands, err := window(r, machoHeader, int(min(int64(le.Uint32(head[20:])), r.Size())))
	if err != nil {
		return "", nil, err
	}
	total := int64(0)
	for range le.Uint32(head[16:]) {
		if len(commands) < 8 || le.Uint32(commands[4:]) < 8 || uint64(le.Uint32(commands[4:])) > uint64(len(commands)) {
			return "", nil, errNotMachO
		}
		command := commands[:le.Uint32(commands[4:])]
		commands = commands[len(command):]
		switch le.Uint32(command) {
		case machoUUID:
			uuid = hex.EncodeToString(command[8:])
		case uint32(macho.LoadCmdSegment64):
			for at := machoSegment; at+machoSection <= len(command); at += machoSection {
				var s macho.Section64
				if _, err := binary.Decode(command[at:], le, &s); err != nil {
					return "", nil, err
				}
				// S_ZEROFILL and S_THREAD_LOCAL_ZEROFILL have no bytes in the file.
				if kind := s.Flags & 0xff; kind == 1 || kind == 12 {
					s.Size = 0
				}
				size := int64(min(s.Size, uint64(r.Size())))
				if total += size; total > 4*r.Size() {
					return "", nil, errNotMachO // comparing sections that overlap would take too long
				}
				sections = append(sections, member{
					name: stringAt(s.Seg[:], 0) + "," + stringAt(s.Name[:], 0), content: inPlace(r, int64(s.Offset), size),
				})
			}
		}
	}
	return uuid, sections, nil
}
