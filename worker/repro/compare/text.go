// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cloister-build/cloister/worker/repro/internal/listdiff"
)

// What is looked at of a text: what lies beyond is not told of.
const (
	maxTextBytes = 2 << 20
	maxLines     = 50_000
	maxCanonical = 256 << 10 // bytes of lines that are looked at word by word, to pair them
	maxAlikeLine = 3         // lines that differ for the same cause
)

// isTextFile reports whether head is text in UTF-8, without control characters but those that lay it out.
func isTextFile(head []byte, _ string) bool {
	control := 0
	for _, b := range head {
		if b < ' ' && b != '\n' && b != '\t' && b != '\r' && b != '\f' && b != '\x1b' {
			control++
		}
	}
	if control > 0 || len(head) == 0 {
		return false
	}
	for cutShort := range utf8.UTFMax { // head may end within a character
		if cutShort < len(head) && utf8.Valid(head[:len(head)-cutShort]) {
			return true
		}
	}
	return false
}

// A text is some lines of one side, from line first, counted from 1, at byte off.
type text struct {
	lines, canonical []string
	offsets          []int64
}

// textComparison is the comparison of two texts, and what was said of each cause.
type textComparison struct {
	*comparison
	first      int // the number of the first of the lines
	a, b       text
	told, more map[Cause]int
}

// compareText compares a and b line by line: lines that differ in no more than what runs differ in belong together, the
// rest by their neighbours.
func compareText(c *comparison, a, b *io.SectionReader) error {
	at, err := firstDifference(a, b)
	if err != nil || at < 0 {
		return err
	}
	t := &textComparison{comparison: c, told: map[Cause]int{}, more: map[Cause]int{}}
	from, line, err := lineStart(c, a, at)
	if err != nil {
		return err
	}
	t.first = line
	for _, side := range []struct {
		s    *io.SectionReader
		text *text
	}{{a, &t.a}, {b, &t.b}} {
		if *side.text, err = readText(side.s, from); err != nil {
			return err
		}
	}
	t.a.canonize(t.attributor, t.attributor.a, t.b.lines)
	t.b.canonize(t.attributor, t.attributor.b, t.a.lines)
	t.compare()
	return nil
}

// lineStart returns where the line begins that byte at is in, and its number.
func lineStart(c *comparison, s *io.SectionReader, at int64) (from int64, number int, err error) {
	r, number := io.NewSectionReader(s, 0, at), 1
	buf := make([]byte, 64<<10)
	for off := int64(0); off < at; {
		n, err := (reading{c.ctx, r}).Read(buf)
		if n == 0 {
			return 0, 0, fmt.Errorf("it ends before byte %d: %w", at, err)
		}
		number += bytes.Count(buf[:n], []byte{'\n'})
		if i := bytes.LastIndexByte(buf[:n], '\n'); i >= 0 {
			from = off + int64(i) + 1
		}
		off += int64(n)
	}
	return max(from, at-maxTextBytes/2), number, nil
}

func readText(s *io.SectionReader, from int64) (text, error) {
	data, err := window(s, from, int(max(0, min(maxTextBytes, s.Size()-from))))
	if err != nil {
		return text{}, err
	}
	var t text
	for len(data) > 0 && len(t.lines) < maxLines {
		n := bytes.IndexByte(data, '\n') + 1
		if n == 0 {
			n = len(data)
		}
		t.lines = append(t.lines, string(data[:n]))
		t.offsets = append(t.offsets, from)
		from += int64(n)
		data = data[n:]
	}
	return t, nil
}

// canonize sets the canonical lines: of those that the other side has too, the lines themselves.
func (t *text) canonize(by *attributor, l *lexer, other []string) {
	has := make(map[string]bool, len(other))
	for _, line := range other {
		has[line] = true
	}
	t.canonical = make([]string, len(t.lines))
	left := maxCanonical
	for i, line := range t.lines {
		t.canonical[i] = line
		if left > 0 && !has[line] {
			t.canonical[i] = by.canonical(l, line)
			left -= min(len(line), maxLine)
		}
	}
}

