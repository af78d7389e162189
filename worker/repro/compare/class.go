// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
)

var errNotClass = errors.New("not a Java class file, or a damaged one")

// isClass reports whether head is that of a Java class. Fat Mach-O files have the same magic number, followed by a
// number of machines, which is lower than every version of Java.
func isClass(head []byte, _ string) bool {
	return len(head) >= 10 && binary.BigEndian.Uint32(head) == 0xcafebabe && binary.BigEndian.Uint16(head[6:]) >= 45
}

// compareClass compares two classes by version and constants, and if these are equal by the rest.
//
// Source: The Java Virtual Machine Specification, chapter 4.
func compareClass(c *comparison, a, b *io.SectionReader) error {
	return c.withBytes(a, b, func(a, b []byte) error {
		constsA, restA, err := classConstants(a)
		if err != nil {
			return err
		}
		constsB, restB, err := classConstants(b)
		if err != nil {
			return err
		}
		version := func(p []byte) string {
			return fmt.Sprintf("%d.%d", binary.BigEndian.Uint16(p[6:]), binary.BigEndian.Uint16(p[4:]))
		}
		if x, y := version(a), version(b); x != y {
			c.differ("version of the format", x, y, 4, Unknown)
		}
		onlyA, onlyB := subtract(constsA, constsB), subtract(constsB, constsA)
		c.unmatched("constant", onlyA, onlyB, "constants")
		if len(onlyA)+len(onlyB) == 0 {
			c.order("constants", constsA, constsB, "constants")
		}
		from, to := len(a)-len(restA), len(b)-len(restB)
		if c.found.none() && slices.Equal(a[:from], b[:to]) {
			c.contents(restA, restB, "fields, methods and attributes")
		}
		return nil
	})
}

// classConstants returns the texts and numbers among the constants of a class in order, and the rest of the file.
func classConstants(data []byte) (consts []string, rest []byte, err error) {
	c := cursor{data: data, off: 8, order: binary.BigEndian}
	count := c.number(2)
	for i := uint64(1); i < count && !c.short; i++ {
		switch tag := c.number(1); tag {
		case 1: // Utf8
			consts = append(consts, string(c.next(c.number(2))))
		case 3, 4: // Integer, Float
			v := c.number(4)
			if consts = append(consts, fmt.Sprint(int32(v))); tag == 4 {
				consts[len(consts)-1] = fmt.Sprint(math.Float32frombits(uint32(v)))
			}
		case 5, 6: // Long, Double, which take two indices
			v := c.number(8)
			if consts = append(consts, fmt.Sprint(int64(v))); tag == 6 {
				consts[len(consts)-1] = fmt.Sprint(math.Float64frombits(v))
			}
			i++
		case 7, 8, 16, 19, 20: // Class, String, MethodType, Module, Package
			c.next(2)
		case 9, 10, 11, 12, 17, 18: // references, NameAndType, Dynamic, InvokeDynamic
			c.next(4)
		case 15: // MethodHandle
			c.next(3)
		default:
			c.short = true
		}
	}
	if c.short {
		return nil, nil, fmt.Errorf("%w: constants", errNotClass)
	}
	return consts, c.data[c.off:], nil
}
