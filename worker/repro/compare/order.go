// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// sameItems reports whether a and b have the same items in any order.
func sameItems(a, b []string) bool {
	return len(a) == len(b) && slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

var (
	fileName = regexp.MustCompile(`^[\w.+@~/-]*(?:/|\.[A-Za-z]\w{0,8}$)[\w.+@~/-]*$`)
	keyed    = regexp.MustCompile(`^\s*[^\s:=]+\s*(?:[:=]|=>|->)`)
)

// classifyOrder returns the likely cause of a different order of the same items.
func (t *classifier) classifyOrder(a, b []string) Cause {
	if cause := guessOrder(a, b); t.plausible(cause) != Unknown {
		return cause
	}
	return Parallel
}

// guessOrder returns Locale if both lists are sorted by different rules. Else the moved items decide: file names are in
// the order of a directory, words and key-value pairs in that of a hash table, and sentences in that of a race.
func guessOrder(a, b []string) Cause {
	if sortedByLocale(a, b) {
		return Locale
	}
	names, words, moved := 0, 0, 0
	for i, item := range a {
		if i < len(b) && item == b[i] {
			continue
		}
		item = strings.TrimSpace(item)
		moved++
		switch {
		case fileName.MatchString(item):
			names++
		case keyed.MatchString(item), !strings.Contains(item, " "):
			words++
		}
	}
	switch {
	case 2*names > moved:
		return MemberOrder
	case 2*(names+words) > moved:
		return HashSeed
	}
	return Parallel
}

// sortedByLocale reports whether one of a and b is sorted by bytes, as in the C locale, and the other as in most
// locales: by letters, regardless of case and punctuation.
func sortedByLocale(a, b []string) bool {
	foreign := func(s string) bool { return strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII }) }
	a, b = slices.DeleteFunc(slices.Clone(a), foreign), slices.DeleteFunc(slices.Clone(b), foreign)
	if len(a) < 3 || slices.Equal(a, b) {
		return false
	}
	people := func(x, y string) int { return strings.Compare(letters(x), letters(y)) }
	return slices.IsSorted(a) && slices.IsSortedFunc(b, people) || slices.IsSorted(b) && slices.IsSortedFunc(a, people)
}

// letters returns the primary sort key of s in most locales.
func letters(s string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune("-_./ '\"", r) {
			return -1
		}
		return r
	}, strings.ToLower(s))
}
