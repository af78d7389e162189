// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Table writes a line per verdict, the number of each result by mnemonic, and the number of actions by cause.
func (r Report) Table(w io.Writer) error {
	var b strings.Builder
	b.WriteString("\n")
	for _, v := range r {
		line := fmt.Sprintf("%-10s  %-14.14s  %.12s  %s  %s", v.Result, v.Mnemonic, v.Action, v.Target,
			strings.Join(v.Causes(), ", "))
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
	kinds, all := r.count()
	if len(kinds) > 1 {
		fmt.Fprintf(&b, "\n%-14s  %7s  %7s  %8s  %7s  %10s\n", "mnemonic", "actions", "same", "unvaried", "differs",
			"flaky exit")
		for _, k := range kinds {
			fmt.Fprintf(&b, "%-14s  %7d  %7d  %8d  %7d  %10d\n", orNone(k.mnemonic), k.actions(), k.same, k.unvaried,
				k.differ, k.flaky)
		}
	}
	for _, s := range r.causes() {
		b.WriteString(s + "\n")
	}
	fmt.Fprintf(&b, "%d actions: %d same, %d unvaried, %d differ, %d with flaky exit\n", all.actions(), all.same,
		all.unvaried, all.differ, all.flaky)
	_, err := io.WriteString(w, b.String())
	return err
}

// causes returns the number of actions that differ by each cause, the most frequent one first: "14 actions: __DATE__". An
// action may have several causes.
func (r Report) causes() []string {
	count := map[string]int{}
	for _, v := range r {
		if v.Result.AllEqual() {
			continue
		}
		causes := v.Causes()
		if len(causes) == 0 {
			causes = []string{"unknown cause"}
		}
		for _, c := range causes {
			count[c]++
		}
	}
	names := slices.SortedFunc(maps.Keys(count), func(a, b string) int {
		return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a, b))
	})
	for i, name := range names {
		noun := "actions"
		if count[name] == 1 {
			noun = "action"
		}
		names[i] = fmt.Sprintf("%d %s: %s", count[name], noun, name)
	}
	return names
}

// counts holds the number of each result for a mnemonic.
type counts struct {
	mnemonic                      string
	same, unvaried, differ, flaky int
}

func (t *counts) actions() int { return t.same + t.unvaried + t.differ + t.flaky }

func (t *counts) add(r Result) {
	switch r {
	case Same:
		t.same++
	case Unvaried:
		t.unvaried++
	case Differs:
		t.differ++
	case FlakyExit:
		t.flaky++
	}
}

// count returns the counts of each mnemonic, sorted, and of all actions.
func (r Report) count() (kinds []counts, all counts) {
	of := map[string]*counts{}
	for _, v := range r {
		if of[v.Mnemonic] == nil {
			of[v.Mnemonic] = &counts{mnemonic: v.Mnemonic}
		}
		of[v.Mnemonic].add(v.Result)
		all.add(v.Result)
	}
	for _, name := range slices.Sorted(maps.Keys(of)) {
		kinds = append(kinds, *of[name])
	}
	return kinds, all
}
