// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"debug/dwarf"
	"debug/elf"
	"strings"
)

// dwarfNames are the names of unitNames, as readelf(1) writes them behind "DW_AT_".
var dwarfNames = map[dwarf.Attr]string{
	dwarf.AttrName: "name", dwarf.AttrCompDir: "comp_dir", dwarf.AttrProducer: "producer", dwarf.AttrDwoName: "dwo_name",
}

// isDerived reports whether a section is made from the others by tools that add nothing of their own.
func isDerived(name string) bool {
	switch name {
	case ".note.gnu.build-id", ".note.go.buildid", ".gnu_debuglink", ".shstrtab", ".gnu.hash", ".hash", ".gnu.version", ".symtab_shndx":
		return true
	}
	return strings.HasPrefix(name, ".group")
}

// holdsData reports whether a section has data of the program or of its tools, texts among them: not code, in which
// bytes look like texts by chance, nor tables of what is where.
func holdsData(s *elfSection) bool {
	if strings.HasPrefix(s.name, ltoPrefix) {
		return false // it is packed
	}
	switch elf.SectionType(s.Type) {
	case elf.SHT_PROGBITS, elf.SHT_NOTE, elf.SHT_STRTAB:
		return s.Flags&uint64(elf.SHF_EXECINSTR) == 0 && !pointsElsewhere(s)
	}
	return false
}

// isStrings reports whether a section is a table of strings, in which they are found by their place.
func isStrings(s *elfSection) bool {
	return s.Flags&uint64(elf.SHF_STRINGS) != 0 || elf.SectionType(s.Type) == elf.SHT_STRTAB
}

// isDebug reports whether a section is for debuggers, or for an optimizer of programs, neither of which is part of the
// program.
func isDebug(s *elfSection) bool {
	return strings.HasPrefix(s.name, ltoPrefix) || strings.HasPrefix(s.name, ".debug_") || strings.HasPrefix(s.name, ".zdebug_")
}

// pointsElsewhere reports whether a section is a table of places in others.
func pointsElsewhere(s *elfSection) bool {
	switch elf.SectionType(s.Type) {
	case elf.SHT_REL, elf.SHT_RELA, elf.SHT_SYMTAB, elf.SHT_DYNSYM, elf.SHT_DYNAMIC, elf.SHT_INIT_ARRAY, elf.SHT_FINI_ARRAY:
		return true
	}
	for _, table := range []string{".eh_frame", ".gcc_except_table", ".got", ".plt", ".rela", ".rel.", ".init_array", ".fini_array", ".data.rel",
		".debug_aranges", ".debug_frame", ".debug_loc", ".debug_rnglists", ".debug_ranges", ".debug_addr", ".debug_str_offsets", ".typelink", ".itablink"} {
		if strings.HasPrefix(s.name, table) {
			return true
		}
	}
	return false
}

// maxSymbols bounds the symbols of a file of which names are compared.
const maxSymbols = 1 << 19

// symbols returns the names of the symbols of a table in its order, nil if there is none, or one too large.
func (f *elfFile) symbols(c *comparison, table string) []string {
	s := f.named(table)
	if s == nil || uint64(s.Link) >= uint64(len(f.sections)) {
		return nil
	}
	entries, release, err := f.load(c, s)
	if err != nil {
		return nil
	}
	defer release()
	text, release, err := f.load(c, &f.sections[s.Link])
	if err != nil {
		return nil
	}
	defer release()
	size := elf.Sym32Size
	if f.wide {
		size = elf.Sym64Size
	}
	if len(entries)/size > maxSymbols {
		return nil
	}
	names := make([]string, 0, len(entries)/size)
	total := 0
	for ; len(entries) >= size; entries = entries[size:] {
		name := stringAt(text, uint64(f.order.Uint32(entries)))
		if total += len(name); total > maxUnpacked {
			return nil // all may be the same long one
		}
		names = append(names, name)
	}
	return names
}
