// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// An elfComparison compares two ELF files. It reports causes before consequences. Texts are causes, among them names of
// symbols and, for debuggers, of sources and directories. Build IDs, checksums and, if sections have moved, code and
// tables are consequences of any other cause.
type elfComparison struct {
	*comparison
	a, b *elfFile
	// moved means that a section has a different size or address, so that pointers differ.
	moved bool
	// later are sections whose differences are consequences.
	later []elfPair
}

// An elfPair is a section of both files.
type elfPair struct{ a, b *elfSection }

func compareELF(c *comparison, a, b *io.SectionReader) error {
	fa, err := readELF(a)
	if err != nil {
		return err
	}
	fb, err := readELF(b)
	if err != nil {
		return err
	}
	if fa.named(".go.buildinfo") != nil || fa.named(".note.go.buildid") != nil {
		c.format = "go"
	}
	e := &elfComparison{comparison: c, a: fa, b: fb}
	if kindA, kindB := fa.kind(), fb.kind(); kindA != kindB {
		c.differ("kind of file", kindA, kindB, -1, Unknown)
		return nil
	}
	if fa.flags != fb.flags {
		c.differ("flags", fmt.Sprintf("%#x", fa.flags), fmt.Sprintf("%#x", fb.flags), -1, Unknown)
	}
	pairs := e.pairs()
	var ids []elfPair
	var others []elfPair
	for _, p := range pairs {
		switch at, err := firstDifference(fa.packed(p.a), fb.packed(p.b)); {
		case err != nil:
			return err
		case at < 0:
		case isDerived(p.a.name):
			ids = append(ids, p)
		default:
			others = append(others, p)
		}
	}
	if err := e.contentsOf(others); err != nil {
		return err
	}
	return e.consequences(ids)
}

// kind describes the type of file and the machine.
func (f *elfFile) kind() string {
	width := 32
	if f.wide {
		width = 64
	}
	return fmt.Sprintf("%v %v of %d bits, %v", f.typ, f.machine, width, f.order)
}

// pairs returns the common sections in the order of the first file. It adds sections that only one file has, or a
// difference in their order.
func (e *elfComparison) pairs() []elfPair {
	inB := map[string]*elfSection{}
	var namesA, namesB []string
	for i := range e.b.sections {
		inB[e.b.sections[i].name] = &e.b.sections[i]
		namesB = append(namesB, e.b.sections[i].name)
	}
	var pairs []elfPair
	for i := range e.a.sections {
		s := &e.a.sections[i]
		namesA = append(namesA, s.name)
		t := inB[s.name]
		if t == nil || elf.SectionType(s.Type) == elf.SHT_NULL {
			continue
		}
		pairs = append(pairs, elfPair{s, t})
		e.moved = e.moved || s.Addr != t.Addr || s.Size != t.Size
	}
	if x, y := e.a.lto, e.b.lto; x != y && x != "" && y != "" {
		e.differ("names of sections for the linker", ltoPrefix+"*"+x, ltoPrefix+"*"+y, -1, Random)
	}
	onlyA, onlyB := subtract(namesA, namesB), subtract(namesB, namesA)
	e.unmatched("section", onlyA, onlyB)
	if len(onlyA)+len(onlyB) == 0 {
		e.order("sections", namesA, namesB)
	}
	return pairs
}

// contentsOf adds the differences of data sections that show a cause. Without any it adds those of other sections. The
// rest is a consequence and goes to later.
func (e *elfComparison) contentsOf(pairs []elfPair) error {
	var weak []elfPair
	for _, p := range pairs {
		in := *e.comparison
		in.found = &findings{}
		if isData(p.a) {
			if err := e.content(&in, p); err != nil {
				return err
			}
		}
		pointers := e.moved && p.a.Flags&uint64(elf.SHF_WRITE) != 0
		if slices.ContainsFunc(in.found.diffs, func(d Difference) bool {
			// The bytes of a hash among debug information may look like text.
			return d.What == "text" && (d.Cause != Unknown || !isDebug(p.a)) || d.Cause == MemberOrder && isSymbols(p.a) ||
				d.Cause != Unknown && d.Cause != MemberOrder && !pointers
		}) {
			e.found.merge(in.found)
		} else {
			weak = append(weak, p)
		}
	}
	reported := !e.found.none()
	reordered := slices.ContainsFunc(e.found.diffs, func(d Difference) bool { return d.Cause == MemberOrder })
	resized := func(p elfPair) bool { return p.a.Size != p.b.Size }
	anyResized := slices.ContainsFunc(weak, resized)
	pointed := reported || slices.ContainsFunc(weak, func(p elfPair) bool { return !isPointerTable(p.a) })
	for i, p := range weak {
		follows := reported && (e.moved || reordered || isDebug(p.a)) || pointed && isPointerTable(p.a) ||
			anyResized && !resized(p)
		if follows || i > maxPerPiece {
			e.later = append(e.later, p)
		} else if err := e.content(e.comparison, p); err != nil {
			return err
		}
	}
	return nil
}

