// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"encoding/hex"
	"io"
)

// compareGcov compares two gcov(1) files of notes (.gcno) or counts (.gcda): the stamp that links them, which is a time
// unless gcc has a seed, and then the rest (gcc/gcov-io.h).
func compareGcov(c *comparison, a, b *io.SectionReader) error {
	const stampAt, stampEnd = 8, 12
	return c.withBytes(a, b, func(a, b []byte) error {
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
