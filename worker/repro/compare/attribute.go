// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"slices"
	"strings"
	"unicode"

	"github.com/cloister-build/cloister/worker/repro/internal/listdiff"
)

// A wordDifference is where two texts differ, and why.
type wordDifference struct {
	a, b     string // the differing words
	atA, atB int    // where they begin
	cause    Cause
}

// attribute returns the likely cause of why two texts differ, a line or a field each, in a thing of this format:
// the words in which they differ are looked for among the facts, and else told by their shape. It is that of the first words for
// which there is one.
func attribute(a, b, format string, k Known) Cause {
	return newAttributor(k).attribute(a, b, format)
}

func (t *attributor) attribute(a, b, format string) Cause {
	for _, d := range t.differences(a, b, format) {
		if d.cause != Unknown {
			return d.cause
		}
	}
	return Unknown
}

// attribute is attribute in the format of c, while there is budget for it.
func (c *comparison) attribute(a, b string) Cause {
	if !c.takeWords(a, b) {
		return Unknown
	}
	return c.attributor.attribute(a, b, c.format)
}

// An attributor finds causes among what is known of two runs.
type attributor struct {
	known Known
	a, b  *lexer
}

func newAttributor(k Known) *attributor {
	if k.A == nil || k.B == nil {
		k.A, k.B = &Facts{}, &Facts{}
	}
	return &attributor{known: k, a: newLexer(k.A, k.B), b: newLexer(k.B, k.A)}
}

// canonical returns a line with all that may depend on the run replaced by what it is.
func (t *attributor) canonical(l *lexer, line string) string {
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

// differences returns the words in which two texts differ, in order.
func (t *attributor) differences(a, b, format string) []wordDifference {
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
		d := wordDifference{cause: t.admit(t.cause(wa[h.A:h.EndA], wb[h.B:h.EndB], format))}
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

// joined returns the words from i to j as one, and where they begin.
func joined(ws []word, i, j int) (string, int) {
	if i == j {
		if i < len(ws) {
			return "", ws[i].at
		}
		return "", 0
	}
	return strings.Join(wordTexts(ws[i:j]), ""), ws[i].at
}

// admit returns c unless the facts speak against it.
func (t *attributor) admit(c Cause) Cause {
	switch {
	case (c == Random || c == HashSeed) && t.known.A.HeldRandom && t.known.B.HeldRandom,
		c == Address && t.known.A.FixedLayout && t.known.B.FixedLayout:
		return Unknown
	}
	return c
}

// cause returns why words differ that stand at the same place: what both sides have, or the one that has any, and then what
// their looks say.
func (t *attributor) cause(a, b []word, format string) Cause {
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
			if wa.kind == Timestamp && (wa.moment.date || wa.moment.clock) && (wb.moment.date || wb.moment.clock) {
				if cause := momentCause(wa.moment, wb.moment, t.known); cause != Timestamp {
					return cause
				}
				if wa.moment.macro && wb.moment.macro && isProgram(format) {
					return BuildDate
				}
			}
			return wa.kind
		}
	}
	for _, side := range [][]word{a, b} {
		for _, w := range side {
			// What one side only has is a variable, or a fact that the other has otherwise.
			if w.known {
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

// minMixed is the least length of what mktemp(1) puts into names.
const minMixed = 6

// isMixed reports whether s has small letters, capitals and digits, and nothing else, as digests in hex have not.
func isMixed(s string) bool {
	var has [4]bool
	for i := range len(s) {
		has[class(s[i])] = true
	}
	return has == [4]bool{true, true, true, false}
}

// isProgram reports whether what a compiler wrote is of this format.
func isProgram(format string) bool { return slices.Contains([]string{"elf", "macho", "pe"}, format) }

// decimals is a number without what locales put into it.
func decimals(s string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune(".,'\u00a0\u202f ", r) {
			return -1
		}
		return r
	}, s)
}

// localName reports whether s has letters beyond ASCII, as names of months and messages have in most languages.
func localName(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII && unicode.IsLetter(r) })
}

// reordered returns the cause if two texts, a line each, have the same words in another order, else Unknown. Several programs
// rarely write words of one line, so that the order of a hash table is one even if the kernel's random numbers were held: the
// clocks, of which some seeds are made, go on.
func (t *attributor) reordered(a, b string) Cause {
	const most = 64 << 10
	if len(a) != len(b) || len(a) > most {
		return Unknown
	}
	between := func(r rune) bool { return unicode.IsSpace(r) || strings.ContainsRune(`,;"'()[]{}<>`, r) }
	ia, ib := strings.FieldsFunc(a, between), strings.FieldsFunc(b, between)
	if len(ia) < 2 || slices.Equal(ia, ib) || !sameItems(ia, ib) {
		return Unknown
	}
	return orderLooks(ia, ib)
}
