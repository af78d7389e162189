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

// Limits of texts. The rest is not compared.
const (
	maxTextBytes  = 2 << 20
	maxLines      = 50_000
	maxNormalized = 256 << 10 // bytes of lines that are normalized to pair them
	maxAlikeLine  = 3         // reported lines of one cause
)

// isTextFile reports whether head is UTF-8 text without control characters other than white space and escape.
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

// A text is a part of one file by lines.
type text struct {
	lines, normalized []string
	offsets           []int64
}

// A textComparison compares two texts.
type textComparison struct {
	*comparison
	first          int // number of the first line
	a, b           text
	reported, more map[Cause]int // lines of each cause
}

// compareText compares a and b line by line. It pairs lines that differ only in words that depend on the run, and then
// the lines between them.
func compareText(c *comparison, a, b *io.SectionReader) error {
	at, err := firstDifference(a, b)
	if err != nil || at < 0 {
		return err
	}
	t := &textComparison{comparison: c, reported: map[Cause]int{}, more: map[Cause]int{}}
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
	t.a.normalize(t.classifier, t.classifier.a, t.b.lines)
	t.b.normalize(t.classifier, t.classifier.b, t.a.lines)
	t.compare()
	return nil
}

// lineStart returns the beginning and the number of the line that contains byte at.
func lineStart(c *comparison, s *io.SectionReader, at int64) (from int64, number int, err error) {
	r, number := io.NewSectionReader(s, 0, at), 1
	buf := make([]byte, 64<<10)
	for off := int64(0); off < at; {
		n, err := (contextReader{c.ctx, r}).Read(buf)
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

// normalize sets the normalized lines. Lines that the other side has too stay unchanged.
func (t *text) normalize(by *classifier, l *lexer, other []string) {
	has := make(map[string]bool, len(other))
	for _, line := range other {
		has[line] = true
	}
	t.normalized = make([]string, len(t.lines))
	left := maxNormalized
	for i, line := range t.lines {
		t.normalized[i] = line
		if left > 0 && !has[line] {
			t.normalized[i] = by.normalized(l, line)
			left -= min(len(line), maxLine)
		}
	}
}

// compare adds the differences.
func (t *textComparison) compare() {
	hs := listdiff.Hunks(t.a.normalized, t.b.normalized)
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
				t.report(i, h.EndB, t.a.lines[i], "", t.words(t.a.lines[i], ""))
			}
			for i := h.B + n; i < h.EndB; i++ {
				t.report(h.EndA, i, "", t.b.lines[i], t.words("", t.b.lines[i]))
			}
		}
	}
	for _, cause := range slices.Sorted(maps.Keys(t.more)) {
		t.differ(fmt.Sprintf("%d more lines", t.more[cause]), "", "", -1, cause)
	}
}

// moved reports whether the different lines are the same ones in a different order.
func (t *textComparison) moved(hs []listdiff.Hunk) bool {
	var a, b []string
	for _, h := range hs {
		if !h.Same {
			a = append(a, t.a.normalized[h.A:h.EndA]...)
			b = append(b, t.b.normalized[h.B:h.EndB]...)
		}
	}
	return sameItems(trimLines(a), trimLines(b)) && !slices.Equal(trimLines(t.a.normalized), trimLines(t.b.normalized))
}

// order adds that the order of lines differs, from the first moved line to the last.
func (t *textComparison) order(hs []listdiff.Hunk) {
	hs = slices.DeleteFunc(slices.Clone(hs), func(h listdiff.Hunk) bool { return h.Same })
	first, last := hs[0], hs[len(hs)-1]
	a, b := trimLines(t.a.lines[first.A:last.EndA]), trimLines(t.b.lines[first.B:last.EndB])
	t.differ(fmt.Sprintf("order of lines, from line %d", t.first+first.A), strings.Join(a, "\n"), strings.Join(b, "\n"),
		t.a.offset(first.A), t.classifier.classifyOrder(trimLines(t.a.lines), trimLines(t.b.lines)))
}

// trimLines returns lines without their line ends, commas and semicolons: the last item of a list has none.
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

// line compares a pair of lines.
func (t *textComparison) line(i, j int) {
	if a, b := t.a.lines[i], t.b.lines[j]; a != b {
		t.report(i, j, a, b, t.words(a, b))
	}
}

// words returns the words in which two lines differ, or nil if the budget is used up.
func (t *textComparison) words(a, b string) []wordDifference {
	if !t.takeWords(a, b) {
		return nil
	}
	return t.classifier.differences(a, b, t.format)
}

// report adds the differences of two lines, one per cause. Beyond maxAlikeLine lines it only counts them.
func (t *textComparison) report(i, j int, a, b string, ds []wordDifference) {
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
		if t.reported[d.cause] == maxAlikeLine {
			t.more[d.cause]++
			continue
		}
		t.reported[d.cause]++
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

// around returns a line or, if it is long, the part of it around the word at byte at.
func around(line string, at int, word string) string {
	line = strings.TrimRight(line, "\n")
	if len(line) <= maxText {
		return line
	}
	from, to := max(0, at-60), min(len(line), at+len(word)+60)
	s := line[min(from, to):to]
	if from > 0 {
		s = ellipsis + s
	}
	if to < len(line) {
		s += ellipsis
	}
	return s
}
