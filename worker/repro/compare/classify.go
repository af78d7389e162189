// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"slices"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/worker/repro/internal/listdiff"
)

// A wordDifference is a run of words in which two texts differ.
type wordDifference struct {
	a, b     string // the differing words
	atA, atB int    // their offsets
	cause    Cause
}

// causes returns the likely causes of a difference between two texts, a line or a field each, in a file of a format:
// one for each of the different words, or only Unknown.
func (t *classifier) causes(a, b, format string) []Cause {
	var all []Cause
	for _, d := range t.differences(a, b, format) {
		if d.cause != Unknown && !slices.Contains(all, d.cause) {
			all = append(all, d.cause)
		}
	}
	if len(all) == 0 {
		all = []Cause{Unknown}
	}
	return all
}

// causes is classifier.causes in the format of c, or Unknown if the budget is used up.
func (c *comparison) causes(a, b string) []Cause {
	if !c.takeWords(a, b) {
		return []Cause{Unknown}
	}
	return c.classifier.causes(a, b, c.format)
}

// classify returns the first of causes.
func (c *comparison) classify(a, b string) Cause { return c.causes(a, b)[0] }

// A classifier finds the causes of differences between texts of two runs.
type classifier struct {
	known Known
	a, b  *lexer
}

func newClassifier(k Known) *classifier {
	if k.A == nil || k.B == nil {
		k.A, k.B = &Facts{}, &Facts{}
	}
	return &classifier{known: k, a: newLexer(k.A, k.B), b: newLexer(k.B, k.A)}
}

// normalized returns a line with every word that may depend on the run replaced by its cause.
func (t *classifier) normalized(l *lexer, line string) string {
	var out strings.Builder
	for _, w := range l.words(line[:min(len(line), maxLine)]) {
		if w.kind == Unknown || w.isSmallNumber() {
			out.WriteString(w.text)
		} else {
			out.WriteString("\x00" + string(w.kind) + "\x00")
		}
	}
	out.WriteString(line[min(len(line), maxLine):])
	return out.String()
}

// differences returns the words in which two texts differ.
func (t *classifier) differences(a, b, format string) []wordDifference {
	const context = 64
	cutA, cutB := 0, 0
	if n := commonPrefix(a, b); n > context {
		cutA, cutB = n-context, n-context
	}
	wa := t.a.words(a[cutA:min(len(a), cutA+maxLine)])
	wb := t.b.words(b[cutB:min(len(b), cutB+maxLine)])
	if cause := t.reordered(a[cutA:], b[cutB:]); cause != Unknown {
		return []wordDifference{{a: a, b: b, cause: cause}}
	}
	var ds []wordDifference
	for _, h := range listdiff.Hunks(wordTexts(wa), wordTexts(wb)) {
		if h.Same {
			continue
		}
		d := wordDifference{cause: t.plausible(t.cause(wa[h.A:h.EndA], wb[h.B:h.EndB], format))}
		d.a, d.atA = joined(wa, h.A, h.EndA)
		d.b, d.atB = joined(wb, h.B, h.EndB)
		d.atA, d.atB = d.atA+cutA, d.atB+cutB
		ds = append(ds, d)
	}
	return ds
}

func wordTexts(ws []word) []string {
	s := make([]string, len(ws))
	for i, w := range ws {
		s[i] = w.text
	}
	return s
}

// joined returns the words from i to j as one text, and its offset.
func joined(ws []word, i, j int) (string, int) {
	if i == j {
		if i < len(ws) {
			return "", ws[i].at
		}
		return "", 0
	}
	return strings.Join(wordTexts(ws[i:j]), ""), ws[i].at
}

// plausible returns c, or Unknown if the facts rule it out.
func (t *classifier) plausible(c Cause) Cause {
	switch {
	case (c == Random || c == HashSeed) && t.known.A.HeldRandom && t.known.B.HeldRandom,
		c == Address && t.known.A.FixedLayout && t.known.B.FixedLayout:
		return Unknown
	}
	return c
}

// cause returns why words at the same position differ.
func (t *classifier) cause(a, b []word, format string) Cause {
	ta, tb := strings.Join(wordTexts(a), ""), strings.Join(wordTexts(b), "")
	locales := t.known.A.Locale != t.known.B.Locale
	if locales && strings.ContainsAny(ta, "0123456789") && decimals(ta) == decimals(tb) {
		return Locale
	}
	for _, wa := range a {
		for _, wb := range b {
			if wa.kind != wb.kind || wa.kind == Unknown || wa.text == wb.text {
				continue
			}
			if wa.kind == Timestamp && (wa.timeText.date || wa.timeText.clock) &&
				(wb.timeText.date || wb.timeText.clock) {
				if cause := timeCause(wa.timeText, wb.timeText, t.known); cause != Timestamp {
					return cause
				}
				if wa.timeText.macro && wb.timeText.macro && isProgram(format) {
					return BuildDate
				}
			}
			return wa.kind
		}
	}
	for _, side := range [][]word{a, b} {
		for _, w := range side {
			if w.known { // a fact of one side
				return w.kind
			}
		}
	}
	switch {
	case locales && (localName(ta) || localName(tb)):
		return Locale
	case len(ta) == len(tb) && len(ta) >= minMixed && isMixed(ta) && isMixed(tb):
		return Random
	}
	return Unknown
}

// minMixed is the minimum length of the random part of mktemp(1)'s names.
const minMixed = 6

// isMixed reports whether s consists of small letters, capitals and digits, with some of each. Hex digests do not.
func isMixed(s string) bool {
	var has [4]bool
	for i := range len(s) {
		has[class(s[i])] = true
	}
	return has == [4]bool{true, true, true, false}
}

// isProgram reports whether compilers write files of this format.
func isProgram(format string) bool { return format == "elf" || format == "pe" }

// decimals returns a number without the separators of locales.
func decimals(s string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(".,'\u00a0\u202f ", r) {
			return -1
		}
		return r
	}, s)
}

// localName reports whether s has letters beyond ASCII, as names of months and messages in most languages do.
func localName(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII && unicode.IsLetter(r) })
}

// reordered returns the cause if two lines have the same words in a different order, else Unknown. It does not ask
// plausible: a race rarely reorders the words of one line, and some hash tables take their seed from the clock rather
// than from the kernel's random numbers.
func (t *classifier) reordered(a, b string) Cause {
	const most = 64 << 10
	if len(a) != len(b) || len(a) > most {
		return Unknown
	}
	between := func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune(`,;"'()[]{}<>`, r) }
	ia, ib := strings.FieldsFunc(a, between), strings.FieldsFunc(b, between)
	if len(ia) < 2 || slices.Equal(ia, ib) || !sameItems(ia, ib) {
		return Unknown
	}
	return guessOrder(ia, ib)
}
