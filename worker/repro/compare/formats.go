// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"debug/elf"
	"io"
	"slices"
)

// A format compares two files of one kind in the terms of that kind.
type format struct {
	// name is the name that Fixes use.
	name string
	// is reports whether a file that begins with head, of at most headSize bytes, has the format. name is its name.
	is func(head []byte, name string) bool
	// needs is the number of bytes that is reads; with fewer it reports true, because the magic number may be beyond head.
	needs int
	// compare adds the differences of a and b to c. If it adds none, or fails with an error that is not from a method
	// of c, its additions are dropped and the next format is tried. a and b are hostile. If nil, the files are compared
	// as bytes, because diffoscope reads the format better.
	compare func(c *comparison, a, b *io.SectionReader) error
	// textsOnly means that of files compared as bytes only texts show causes: some numbers in compressed data and code
	// look like times.
	textsOnly bool
}

// formats returns the formats in the order in which they are tried. The first one that finds a difference wins.
func formats() []format {
	return []format{
		archiveFormat("deb", isDeb, (*comparison).arMembers),
		archiveFormat("ar", hasMagic(arMagic, thinMagic), (*comparison).arMembers),
		archiveFormat("tar", isTar, (*comparison).tarMembers),
		archiveFormat("cpio", hasMagic(newcMagic, crcMagic, odcMagic), (*comparison).cpioMembers),
		{name: "jar", is: isJar, compare: compareZip},
		{name: "epub", is: isEpub, compare: compareZip},
		{name: "wheel", is: isWheel, compare: compareZip},
		{name: "zip", is: isZip, compare: compareZip},
		{name: "jmod", is: hasMagic(jmodMagic), compare: compareJmod},
		{name: "gzip", is: hasMagic("\x1f\x8b\x08"), compare: compareGzip},
		packedFormat("zstd", "\x28\xb5\x2f\xfd", unpackZstd),
		packedFormat("bzip2", "BZh", unpackBzip2),
		packedFormat("xz", "\xfd7zXZ\x00", unpackXz),
		{name: "rpm", is: hasMagic("\xed\xab\xee\xdb"), compare: compareRPM},
		{name: "elf", is: hasMagic(elf.ELFMAG), compare: compareELF},
		{name: "macho", is: hasMagic("\xcf\xfa\xed\xfe"), compare: compareMachO},
		{name: "go object", is: hasMagic("go object "), compare: compareGoObject},
		{name: "gcov", is: hasMagic("oncg", "gcno", "adcg", "gcda"), compare: compareGcov},
		{name: "pyc", is: isPyc, compare: comparePyc},
		{name: "pe", is: hasMagic("MZ")},
		{name: "png", is: hasMagic("\x89PNG\r\n\x1a\n"), textsOnly: true},
		{name: "pdf", is: hasMagic("%PDF-"), textsOnly: true},
		{name: "class", is: hasMagic("\xca\xfe\xba\xbe"), textsOnly: true}, // and Mach-O for several machines
		{name: "macho", is: hasMagic("\xce\xfa\xed\xfe"), textsOnly: true}, // of 32 bits
		imageFormat("squashfs", "hsqs", 0, squashfsFields),
		imageFormat("fat", "\x55\xaa", 510, fatFields),
		imageFormat("swap", "SWAPSPACE2", 4086, swapFields),
		imageFormat("ext4", "\x53\xef", 1080, ext4Fields),
		imageFormat("iso9660", "CD001", 32769, isoFields),
		{name: "json", is: isJSON, compare: compareJSON},
		{name: "text", is: isTextFile, compare: compareText},
	}
}

// archiveFormat returns a format of archives that consist of members only.
func archiveFormat(
	name string, is func([]byte, string) bool, members func(*comparison, *io.SectionReader) ([]member, error),
) format {
	return format{name: name, is: is, compare: func(c *comparison, a, b *io.SectionReader) error {
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
	return format{name: name, is: hasMagic(magic), compare: func(c *comparison, a, b *io.SectionReader) error {
		return comparePacked(c, a, b, unpacker)
	}}
}

// hasMagic returns a format.is for files that begin with one of several magic numbers.
func hasMagic(magic ...string) func(head []byte, name string) bool {
	return func(head []byte, _ string) bool {
		return slices.ContainsFunc(magic, func(m string) bool { return bytes.HasPrefix(head, []byte(m)) })
	}
}
