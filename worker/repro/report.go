// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"strings"

	"github.com/cloister-build/cloister/sandbox/printable"
	"github.com/cloister-build/cloister/worker/repro/pagestyle"
)

// A Report presents the verdicts of several actions.
type Report []*Verdict

// maxPage limits the size of an HTML page, in bytes.
const maxPage = 60_000

//go:embed report.html
var page string

// pages is the template of the HTML page. It escapes all values.
var pages = template.Must(template.New("report").Funcs(template.FuncMap{
	"inc":   func(i int) int { return i + 1 },
	"join":  strings.Join,
	"list":  Join,
	"short": func(s string) string { return s[:min(len(s), 12)] },
	"clip":  clip,
	"style": func() template.CSS { return template.CSS(pagestyle.CSS) },
}).Parse(page))

// clip returns s as printable text of limited length, because actions choose their names.
func clip(s string) string {
	return printable.Head(s, 300)
}

// pageLimits limit what a page shows.
type pageLimits struct{ verdicts, outputs, differences, runs int }

// limits are tried in this order. The last ones always fit into maxPage.
var limits = []pageLimits{
	{1000, 200, 60, MaxRuns},
	{200, 60, 20, MaxRuns},
	{100, 20, 8, MaxRuns},
	{40, 10, 3, MaxRuns},
	{10, 5, 2, MaxRuns},
	{3, 3, 1, MaxRuns},
	{200, 20, 8, 10},
	{40, 10, 3, 5},
	{10, 5, 2, 3},
	{1, 3, 1, 3},
}

// A section is a verdict on a page.
type section struct {
	*Verdict
	Ran             []Run
	Rows            []row
	Shown           []*Difference
	MoreRuns        int // not in Ran and Rows
	MoreOutputs     int // not in Rows
	MoreDifferences int // not in Shown
	Unknown         []string
	Headline        string
	Skips           []Skipped
}

// A row is an output in all runs.
type row struct {
	*Output
	Cells []cell
}

// A cell is an output of one run. Equal cells of a row have the same Class.
type cell struct {
	Digest string
	Class  int
}

// HTML returns a self-contained page without scripts of at most 60 kB. For several actions it begins with a matrix of
// actions and causes and omits the reproducible ones. If necessary it also omits equal outputs, then differences, and
// then runs, and fails if even the shortest page is larger. The other formats have no limit.
func (r Report) HTML() ([]byte, error) {
	shown := r
	if len(r) > 1 {
		shown = r.differing()
	}
	for _, l := range limits {
		var b bytes.Buffer
		data := struct {
			Matrix   *matrix
			Sections []*section
		}{}
		if len(r) > 1 {
			data.Matrix = r.matrix(10 * l.verdicts)
		}
		for _, v := range shown[:min(len(shown), l.verdicts)] {
			data.Sections = append(data.Sections, v.section(l))
		}
		if err := pages.Execute(&b, data); err != nil {
			return nil, err
		}
		if b.Len() <= maxPage {
			return b.Bytes(), nil
		}
	}
	return nil, errors.New("report is too large for an HTML page")
}

// section returns what a page shows of v.
func (v *Verdict) section(l pageLimits) *section {
	ran := min(len(v.Runs), l.runs)
	s := &section{
		Verdict: v, Headline: v.conclusion(), Skips: v.skips(false), Ran: v.Runs[:ran], MoreRuns: len(v.Runs) - ran,
		Unknown: v.Unexplained[:min(len(v.Unexplained), l.differences)],
	}
	for _, differ := range []bool{true, false} {
		for i := range v.Outputs {
			o := &v.Outputs[i]
			if o.Differ != differ {
				continue
			}
			if len(s.Rows) == l.outputs {
				s.MoreOutputs++
				continue
			}
			s.Rows = append(s.Rows, row{o, o.cells()[:ran]})
		}
	}
	for i := range v.Differences {
		if len(s.Shown) == l.differences {
			s.MoreDifferences = len(v.Differences) - i
			break
		}
		s.Shown = append(s.Shown, &v.Differences[i])
	}
	return s
}

