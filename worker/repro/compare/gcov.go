// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/hex"
	"io"
	"slices"
)

// isGcov reports whether head is that of what gcc writes for gcov(1), in either order of bytes: the notes of an object
// (.gcno), or the counts of a run (.gcda).
func isGcov(head []byte, _ string) bool {
	return slices.ContainsFunc([]string{"oncg", "gcno", "adcg", "gcda"}, func(magic string) bool { return bytes.HasPrefix(head, []byte(magic)) })
}

// compareGcov compares the stamp by which notes and counts belong together, which is of the time unless there is a seed, and
// then the rest (gcc/gcov-io.h).
func compareGcov(c *comparison, a, b *io.SectionReader) error {
	const stampAt, stampEnd = 8, 12
	return c.loaded(a, b, func(a, b []byte) error {
		if len(a) < stampEnd || len(b) < stampEnd {
			return io.ErrUnexpectedEOF
		}
		if !bytes.Equal(a[:stampAt], b[:stampAt]) {
			c.firstByte(a[:stampAt], b[:stampAt], "header")
		}
		if x, y := a[stampAt:stampEnd], b[stampAt:stampEnd]; !bytes.Equal(x, y) {
			c.differ("stamp", hex.EncodeToString(x), hex.EncodeToString(y), stampAt, Timestamp)
		}
		if x, y := a[stampEnd:], b[stampEnd:]; !bytes.Equal(x, y) {
			c.contents(x, y, "records")
		}
		return nil
	})
}
