// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Magics of archives of cpio(1): those of the kernel's initramfs and of RPM, with a checksum or without, and POSIX's.
const (
	newcMagic = "070701"
	crcMagic  = "070702"
	odcMagic  = "070707"
)

func isCpio(head []byte, _ string) bool {
	return bytes.HasPrefix(head, []byte(newcMagic)) || bytes.HasPrefix(head, []byte(crcMagic)) || bytes.HasPrefix(head, []byte(odcMagic))
}

func compareCpio(c *comparison, a, b *io.SectionReader) error {
	ma, err := c.cpioMembers(a)
	if err != nil {
		return err
	}
	mb, err := c.cpioMembers(b)
	if err != nil {
		return err
	}
	return c.compareMembers(ma, mb)
}

// A cpioHeader is what stands in front of a member: numbers of so many digits each, in a base.
type cpioHeader struct {
	base   int
	align  int64 // of names and contents
	widths []int
	names  []string // of the numbers
}

var (
	newcHeader = cpioHeader{16, 4, []int{8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8},
		[]string{"inode", "mode", "uid", "gid", "links", "mtime", "size", "major", "minor", "rmajor", "rminor", "name", "checksum"}}
	odcHeader = cpioHeader{8, 1, []int{6, 6, 6, 6, 6, 6, 6, 11, 6, 11},
		[]string{"device", "inode", "mode", "uid", "gid", "links", "rdevice", "mtime", "name", "size"}}
)

// cpioMembers returns the members of an archive of cpio(1), up to the one that says that there are no more, and what lies
// behind it as a member of its own (cpio(5); the kernel's Documentation/driver-api/early-userspace/buffer-format.rst).
func (c *comparison) cpioMembers(s *io.SectionReader) ([]member, error) {
	const most = 4096 // of names
	var (
		all   []member
		taken memory
	)
	for off := int64(0); ; {
		if err := c.ctx.Err(); err != nil {
			return nil, err
		}
		p, err := window(s, off, 110) // of the longer one
		if err != nil {
			return nil, err
		}
		if !isCpio(p, "") {
			return nil, fmt.Errorf("no header of a member at byte %d", off)
		}
		h := &newcHeader
		if bytes.HasPrefix(p, []byte(odcMagic)) {
			h = &odcHeader
		}
		values, end, err := h.read(p)
		if err != nil {
			return nil, fmt.Errorf("member at byte %d: %w", off, err)
		}
		length, size := values["name"], values["size"]
		if length > most || size > s.Size() {
			return nil, errors.New("a member is longer than the archive")
		}
		raw, err := window(s, off+end, int(length))
		if err != nil {
			return nil, err
		}
		name := strings.TrimRight(string(raw), "\x00")
		content := h.aligned(off + end + length)
		off = h.aligned(content + size)
		if off < content || content+size > s.Size() {
			return nil, errors.New("a member is longer than the archive")
		}
		if name == "TRAILER!!!" {
			if off < s.Size() {
				all = append(all, member{name: "(behind the end)", content: stays(s, off, s.Size()-off)})
			}
			return all, nil
		}
		if err := taken.take(len(name) + 2*len(h.names)*11); err != nil {
			return nil, err
		}
		all = append(all, member{name: name, fields: h.fields(values), content: stays(s, content, size)})
	}
}

// aligned returns the offset at which something begins that cannot before off.
func (h *cpioHeader) aligned(off int64) int64 { return (off + h.align - 1) / h.align * h.align }

// read returns the numbers at the beginning of p, and where they end.
func (h *cpioHeader) read(p []byte) (values map[string]int64, end int64, err error) {
	values = make(map[string]int64, len(h.names))
	at := len(newcMagic)
	for i, width := range h.widths {
		if at+width > len(p) {
			return nil, 0, io.ErrUnexpectedEOF
		}
		v, err := strconv.ParseUint(string(p[at:at+width]), h.base, 40)
		if err != nil {
			return nil, 0, err
		}
		values[h.names[i]] = int64(v)
		at += width
	}
	return values, int64(at), nil
}

// fields returns what the numbers say of a member, but for the lengths of name and content.
func (h *cpioHeader) fields(values map[string]int64) []field {
	var fs []field
	for _, name := range h.names {
		decimal := strconv.FormatInt(values[name], 10)
		switch name {
		case "name", "size":
		case "mode":
			fs = append(fs, field{name, strconv.FormatInt(values[name], 8), Mode})
		case "uid", "gid":
			fs = append(fs, field{name, decimal, Owner})
		case "mtime":
			fs = append(fs, field{name, seconds(decimal), Timestamp})
		default:
			fs = append(fs, field{name, decimal, Unknown})
		}
	}
	return fs
}
