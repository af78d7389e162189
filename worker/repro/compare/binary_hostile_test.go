// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// An elfPart is a section for elfOf.
type elfPart struct {
	name  string
	typ   elf.SectionType
	flags elf.SectionFlag
	data  string
}

// elfOf returns an object file for amd64. change may modify its headers.
func elfOf(change func(h *elf.Header64, sections []elf.Section64), parts ...elfPart) string {
	var body strings.Builder
	names := "\x00"
	sections := []elf.Section64{{}}
	for _, p := range append(parts, elfPart{name: ".shstrtab", typ: elf.SHT_STRTAB}) {
		s := elf.Section64{Name: uint32(len(names)), Type: uint32(p.typ), Flags: uint64(p.flags), Off: uint64(64 + body.Len()), Size: uint64(len(p.data)), Entsize: 24}
		names += p.name + "\x00"
		if p.name == ".shstrtab" {
			p.data = names
			s.Size = uint64(len(names))
		}
		if p.typ == elf.SHT_SYMTAB {
			s.Link = uint32(len(sections) + 1)
		}
		body.WriteString(p.data)
		sections = append(sections, s)
	}
	h := elf.Header64{
		Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1, Shoff: uint64(64 + body.Len()), Ehsize: 64, Shentsize: 64,
		Shnum: uint16(len(sections)), Shstrndx: uint16(len(sections) - 1),
	}
	copy(h.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	if change != nil {
		change(&h, sections)
	}
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, &h)
	b.WriteString(body.String())
	binary.Write(&b, binary.LittleEndian, sections)
	return b.String()
}

// compressed returns the content of a compressed section that claims a size.
func compressed(size uint64, data string) string {
	h := elf.Chdr64{Type: uint32(elf.COMPRESS_ZLIB), Size: size, Addralign: 1}
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, &h)
	return b.String() + deflated(data)
}

// allocated returns the bytes that f allocates in total.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestHostileProgramsTakeLimitedMemory(t *testing.T) {
	long := strings.Repeat("n", 4000)
	symbols := strings.Repeat("\x01\x00\x00\x00"+strings.Repeat("\x00", 20), 1<<16)
	for _, row := range []struct {
		name string
		file func(end string) string
		most uint64
	}{
		{"2^62 sections", func(end string) string {
			return elfOf(func(h *elf.Header64, s []elf.Section64) { h.Shnum, s[0].Size = 0, 1<<62 }, elfPart{".data", elf.SHT_PROGBITS, 0, end})
		}, 4 << 20},
		{"sections that span the file", func(end string) string {
			var parts []elfPart
			for range 3000 {
				parts = append(parts, elfPart{".data", elf.SHT_PROGBITS, 0, ""})
			}
			return elfOf(func(_ *elf.Header64, s []elf.Section64) {
				for i := range s[:3000] {
					s[i].Off, s[i].Size = 64, 1<<20
				}
			}, append(parts, elfPart{".big", elf.SHT_PROGBITS, 0, strings.Repeat("x", 1<<20) + end})...)
		}, 16 << 20},
		{"sections that share a long name", func(end string) string {
			parts := []elfPart{{long, elf.SHT_PROGBITS, 0, end}}
			for range 10_000 {
				parts = append(parts, elfPart{"", elf.SHT_PROGBITS, 0, ""})
			}
			return elfOf(func(_ *elf.Header64, s []elf.Section64) {
				for i := range s[:10_000] {
					s[i].Name = 1
				}
			}, parts...)
		}, 40 << 20},
		{"section that unpacks to more than it claims", func(end string) string {
			return elfOf(nil, elfPart{".debug_str", elf.SHT_PROGBITS, elf.SHF_COMPRESSED, compressed(10, strings.Repeat("\x00", 24<<20)+end)})
		}, 140 << 20},
		{"symbols that share a long name", func(end string) string {
			return elfOf(nil, elfPart{".symtab", elf.SHT_SYMTAB, 0, symbols}, elfPart{".strtab", elf.SHT_STRTAB, 0, "\x00" + long + end + "\x00"})
		}, 200 << 20},
	} {
		t.Run(row.name, func(t *testing.T) {
			a, b := row.file("one"), row.file("two")
			_ = compareELF(newComparison(t.Context(), Known{}).within("x.o"), section([]byte(a)), section([]byte(b))) // does not panic
			if got := allocated(func() {
				if len(blobs(t, "x.o", a, b, Known{})) == 0 {
					t.Error("no difference")
				}
			}); got > row.most {
				t.Errorf("comparing %d bytes allocated %d bytes, want at most %d", len(a), got, row.most)
			} else {
				t.Logf("comparing %d bytes allocated %d KiB", len(a), got>>10)
			}
		})
	}
}