func (o *Output) cells() []cell {
	var all []cell
	seen := map[string]int{}
	for _, d := range o.Digests {
		if _, ok := seen[d]; !ok {
			seen[d] = min(len(seen), 5)
		}
		all = append(all, cell{orNone(d), seen[d]})
	}
	return all
}

// Location returns where a difference is.
func (d *Difference) Location() string {
	s := text(strings.Join(d.Where, " > ")) + ": " + text(d.What)
	if d.Offset >= 0 {
		s += fmt.Sprintf(", byte %d", d.Offset)
	}
	return s
}

// Markdown returns the report as text for a review or an issue. For several actions it begins with counts and omits the
// reproducible ones.
func (r Report) Markdown() []byte {
	var b bytes.Buffer
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("# Reproducibility")
	if len(r) > 1 {
		kinds, all := r.count()
		line("\n| mnemonic | actions | same | unvaried | differs | flaky exit |\n|---|---|---|---|---|---|")
		for _, k := range kinds {
			line("| %s | %d | %d | %d | %d | %d |", tableCode(orNone(k.mnemonic)), k.actions(), k.same, k.unvaried, k.differ,
				k.flaky)
		}
		line("| all | %d | %d | %d | %d | %d |", all.actions(), all.same, all.unvaried, all.differ, all.flaky)
	}
	for _, v := range r {
		if len(r) > 1 && v.Result == Same {
			continue
		}
		line("\n## %s\n\n**%s.** %s", code(v.Title()), v.Result, v.conclusion())
		line("\n| run | where | ended | varied |\n|---|---|---|---|")
		for i, run := range v.Runs {
			line("| %d | %s | %s | %s |", i+1, tableCode(run.On), tableEnd(&run), cells(run.Varied))
		}
		if len(v.differing()) > 0 {
			line("\n| output | digests | depends on |\n|---|---|---|")
		}
		for _, name := range v.differing() {
			o := v.output(name)
			line("| %s | %d in %d runs | %s |", tableCode(name), o.distinct(), len(o.Digests), Join(o.Factors))
		}
		if len(v.Differences) > 0 {
			line("\n| where | one run | another | why | fix |\n|---|---|---|---|---|")
		}
		for i := range v.Differences {
			d := &v.Differences[i]
			why := string(d.Cause)
			if len(d.Factors) > 0 {
				why = strings.TrimPrefix(why+", found by varying "+Join(d.Factors), ", ")
			}
			line("| %s | %s | %s | %s | %s |", tableCode(d.Location()), tableCode(text(d.A)), tableCode(text(d.B)), why,
				tableCode(d.fixText()))
		}
		if v.hasVerifiedFix() {
			line("\n%s.", verifiedMeans)
		}
		if v.Bisection != nil {
			line("\nBisected in %d runs: %s.", v.Bisection.Runs, code(v.Bisection.Summary))
		}
		for _, s := range v.skips(false) {
			line("\nNot varied: %s: %s.", s.Factor, code(s.Why))
		}
	}
	return b.Bytes()
}

// code returns s as a code span, which cannot contain backquotes; "" stays empty.
func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + strings.NewReplacer("`", "'", "\n", " ").Replace(s) + "`"
}

// tableCode returns s as a code span in a table, where even in code spans a bar needs a backslash (GitHub Flavored
// Markdown).
func tableCode(s string) string { return strings.ReplaceAll(code(s), "|", `\|`) }

// tableEnd returns how a run ended, with the last line of stderr if it failed.
func tableEnd(r *Run) string { return strings.TrimSpace(r.Ended() + " " + tableCode(r.Stderr)) }

func cells(all []string) string {
	if len(all) == 0 {
		return "no variation"
	}
	return tableCode(strings.Join(all, ", "))
}
