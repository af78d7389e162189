// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"debug/elf"
	"slices"
	"strings"
)

// isDerived reports whether a section is computed from others.
func isDerived(name string) bool {
	switch name {
	case ".note.gnu.build-id",
		".note.go.buildid",
		".gnu_debuglink",
		".shstrtab",
		".gnu.hash",
		".hash",
		".gnu.version",
		".symtab_shndx":
		return true
	}
	return strings.HasPrefix(name, ".group")
}

// isData reports whether a section contains data such as texts. Code, where bytes look like text by chance, and tables
// of offsets are not data.
func isData(s *elfSection) bool {
	if strings.HasPrefix(s.name, ltoPrefix) {
		return false // compressed
	}
	switch elf.SectionType(s.Type) {
	case elf.SHT_PROGBITS, elf.SHT_NOTE, elf.SHT_STRTAB:
		return s.Flags&uint64(elf.SHF_EXECINSTR) == 0 && !isPointerTable(s)
	}
	return false
}

// isStrings reports whether a section is a string table.
func isStrings(s *elfSection) bool {
	return s.Flags&uint64(elf.SHF_STRINGS) != 0 || elf.SectionType(s.Type) == elf.SHT_STRTAB
}

// isSymbols reports whether a section is the string table of a symbol table.
func isSymbols(s *elfSection) bool { return s.name == ".strtab" || s.name == ".dynstr" }

// isDebug reports whether a section is for debuggers or LTO, and not part of the program.
func isDebug(s *elfSection) bool {
	return strings.HasPrefix(s.name, ltoPrefix) || strings.HasPrefix(s.name, ".debug_") ||
		strings.HasPrefix(s.name, ".zdebug_")
}

// pointerTables are prefixes of names of sections that consist of offsets.
var pointerTables = []string{
	".eh_frame", ".gcc_except_table", ".got", ".plt", ".rela", ".rel.", ".init_array", ".fini_array", ".data.rel",
	".debug_aranges", ".debug_frame", ".debug_loc", ".debug_rnglists", ".debug_ranges", ".debug_addr",
	".debug_str_offsets", ".typelink", ".itablink",
}

// isPointerTable reports whether a section consists of offsets into others.
func isPointerTable(s *elfSection) bool {
	switch elf.SectionType(s.Type) {
	case elf.SHT_REL,
		elf.SHT_RELA,
		elf.SHT_SYMTAB,
		elf.SHT_DYNSYM,
		elf.SHT_DYNAMIC,
		elf.SHT_INIT_ARRAY,
		elf.SHT_FINI_ARRAY:
		return true
	}
	return slices.ContainsFunc(pointerTables, func(table string) bool { return strings.HasPrefix(s.name, table) })
}
