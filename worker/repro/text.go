// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/compare"
)

// Text writes v for a terminal in ASCII.
func (v *Verdict) Text(w io.Writer) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("%s  %s  %d runs: %s", v.Title(), strings.ToUpper(string(v.Result)), len(v.Runs), v.executors())
	for i, r := range v.Runs {
		line("  run %-3d %s", i+1, strings.Join(r.about(), ", "))
	}
	if v.Result == FlakyExit {
		line("  exit code  DIFFERS  %s", v.exits())
	}
	differing := v.Differing()
	for i, name := range differing {
		const limit = 40
		if i == limit {
			line("  and %d more", len(differing)-limit)
			break
		}
		o := v.output(name)
		line("  %s  DIFFERS  %d digests in %d runs  (%d of %d outputs)%s",
			name, o.Distinct(), len(o.Digests), len(differing), len(v.Outputs), dependsOn(o.Factors))
		for _, d := range v.differences(name) {
			line("    %s", d.sentence())
			if d.Cause != compare.Unknown || len(d.Factors) > 0 || d.Fix != "" {
				line("      %s", d.why())
			}
		}
	}
	for _, u := range v.Unexplained {
		line("  not compared: %s", u)
	}
	for _, s := range v.skips() {
		line("  not varied: %s: %s", s.Factor, s.Why)
	}
	if bisection := v.Bisection; bisection != nil {
		line("  bisected in %d runs: %s", bisection.Runs, bisection.Summary)
	}
	line("  %s", v.conclusion())
	b.WriteString(v.Diffoscope)
	_, err := io.WriteString(w, b.String())
	return err
}

// Title returns target, mnemonic and digest of the action.
func (v *Verdict) Title() string {
	var words []string
	for _, w := range []string{v.Target, v.Mnemonic, v.Action} {
		if w != "" {
			words = append(words, w)
		}
	}
	return strings.Join(words, "  ")
}

// executors lists the names of the executors.
func (v *Verdict) executors() string {
	var names []string
	for _, r := range v.Runs {
		if !slices.Contains(names, r.On) {
			names = append(names, r.On)
		}
	}
	return strings.Join(names, ", ")
}

// about describes a run.
func (r *Run) about() []string {
	words := []string{r.On}
	if len(r.Varied) == 0 {
		words = append(words, "no variation")
	}
	words = append(words, r.Varied...)
	if r.Action != "" {
		words = append(words, "as action "+r.Action)
	}
	if r.ExitCode != 0 || r.Code != "" {
		words = append(words, r.Ended())
	}
	return words
}

// skips returns the skipped factors grouped by reason.
func (v *Verdict) skips() []Skipped {
	var all []Skipped
	for _, s := range v.Skipped {
		if i := slices.IndexFunc(all, func(t Skipped) bool { return t.Why == s.Why }); i >= 0 {
			all[i].Factor += ", " + s.Factor
		} else {
			all = append(all, s)
		}
	}
	return all
}

func (v *Verdict) output(path string) *Output {
	i := slices.IndexFunc(v.Outputs, func(o Output) bool { return o.Path == path && o.Differ })
	return &v.Outputs[i]
}

// differences returns the differences of an output.
func (v *Verdict) differences(path string) []*Difference {
	var all []*Difference
	for i := range v.Differences {
		if d := &v.Differences[i]; d.Output == path {
			all = append(all, d)
		}
	}
	return all
}

// dependsOn lists the factors of an output.
func dependsOn(factors []Factor) string {
	if len(factors) == 0 {
		return ""
	}
	return "  depends on " + Join(factors)
}

// sentence describes a difference in printable ASCII.
func (d *Difference) sentence() string {
	where := strings.Join(d.Where, " > ")
	switch below, in := strings.CutPrefix(where, d.Output); {
	case in && below == "":
		where = ""
	case in: // a member, or something in a directory
		where = strings.TrimLeft(below, " >/") + ": "
	default:
		where += ": "
	}
	at := ""
	if d.Offset >= 0 {
		at = fmt.Sprintf(" at byte %d", d.Offset)
	}
	if d.A == "" && d.B == "" { // a count, or content that was not compared
		return text(where + d.What + at)
	}
	return text(fmt.Sprintf("%s%s%s: %s != %s", where, d.What, at, orNone(d.A), orNone(d.B)))
}

// why returns the cause and how to remove it.
func (d *Difference) why() string {
	var words []string
	if d.Cause != compare.Unknown {
		words = append(words, "cause: "+string(d.Cause))
	}
	if len(d.Factors) > 0 {
		words = append(words, "found by varying: "+Join(d.Factors))
	}
	if d.Fix != "" {
		words = append(words, "fix: "+text(d.Fix))
	}
	return strings.Join(words, "   ")
}

// Causes returns the distinct causes in the order of the differences.
func (v *Verdict) Causes() []string {
	var all []string
	for _, d := range v.Differences {
		if d.Cause != compare.Unknown && !slices.Contains(all, string(d.Cause)) {
			all = append(all, string(d.Cause))
		}
	}
	return all
}

// conclusion summarizes the verdict.
func (v *Verdict) conclusion() string {
	switch causes := v.Causes(); {
	case v.Result == Unvaried:
		return fmt.Sprintf("equal in %d runs, but nothing was varied", len(v.Runs))
	case v.Result == Same && len(v.Factors) == 0:
		return fmt.Sprintf("same in %d runs; only the executor was varied", len(v.Runs))
	case v.Result == Same:
		return fmt.Sprintf("same in %d runs; varied: %s", len(v.Runs), Join(v.Factors))
	case len(causes) > 0:
		return fmt.Sprintf("not reproducible: %s", strings.Join(causes, ", "))
	case v.Bisection == nil:
		return "not reproducible for an unknown cause; bisect to find the factor"
	}
	return "not reproducible"
}

// Table writes a line per verdict and the number of each result by mnemonic.
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
	fmt.Fprintf(&b, "%d actions: %d same, %d unvaried, %d differ, %d with flaky exit\n", all.actions(), all.same,
		all.unvaried, all.differ, all.flaky)
	_, err := io.WriteString(w, b.String())
	return err
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

func orNone(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}
