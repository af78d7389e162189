// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// sameItems reports whether a and b are the same, but for their order.
func sameItems(a, b []string) bool {
	return len(a) == len(b) && slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// orderCause returns the likely cause of why the same items are in another order.
func orderCause(a, b []string, k Known) Cause { return newAttributor(k).orderCause(a, b) }

var (
	fileName = regexp.MustCompile(`^[\w.+@~/-]*(?:/|\.[A-Za-z]\w{0,8}$)[\w.+@~/-]*$`)
	keyed    = regexp.MustCompile(`^\s*[^\s:=]+\s*(?:[:=]|=>|->)`)
)

// orderCause is what the order looks like, unless the facts speak against it.
func (t *attributor) orderCause(a, b []string) Cause {
	if cause := orderLooks(a, b); t.admit(cause) != Unknown {
		return cause
	}
	return Parallel
}

// orderLooks looks at the orders first: where both are sorted, each by other rules, it is the locale. Then at the items that moved: names
// of files are in the order of a directory, words and pairs of key and value in that of a hash table, and sentences in that in
// which somebody came to say them.
func orderLooks(a, b []string) Cause {
	if collated(a, b) {
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

// collated reports whether one of a and b is sorted by bytes, as in the C locale, and the other as people sort: by
// letters first, whatever their case, and marks ignored.
func collated(a, b []string) bool {
	foreign := func(s string) bool { return strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII }) }
	a, b = slices.DeleteFunc(slices.Clone(a), foreign), slices.DeleteFunc(slices.Clone(b), foreign)
	if len(a) < 3 || slices.Equal(a, b) {
		return false
	}
	people := func(x, y string) int { return strings.Compare(letters(x), letters(y)) }
	return slices.IsSorted(a) && slices.IsSortedFunc(b, people) || slices.IsSorted(b) && slices.IsSortedFunc(a, people)
}

// letters is s as most locales compare it first.
func letters(s string) string {
	return strings.Map(func(r rune) rune {
		if strings.ContainsRune("-_./ '\"", r) {
			return -1
		}
		return r
	}, strings.ToLower(s))
}
