// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"fmt"
)

const (
	// maxSpots bounds what is told of one piece of a binary file, such as a section.
	maxSpots = 6
	// minWord is the length from which printable bytes are taken for text, as strings(1) does.
	minWord = 4
	// maxStrings bounds the texts that are looked for in one piece.
	maxStrings = 1 << 18
)

// contents adds the places in which two pieces of binary files differ, named below: texts in full, other bytes in hex,
// once for each cause. Both are in memory.
func (c *comparison) contents(a, b []byte, below ...string) {
	if len(a) != len(b) {
		c.resized(a, b, below)
		return
	}
	told := map[string]bool{}
	end := 0
	for range maxRuns {
		r, ok := nextRun(a, b, end)
		if !ok || len(told) == maxSpots {
			return
		}
		if x, y, to := textsAt(a, b, r); to > 0 {
			end = max(r.to, to)
			if key := "text " + x + "\x00" + y; !told[key] {
				told[key] = true
				c.differ("text", x, y, int64(r.from), attribute(x, y, c.format, c.known), below...)
			}
			continue
		}
		var cause Cause
		cause, end = guessRun(a, b, r, c.known)
		if key := "bytes " + string(cause); !told[key] {
			told[key] = true
			c.differ("bytes", hexText(a[r.from:]), hexText(b[r.from:]), int64(r.from), cause, below...)
		}
	}
}

// resized adds the differences of two pieces of different length: the texts that only one of them has, and otherwise
// the first differing byte.
func (c *comparison) resized(a, b []byte, below []string) {
	textsA, textsB := texts(a), texts(b)
	onlyA, onlyB := lessTexts(textsA, textsB), lessTexts(textsB, textsA)
	for i := range min(maxSpots, max(len(onlyA), len(onlyB))) {
		x, y := at(onlyA, i), at(onlyB, i)
		offset := bytes.Index(a, []byte(x))
		if x == "" {
			offset = bytes.Index(b, []byte(y))
		}
		c.differ("text", x, y, int64(offset+commonPrefix(x, y)), attribute(x, y, c.format, c.known), below...)
	}
	if len(onlyA)+len(onlyB) == 0 {
		first := commonPrefix(a, b)
		c.differ(fmt.Sprintf("bytes, %d and %d of them", len(a), len(b)), hexText(a[first:]), hexText(b[first:]), int64(first), Unknown, below...)
	}
}

func at(s []string, i int) string {
	if i < len(s) {
		return s[i]
	}
	return ""
}

// textsAt returns the texts of both sides around the run, and where they end; 0 if they are none.
func textsAt(a, b []byte, r run) (x, y string, end int) {
	from := r.from
	for from > 0 && from > r.from-MaxText/2 && isText(a[from-1]) {
		from--
	}
	p, q := textEnd(a, from, r.from), textEnd(b, from, r.from)
	switch {
	case p-from < minWord && q-from < minWord, p < r.to && q < r.to:
		return "", "", 0
	case p < r.to && (p == len(a) || a[p] != 0), q < r.to && (q == len(b) || b[q] != 0):
		return "", "", 0 // neither text to the end of the run, nor a text that ends
	}
	return string(a[from:p]), string(b[from:q]), max(p, q)
}

func textEnd(s []byte, from, differ int) int {
	end := from
	for end < len(s) && end < differ+MaxText/2 && isText(s[end]) {
		end++
	}
	return end
}

func isText(c byte) bool { return ' ' <= c && c <= '~' || c == '\t' }

// texts returns the printable texts in s, in order.
func texts(s []byte) []string {
	var ts []string
	from := 0
	for i := 0; i <= len(s) && len(ts) < maxStrings; i++ {
		if i < len(s) && isText(s[i]) {
			continue
		}
		if i-from >= minWord+2 { // shorter ones occur in code
			ts = append(ts, string(s[from:i]))
		}
		from = i + 1
	}
	return ts
}

// lessTexts returns those of a that are not in b, each as often as it is there oftener, in the order of a.
func lessTexts(a, b []string) []string {
	n := make(map[string]int, len(b))
	for _, s := range b {
		n[s]++
	}
	var rest []string
	for _, s := range a {
		if n[s]--; n[s] < 0 {
			rest = append(rest, s)
		}
	}
	return rest
}
