// SPDX-License-Identifier: Apache-2.0

package segment

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/cloister-build/cloister/cas/disk/internal/index"
)

// A log is a sequence of units. A record begins with the checksum of the rest of it, and its type:
//
//	put      4 units   0 crc  4 type  5 kind  6 instance  8 stamp  12 offset  16 size  24 length  28 hash  60 order
//	touch    1 unit    0 crc  4 type  8 stamp  12 record: the put there was used at stamp
//	drop     1 unit    0 crc  4 type          12 record: the put there is absent
//	durable  1 unit    0 crc  4 type  8 stamp  12 record: everything before it was durable at stamp
//
// All numbers are little-endian. Other units, which torn writes leave, are skipped.
const (
	unit     = 16
	putUnits = 4
	putBytes = putUnits * unit
)

const (
	typeFree   = iota // a hole in a file
	typePacked        // put: the content is in the data of the segment
	typeFile          // put: the content is a separate file
	typeTouch
	typeDrop
	typeDurable

	// syncedBit of a put means that its content was synced before the record was written.
	syncedBit = 0x80
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// A Record describes a put.
type Record struct {
	index.Entry
	// Order is greater for the later of two results of an action.
	Order uint32
	// Synced means that the content was synced before the record was written.
	Synced bool
}

// appendPut appends the record r to b.
func appendPut(b []byte, r *Record) []byte {
	var p [putBytes]byte
	p[4] = typePacked
	if r.File {
		p[4] = typeFile
	}
	if r.Synced {
		p[4] |= syncedBit
	}
	p[5] = byte(r.Kind)
	binary.LittleEndian.PutUint16(p[6:], r.Instance)
	binary.LittleEndian.PutUint32(p[8:], r.Stamp)
	binary.LittleEndian.PutUint32(p[12:], r.Offset)
	binary.LittleEndian.PutUint64(p[16:], uint64(r.Size))
	binary.LittleEndian.PutUint32(p[24:], r.Length)
	copy(p[28:], r.Hash[:])
	binary.LittleEndian.PutUint32(p[60:], r.Order)
	return appendSummed(b, p[:])
}

// appendNote appends a record of one unit to b.
func appendNote(b []byte, kind byte, stamp, record uint32) []byte {
	var p [unit]byte
	p[4] = kind
	binary.LittleEndian.PutUint32(p[8:], stamp)
	binary.LittleEndian.PutUint32(p[12:], record)
	return appendSummed(b, p[:])
}

func appendSummed(b, p []byte) []byte {
	binary.LittleEndian.PutUint32(p, crc32.Checksum(p[4:], crcTable))
	return append(b, p...)
}

// parse returns the type of the record at the beginning of b, without syncedBit, and its length in units, which is 0 if
// there is none.
func parse(b []byte) (kind byte, units uint32) {
	if len(b) < unit {
		return typeFree, 0
	}
	kind = b[4] &^ syncedBit
	n := uint32(1)
	switch kind {
	case typePacked, typeFile:
		n = putUnits
	case typeTouch, typeDrop, typeDurable:
	default:
		return typeFree, 0
	}
	if len(b) < int(n*unit) || binary.LittleEndian.Uint32(b) != crc32.Checksum(b[4:n*unit], crcTable) {
		return typeFree, 0
	}
	return kind, n
}

// decodePut decodes the put at record of segment n. The caller has checked it with parse.
func decodePut(b []byte, n, record uint32) Record {
	r := Record{
		Entry: index.Entry{
			Key: index.Key{
				Size: int64(binary.LittleEndian.Uint64(b[16:])), Instance: binary.LittleEndian.Uint16(b[6:]),
				Kind: index.Kind(b[5]),
			},
			Position: index.Position{Segment: n, Record: record},
			Stamp:    binary.LittleEndian.Uint32(b[8:]),
			Offset:   binary.LittleEndian.Uint32(b[12:]),
			Length:   binary.LittleEndian.Uint32(b[24:]),
			File:     b[4]&^syncedBit == typeFile,
		},
		Order:  binary.LittleEndian.Uint32(b[60:]),
		Synced: b[4]&syncedBit != 0,
	}
	copy(r.Hash[:], b[28:])
	return r
}

func noteStamp(b []byte) uint32  { return binary.LittleEndian.Uint32(b[8:]) }
func noteRecord(b []byte) uint32 { return binary.LittleEndian.Uint32(b[12:]) }
