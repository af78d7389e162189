// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

var isZip = hasMagic("PK\x03\x04", "PK\x05\x06")

// isJar reports whether a zip file is a Java archive.
func isJar(head []byte, name string) bool {
	const nameAt = 30
	return isZip(head, name) &&
		(strings.HasSuffix(name, ".jar") || len(head) > nameAt && bytes.HasPrefix(head[nameAt:], []byte("META-INF/")))
}

func compareZip(c *comparison, a, b *io.SectionReader) error {
	za, err := readZip(a)
	if err != nil {
		return err
	}
	zb, err := readZip(b)
	if err != nil {
		return err
	}
	c.compareFields([]field{{"comment", za.Comment, Unknown}}, []field{{"comment", zb.Comment, Unknown}})
	ma, err := c.zipMembers(a, za)
	if err != nil {
		return err
	}
	mb, err := c.zipMembers(b, zb)
	if err != nil {
		return err
	}
	if err := c.compareMembers(ma, mb); err != nil {
		return err
	}
	if c.found.none() {
		c.differ("compression, of the same members", fmt.Sprint(a.Size(), " bytes"), fmt.Sprint(b.Size(), " bytes"), -1,
			Unknown)
	}
	return nil
}

// A limitedReader reads at most left bytes of s; no limit if left is negative.
type limitedReader struct {
	s    *io.SectionReader
	left int64
}

func (b *limitedReader) ReadAt(p []byte, off int64) (int, error) {
	if b.left >= 0 {
		if b.left -= int64(len(p)); b.left < 0 {
			b.left = 0
			return 0, errManyMembers
		}
	}
	return b.s.ReadAt(p, off)
}

// readZip reads the directory of a zip file. It reads at most 8 MiB, because package zip keeps all of it in memory.
func readZip(s *io.SectionReader) (*zip.Reader, error) {
	r := &limitedReader{s, 8 << 20}
	z, err := zip.NewReader(r, s.Size())
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) { // nothing is extracted
		return nil, err
	}
	r.left = -1
	return z, nil
}

func (c *comparison) zipMembers(s *io.SectionReader, z *zip.Reader) ([]member, error) {
	all := make([]member, len(z.File))
	var limit memberLimit
	for i, f := range z.File {
		if err := c.ctx.Err(); err != nil {
			return nil, err
		}
		if err := limit.take(len(f.Name) + len(f.Comment) + 3*len(f.Extra)); err != nil {
			return nil, err
		}
		all[i] = member{name: f.Name, fields: zipFields(s, f), content: c.zipContent(s, f)}
	}
	return all, nil
}

// zipContent opens a member. If it cannot be unpacked the content is the packed data.
func (c *comparison) zipContent(s *io.SectionReader, f *zip.File) func() (*io.SectionReader, func(), error) {
	return func() (*io.SectionReader, func(), error) {
		at, err := f.DataOffset()
		if err != nil {
			return nil, nil, err
		}
		packed := inPlace(s, at, int64(min(f.CompressedSize64, 1<<62)))
		if f.Method == zip.Store {
			return packed()
		}
		r, err := f.Open()
		if err != nil {
			return packed()
		}
		defer r.Close()
		unpacked, release, err := c.unpack(r, int64(min(f.CompressedSize64, 1<<32)))
		if err != nil && !errors.Is(err, errTooMuch) && c.ctx.Err() == nil {
			return packed()
		}
		return section(unpacked), release, err
	}
}

// zipFields returns the fields of f in the directory and in its local header.
func zipFields(s *io.SectionReader, f *zip.File) []field {
	day, clock := f.ModifiedDate, f.ModifiedTime // local time, as stored
	fs := []field{
		{
			"modified",
			fmt.Sprintf("%04d-%02d-%02d %02d:%02d:%02d", 1980+int(day>>9), day>>5&15, day&31, clock>>11, clock>>5&63,
				clock&31*2),
			Unknown,
		},
		{"mode", f.Mode().String(), Mode},
		{"attributes", fmt.Sprintf("%#08x", f.ExternalAttrs&0xffff), Unknown},
		{"method", strconv.Itoa(int(f.Method)), Unknown},
		{"flags", fmt.Sprintf("%#04x", f.Flags), Unknown},
		{"comment", f.Comment, Unknown},
		{"version", fmt.Sprintf("%d by %#04x", f.ReaderVersion, f.CreatorVersion), Unknown},
	}
	fs = append(fs, extraFields("", f.Extra)...)
	return append(fs, extraFields("local ", localExtra(s, f))...)
}

// extraFields returns the blocks of an extra field (APPNOTE, 4.5; Info-ZIP's proginfo/extrafld.txt).
func extraFields(prefix string, extra []byte) []field {
	var fs []field
	for n := 0; len(extra) >= 4; n++ {
		id, size := binary.LittleEndian.Uint16(extra), int(binary.LittleEndian.Uint16(extra[2:]))
		data := extra[4:min(len(extra), 4+size)]
		extra = extra[4+len(data):]
		f := field{
			what: fmt.Sprintf("%sextra field %#04x", prefix, id),
			text: hex.EncodeToString(data[:min(len(data), maxText)]),
		}
		switch {
		case id == 0x5455 && len(data) >= 5: // extended timestamp: flags, mtime, optional atime and ctime
			f.text, f.cause = "", Timestamp
			for times := data[1:]; len(times) >= 4; times = times[4:] {
				f.text += " " + seconds(strconv.Itoa(int(binary.LittleEndian.Uint32(times))))
			}
			f.text = strings.TrimSpace(f.text)
		case id == 0x000a, id == 0x000d, id == 0x5855: // times of NTFS and of old unixes
			f.cause = Timestamp
		case id == 0x7875 && len(data) == 11: // version, size and uid, size and gid
			f.text = fmt.Sprintf("uid %d, gid %d", binary.LittleEndian.Uint32(data[2:]),
				binary.LittleEndian.Uint32(data[7:]))
			f.cause = Owner
		case id == 0x7855:
			f.cause = Owner
		case id == 0x0001: // sizes beyond 4 GiB
			continue
		}
		if n > 0 {
			for _, other := range fs {
				if other.what == f.what {
					f.what += fmt.Sprintf(" (%d)", n+1)
					break
				}
			}
		}
		fs = append(fs, f)
	}
	return fs
}

// localExtra returns the extra field of f's local header, which package zip does not expose; nil if it is longer than
// 256 bytes or the header is damaged.
func localExtra(s *io.SectionReader, f *zip.File) []byte {
	const fixed, limit = 30, 256
	at, err := f.DataOffset()
	if err != nil {
		return nil
	}
	from := max(0, at-int64(fixed+len(f.Name)+limit))
	p, err := window(s, from, int(at-from))
	if err != nil {
		return nil
	}
	for n := range limit {
		h := len(p) - n - len(f.Name) - fixed
		if h < 0 {
			return nil
		}
		if string(p[h:h+4]) == "PK\x03\x04" && int(binary.LittleEndian.Uint16(p[h+28:])) == n &&
			int(binary.LittleEndian.Uint16(p[h+26:])) == len(f.Name) {
			return p[len(p)-n:]
		}
	}
	return nil
}