func TestOverlappingSectionsAreRejected(t *testing.T) {
	program := []byte(machoOf("0123456789abcdef", strings.Repeat("\x00", 2000)))
	size := machoHeader + machoSegment + 40 // the place of the section's size
	binary.LittleEndian.PutUint64(program[size:], uint64(len(program)))
	if _, sections, err := machoSections(section(program)); err != nil || len(sections) != 1 {
		t.Errorf("one section: got %d, %v", len(sections), err)
	}
	segment := slices.Clone(program[machoHeader : machoHeader+machoSegment+machoSection])
	five := append(slices.Clone(program[:machoHeader]), bytes.Repeat(segment, 5)...)
	binary.LittleEndian.PutUint32(five[16:], 5)
	binary.LittleEndian.PutUint32(five[20:], uint32(5*len(segment)))
	five = append(five, program[len(five):]...)
	if _, _, err := machoSections(section(five)); err == nil {
		t.Error("five sections that span the file: got no error")
	}
}

// samples returns a small file of each format.
func samples(t testing.TB) map[string]string {
	abbrev := "\x01\x11\x00\x25\x0e\x13\x0b\x03\x08\x1b\x08\x00\x00\x00"
	info := "\x20\x00\x00\x00\x04\x00\x00\x00\x00\x00\x08\x01\x00\x00\x00\x00\x0ca.c\x00/tmp/one\x00\x00\x00\x00\x00"
	return map[string]string{
		"a.o": elfOf(nil, elfPart{".debug_info", elf.SHT_PROGBITS, 0, info}, elfPart{".debug_abbrev", elf.SHT_PROGBITS, 0, abbrev},
			elfPart{".debug_str", elf.SHT_PROGBITS, elf.SHF_COMPRESSED | elf.SHF_STRINGS, compressed(4, "GNU C\x00")},
			elfPart{".symtab", elf.SHT_SYMTAB, 0, strings.Repeat("\x01\x00\x00\x00"+strings.Repeat("\x00", 20), 4)}, elfPart{".strtab", elf.SHT_STRTAB, 0, "\x00main\x00"},
			elfPart{".note.gnu.build-id", elf.SHT_NOTE, elf.SHF_ALLOC, "\x04\x00\x00\x00\x04\x00\x00\x00\x03\x00\x00\x00GNU\x00abcd"},
			elfPart{".go.buildinfo", elf.SHT_PROGBITS, elf.SHF_ALLOC, "\xff Go buildinf:\x08\x02" + strings.Repeat("\x00", 16) + "\x06go1.26\x04none"}),
		"a.pyc":  "\xa7\r\r\n\x00\x00\x00\x00timesize\xe3\x00\x00\x00\x00z\x05alphaz\x04beta",
		"_go_.o": "go object linux amd64 go1.26 X:none\nbuild id \"a/b\"\n\n!\n\x00\x00go120ldtexts of it",
		"a":      machoOf("0123456789abcdef", "in /tmp/one/a\x00"),
	}
}

// The formats must handle damaged files without panicking.
func TestDamagedFilesAreCompared(t *testing.T) {
	files := samples(t)
	gcc := build{"gcc", "gcc -g -gz=zlib -c -o out a.c", map[string]string{"a.c": plain}}
	files["gcc.o"], _ = gcc.run(t, "x")
	for name, file := range files {
		t.Run(name, func(t *testing.T) {
			random := rand.New(rand.NewPCG(1, 2))
			for i := range 60 {
				damaged := []byte(file)
				for range 1 + i%4 {
					damaged[random.IntN(len(damaged))] = []byte{0, 1, 0x7f, 0x80, 0xff, byte(random.Uint32())}[random.IntN(6)]
				}
				if i%3 == 0 {
					damaged = damaged[:random.IntN(len(damaged))]
				}
				if string(damaged) == file {
					continue
				}
				for _, f := range formats() {
					if f.is(damaged[:min(len(damaged), headSize)], name) && f.is([]byte(file[:min(len(file), headSize)]), name) {
						c := newComparison(t.Context(), Known{}).within(name)
						f.compare(c, section([]byte(file)), section(damaged))
						f.compare(c, section(damaged), section(damaged))
					}
				}
				if len(blobs(t, name, file, string(damaged), Known{})) == 0 {
					t.Fatalf("no difference of %q", damaged)
				}
			}
		})
	}
}

func FuzzBinary(f *testing.F) {
	for name, file := range samples(f) {
		f.Add(name, []byte(file), []byte(strings.ReplaceAll(file, "a", "b")))
		f.Add(name, []byte(file), []byte(file[:len(file)/2]))
	}
	f.Fuzz(func(t *testing.T, name string, a, b []byte) {
		for _, format := range formats() {
			headA, headB := a[:min(len(a), headSize)], b[:min(len(b), headSize)]
			if format.is(headA, name) && format.is(headB, name) {
				c := newComparison(t.Context(), Known{}).within(name)
				_ = format.compare(c, section(a), section(b)) // without recovering from panics
				checkDifferences(t, c.found.all())
			}
		}
		blobs(t, name, string(a), string(b), Known{})
	})
}