// compare adds the differences.
func (t *textComparison) compare() {
	hs := listdiff.Hunks(t.a.canonical, t.b.canonical)
	moved := t.moved(hs)
	if moved {
		t.order(hs)
	}
	for _, h := range hs {
		n := min(h.EndA-h.A, h.EndB-h.B)
		switch {
		case h.Same:
			for i := range n {
				t.line(h.A+i, h.B+i)
			}
		case !moved:
			for i := range n {
				t.line(h.A+i, h.B+i)
			}
			for i := h.A + n; i < h.EndA; i++ {
				t.tell(i, h.EndB, t.a.lines[i], "", t.words(t.a.lines[i], ""))
			}
			for i := h.B + n; i < h.EndB; i++ {
				t.tell(h.EndA, i, "", t.b.lines[i], t.words("", t.b.lines[i]))
			}
		}
	}
	for _, cause := range slices.Sorted(maps.Keys(t.more)) {
		t.differ(fmt.Sprintf("%d more lines", t.more[cause]), "", "", -1, cause)
	}
}

// moved reports whether the lines that stand in no common order are the same all the same.
func (t *textComparison) moved(hs []listdiff.Hunk) bool {
	var a, b []string
	for _, h := range hs {
		if !h.Same {
			a = append(a, t.a.canonical[h.A:h.EndA]...)
			b = append(b, t.b.canonical[h.B:h.EndB]...)
		}
	}
	return sameItems(trimLines(a), trimLines(b)) && !slices.Equal(trimLines(t.a.canonical), trimLines(t.b.canonical))
}

// order says that lines are in another order: from the first that is not in its place to the last.
func (t *textComparison) order(hs []listdiff.Hunk) {
	hs = slices.DeleteFunc(slices.Clone(hs), func(h listdiff.Hunk) bool { return h.Same })
	first, last := hs[0], hs[len(hs)-1]
	a, b := trimLines(t.a.lines[first.A:last.EndA]), trimLines(t.b.lines[first.B:last.EndB])
	t.differ(fmt.Sprintf("order of lines, from line %d", t.first+first.A), strings.Join(a, "\n"), strings.Join(b, "\n"),
		t.a.offset(first.A), t.attributor.orderCause(trimLines(t.a.lines), trimLines(t.b.lines)))
}

// trimLines returns the lines without what ends them: the last item of a list has no comma, in many notations.
func trimLines(lines []string) []string {
	trimmed := make([]string, len(lines))
	for i, line := range lines {
		trimmed[i] = strings.TrimRight(strings.TrimRight(line, "\r\n"), ",;")
	}
	return trimmed
}

func (t *text) offset(i int) int64 {
	if i < len(t.offsets) {
		return t.offsets[i]
	}
	return -1
}

// line compares one line of each side.
func (t *textComparison) line(i, j int) {
	if a, b := t.a.lines[i], t.b.lines[j]; a != b {
		t.tell(i, j, a, b, t.words(a, b))
	}
}

// words returns the words in which two lines differ, while there is budget for it.
func (t *textComparison) words(a, b string) []wordDifference {
	if !t.takeWords(a, b) {
		return nil
	}
	return t.attributor.differences(a, b, t.format)
}

// tell adds the differences of two lines, one for each cause, and counts those for which there are enough.
func (t *textComparison) tell(i, j int, a, b string, ds []wordDifference) {
	var here []Cause
	if len(ds) == 0 {
		ds = []wordDifference{{}}
	}
	known := slices.ContainsFunc(ds, func(d wordDifference) bool { return d.cause != Unknown })
	for _, d := range ds {
		if slices.Contains(here, d.cause) || known && d.cause == Unknown {
			continue
		}
		here = append(here, d.cause)
		if t.told[d.cause] == maxAlikeLine {
			t.more[d.cause]++
			continue
		}
		t.told[d.cause]++
		what, offset := fmt.Sprintf("line %d", t.first+i), t.a.offset(i)
		if offset >= 0 {
			offset += int64(d.atA)
		}
		switch {
		case a == "":
			what = fmt.Sprintf("line %d of the second only", t.first+j)
		case b == "":
			what += " of the first only"
		}
		t.differ(what, around(a, d.atA, d.a), around(b, d.atB, d.b), offset, d.cause)
	}
}

// around returns the line with a word at byte at, or the part of it around the word.
func around(line string, at int, word string) string {
	line = strings.TrimRight(line, "\n")
	if len(line) <= MaxText {
		return line
	}
	from, to := max(0, at-60), min(len(line), at+len(word)+60)
	s := line[min(from, to):to]
	if from > 0 {
		s = cut + s
	}
	if to < len(line) {
		s += cut
	}
	return s
}
