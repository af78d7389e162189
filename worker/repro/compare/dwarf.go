// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"debug/dwarf"
	"debug/elf"
	"encoding/binary"
	"slices"
	"sort"
)

const (
	maxUnits      = 1 << 16
	maxDwarfSteps = 2 << 20 // attributes read or skipped in one file
)

// unitNames are the compared attributes of a compile unit: source, directory, compiler and split file.
var unitNames = []dwarf.Attr{dwarf.AttrName, dwarf.AttrCompDir, dwarf.AttrProducer, dwarf.AttrDwoName}

// A dwarfUnit holds the values of unitNames, "" for missing ones.
type dwarfUnit [4]string

// A dwarfReader reads only the first entry of each compile unit. Package debug/dwarf is not safe for hostile files: it
// reads all abbreviation tables, one per unit, and in a small file these may overlap.
//
// Source: DWARF 5, sections 7.5.1 (headers of units), 7.5.3 (abbreviations), 7.5.6 (forms).
type dwarfReader struct {
	info, abbrev, str, lineStr, strOffsets []byte
	// relocs are the relocations of info, which replace the offsets of object files.
	relocs []byte
	wide   bool // relocs has 64 bits
	order  binary.ByteOrder
	steps  int
}

// units returns the compile units of a file in order, nil if it cannot read them.
func (f *elfFile) units(c *comparison) []dwarfUnit {
	d := dwarfReader{order: f.order, wide: f.wide, steps: maxDwarfSteps}
	for _, part := range []struct {
		name string
		to   *[]byte
	}{
		{"info", &d.info},
		{"abbrev", &d.abbrev},
		{"str", &d.str},
		{"line_str", &d.lineStr},
		{"str_offsets", &d.strOffsets},
		{"", &d.relocs},
	} {
		s := f.debugSection(part.name)
		if s == nil {
			continue
		}
		data, release, err := f.load(c, s)
		if err != nil {
			return nil
		}
		defer release()
		*part.to = data
	}
	return d.units()
}

// debugSection returns the DWARF section of a name in any form, or nil. "" stands for the relocations of the units.
func (f *elfFile) debugSection(name string) *elfSection {
	if name == "" {
		if f.typ != elf.ET_REL {
			return nil
		}
		return f.named(".rela.debug_info")
	}
	for _, full := range []string{".debug_" + name, ".zdebug_" + name, ".debug_" + name + ".dwo"} {
		if s := f.named(full); s != nil {
			return s
		}
	}
	return nil
}

func (d *dwarfReader) units() []dwarfUnit {
	var us []dwarfUnit
	c := cursor{data: d.info, order: d.order}
	for len(us) < maxUnits && d.steps > 0 && !c.atEnd() {
		offset := 4
		size := c.number(4)
		if size == 0xffffffff {
			offset, size = 8, c.number(8)
		}
		from := c.off
		if c.next(size) == nil {
			break
		}
		unit := cursor{data: d.info[:from+int(size)], off: from, order: d.order}
		if u, ok := d.unit(&unit, offset); ok {
			us = append(us, u)
			for _, name := range u {
				d.steps -= len(name) / 16 // many may share a long name
			}
		}
		d.steps--
	}
	return us
}

// unit reads the rest of a header and the first entry. offset is the size of offsets in the unit.
func (d *dwarfReader) unit(c *cursor, offset int) (u dwarfUnit, ok bool) {
	version := c.number(2)
	if version < 2 || version > 5 {
		return u, false
	}
	form := dwarfForms{offset: offset, version: int(version)}
	kind := uint64(1) // DW_UT_compile
	if version == 5 {
		kind = c.number(1)
		form.address = int(c.number(1))
	}
	abbrev := d.offsetAt(c, offset)
	switch {
	case version < 5:
		form.address = int(c.number(1))
	case kind == 4 || kind == 5: // DW_UT_skeleton, DW_UT_split_compile
		c.next(8)
	case kind == 2 || kind == 6: // DW_UT_type, DW_UT_split_type
		return u, false
	}
	fields, ok := d.fields(abbrev, c.uleb())
	if !ok {
		return u, false
	}
	return d.names(c, fields, &form), !c.short
}

// A dwarfField is an attribute of an entry and its form.
type dwarfField struct{ attr, form uint64 }

// fields returns the fields of an abbreviation in the table at off.
func (d *dwarfReader) fields(off, code uint64) ([]dwarfField, bool) {
	if off >= uint64(len(d.abbrev)) || code == 0 {
		return nil, false
	}
	c := cursor{data: d.abbrev, off: int(off), order: d.order}
	for !c.short {
		this := c.uleb()
		if this == 0 {
			break
		}
		c.uleb() // the tag
		c.next(1)
		var fields []dwarfField
		for {
			if d.steps--; d.steps <= 0 || c.short {
				return nil, false
			}
			f := dwarfField{c.uleb(), c.uleb()}
			if f.attr == 0 && f.form == 0 {
				break
			}
			if f.form == formImplicitConst {
				c.uleb()
			}
			if this == code {
				fields = append(fields, f)
			}
		}
		if this == code {
			return fields, true
		}
	}
	return nil, false
}

// names reads an entry with these fields, up to the first unknown form.
func (d *dwarfReader) names(c *cursor, fields []dwarfField, form *dwarfForms) (u dwarfUnit) {
	var indexed [len(u)]int // index of the string + 1
	base := uint64(0)
	if form.version == 5 {
		base = uint64(2 * form.offset) // after the table's header
	}
	for _, f := range fields {
		i := slices.Index(unitNames, dwarf.Attr(f.attr))
		switch {
		case f.attr == uint64(dwarf.AttrStrOffsetsBase):
			base = d.offsetAt(c, form.offset)
			continue
		case i < 0:
			form.skip(c, f.form)
		default:
			u[i], indexed[i] = d.string(c, f.form, form)
		}
		if c.short {
			break
		}
	}
	for i, n := range indexed {
		if n > 0 {
			at := cursor{
				data:  d.strOffsets,
				off:   int(min(base+uint64(n-1)*uint64(form.offset), uint64(len(d.strOffsets)))),
				order: d.order,
			}
			u[i] = stringAt(d.str, at.number(form.offset))
		}
	}
	return u
}

// string reads a string, or returns its index in the table of offsets plus 1.
func (d *dwarfReader) string(c *cursor, form uint64, forms *dwarfForms) (s string, index int) {
	switch form {
	case formString:
		return c.text(), 0
	case formStrp:
		return stringAt(d.str, d.offsetAt(c, forms.offset)), 0
	case formLineStrp:
		return stringAt(d.lineStr, d.offsetAt(c, forms.offset)), 0
	case formStrx, formGNUStrIndex:
		return "", int(min(c.uleb(), 1<<31)) + 1
	case formStrx1, formStrx1 + 1, formStrx1 + 2, formStrx1 + 3:
		return "", int(c.number(int(form-formStrx1)+1)) + 1
	}
	forms.skip(c, form)
	return "", 0
}

// offsetAt reads an offset into another section. In object files it is the addend of the relocation.
func (d *dwarfReader) offsetAt(c *cursor, width int) uint64 {
	at := uint64(c.off)
	v := c.number(width)
	word := 4
	if d.wide {
		word = 8
	}
	entry := func(i, field int) uint64 {
		r := cursor{data: d.relocs, off: (3*i + field) * word, order: d.order}
		return r.number(word)
	}
	n := len(d.relocs) / (3 * word)
	if i := sort.Search(n, func(i int) bool { return entry(i, 0) >= at }); i < n && entry(i, 0) == at && !c.short {
		return entry(i, 2)
	}
	return v
}
