// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"fmt"
	"io"
	"slices"
)

// maxSearched is the size, in bytes, of the largest file of no format that is searched beyond its first difference.
const maxSearched = 8 << 20

// plain compares two files of no format, which first differ at byte at. It adds the first difference and, for each
// further cause that it finds, one place.
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
	cause := c.guess(wa, wb)
	var hints []hint
	if size := a.Size() + b.Size(); max(a.Size(), b.Size()) <= maxSearched &&
		size <= min(c.budget.live, c.budget.work) {
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
			hints = c.hints(x, y)
		}
	}
	if cause == Unknown && len(hints) > 0 && hints[0].offset <= at && at <= hints[0].offset+int64(len(hints[0].a)) {
		cause = hints[0].cause // of the text around the first difference
	}
	if cause == Random {
		if cause = randomOr(wa, wb, int(at-from)); a.Size() != b.Size() && len(wa) == before+after {
			cause = Compressed // of another length
		}
	}
	shown := int(at-from) &^ 15
	c.differ(what, hexText(wa[min(shown, len(wa)):]), hexText(wb[min(shown, len(wb)):]), at, cause)
	for _, h := range hints {
		if h.cause != cause {
			c.differ("content, further on", h.a, h.b, h.offset, h.cause)
		}
	}
	return nil
}

// guess returns the likely cause of a difference between two pieces of bytes at the same offset, from the words and
// numbers in them.
func (c *comparison) guess(a, b []byte) Cause {
	n := min(len(a), len(b))
	if r, ok := nextRun(a[:n], b[:n], 0); ok {
		if x, y, end := textsAt(a, b, r); end > 0 {
			if cause := c.classify(x, y); cause != Unknown || !c.known.timed() { // without facts, words look like times
				return cause
			}
		}
	}
	if c.textsOnly {
		return Unknown
	}
	return numbers(a, b, c.known)
}

// A hint is a place of a difference with a known cause.
type hint struct {
	a, b   string
	offset int64 // in the file that has the text, or in the first
	cause  Cause
}

// maxRandom is the length, in bytes, of the longest random value in a file, such as an ID or a key. Longer ranges of
// bytes that all look random are compressed or encrypted.
const maxRandom = 64

// isShort reports whether a value that looks random ends where it should: equal bytes or the end of both files follow.
func isShort(a, b []byte, from, to int) bool {
	const equal = 8
	return len(a) == len(b) && to-from <= maxRandom && bytes.Equal(a[to:min(len(a), to+equal)], b[to:min(len(b), to+equal)])
}

// randomOr returns Random if bytes that look random, from an offset of two files on, are a short value, else
// Compressed.
func randomOr(a, b []byte, from int) Cause {
	if to, ok := disorder(a, b, from); ok && !isShort(a, b, from, to) {
		return Compressed
	}
	return Random
}

// hints returns the first place of each cause, of random bytes only if they are a short value.
func (c *comparison) hints(a, b []byte) []hint {
	var all []hint
	add := func(x, y string, offset int, causes ...Cause) {
		for _, cause := range causes {
			if cause != Unknown && !slices.ContainsFunc(all, func(h hint) bool { return h.cause == cause }) {
				all = append(all, hint{x, y, int64(offset), cause})
			}
		}
	}
	if len(a) != len(b) {
		textsA, textsB := stringsIn(a, minText), stringsIn(b, minText)
		onlyA, onlyB := subtract(textsA, textsB), subtract(textsB, textsA)
		pairs := len(onlyA) == len(onlyB)
		for i := range min(max(len(onlyA), len(onlyB)), maxRuns) {
			x, y := at(onlyA, i), at(onlyB, i)
			if pairs {
				add(x, y, bytes.Index(a, []byte(x)), c.causes(x, y)...)
				continue
			}
			add(x, "", bytes.Index(a, []byte(x)), c.causes(x, "")...)
			add("", y, bytes.Index(b, []byte(y)), c.causes("", y)...)
		}
		all = slices.DeleteFunc(all, func(h hint) bool { return h.cause == Random })
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
			causes := c.causes(x, y)
			if !isShort(a, b, r.from, end) {
				causes = slices.DeleteFunc(causes, func(cause Cause) bool { return cause == Random })
			}
			add(x, y, r.from, causes...)
		case c.known.timed() && !c.textsOnly:
			var cause Cause
			cause, end = guessRun(a, b, r, c.known)
			if cause == Random && !isShort(a, b, r.from, end) {
				cause = Unknown
			}
			add(hexText(a[r.from:]), hexText(b[r.from:]), r.from, cause)
		default: // without facts, numbers in many places look like times
			end = r.to
		}
	}
	return all
}

// orderOfTexts returns a cause if a and b contain the same texts in a different order, else Unknown.
func (c *comparison) orderOfTexts(a, b []byte) Cause {
	textsA, textsB := stringsIn(a, minWord), stringsIn(b, minWord)
	if len(textsA) < 2 || slices.Equal(textsA, textsB) || !sameItems(textsA, textsB) {
		return Unknown
	}
	return c.classifier.classifyOrder(textsA, textsB)
}
