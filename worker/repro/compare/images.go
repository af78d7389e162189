// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/hex"
	"errors"
	"io"
	"strconv"
	"strings"
)

var errImage = errors.New("not such an image")

// An imageField is a field of a superblock at a fixed offset.
type imageField struct {
	at, size int
	show     func([]byte) string
	what     string
	cause    Cause
}

// Superblocks of file systems. Everything else in an image is compared as bytes.
//
// Sources: Linux fs/ext4/ext4.h and fs/squashfs/squashfs_fs.h; mkswap(8); Microsoft's FAT specification of 2000, with
// the serial number of FAT32 at 67; ECMA-119, 8.4 and 9.1.
var (
	ext4Fields = []imageField{
		{1024 + 0x2c, 4, unixTime, "mount time", Timestamp},
		{1024 + 0x30, 4, unixTime, "write time", Timestamp},
		{1024 + 0x40, 4, unixTime, "time of the last check", Timestamp},
		{1024 + 0x108, 4, unixTime, "creation time", Timestamp},
		{1024 + 0x68, 16, hex.EncodeToString, "UUID", Random},
		{1024 + 0xec, 16, hex.EncodeToString, "hash seed", Random},
		{1024 + 0x88, 64, cText, "last mounted at", Path},
	}
	squashfsFields = []imageField{{8, 4, unixTime, "creation time", Timestamp}}
	fatFields      = []imageField{
		{39, 4, hex.EncodeToString, "serial number", Timestamp}, // mkfs.fat takes it from the clock
		{67, 4, hex.EncodeToString, "serial number", Timestamp},
	}
	swapFields = []imageField{{1024 + 12, 16, hex.EncodeToString, "UUID", Random}}
	isoFields  = []imageField{
		{32768 + 40, 32, cText, "volume", Unknown},
		{32768 + 813, 17, isoTime, "creation time", Timestamp},
		{32768 + 830, 17, isoTime, "modification time", Timestamp},
		{32768 + 864, 17, isoTime, "effective time", Timestamp},
		{32768 + 156 + 18, 7, isoDate, "time of the root directory", Timestamp},
	}
)

// imageFormat returns a format of files that have a magic number at an offset and a superblock.
func imageFormat(name, magic string, at int64, fields []imageField) format {
	needs := int(at) + len(magic)
	is := func(head []byte, _ string) bool { return len(head) < needs || string(head[at:needs]) == magic }
	return format{name: name, is: is, needs: needs, compare: func(c *comparison, a, b *io.SectionReader) error {
		for _, side := range []*io.SectionReader{a, b} {
			if p, err := window(side, at, len(magic)); err != nil || string(p) != magic {
				return errImage
			}
		}
		var fa, fb []field
		for _, f := range fields {
			x, errA := window(a, int64(f.at), f.size)
			y, errB := window(b, int64(f.at), f.size)
			if errA != nil || errB != nil || len(x) < f.size || len(y) < f.size {
				return errImage
			}
			fa = append(fa, field{f.what, f.show(x), f.cause})
			fb = append(fb, field{f.what, f.show(y), f.cause})
		}
		return c.image(a, b, fa, fb, fields)
	}}
}

// image adds the differing fields, and what else differs.
func (c *comparison) image(a, b *io.SectionReader, fa, fb []field, fields []imageField) error {
	if a.Size() > maxSearched || b.Size() > maxSearched {
		c.compareFields(fa, fb, "superblock")
		return nil
	}
	return c.withBytes(a, b, func(x, y []byte) error {
		for i, f := range fields {
			if fa[i].text != fb[i].text {
				c.compareFields(fa[i:i+1], fb[i:i+1], "superblock")
				copy(y[f.at:f.at+f.size], x[f.at:]) // reported; withBytes has copies
			}
		}
		for _, h := range c.hints(x, y) {
			c.differ("content", h.a, h.b, h.offset, h.cause)
		}
		if at, err := firstDifference(section(x), section(y)); err == nil && at >= 0 && c.found.none() {
			c.firstByte(x, y)
		}
		return nil
	})
}

func unixTime(p []byte) string {
	v := uint64(p[0]) | uint64(p[1])<<8 | uint64(p[2])<<16 | uint64(p[3])<<24
	return seconds(strconv.FormatUint(v, 10))
}

func cText(p []byte) string { return strings.TrimRight(string(p), "\x00 ") }

// isoTime returns a date of 16 digits and a zone in quarters of an hour as text.
func isoTime(p []byte) string {
	s := string(p[:16])
	return s[:4] + "-" + s[4:6] + "-" + s[6:8] + " " + s[8:10] + ":" + s[10:12] + ":" + s[12:14] + "." + s[14:]
}

// isoDate returns a date of seven bytes as text: years since 1900, month, day, hour, minute, second and zone.
func isoDate(p []byte) string {
	n := func(i int) string { return strconv.Itoa(int(p[i])) }
	return strconv.Itoa(1900+int(p[0])) + "-" + n(1) + "-" + n(2) + " " + n(3) + ":" + n(4) + ":" + n(5)
}
