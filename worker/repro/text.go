// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/cloister-build/cloister/worker/repro/compare"
)

// TextOptions select what Verdict.Text writes.
type TextOptions struct {
	// Verbose lists each run with its variations and each difference on its own.
	Verbose bool
	// Color marks differences with the escape sequences of terminals.
	Color bool
}

// Text writes v for a terminal in ASCII.
func (v *Verdict) Text(w io.Writer, o TextOptions) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	mark := func(word string) string {
		if !o.Color || v.Result.AllEqual() {
			return word
		}
		return "\x1b[31m" + word + "\x1b[0m"
	}
	line("%s  %s  %d runs: %s", v.Title(), mark(strings.ToUpper(string(v.Result))), len(v.Runs), v.executors())
	matters := func(r Run) bool { return r.On != v.Runs[0].On || !r.succeeded() }
	if o.Verbose || slices.ContainsFunc(v.Runs, matters) {
		for i, r := range v.Runs {
			line("  run %-3d %s", i+1, strings.Join(r.about(o.Verbose), ", "))
		}
	}
	if v.Result == FlakyExit {
		line("  exit code  %s  %s%s", mark("DIFFERS"), v.exits(), dependsOn(v.exitFactors()))
	}
	fixes := map[string]bool{} // already written
	differing := v.differing()
	alike := v.alike(o.Verbose)
	for i, names := range alike {
		const limit = 40
		if i == limit {
			line("  and %d more", len(slices.Concat(alike[limit:]...)))
			break
		}
		name := names[0]
		out := v.output(name)
		line("  %s  %s  %d digests in %d runs  (%d of %d outputs)%s",
			name, mark("DIFFERS"), out.distinct(), len(out.Digests), len(differing), len(v.Outputs), dependsOn(out.Factors))
		for _, f := range findings(v.differences(name), o.Verbose) {
			f.write(line, fixes)
		}
		if len(names) > 1 {
			line("  alike: %s", abbreviate(names[1:]))
		}
	}
	for _, u := range v.Unexplained {
		line("  not compared: %s", u)
	}
	for _, s := range v.skips(o.Verbose) {
		if !o.Verbose && !v.Result.AllEqual() {
			break // what was varied is enough
		}
		line("  not varied: %s: %s", s.Factor, s.Why)
	}
	if bisection := v.Bisection; bisection != nil {
		line("  bisected in %d runs: %s", bisection.Runs, bisection.Summary)
	}
	if v.hasVerifiedFix() {
		line("  %s", verifiedMeans)
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

// about describes a run, with what it varied if requested.
func (r *Run) about(varied bool) []string {
	words := []string{r.On}
	switch {
	case !varied:
	case len(r.Varied) == 0:
		words = append(words, "no variation")
	default:
		words = append(words, r.Varied...)
	}
	if r.Action != "" {
		words = append(words, "as action "+r.Action)
	}
	if !r.succeeded() {
		words = append(words, r.failure())
	}
	return words
}

// skips returns the skipped factors grouped by reason, with everything also what no worker varies.
func (v *Verdict) skips(everything bool) []Skipped {
	var all []Skipped
	for _, s := range v.Skipped {
		if s.isUnvaried() && !everything {
			continue
		}
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

// exitFactors returns the factors that change the exit code, if they were searched for.
func (v *Verdict) exitFactors() []Factor {
	var all []Factor
	for _, s := range v.steps() {
		if slices.Contains(s.Changed, displayName(exitCode)) {
			all = append(all, s.Factor)
		}
	}
	return all
}

// steps returns the steps of the bisection, if there was one.
func (v *Verdict) steps() []Step {
	if v.Bisection == nil {
		return nil
	}
	return v.Bisection.Steps
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

// A finding is one or more differences of an output with the same cause, factors and fix.
type finding []*Difference

// findings groups the differences of an output, or with each returns every one on its own. Differences without a cause
// are never grouped.
func findings(all []*Difference, each bool) []finding {
	var groups []finding
	for _, d := range all {
		i := slices.IndexFunc(groups, func(f finding) bool {
			return !each && d.Cause != compare.Unknown && f[0].Cause == d.Cause && f[0].fixText() == d.fixText() && slices.Equal(f[0].Factors, d.Factors)
		})
		if i < 0 {
			groups = append(groups, finding{d})
		} else {
			groups[i] = append(groups[i], d)
		}
	}
	return groups
}

// alike groups the outputs that differ by the same causes, factors and fixes, or with each returns every one on its
// own. Outputs with a difference without a cause are never grouped.
func (v *Verdict) alike(each bool) [][]string {
	var groups [][]string
	group := map[string]int{} // by description
	for _, name := range v.differing() {
		var b strings.Builder
		b.WriteString(Join(v.output(name).Factors))
		all := v.differences(name)
		for _, f := range findings(all, false) {
			fmt.Fprintf(&b, "\n%s %s %s", f[0].Cause, Join(f[0].Factors), f[0].fixText())
		}
		description := b.String()
		unknown := func(d *Difference) bool { return d.Cause == compare.Unknown }
		i, seen := group[description]
		if seen && !each && len(all) > 0 && !slices.ContainsFunc(all, unknown) {
			groups[i] = append(groups[i], name)
			continue
		}
		group[description] = len(groups)
		groups = append(groups, []string{name})
	}
	return groups
}

// write writes f, and its fix unless that is written already.
func (f finding) write(line func(format string, args ...any), written map[string]bool) {
	first := f[0]
	var words []string
	if len(f) == 1 {
		line("    %s", first.sentence())
		if first.Cause != compare.Unknown {
			words = append(words, "cause: "+string(first.Cause))
		}
	} else {
		line("    %s", f.title())
		line("      %s", first.sentence())
	}
	if len(first.Factors) > 0 {
		words = append(words, "found by varying: "+Join(first.Factors))
	}
	if fix := first.fixText(); fix != "" && !written[fix] {
		written[fix] = true
		words = append(words, fix)
	}
	if len(words) > 0 {
		line("      %s", strings.Join(words, "   "))
	}
}

// title returns the cause of several differences and where it shows: "owner in 9 members: uid, gid",
// or "owner: uid, gid" in one member.
func (f finding) title() string {
	const named = 5
	places, kinds, total := map[string]bool{}, []string{}, 0
	count := map[string]int{} // by kind
	members := false
	for _, d := range f {
		kind, n := d.What, 1
		if d.More > 0 {
			kind, n = strings.TrimSuffix(d.What, fmt.Sprintf(", in %d more like these", d.More)), d.More
		} else {
			places[strings.Join(d.Where, "\x00")] = true
		}
		if count[kind] == 0 {
			kinds = append(kinds, kind)
		}
		count[kind] += n
		total += n
		members = members || len(d.Where) > 1
	}
	n, noun := 0, "files"
	for _, of := range count {
		n = max(n, of)
	}
	switch {
	case len(places) == 1:
		n, noun = total, "places"
	case members:
		noun = "members"
	}
	if len(places) == 1 && len(kinds) <= named {
		return fmt.Sprintf("%s: %s", f[0].Cause, text(strings.Join(kinds, ", ")))
	}
	title := fmt.Sprintf("%s in %d %s", f[0].Cause, n, noun)
	if len(kinds) > 1 && len(kinds) <= named {
		title += ": " + text(strings.Join(kinds, ", "))
	}
	return title
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
	end := "" // of all runs, if they are equal
	if first := &v.Runs[0]; first.ExitCode != 0 || first.Code != "" {
		end = " with " + first.Ended()
	}
	switch causes := v.Causes(); {
	case v.Result == Unvaried:
		return fmt.Sprintf("equal in %d runs%s, but nothing was varied", len(v.Runs), end)
	case v.Result == Same && len(v.Factors) == 0:
		return fmt.Sprintf("same in %d runs%s; only the executor was varied", len(v.Runs), end)
	case v.Result == Same:
		return fmt.Sprintf("same in %d runs%s; varied: %s", len(v.Runs), end, Join(v.Factors))
	case v.Result == FlakyExit && len(v.exitFactors()) > 0:
		return "not reproducible: the exit code depends on " + Join(v.exitFactors())
	case len(causes) > 0:
		return fmt.Sprintf("not reproducible: %s", strings.Join(causes, ", "))
	case v.Bisection == nil:
		return "not reproducible for an unknown cause; bisect to find the factor"
	}
	return "not reproducible"
}

func orNone(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}
