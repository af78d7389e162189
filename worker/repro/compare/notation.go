// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"encoding/binary"
	"time"
)

// A notation is a binary form of a time of day and date, in an unknown zone.
type notation struct {
	size   int
	decode func(p []byte) (y, mon, d, h, m, s int)
}

// notations are the binary forms other than numbers of seconds.
var notations = []notation{
	{7, func(p []byte) (y, mon, d, h, m, s int) { // binary-coded decimal: YYYYMMDDhhmmss
		return bcd(p[0])*100 + bcd(p[1]), bcd(p[2]), bcd(p[3]), bcd(p[4]), bcd(p[5]), bcd(p[6])
	}},
	{7, func(p []byte) (y, mon, d, h, m, s int) { // ECMA-119, 9.1.5, with a zone
		return 1900 + int(p[0]), int(p[1]), int(p[2]), int(p[3]), int(p[4]), int(p[5])
	}},
	{4, func(p []byte) (y, mon, d, h, m, s int) {
		return dosTime(binary.LittleEndian.Uint16(p[2:]), binary.LittleEndian.Uint16(p))
	}},
	{4, func(p []byte) (y, mon, d, h, m, s int) {
		return dosTime(binary.LittleEndian.Uint16(p), binary.LittleEndian.Uint16(p[2:]))
	}},
	{4, func(p []byte) (y, mon, d, h, m, s int) {
		return bcd(p[0])*100 + bcd(p[1]), bcd(p[2]), bcd(p[3]), -1, 0, 0
	}},
}

// bcd returns the value of two decimal digits in a byte, or a large number.
func bcd(b byte) int {
	if b&0xf > 9 || b>>4 > 9 {
		return 1 << 20
	}
	return int(b>>4)*10 + int(b&0xf)
}

// dosTime decodes date and time of FAT.
func dosTime(date, clock uint16) (y, mon, d, h, m, s int) {
	y, mon, d = 1980+int(date>>9), int(date>>5&15), int(date&31)
	return y, mon, d, int(clock >> 11), int(clock >> 5 & 63), int(clock&31) * 2
}

// notedTimes reports whether a run of different bytes is in times of the two runs in one of the notations, and where
// these end.
func notedTimes(a, b []byte, r run, k Known) (int, bool) {
	if !k.timed() {
		return 0, false // any bytes may look like a time
	}
	for _, n := range notations {
		for at := max(0, r.from-n.size+1); at <= r.from && at+n.size <= len(a); at++ {
			if n.isOf(k.A, a[at:]) && n.isOf(k.B, b[at:]) {
				return at + n.size, true
			}
		}
	}
	return 0, false
}

// isOf reports whether p begins with a time of the run in any zone, or with its date if the notation has no time.
func (n *notation) isOf(f *Facts, p []byte) bool {
	const zones = 15 * time.Hour
	y, mon, d, h, m, s := n.decode(p)
	before := zones
	if h < 0 {
		h, before = 0, zones+24*time.Hour
	}
	if y < 1980 || y > 2200 || mon < 1 || mon > 12 || d < 1 || d > 31 || h > 23 || m > 59 || s > 60 {
		return false
	}
	t := time.Date(y, time.Month(mon), d, h, m, s, 0, time.UTC)
	return t.After(f.Start.Add(-before)) && t.Before(f.End.Add(zones))
}
