// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"slices"
	"strings"
)

// A Change is a line of the stable part that two manifests do not share, "" where one has nothing in its place.
type Change struct{ A, B string }

// Diff returns the lines in which the stable parts of a and b differ, in their order in a and then in b. Lines that say
// the same of the same thing, as of an output of one path, are one Change. The hashes of sections are among them, since
// they tell which section it is.
func Diff(a, b *Manifest) []Change {
	onlyA, onlyB := without(a.stable(), b.stable()), without(b.stable(), a.stable())
	places := map[string][]int{} // of lines of b, by what they speak of
	for i, line := range onlyB {
		places[subject(line)] = append(places[subject(line)], i)
	}
	var changes []Change
	used := make([]bool, len(onlyB))
	for _, line := range onlyA {
		c := Change{A: line}
		if at := places[subject(line)]; len(at) > 0 {
			c.B, used[at[0]] = onlyB[at[0]], true
			places[subject(line)] = at[1:]
		}
		changes = append(changes, c)
	}
	for i, line := range onlyB {
		if !used[i] {
			changes = append(changes, Change{B: line})
		}
	}
	return changes
}

// without returns the lines of a text that another has not, or less often.
func without(text, other string) []string {
	count := map[string]int{}
	for line := range strings.Lines(other) {
		count[line]++
	}
	var only []string
	for line := range strings.Lines(text) {
		if count[line] > 0 {
			count[line]--
			continue
		}
		only = append(only, strings.TrimSuffix(line, "\n"))
	}
	return only
}

// subject returns what a line speaks of: its key, and the name that follows if there may be several.
func subject(line string) string {
	key, rest, _ := strings.Cut(line, " ")
	if key == "spec" || key == "configuration" || key == "toolchain" {
		var more string
		more, rest, _ = strings.Cut(rest, " ")
		key += " " + more
	}
	if !slices.Contains([]string{"output", "toolchain program", "spec env", "spec input", "spec temp", "spec limit", "spec condition"}, key) {
		return key
	}
	name, _, err := unquote(rest)
	if err != nil {
		return key
	}
	if key == "spec env" {
		name, _, _ = strings.Cut(name, "=")
	}
	return key + " " + name
}
