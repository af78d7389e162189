// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Magic numbers of cpio(1): of initramfs and RPM without and with a checksum, and of POSIX.
const (
	newcMagic = "070701"
	crcMagic  = "070702"
	odcMagic  = "070707"
)

// A cpioHeader describes the numbers in front of a member.
type cpioHeader struct {
	base   int
	align  int64 // of names and contents
	widths []int // digits
	names  []string
}

var (
	newcHeader = cpioHeader{16, 4, slices.Repeat([]int{8}, 13), []string{
		"inode", "mode", "uid", "gid", "links", "mtime", "size", "major", "minor", "rmajor", "rminor", "name", "checksum",
	}}
	odcHeader = cpioHeader{
		8, 1,
		[]int{6, 6, 6, 6, 6, 6, 6, 11, 6, 11},
		[]string{"device", "inode", "mode", "uid", "gid", "links", "rdevice", "mtime", "name", "size"},
	}
)

// cpioMembers returns the members of a cpio archive. Data after the trailer is a further member (cpio(5); the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst).
func (c *comparison) cpioMembers(s *io.SectionReader) ([]member, error) {
	const maxName = 4096
	var (
		all   []member
		limit memberLimit
	)
	for off := int64(0); ; {
		if err := c.ctx.Err(); err != nil {
			return nil, err
		}
		p, err := window(s, off, 110) // the longest header
		if err != nil {
			return nil, err
		}
		var h *cpioHeader
		switch string(p[:min(len(p), len(newcMagic))]) {
		case newcMagic, crcMagic:
			h = &newcHeader
		case odcMagic:
			h = &odcHeader
		default:
			return nil, fmt.Errorf("no member header at byte %d", off)
		}
		values, end, err := h.read(p)
		if err != nil {
			return nil, fmt.Errorf("member at byte %d: %w", off, err)
		}
		length, size := values["name"], values["size"]
		if length > maxName || size > s.Size() {
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
				all = append(all, member{name: "(behind the end)", content: inPlace(s, off, s.Size()-off)})
			}
			return all, nil
		}
		if err := limit.take(len(name) + 2*len(h.names)*11); err != nil {
			return nil, err
		}
		all = append(all, member{name: name, fields: h.fields(values), content: inPlace(s, content, size)})
	}
}

// aligned rounds off up to the alignment.
func (h *cpioHeader) aligned(off int64) int64 { return (off + h.align - 1) / h.align * h.align }

// read returns the numbers at the beginning of p and their end.
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

// fields returns the fields of a member except the lengths of its name and content.
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
