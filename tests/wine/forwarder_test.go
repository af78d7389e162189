// SPDX-License-Identifier: Apache-2.0

package wine

import (
	"bytes"
	"encoding/binary"
)

// forwarder returns a DLL of 64 bits without code whose only function is one of another DLL, in the portable executable
// format. Forward has the form DLL.FUNCTION.
func forwarder(library, function, forward string) []byte {
	const (
		fileAlign, memoryAlign = 0x200, 0x1000
		directories            = 16
		optionalSize           = 112 + directories*8
	)
	var names bytes.Buffer
	// The section begins with the export directory and its three tables of one entry each.
	const at = memoryAlign + 40 + 4 + 4 + 2
	name := func(s string) uint32 {
		rva := uint32(at + names.Len())
		names.WriteString(s + "\x00")
		return rva
	}
	self, export, target := name(library), name(function), name(forward)
	var out bytes.Buffer
	put := func(fields ...any) {
		for _, f := range fields {
			_ = binary.Write(&out, binary.LittleEndian, f) // a Buffer never fails
		}
	}
	pad := func(to int) { out.Write(make([]byte, to-out.Len())) }

	put([]byte("MZ"))
	pad(60)
	put(uint32(64), []byte("PE\x00\x00"))
	// File header: machine, sections, time, symbols, size of the optional header, characteristics of a DLL.
	put(uint16(0x8664), uint16(1), uint32(0), uint32(0), uint32(0), uint16(optionalSize), uint16(0x2022))
	// Optional header.
	put(uint16(0x20b), uint16(0), uint32(0), uint32(fileAlign), uint32(0), uint32(0), uint32(memoryAlign))
	put(uint64(0x180000000), uint32(memoryAlign), uint32(fileAlign), uint16(6), uint16(0), uint16(0), uint16(0), uint16(6), uint16(0))
	put(uint32(0), uint32(2*memoryAlign), uint32(fileAlign), uint32(0), uint16(3), uint16(0))
	put(uint64(1<<20), uint64(1<<12), uint64(1<<20), uint64(1<<12), uint32(0), uint32(directories))
	size := uint32(at - memoryAlign + names.Len())
	put(uint32(memoryAlign), size, make([]byte, (directories-1)*8))
	put([]byte(".edata\x00\x00"), size, uint32(memoryAlign), uint32(fileAlign), uint32(fileAlign), make([]byte, 12), uint32(0x40000040))
	pad(fileAlign)
	// Export directory. The address of a forwarded function is inside it.
	put(uint32(0), uint32(0), uint32(0), self, uint32(1), uint32(1), uint32(1), uint32(memoryAlign+40), uint32(memoryAlign+44), uint32(memoryAlign+48))
	put(target, export, uint16(0))
	out.Write(names.Bytes())
	pad(2 * fileAlign)
	return out.Bytes()
}
