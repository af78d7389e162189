// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"

	"github.com/klauspost/compress/zstd"
)

// packedFormat returns a format of things that are one packed thing.
func packedFormat(name, magic string, unpacker func(io.Reader) (io.ReadCloser, error)) format {
	return format{
		name: name,
		is:   func(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte(magic)) },
		compare: func(c *comparison, a, b *io.SectionReader) error {
			return comparePacked(c, a, b, unpacker)
		},
	}
}

func unpackBzip2(r io.Reader) (io.ReadCloser, error) { return io.NopCloser(bzip2.NewReader(r)), nil }

func unpackGzip(r io.Reader) (io.ReadCloser, error) { return gzip.NewReader(r) }

func unpackZstd(r io.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUnpacked), zstd.WithDecoderMaxWindow(32<<20),
		zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// comparePacked compares the contents of a and b, and says so if only the packing differs.
func comparePacked(c *comparison, a, b *io.SectionReader, unpacker func(io.Reader) (io.ReadCloser, error)) error {
	ra, err := unpacker(a)
	if err != nil {
		return err
	}
	defer ra.Close()
	rb, err := unpacker(b)
	if err != nil {
		return err
	}
	defer rb.Close()
	before := c.found.count()
	if err := c.descendPacked("contents", ra, a.Size(), rb, b.Size()); err != nil {
		return c.unread("contents", err)
	}
	if c.found.count() == before {
		c.differ("compression, of the same contents", fmt.Sprint(a.Size(), " bytes"), fmt.Sprint(b.Size(), " bytes"), -1, Unknown)
	}
	return nil
}

func isGzip(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte{0x1f, 0x8b, 8}) }

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
	before := c.found.count()
	c.compareFields(fa, fb)
	at, err := firstDifference(io.NewSectionReader(a, endA, a.Size()-endA), io.NewSectionReader(b, endB, b.Size()-endB))
	if err != nil || at < 0 && c.found.count() > before {
		return err // nothing but the header differs
	}
	return comparePacked(c, fromStart(a), fromStart(b), unpackGzip)
}

// gzipFields returns what the header says, and where it ends. Package gzip bounds the texts.
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
		{0x02, 2}, // a checksum, which follows from the rest
		{0x04, 2 + len(r.Extra)},
		{0x08, utf8.RuneCountInString(r.Name) + 1}, // which is Latin-1 in the file
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
