// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"fmt"
	"io"
	"slices"
)

// maxSearched is up to which size, in bytes, a thing of no format is searched behind the first place in which it differs.
const maxSearched = 8 << 20

// plain says of two things of no format where their bytes begin to differ, which is at byte at, and of places behind it
// those that show another cause.
func (c *comparison) plain(a, b *io.SectionReader, at int64) error {
	const before, after = 32, 224
	from := max(0, at-before) &^ 15
	wa, err := window(a, from, before+after)
	if err != nil {
		return err
	}
	wb, err := window(b, from, before+after)
	if err != nil {
		return err
	}
	what := "content"
	if a.Size() != b.Size() {
		what = fmt.Sprintf("content, of %d and %d bytes", a.Size(), b.Size())
	}
	cause := guess(wa, wb, c.known)
	var clues []clue
	if size := a.Size() + b.Size(); max(a.Size(), b.Size()) <= maxSearched && size <= min(c.budget.live, c.budget.work) {
		c.budget.work -= size
		x, err := window(a, 0, int(a.Size()))
		if err != nil {
			return err
		}
		y, err := window(b, 0, int(b.Size()))
		if err != nil {
			return err
		}
		if order := c.orderOfTexts(x, y); order != Unknown {
			cause = order
		} else {
			clues = c.clues(x, y)
		}
	}
	if cause == Unknown && len(clues) > 0 && clues[0].offset <= at && at <= clues[0].offset+int64(len(clues[0].a)) {
		cause = clues[0].cause // of the text around the first byte
	}
	shown := int(at-from) &^ 15
	c.differ(what, hexText(wa[min(shown, len(wa)):]), hexText(wb[min(shown, len(wb)):]), at, cause)
	for _, l := range clues {
		if l.cause != cause {
			c.differ("content, further on", l.a, l.b, l.offset, l.cause)
		}
	}
	return nil
}

// A clue is a place in which two pieces of bytes differ and which shows a cause.
type clue struct {
	a, b   string
	offset int64 // in the one that has it, or in the first
	cause  Cause
}

// clues returns the first place for each cause that shows in what differs in a and b. What looks random is none: all that
// was compressed does.
func (c *comparison) clues(a, b []byte) []clue {
	var all []clue
	add := func(x, y string, offset int, cause Cause) {
		if cause == Unknown || cause == Random {
			return
		}
		for i := range all {
			if all[i].cause == cause {
				return
			}
		}
		all = append(all, clue{x, y, int64(offset), cause})
	}
	if len(a) != len(b) {
		textsA, textsB := stringsIn(a, minWord+2), stringsIn(b, minWord+2)
		onlyA, onlyB := lessTexts(textsA, textsB), lessTexts(textsB, textsA)
		pairs := len(onlyA) == len(onlyB)
		for i := range min(max(len(onlyA), len(onlyB)), maxRuns) {
			x, y := at(onlyA, i), at(onlyB, i)
			if pairs {
				add(x, y, bytes.Index(a, []byte(x)), c.attribute(x, y))
				continue
			}
			add(x, "", bytes.Index(a, []byte(x)), c.attribute(x, ""))
			add("", y, bytes.Index(b, []byte(y)), c.attribute("", y))
		}
		return all
	}
	end := 0
	for range maxRuns {
		r, ok := nextRun(a, b, end)
		if !ok {
			break
		}
		x, y, to := textsAt(a, b, r)
		switch {
		case to > 0:
			end = max(r.to, to)
			add(x, y, r.from, c.attribute(x, y))
		case c.known.timed():
			var cause Cause
			cause, end = guessRun(a, b, r, c.known)
			add(hexText(a[r.from:]), hexText(b[r.from:]), r.from, cause)
		default: // without facts numbers of many places look like times
			end = r.to
		}
	}
	return all
}

// orderOfTexts returns the cause if two pieces of bytes have the same texts in another order, else Unknown.
func (c *comparison) orderOfTexts(a, b []byte) Cause {
	textsA, textsB := stringsIn(a, minWord), stringsIn(b, minWord)
	if len(textsA) < 2 || slices.Equal(textsA, textsB) || !sameItems(textsA, textsB) {
		return Unknown
	}
	return c.attributor.orderCause(textsA, textsB)
}
