// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"fmt"
	"strings"
)

const (
	// maxPerPiece limits the differences of one part of a binary file, such as a section.
	maxPerPiece = 6
	// minWord is the minimum length of text, as in strings(1), and minText that of text beside code, which contains
	// shorter ones by chance.
	minWord = 4
	minText = 6
	// maxStrings limits the texts of one part.
	maxStrings = 1 << 18
)

// contents adds the differences of two parts of binary files: each pair of texts once, and one location of other bytes.
func (c *comparison) contents(a, b []byte, below ...string) {
	if len(a) != len(b) {
		if !c.texts(a, b, minText, below...) {
			c.firstByte(a, b, below...)
		}
		return
	}
	reported := map[[2]string]bool{}
	tally := tally{first: map[Cause]run{}, seen: map[Cause]int{}}
	end := 0
	for range maxRuns {
		r, ok := nextRun(a, b, end)
		if !ok || len(reported) == maxPerPiece {
			break
		}
		x, y, to := textsAt(a, b, r)
		if to == 0 {
			end = tally.add(a, b, r, c.known)
			continue
		}
		end = max(r.to, to)
		if !reported[[2]string{x, y}] {
			reported[[2]string{x, y}] = true
			c.text("text", x, y, int64(r.from), below...)
		}
	}
	cause, r := tally.most()
	if len(reported) == 0 && tally.runs == maxRuns && cause == Unknown && c.texts(a, b, minText, below...) {
		return // the same data at other offsets
	}
	if tally.runs > 0 {
		if cause == Random {
			cause = randomOr(a, b, r.from)
		}
		c.differ("bytes", hexText(a[r.from:]), hexText(b[r.from:]), int64(r.from), cause, below...)
	}
}

// text adds the difference of a text in a program, where anything that looks like a path is one, for each of its
// causes.
func (c *comparison) text(what, a, b string, offset int64, below ...string) {
	for _, cause := range c.causes(a, b) {
		if (cause == Unknown || cause == Random) && (isPath(a) || isPath(b)) {
			cause = Path
		}
		c.differ(what, a, b, offset, cause, below...)
	}
}

// isPath reports whether s is an absolute path of two or more names.
func isPath(s string) bool {
	return strings.HasPrefix(s, "/") && strings.LastIndexByte(s, '/') > 0 && !strings.ContainsAny(s, " \t")
}

// firstByte adds the first different byte, without a cause.
func (c *comparison) firstByte(a, b []byte, below ...string) {
	what, first := "bytes", commonPrefix(a, b)
	if len(a) != len(b) {
		what = fmt.Sprintf("bytes, %d and %d of them", len(a), len(b))
	}
	c.differ(what, hexText(a[first:]), hexText(b[first:]), int64(first), Unknown, below...)
}

// texts adds the texts of at least least bytes that only one part has or a difference in their order. It reports
// whether it added anything.
func (c *comparison) texts(a, b []byte, least int, below ...string) bool {
	textsA, textsB := stringsIn(a, least), stringsIn(b, least)
	onlyA, onlyB := subtract(textsA, textsB), subtract(textsB, textsA)
	reported := map[[2]string]bool{}
	for i := 0; i < max(len(onlyA), len(onlyB)) && len(reported) < maxPerPiece; i++ {
		x, y := at(onlyA, i), at(onlyB, i)
		if reported[[2]string{x, y}] {
			continue
		}
		reported[[2]string{x, y}] = true
		offset := bytes.Index(a, []byte(x))
		if x == "" {
			offset = bytes.Index(b, []byte(y))
		}
		c.text("text", x, y, int64(offset+commonPrefix(x, y)), below...)
	}
	if len(onlyA)+len(onlyB) > 0 {
		return true
	}
	return c.order("texts", textsA, textsB, below...)
}

// unmatched adds the items that only one list has, in pairs.
func (c *comparison) unmatched(what string, onlyA, onlyB []string, below ...string) {
	if len(onlyA) == 0 && len(onlyB) == 0 {
		return
	}
	if len(onlyA) == 0 || len(onlyB) == 0 {
		c.differ(what, nameList(onlyA), nameList(onlyB), -1, Unknown, below...)
		return
	}
	for i := range min(maxPerPiece, max(len(onlyA), len(onlyB))) {
		x, y := at(onlyA, i), at(onlyB, i)
		c.text(what, x, y, -1, below...)
	}
}

// nameList joins names and shortens the list.
func nameList(names []string) string {
	const most = 8
	text := strings.Join(names[:min(len(names), most)], ", ")
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// order adds a difference if the order of the same items differs, and reports that.
func (c *comparison) order(of string, a, b []string, below ...string) bool {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			c.differ("order of "+of, a[i], b[i], -1, MemberOrder, below...)
			return true
		}
	}
	return false
}

func at(s []string, i int) string {
	if i < len(s) {
		return s[i]
	}
	return ""
}

// textsAt returns the texts of both sides around a run and their end; 0 if there are none.
func textsAt(a, b []byte, r run) (x, y string, end int) {
	from := r.from
	for from > 0 && from > r.from-maxText/2 && isTextByte(a[from-1]) {
		from--
	}
	p, q := textEnd(a, from, r.from), textEnd(b, from, r.from)
	switch {
	case p-from < minWord && q-from < minWord, p < r.to && q < r.to:
		return "", "", 0
	case p < r.to && (p == len(a) || a[p] != 0), q < r.to && (q == len(b) || b[q] != 0):
		return "", "", 0 // the run contains other bytes and no terminator
	}
	return string(a[from:p]), string(b[from:q]), max(p, q)
}

func textEnd(s []byte, from, differ int) int {
	end := from
	for end < len(s) && end < differ+maxText/2 && isTextByte(s[end]) {
		end++
	}
	return end
}

func isTextByte(c byte) bool { return ' ' <= c && c <= '~' || c == '\t' }

// stringsIn returns the printable texts in s of at least least bytes, in order.
func stringsIn(s []byte, least int) []string {
	var ts []string
	from := 0
	for i := 0; i <= len(s) && len(ts) < maxStrings; i++ {
		if i < len(s) && isTextByte(s[i]) {
			continue
		}
		if i-from >= least {
			ts = append(ts, string(s[from:i]))
		}
		from = i + 1
	}
	return ts
}

// subtract returns the items of a less those of b, as multisets, in the order of a.
func subtract(a, b []string) []string {
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
