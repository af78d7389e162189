// SPDX-License-Identifier: Apache-2.0

package manifest

import (
	"slices"
	"strings"
)

// A Change is a pair of lines that differ; "" means that one manifest has no such line.
type Change struct{ A, B string }

// Diff returns the lines in which the stable parts of a and b differ, in the order of a and then of b. Lines with the
// same subject, such as an output of the same path, form one Change. Hashes of sections are included.
func Diff(a, b *Manifest) []Change {
	onlyA, onlyB := without(a.stable(), b.stable()), without(b.stable(), a.stable())
	bySubject := map[string][]int{} // indexes in onlyB
	for i, line := range onlyB {
		bySubject[subject(line)] = append(bySubject[subject(line)], i)
	}
	var changes []Change
	used := make([]bool, len(onlyB))
	for _, line := range onlyA {
		c := Change{A: line}
		if at := bySubject[subject(line)]; len(at) > 0 {
			c.B, used[at[0]] = onlyB[at[0]], true
			bySubject[subject(line)] = at[1:]
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

// without returns the lines of text that other lacks or has fewer times.
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

// subject returns the key of a line and, if the key can occur several times, the name after it.
func subject(line string) string {
	key, rest, _ := strings.Cut(line, " ")
	if key == "spec" || key == "configuration" || key == "toolchain" {
		var more string
		more, rest, _ = strings.Cut(rest, " ")
		key += " " + more
	}
	if key == "remote-apis" {
		switch kind, _, _ := strings.Cut(rest, " "); kind {
		case "blob":
			return line
		case "result": // of one action
			return line[:strings.LastIndexByte(line, ' ')]
		default:
			return key + " " + kind
		}
	}
	if !slices.Contains(
		[]string{"output", "toolchain program", "spec env", "spec input", "spec temp", "spec limit", "spec condition"},
		key) {
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
