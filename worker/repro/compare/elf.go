// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"compress/zlib"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Limits of ELF files. An object of 60,000 functions has 130,000 sections.
const (
	maxSections = 1 << 18
	maxNamesELF = 16 << 20 // bytes of section names
)

var errNotELF = errors.New("not an ELF file, or a damaged one")

// An elfFile holds the section headers of an ELF file. Package debug/elf is not safe for hostile files: it unpacks as
// many bytes as they claim.
//
// Source: System V ABI, chapter 4; elf(5).
type elfFile struct {
	r        *io.SectionReader
	order    binary.ByteOrder
	wide     bool // 64 bits
	typ      elf.Type
	machine  elf.Machine
	flags    uint32
	sections []elfSection
	// lto is the random suffix that gcc gives to the names of LTO sections.
	lto string
}

const ltoPrefix = ".gnu.lto_"

// An elfSection is a section header, converted to 64 bits.
type elfSection struct {
	elf.Section64
	// name is numbered if several sections have it, as with function groups: "name [2]".
	name string
}

// readELF reads the headers of an ELF file.
func readELF(r *io.SectionReader) (*elfFile, error) {
	ident, err := window(r, 0, elf.EI_NIDENT)
	if err != nil {
		return nil, err
	}
	if len(ident) < elf.EI_NIDENT || string(ident[:4]) != elf.ELFMAG {
		return nil, errNotELF
	}
	f := &elfFile{r: r, order: binary.LittleEndian, wide: ident[elf.EI_CLASS] == byte(elf.ELFCLASS64)}
	if ident[elf.EI_DATA] == byte(elf.ELFDATA2MSB) {
		f.order = binary.BigEndian
	}
	h, err := f.header()
	if err != nil {
		return nil, err
	}
	f.typ, f.machine, f.flags = elf.Type(h.Type), elf.Machine(h.Machine), h.Flags
	if h.Shoff == 0 {
		return f, nil
	}
	return f, f.readSections(h)
}

// decode reads a struct of integers at off.
func (f *elfFile) decode(v any, off uint64) error {
	p, err := window(f.r, int64(min(off, 1<<62)), binary.Size(v))
	if err != nil {
		return err
	}
	if _, err := binary.Decode(p, f.order, v); err != nil {
		return fmt.Errorf("%w: header at %#x", errNotELF, off)
	}
	return nil
}

func (f *elfFile) header() (h elf.Header64, err error) {
	if f.wide {
		err = f.decode(&h, 0)
		return h, err
	}
	var n elf.Header32
	err = f.decode(&n, 0)
	h = elf.Header64{
		Type: n.Type, Machine: n.Machine, Flags: n.Flags, Shoff: uint64(n.Shoff),
		Shentsize: n.Shentsize, Shnum: n.Shnum, Shstrndx: n.Shstrndx,
	}
	return h, err
}

func (f *elfFile) section(h *elf.Header64, i uint64) (s elf.Section64, err error) {
	off := h.Shoff + i*uint64(h.Shentsize)
	if f.wide {
		err = f.decode(&s, off)
		return s, err
	}
	var n elf.Section32
	err = f.decode(&n, off)
	return elf.Section64{
		Name: n.Name, Type: n.Type, Flags: uint64(n.Flags), Addr: uint64(n.Addr), Off: uint64(n.Off), Size: uint64(n.Size),
		Link: n.Link, Info: n.Info, Addralign: uint64(n.Addralign), Entsize: uint64(n.Entsize),
	}, err
}

// readSections reads the table of sections and their names.
func (f *elfFile) readSections(h elf.Header64) error {
	first, err := f.section(&h, 0)
	if err != nil {
		return err
	}
	count, names := uint64(h.Shnum), uint64(h.Shstrndx)
	if count == 0 {
		count = first.Size // too many for the header
	}
	if names == uint64(elf.SHN_XINDEX) {
		names = uint64(first.Link)
	}
	if count > maxSections || h.Shentsize < 40 || h.Shoff > uint64(f.r.Size()) || names >= count ||
		count*uint64(h.Shentsize) > uint64(f.r.Size())-h.Shoff {
		return fmt.Errorf("%w: %d sections", errNotELF, count)
	}
	f.sections = make([]elfSection, count)
	total := int64(0)
	for i := range count {
		if f.sections[i].Section64, err = f.section(&h, i); err != nil {
			return err
		}
		if total += f.packed(&f.sections[i]).Size(); total > 4*f.r.Size() {
			return fmt.Errorf("%w: sections overlap", errNotELF) // comparing them would take too long
		}
	}
	return f.name(names)
}

