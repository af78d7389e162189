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
	for _, c := range r.causes() {
		noun := "actions"
		if c.actions == 1 {
			noun = "action"
		}
		fmt.Fprintf(&b, "%d %s: %s\n", c.actions, noun, c.name)
	}
	b.WriteString(all.String() + "\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// A causeCount is the number of actions that differ by a cause.
type causeCount struct {
	name    string
	actions int
}

const unknownCause = "unknown cause"

// causes returns the number of actions that differ by each cause, the most frequent one first. An action may have
// several causes.
func (r Report) causes() []causeCount {
	count := map[string]int{}
	for _, v := range r {
		if v.Result.AllEqual() {
			continue
		}
		causes := v.Causes()
		if len(causes) == 0 {
			causes = []string{unknownCause}
		}
		for _, c := range causes {
			count[c]++
		}
	}
	var all []causeCount
	for name, n := range count {
		all = append(all, causeCount{name, n})
	}
	slices.SortFunc(all, func(a, b causeCount) int {
		return cmp.Or(cmp.Compare(b.actions, a.actions), cmp.Compare(a.name, b.name))
	})
	return all
}

// A matrix shows which actions differ by which causes.
type matrix struct {
	Causes []string
	Rows   []matrixRow
	More   int    // actions that are not in Rows
	Totals []int  // actions by cause
	Counts string // of all results
}

// A matrixRow is an action. Its cells belong to the causes of the matrix; "" means that it does not differ by this one.
type matrixRow struct {
	*Verdict
	Cells []string
}

// matrix returns the matrix of the actions that differ, with at most some rows.
func (r Report) matrix(rows int) *matrix {
	m := &matrix{}
	_, all := r.count()
	m.Counts = all.String()
	causes := r.causes()
	for _, c := range causes {
		m.Causes, m.Totals = append(m.Causes, c.name), append(m.Totals, c.actions)
	}
	for _, v := range r.differing() {
		if len(m.Rows) == rows {
			m.More++
			continue
		}
		row := matrixRow{Verdict: v}
		for _, name := range m.Causes {
			row.Cells = append(row.Cells, v.causeCell(name))
		}
		m.Rows = append(m.Rows, row)
	}
	return m
}

// differing returns the verdicts of actions that are not reproducible.
func (r Report) differing() Report {
	return slices.DeleteFunc(slices.Clone(r), func(v *Verdict) bool { return v.Result.AllEqual() })
}

// causeCell returns the factors of the differences with a cause, "yes" if they are not known, and "" if there are none.
func (v *Verdict) causeCell(name string) string {
	const listed = 3
	var factors []Factor
	found := name == unknownCause && len(v.Causes()) == 0
	for i := range v.Differences {
		if d := &v.Differences[i]; string(d.Cause) == name {
			found, factors = true, append(factors, d.Factors...)
		}
	}
	slices.Sort(factors)
	factors = slices.Compact(factors)
	switch {
	case !found:
		return ""
	case len(factors) == 0:
		return "yes"
	case len(factors) > listed:
		return fmt.Sprintf("%d factors", len(factors))
	}
	return Join(factors)
}

// counts holds the number of each result for a mnemonic.
type counts struct {
	mnemonic                      string
	same, unvaried, differ, flaky int
}

func (t *counts) actions() int { return t.same + t.unvaried + t.differ + t.flaky }

func (t *counts) String() string {
	return fmt.Sprintf("%d actions: %d same, %d unvaried, %d differ, %d with flaky exit", t.actions(), t.same, t.unvaried,
		t.differ, t.flaky)
}

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
