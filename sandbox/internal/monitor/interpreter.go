// SPDX-License-Identifier: Apache-2.0

package monitor

import (
	"bytes"
	"encoding/binary"
	"io"
	"strings"
)

const (
	// headBytes is how much of a file the kernel reads to find how to execute it (BINPRM_BUF_SIZE).
	headBytes = 256
	// maxInterpreters is the length of a chain of interpreters; the kernel follows fewer.
	maxInterpreters = 6
)

// interpreter returns the interpreter of an executable: the program in a #! line (execve(2)) or the dynamic linker of a
// 64-bit little-endian ELF file (elf(5), PT_INTERP); "" if it has none. It reads at most a few KiB.
func interpreter(file io.ReaderAt) string {
	var head [headBytes]byte
	n, _ := file.ReadAt(head[:], 0) // the file may be shorter
	line, script := bytes.CutPrefix(head[:n], []byte("#!"))
	switch {
	case script:
		if i := bytes.IndexAny(line, "\n\x00"); i >= 0 {
			line = line[:i]
		}
		for word := range bytes.FieldsSeq(line) {
			return string(word)
		}
	case n >= 64 && string(head[:6]) == "\x7fELF\x02\x01":
		return linker(file, head[:64])
	}
	return ""
}

// linker returns the dynamic linker of an ELF file with this header.
func linker(file io.ReaderAt, header []byte) string {
	const size, maxEntries, maxName, interp = 56, 64, 4096, 3
	le := binary.LittleEndian
	entries := make([]byte, size*min(maxEntries, int(le.Uint16(header[56:]))))
	if le.Uint16(header[54:]) != size || !readAt(file, entries, le.Uint64(header[32:])) {
		return ""
	}
	for ; len(entries) > 0; entries = entries[size:] {
		if le.Uint32(entries) != interp {
			continue
		}
		name := make([]byte, min(maxName, le.Uint64(entries[32:])))
		if !readAt(file, name, le.Uint64(entries[8:])) {
			return ""
		}
		text, _, _ := strings.Cut(string(name), "\x00")
		return text
	}
	return ""
}

// readAt fills b from an offset and reports whether it did.
func readAt(file io.ReaderAt, b []byte, off uint64) bool {
	if int64(off) < 0 {
		return false
	}
	n, _ := file.ReadAt(b, int64(off))
	return n == len(b)
}
