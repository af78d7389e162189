// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// isDeb reports whether an ar archive is a Debian package (deb(5)).
func isDeb(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte(arMagic+"debian-binary")) }

// isWheel reports whether a zip file is a Python package (PEP 427).
func isWheel(head []byte, name string) bool {
	return isZip(head, name) && strings.HasSuffix(name, ".whl")
}

// isEpub reports whether a zip file is an electronic book, whose first member says so (EPUB 3.3, OCF).
func isEpub(head []byte, name string) bool {
	const nameAt = 30
	return isZip(head, name) && len(head) > nameAt &&
		bytes.HasPrefix(head[nameAt:], []byte("mimetypeapplication/epub+zip"))
}

const jmodMagic = "JM\x01\x00"

// compareJmod compares two Java modules: zip files behind a magic number.
func compareJmod(c *comparison, a, b *io.SectionReader) error {
	const n = int64(len(jmodMagic))
	return compareZip(c, io.NewSectionReader(a, n, a.Size()-n), io.NewSectionReader(b, n, b.Size()-n))
}

// Limits of a header of an RPM package.
const (
	rpmLead       = 96
	rpmMaxTags    = 4096
	rpmMaxData    = 16 << 20
	rpmMaxValue   = 32 // listed elements of an array
	rpmHeaderSize = 16
)

var errRPM = errors.New("not a header of an RPM package")

// rpmTags are the tags whose values have a known meaning (rpmtag.h). Digests and signatures follow from the rest.
var rpmTags = map[uint32]field{
	1006: {"build time", "", Timestamp},
	1007: {"build host", "", Hostname},
	1028: {what: "file sizes"},
	1030: {"file modes", "", Mode},
	1034: {"file mtimes", "", Timestamp},
	1039: {"file owners", "", Owner},
	1040: {"file groups", "", Owner},
	1080: {"change times", "", Timestamp},
	1094: {"cookie", "", Hostname},
}

// compareRPM compares the fields of the main header, and then the payload. The signature header follows from both.
//
// Source: rpm's format document, version 4: a lead, the signature, padding to 8 bytes, the header and the payload.
func compareRPM(c *comparison, a, b *io.SectionReader) error {
	fa, endA, err := rpmFields(a)
	if err != nil {
		return err
	}
	fb, endB, err := rpmFields(b)
	if err != nil {
		return err
	}
	c.compareFields(fa, fb, "header")
	return c.descend("payload", io.NewSectionReader(a, endA, a.Size()-endA), io.NewSectionReader(b, endB, b.Size()-endB))
}

// rpmFields returns the fields of the main header, and where the payload begins.
func rpmFields(s *io.SectionReader) (fields []field, end int64, err error) {
	_, end, err = rpmHeader(s, rpmLead)
	if err != nil {
		return nil, 0, err
	}
	return rpmHeader(s, (end+7)&^7)
}

// rpmHeader reads the header at off, without digests.
func rpmHeader(s *io.SectionReader, off int64) (fields []field, end int64, err error) {
	h, err := window(s, off, rpmHeaderSize)
	if err != nil {
		return nil, 0, err
	}
	if len(h) < rpmHeaderSize || !bytes.HasPrefix(h, []byte("\x8e\xad\xe8\x01")) {
		return nil, 0, errRPM
	}
	tags, size := binary.BigEndian.Uint32(h[8:]), binary.BigEndian.Uint32(h[12:])
	if tags > rpmMaxTags || size > rpmMaxData {
		return nil, 0, errRPM
	}
	at := off + rpmHeaderSize + int64(tags)*rpmHeaderSize
	index, err := window(s, off+rpmHeaderSize, int(tags)*rpmHeaderSize)
	if err != nil {
		return nil, 0, err
	}
	data, err := window(s, at, int(size))
	if err != nil {
		return nil, 0, err
	}
	if len(index) < int(tags)*rpmHeaderSize || len(data) < int(size) {
		return nil, 0, errRPM
	}
	seen := map[uint32]bool{} // each value may take as long as all data
	for ; len(index) > 0; index = index[rpmHeaderSize:] {
		tag := binary.BigEndian.Uint32(index)
		if f, ok := rpmTags[tag]; ok && !seen[tag] {
			seen[tag] = true
			f.text = rpmValue(index, data)
			fields = append(fields, f)
		}
	}
	return fields, at + int64(size), nil
}

// rpmValue returns the value of an entry of the index as text: numbers, or strings that end in a null.
func rpmValue(entry, data []byte) string {
	number := binary.BigEndian.Uint32
	kind, from, count := number(entry[4:]), number(entry[8:]), number(entry[12:])
	if int64(from) > int64(len(data)) {
		return ""
	}
	data = data[from:]
	var values []string
	for i := uint32(0); i < min(count, rpmMaxValue); i++ {
		switch {
		case kind == 3 && len(data) >= 2:
			values = append(values, fmt.Sprintf("%04o", binary.BigEndian.Uint16(data)&0o7777))
			data = data[2:]
		case kind == 4 && len(data) >= 4:
			values = append(values, strconv.FormatUint(uint64(binary.BigEndian.Uint32(data)), 10))
			data = data[4:]
		case kind == 6 || kind == 8 || kind == 9:
			text, rest, _ := bytes.Cut(data, []byte{0})
			values = append(values, string(text[:min(len(text), maxText)]))
			data = rest
		default:
			return hex.EncodeToString(data[:min(len(data), 16)])
		}
	}
	return strings.Join(values, " ")
}
