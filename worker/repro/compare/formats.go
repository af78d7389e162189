// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"io"
)

// A format compares two files of one kind in the terms of that kind.
type format struct {
	// name is the name that Fixes use.
	name string
	// is reports whether a file that begins with head, of at most headSize bytes, has the format. name is its name.
	is func(head []byte, name string) bool
	// compare adds the differences of a and b to c. If it adds none, or fails with an error that is not from a method
	// of c, its additions are dropped and the next format is tried. a and b are hostile.
	compare func(c *comparison, a, b *io.SectionReader) error
}

// formats returns the formats in the order in which they are tried. The first one that finds a difference wins.
func formats() []format {
	return []format{
		archiveFormat("ar", isAr, (*comparison).arMembers),
		archiveFormat("tar", isTar, (*comparison).tarMembers),
		archiveFormat("cpio", isCpio, (*comparison).cpioMembers),
		{"jar", isJar, compareZip},
		{"zip", isZip, compareZip},
		{"gzip", isGzip, compareGzip},
		packedFormat("zstd", "\x28\xb5\x2f\xfd", unpackZstd),
		packedFormat("bzip2", "BZh", unpackBzip2),
		{"elf", isELF, compareELF},
		{"macho", isMachO, compareMachO},
		{"pe", isPE, comparePE},
		{"class", isClass, compareClass},
		{"go object", isGoObject, compareGoObject},
		{"gcov", isGcov, compareGcov},
		{"pyc", isPyc, comparePyc},
		{"png", isPNG, comparePNG},
		{"pdf", isPDF, comparePDF},
		{"json", isJSON, compareJSON},
		{"text", isTextFile, compareText},
	}
}

// archiveFormat returns a format of archives that consist of members only.
func archiveFormat(
	name string, is func([]byte, string) bool, members func(*comparison, *io.SectionReader) ([]member, error),
) format {
	return format{name, is, func(c *comparison, a, b *io.SectionReader) error {
		ma, err := members(c, a)
		if err != nil {
			return err
		}
		mb, err := members(c, b)
		if err != nil {
			return err
		}
		return c.compareMembers(ma, mb)
	}}
}

// packedFormat returns a format of files that consist of one compressed stream.
func packedFormat(name, magic string, unpacker func(io.Reader) (io.ReadCloser, error)) format {
	return format{
		name: name,
		is:   func(head []byte, _ string) bool { return bytes.HasPrefix(head, []byte(magic)) },
		compare: func(c *comparison, a, b *io.SectionReader) error {
			return comparePacked(c, a, b, unpacker)
		},
	}
}
