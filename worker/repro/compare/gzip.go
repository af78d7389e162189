// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"
)

func unpackGzip(r io.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) }

// compareGzip compares the headers of two gzip files (RFC 1952, 2.3), and then the contents.
func compareGzip(c *comparison, a, b *io.SectionReader) error {
	fa, endA, err := gzipFields(a)
	if err != nil {
		return err
	}
	fb, endB, err := gzipFields(b)
	if err != nil {
		return err
	}
	before := c.found.added
	c.compareFields(fa, fb)
	at, err := firstDifference(io.NewSectionReader(a, endA, a.Size()-endA), io.NewSectionReader(b, endB, b.Size()-endB))
	if err != nil || at < 0 && c.found.added > before {
		return err // only the headers differ
	}
	return comparePacked(c, fromStart(a), fromStart(b), unpackGzip)
}

// gzipFields returns the header's fields and its end. Package gzip limits the size of its texts.
func gzipFields(s *io.SectionReader) (fields []field, end int64, err error) {
	h, err := window(s, 0, 10)
	if err != nil {
		return nil, 0, err
	}
	r, err := gzip.NewReader(fromStart(s))
	if err != nil {
		return nil, 0, err
	}
	defer r.Close()
	end = 10
	for _, part := range []struct {
		flag byte
		size int
	}{
		{0x02, 2}, // a checksum of the header
		{0x04, 2 + len(r.Extra)},
		{0x08, utf8.RuneCountInString(r.Name) + 1}, // Latin-1 in the file
		{0x10, utf8.RuneCountInString(r.Comment) + 1},
	} {
		if h[3]&part.flag != 0 {
			end += int64(part.size)
		}
	}
	return []field{
		{"mtime", seconds(strconv.FormatUint(uint64(binary.LittleEndian.Uint32(h[4:])), 10)), Timestamp},
		{"name", r.Name, Unknown},
		{"comment", r.Comment, Unknown},
		{"extra field", fmt.Sprintf("%.64x", r.Extra), Unknown},
		{"level", strconv.Itoa(int(h[8])), Unknown},
		{"system", strconv.Itoa(int(r.OS)), Unknown},
	}, end, nil
}