// content adds the differences of an unpacked section to c. Of a large one it adds the first only.
func (e *elfComparison) content(c *comparison, p elfPair) error {
	a, b, release, err := e.load(c, p)
	if err != nil {
		if c.ctx.Err() != nil {
			return c.ctx.Err()
		}
		ra, rb := e.a.packed(p.a), e.b.packed(p.b)
		at, err := firstDifference(ra, rb)
		if err != nil || at < 0 {
			return err
		}
		return c.within(p.a.name).plain(ra, rb, at)
	}
	defer release()
	switch {
	case bytes.Equal(a, b):
		c.differ("compression", fmt.Sprintf("%d bytes", e.a.packed(p.a).Size()),
			fmt.Sprintf("%d bytes", e.b.packed(p.b).Size()), -1, Unknown, p.a.name)
	case isStrings(p.a) && c.texts(a, b, 1, p.a.name):
	case isData(p.a) && !isDebug(p.a):
		c.contents(a, b, p.a.name)
	case isDebug(p.a) && isData(p.a) && c.texts(a, b, minText, p.a.name):
	default:
		c.firstByte(a, b, p.a.name)
	}
	return nil
}

func (e *elfComparison) load(c *comparison, p elfPair) (a, b []byte, release func(), err error) {
	a, releaseA, err := e.a.load(c, p.a)
	if err != nil {
		return nil, nil, nil, err
	}
	b, releaseB, err := e.b.load(c, p.b)
	if err != nil {
		releaseA()
		return nil, nil, nil, err
	}
	return a, b, func() { releaseA(); releaseB() }, nil
}

// consequences adds the consequences of the differences found, or the build ID if there are none.
func (e *elfComparison) consequences(ids []elfPair) error {
	if len(e.later) > 0 {
		var names []string
		for _, p := range e.later[:min(len(e.later), 5)] {
			names = append(names, p.a.name)
		}
		if n := len(e.later) - len(names); n > 0 {
			names = append(names, fmt.Sprintf("%d more", n))
		}
		e.follows("content of sections that "+followsRest+": "+strings.Join(names, ", "), "", "",
			e.firstCause())
	}
	for _, p := range ids {
		x, errX := e.a.id(p.a)
		y, errY := e.b.id(p.b)
		if err := errors.Join(errX, errY); err != nil {
			return err
		}
		if strings.HasPrefix(p.a.name, ".note") || p.a.name == ".gnu_debuglink" {
			e.identity("build id", x, y, p.a.name)
		}
	}
	return nil
}

// id returns the build ID in a section: text for the go command, else hexadecimal.
func (f *elfFile) id(s *elfSection) (string, error) {
	r := f.packed(s)
	p, err := window(r, 0, 12+16+maxText)
	if err != nil || len(p) < 12 {
		return "", errors.Join(err, errNotELF)
	}
	if s.name == ".gnu_debuglink" {
		return fmt.Sprintf("%s, checksum %x", stringAt(p, 0), p[len(p)-4:]), nil
	}
	name := min((f.order.Uint32(p)+3)&^3, uint32(len(p)-12)) // size of the note's owner
	id := bytes.TrimRight(p[12+name:], "\x00")
	if !slices.ContainsFunc(id, func(c byte) bool { return !isTextByte(c) }) {
		return string(id), nil
	}
	return hex.EncodeToString(id), nil
}
