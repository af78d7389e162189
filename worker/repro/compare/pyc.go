// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"time"
)

// The header of a .pyc file: magic number, flags, and the time and size or the hash of the source.
const (
	pycHeader = 16
	pycHashed = 1 // a flag
)

// isPyc reports whether head is that of a .pyc file of Python 3.7 or later.
//
// Source: PEP 552; Lib/importlib/_bootstrap_external.py.
func isPyc(head []byte, _ string) bool {
	if len(head) < pycHeader || head[2] != '\r' || head[3] != '\n' {
		return false
	}
	magic := binary.LittleEndian.Uint16(head)
	return magic >= 3390 && magic < 4500 && binary.LittleEndian.Uint32(head[4:]) <= 3
}

// comparePyc compares the fields of the header and the texts in the marshalled code.
func comparePyc(c *comparison, a, b *io.SectionReader) error {
	headA, err := window(a, 0, pycHeader)
	if err != nil {
		return err
	}
	headB, err := window(b, 0, pycHeader)
	if err != nil {
		return err
	}
	number := binary.LittleEndian.Uint32
	if x, y := number(headA), number(headB); x != y {
		c.differ("magic number of Python's version", fmt.Sprint(x&0xffff), fmt.Sprint(y&0xffff), 0, Unknown)
		return nil
	}
	flagsA, flagsB := number(headA[4:]), number(headB[4:])
	switch {
	case flagsA != flagsB:
		c.differ("kind of validation", pycKind(flagsA), pycKind(flagsB), 4, Unknown)
	case flagsA&pycHashed != 0:
		if x, y := hex.EncodeToString(headA[8:]), hex.EncodeToString(headB[8:]); x != y {
			c.differ("hash of the source", x, y, 8, Unknown)
		}
	default:
		c.pycSource(headA, headB)
	}
	rest := func(r *io.SectionReader) *io.SectionReader {
		return io.NewSectionReader(r, pycHeader, r.Size()-pycHeader)
	}
	return c.withBytes(rest(a), rest(b), func(a, b []byte) error {
		c.marshalled(a, b)
		return nil
	})
}

func pycKind(flags uint32) string {
	return []string{"time of the source", "hash of the source, unchecked", "unknown", "hash of the source, checked"}[flags&3]
}

// pycSource compares the time and size of the source.
func (c *comparison) pycSource(a, b []byte) {
	seconds := func(head []byte) string {
		return time.Unix(int64(binary.LittleEndian.Uint32(head[8:])), 0).UTC().Format(time.RFC3339)
	}
	if x, y := seconds(a), seconds(b); x != y {
		c.differ("time of the source", x, y, 8, Timestamp)
	}
	if x, y := binary.LittleEndian.Uint32(a[12:]), binary.LittleEndian.Uint32(b[12:]); x != y {
		c.differ("size of the source", fmt.Sprint(x), fmt.Sprint(y), 12, Unknown)
	}
}

// marshalled compares two marshalled objects: first texts, then the order of the same bytes, as in the items of a set,
// and then the flags of shared objects.
func (c *comparison) marshalled(a, b []byte) {
	const code = "code"
	textsA, textsB := marshalTexts(a), marshalTexts(b)
	onlyA, onlyB := subtract(textsA, textsB), subtract(textsB, textsA)
	switch first := commonPrefix(a, b); {
	case len(a) == len(b) && first == len(a):
	case len(onlyA)+len(onlyB) > 0:
		c.unmatched("text", onlyA, onlyB, code)
	case sameBytes(a, b):
		x, y := "", ""
		for i := range min(len(textsA), len(textsB)) {
			if textsA[i] != textsB[i] {
				x, y = textsA[i], textsB[i]
				break
			}
		}
		c.differ("order of constants", x, y, int64(first), HashSeed, code)
	case sameButMarks(a, b):
		c.differ("marks of objects that are referred to", hexText(a[first:]), hexText(b[first:]), int64(first), Unknown,
			code)
	default:
		c.contents(a, b, code)
	}
}

// marshalTexts returns the texts in a marshalled object: everything that looks like text after its length.
//
// Source: Python/marshal.c; types z and Z have a length of one byte, the others one of four.
func marshalTexts(p []byte) []string {
	var texts []string
	last := -1 // last byte that is not text; texts that would contain it are skipped
	for i := 0; i < len(p) && len(texts) < maxStrings; i++ {
		from, n := 0, 0
		switch p[i] &^ 0x80 {
		case 'z', 'Z':
			if i+1 < len(p) {
				from, n = i+2, int(p[i+1])
			}
		case 'a', 'A', 'u', 't':
			if i+5 <= len(p) {
				from, n = i+5, int(min(binary.LittleEndian.Uint32(p[i+1:]), 1<<20))
			}
		}
		if n < minWord || from+n > len(p) || from <= last && last < from+n {
			continue
		}
		end := from
		for end < from+n && (isTextByte(p[end]) || p[end] == '\n' || p[end] >= 0x80) {
			end++
		}
		if end == from+n {
			texts = append(texts, string(p[from:end]))
			i = end - 1
			continue
		}
		last = end
	}
	return texts
}

// sameBytes reports whether a and b have the same bytes in any order.
func sameBytes(a, b []byte) bool {
	var n [256]int
	for _, c := range a {
		n[c]++
	}
	for _, c := range b {
		n[c]--
	}
	return n == [256]int{}
}

// sameButMarks reports whether a and b differ only in the flag of shared objects.
func sameButMarks(a, b []byte) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i]&^0x80 != b[i]&^0x80 {
			return false
		}
	}
	return true
}
