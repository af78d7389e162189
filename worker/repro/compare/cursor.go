// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/binary"
)

// A cursor reads from bytes. At their end it sets short and returns zero values.
type cursor struct {
	data  []byte
	off   int
	order binary.ByteOrder
	short bool
}

// next returns the next n bytes, nil if there are fewer.
func (c *cursor) next(n uint64) []byte {
	if c.short || n > uint64(len(c.data)-c.off) {
		c.short = true
		return nil
	}
	p := c.data[c.off : c.off+int(n)]
	c.off += int(n)
	return p
}

// number returns an integer of 1, 2, 3, 4 or 8 bytes.
func (c *cursor) number(width int) uint64 {
	p := c.next(uint64(width))
	if p == nil {
		return 0
	}
	var v uint64
	for i := range p {
		if c.order == binary.ByteOrder(binary.BigEndian) {
			v = v<<8 | uint64(p[i])
		} else {
			v |= uint64(p[i]) << (8 * i)
		}
	}
	return v
}

// uleb returns a ULEB128 integer. It also skips a signed one.
func (c *cursor) uleb() uint64 {
	var v uint64
	for shift := 0; ; shift += 7 {
		p := c.next(1)
		if p == nil || shift > 70 {
			c.short = true
			return 0
		}
		v |= uint64(p[0]&0x7f) << shift
		if p[0]&0x80 == 0 {
			return v
		}
	}
}

// text returns a zero-terminated string.
func (c *cursor) text() string {
	if c.short {
		return ""
	}
	n := bytes.IndexByte(c.data[c.off:], 0)
	if n < 0 {
		c.short = true
		return ""
	}
	s := stringAt(c.data, uint64(c.off))
	c.off += n + 1
	return s
}

func (c *cursor) atEnd() bool { return c.short || c.off >= len(c.data) }