// name sets the names of the sections from the string table with this index.
func (f *elfFile) name(table uint64) error {
	s := &f.sections[table]
	if s.Size > maxNamesELF {
		return fmt.Errorf("%w: %d bytes of names", errNotELF, s.Size)
	}
	text, err := window(f.r, int64(min(s.Off, 1<<62)), int(s.Size))
	if err != nil {
		return err
	}
	seen := map[string]int{}
	total := 0
	for i := range f.sections {
		name := stringAt(text, uint64(f.sections[i].Name))
		if total += len(name); total > maxNamesELF {
			return fmt.Errorf("%w: names of more than %d bytes", errNotELF, maxNamesELF) // many may share a long one
		}
		if i := strings.LastIndexByte(name, '.'); strings.HasPrefix(name, ltoPrefix) && i > len(ltoPrefix) {
			name, f.lto = name[:i], name[i:]
		}
		if seen[name]++; seen[name] > 1 {
			name = fmt.Sprintf("%s [%d]", name, seen[name])
		}
		f.sections[i].name = name
	}
	return nil
}

// stringAt returns the zero-terminated string at off, truncated if it is very long.
func stringAt(table []byte, off uint64) string {
	if off >= uint64(len(table)) {
		return ""
	}
	s := table[off:min(uint64(len(table)), off+4096)]
	if i := bytes.IndexByte(s, 0); i >= 0 {
		s = s[:i]
	}
	return string(s)
}

// named returns the section of a name, or nil.
func (f *elfFile) named(name string) *elfSection {
	for i := range f.sections {
		if f.sections[i].name == name {
			return &f.sections[i]
		}
	}
	return nil
}

// packed returns the content of a section as stored.
func (f *elfFile) packed(s *elfSection) *io.SectionReader {
	if elf.SectionType(s.Type) == elf.SHT_NOBITS || s.Off >= uint64(f.r.Size()) {
		return section(nil)
	}
	return io.NewSectionReader(f.r, int64(s.Off), int64(min(s.Size, uint64(f.r.Size())-s.Off)))
}

// load returns the unpacked content of a section. The caller calls release when done.
func (f *elfFile) load(c *comparison, s *elfSection) (data []byte, release func(), err error) {
	packed := f.packed(s)
	unpacked, err := f.unpacker(s, packed)
	if err != nil {
		return nil, nil, err
	}
	defer unpacked.Close()
	return c.unpack(unpacked, packed.Size())
}

// unpacker returns a reader of the unpacked content of a section.
func (f *elfFile) unpacker(s *elfSection, r *io.SectionReader) (io.ReadCloser, error) {
	typ := elf.COMPRESS_ZLIB
	skip := 12 // "ZLIB" and a size, in the older form
	switch {
	case s.Flags&uint64(elf.SHF_COMPRESSED) != 0:
		h, err := window(r, 0, 24)
		if err != nil || len(h) < 24 {
			return nil, errNotELF
		}
		typ = elf.CompressionType(f.order.Uint32(h))
		if skip = 24; !f.wide {
			skip = 12
		}
	case !strings.HasPrefix(s.name, ".zdebug_"):
		return io.NopCloser(r), nil
	}
	body := io.NewSectionReader(r, int64(skip), r.Size())
	switch typ {
	case elf.COMPRESS_ZLIB:
		return zlib.NewReader(body)
	case elf.COMPRESS_ZSTD:
		return unpackZstd(body)
	}
	return nil, fmt.Errorf("%w: compression %d", errNotELF, typ)
}
