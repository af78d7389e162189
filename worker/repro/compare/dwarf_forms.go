// SPDX-License-Identifier: Apache-2.0

package compare

// The DWARF forms of strings, and one without a value in the entry.
const (
	formString        = 0x08
	formStrp          = 0x0e
	formStrx          = 0x1a
	formLineStrp      = 0x1f
	formImplicitConst = 0x21
	formStrx1         = 0x25 // followed by those of 2, 3 and 4 bytes
	formGNUStrIndex   = 0x1f02
)

// dwarfForms determines the sizes of forms.
type dwarfForms struct{ version, address, offset int }

// skip skips a value. It sets c.short if the form is unknown.
//
// Source: DWARF 5, section 7.5.6, table 7.6; GNU forms of split DWARF in version 4.
func (f *dwarfForms) skip(c *cursor, form uint64) {
	switch form {
	case 0x19, formImplicitConst: // flag_present
	case 0x0b, 0x0c, 0x11, 0x29, formStrx1: // data1, flag, ref1, addrx1
		c.next(1)
	case 0x05, 0x12, 0x2a, formStrx1 + 1: // data2, ref2, addrx2
		c.next(2)
	case 0x2b, formStrx1 + 2: // addrx3
		c.next(3)
	case 0x06, 0x13, 0x1c, 0x2c, formStrx1 + 3: // data4, ref4, ref_sup4, addrx4
		c.next(4)
	case 0x07, 0x14, 0x20, 0x24: // data8, ref8, ref_sig8, ref_sup8
		c.next(8)
	case 0x1e: // data16
		c.next(16)
	case 0x01: // addr
		c.next(uint64(f.address))
	case formStrp, formLineStrp, 0x17, 0x1d, 0x1f20, 0x1f21: // sec_offset, strp_sup, GNU_ref_alt, GNU_strp_alt
		c.next(uint64(f.offset))
	case 0x10: // ref_addr
		if f.version == 2 {
			c.next(uint64(f.address))
		} else {
			c.next(uint64(f.offset))
		}
	case 0x0d,
		0x0f,
		0x15,
		formStrx,
		0x1b,
		0x22,
		0x23,
		0x1f01,
		formGNUStrIndex: // sdata, udata, ref_udata, addrx, loclistx, rnglistx
		c.uleb()
	case 0x0a: // block1
		c.next(c.number(1))
	case 0x03: // block2
		c.next(c.number(2))
	case 0x04: // block4
		c.next(c.number(4))
	case 0x09, 0x18: // block, exprloc
		c.next(c.uleb())
	case formString:
		c.text()
	default:
		c.short = true
	}
}
